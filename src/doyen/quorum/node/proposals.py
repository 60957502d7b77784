"""A node's proposals, from the moment they are made until their outcome is known.

Each has a request id (see `machine`), which it keeps however often it is proposed, so a lost leader
or a broken link is answered by proposing it again. `Proposals` numbers them, gathers what waits
into batches within bounds, tells proposers the outcome, and lets those go whose time is over.

Commands of the node itself (ends of leases, upkeep) have a queue and a bound of their own and are
gathered first, so that no load of clients' delays or refuses them.

Nothing here waits or sends; the driver says when.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import CommandFailed, ConfigError, OutcomeUnknown, StoreUnavailable
from doyen.quorum.node.replicated import FORGOTTEN_AFTER, Command, Failure

__all__ = [
    "Batch",
    "Forgotten",
    "Offers",
    "ProposalLimits",
    "Proposals",
    "Request",
    "Settle",
    "decode_results",
    "encode_results",
    "inform",
]

log = logging.getLogger("doyen.quorum.node")

Settle = Callable[[int, Any, BaseException | None], None]
"""Told the number of a proposal in its proposer's count, and its result or what became of it.
Called once, on the driver's loop."""
Request = tuple[str, int, int]
"""Who proposes, the how manieth time, and up to where it has its answers: client, seq, floor."""


RESULTS_BYTES = 4 << 20
"""How much a leader sends back for a batch of a follower's."""


class Forgotten(OutcomeUnknown):
    """Proposed once by this node, and not carried out: its client's count is not known any more.
    A client that has asked no other node may ask again under another name."""


class ProposalLimits(Struct, frozen=True, kw_only=True):
    """Bounds on what a driver does at a time."""

    patience_s: float = 10.0
    """How long a proposal or a read may take."""
    batch_commands: int = 512
    batch_bytes: int = 1 << 20
    command_bytes: int = 1 << 20
    pending_commands: int = 16384
    """Proposals under way at a time; more are refused."""
    pending_bytes: int = 64 << 20
    internal_commands: int = 1024
    """Commands of the node itself under way at a time. Proposals of clients are not counted."""
    forwards: int = 4
    """Batches that a follower has sent to the leader and that are not answered yet. What is
    proposed meanwhile is gathered into the next ones."""
    pipeline: int = 8
    """Entries of our own that may be under way before what comes next is gathered up."""
    journal_bytes: int = 64 << 20
    """Bytes that may wait for a leader's own disk; beyond, clients' writes are refused."""
    apply_commands: int = 2048
    """Commands that are applied in one turn of the loop, to the end of an entry."""
    snapshot_entries: int = 100_000
    snapshot_bytes: int = 16 << 20
    """A snapshot is taken after so many entries, or so many bytes, of the log."""


class _Identity:
    """Under which name, and which numbers, proposals of this driver go."""

    __slots__ = ("name", "open", "seq")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        # Numbers whose outcome is not known yet, the least first.
        self.open: dict[int, None] = {}

    @property
    def floor(self) -> int:
        return next(iter(self.open))


class _Proposal(Struct, eq=False, gc=False):
    """Something to be agreed on, until its outcome is known. Nothing that it refers to refers to
    it, so the collector need not look at it."""

    target: int
    body: bytes
    settle: Settle
    deadline: float
    origin: Command | _Identity
    """The command, with the id of a client that keeps its own count; or an identity of ours."""
    seq: int
    """Its number in that count."""
    born: int = 0
    """Where in the log we were when it was first proposed."""
    tried: int = 0
    internal: bool = False
    """A command of the node itself."""


class Batch:
    """An entry of our own on its way: what it holds, and who is told when it is applied.

    The commands of peers come first, in the order of `answers`; those of `proposals` follow."""

    __slots__ = ("answers", "commands", "generation", "proposals")

    def __init__(
        self,
        commands: list[Command],
        proposals: list[_Proposal],
        answer: Callable[[int, bytes], None] | None = None,
    ) -> None:
        self.commands = commands
        self.proposals = proposals
        self.answers = [] if answer is None else [(answer, len(commands))]
        """How to tell each peer that sent a part of it, and how many commands are that peer's."""
        self.generation = 0

    @classmethod
    def merged(cls, offers: list[Batch], own: Batch | None) -> Batch:
        """One entry of what peers have sent and what this node proposes."""
        parts = offers if own is None else [*offers, own]
        if len(parts) == 1:
            return parts[0]
        merged = cls(
            [each for part in parts for each in part.commands], own.proposals if own else []
        )
        merged.answers = [answer for offer in offers for answer in offer.answers]
        return merged

    def parted(self, first: Callable[[Command], bool]) -> tuple[Batch, Batch]:
        """A batch of this node's own as two: the commands for which `first` holds, and the rest."""
        parts: tuple[Batch, Batch] = Batch([], []), Batch([], [])
        for command, proposal in zip(self.commands, self.proposals, strict=True):
            part = parts[0 if first(command) else 1]
            part.commands.append(command)
            part.proposals.append(proposal)
        return parts

    def tried(self, times: int = 1) -> None:
        """Its commands may be carried out; or (-1) they were not, for certain."""
        for proposal in self.proposals:
            proposal.tried += times


def inform(callback: Callable[..., None], *given: Any) -> None:
    """Tell somebody whose defects are not ours."""
    try:
        callback(*given)
    except Exception:
        log.exception("a node could not tell what it had to")


class _Results(Struct, array_like=True):
    values: list[Any]
    failures: dict[int, Failure]


_encode = Encoder().encode
_decode = Decoder(_Results).decode


def encode_results(results: list[Any]) -> bytes:
    """A batch's results, for the node that it came from."""
    failures = {at: each for at, each in enumerate(results) if type(each) is Failure}
    if failures:
        results = [None if type(each) is Failure else each for each in results]
    data = _encode(_Results(results, failures))
    if len(data) > RESULTS_BYTES:
        fair = RESULTS_BYTES // len(results)
        for at, each in enumerate(results):
            if len(_encode(each)) > fair:
                failures[at] = Failure(
                    "it was carried out, but its result is too large to be sent to the node that"
                    " proposed it: propose on the leader, or give back less"
                )
                results = [*results[:at], None, *results[at + 1 :]]
        data = _encode(_Results(results, failures))
    return data


def decode_results(data: bytes) -> list[Any]:
    results = _decode(data)
    for at, failure in results.failures.items():
        results.values[at] = failure
    return results.values


class Proposals:
    """Those of one node."""

    def __init__(self, node: str, incarnation: str, limits: ProposalLimits) -> None:
        self._node = node
        self._name = f"{node}/{incarnation}"
        self._identities = 0
        self._limits = limits
        self._identity = self._new_identity()
        # All whose outcome is not known, the oldest first.
        self._live: dict[_Proposal, None] = {}
        self._live_bytes = 0
        self._queue: deque[_Proposal] = deque()
        self._internal: deque[_Proposal] = deque()
        self._internal_live = 0

    def __len__(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> bool:
        """Whether something is there to be gathered."""
        return bool(self._queue or self._internal)

    @property
    def clients_waiting(self) -> bool:
        """Whether something of clients is there to be gathered."""
        return bool(self._queue)

    @property
    def internal_waiting(self) -> bool:
        """Whether a command of the node itself is there to be gathered."""
        return bool(self._internal)

    def add(
        self,
        target: int,
        body: bytes,
        settle: Settle,
        request: Request | None,
        deadline: float,
        *,
        internal: bool = False,
    ) -> None:
        """Take in one; refuse what is beyond the bounds."""
        limits = self._limits
        if type(body) is not bytes:
            # Anything else would be one thing to this node and, out of the log, another to the
            # others.
            raise ConfigError(f"a command is bytes, not {type(body).__name__}: encode it first")
        size = len(body)
        if size > limits.command_bytes:
            raise ConfigError(
                f"a command has at most {limits.command_bytes} bytes, not {size}: keep large"
                " data elsewhere and propose where it is"
            )
        live = len(self._live) - self._internal_live
        if internal:
            if self._internal_live >= limits.internal_commands:
                raise StoreUnavailable(
                    f"{self._internal_live} commands of node {self._node} itself are under way"
                    " already"
                )
            self._internal_live += 1
        elif live >= limits.pending_commands or self._live_bytes + size > limits.pending_bytes:
            raise StoreUnavailable(
                f"{live} proposals are under way on node {self._node} already; wait for"
                " some of them"
            )
        if request is not None:
            client, seq, floor = request
            command = Command(client, seq, floor, target, body)
            proposal = _Proposal(target, body, settle, deadline, command, seq)
        else:
            proposal = _Proposal(
                target, body, settle, deadline, self._identity, 0, internal=internal
            )
            self._identify(proposal)
        self._live[proposal] = None
        if internal:
            self._internal.append(proposal)
        else:
            self._live_bytes += size
            self._queue.append(proposal)

    def _queue_of(self, proposal: _Proposal) -> deque[_Proposal]:
        return self._internal if proposal.internal else self._queue

    def _new_identity(self) -> _Identity:
        self._identities += 1
        return _Identity(f"{self._name}/{self._identities}")

    def _identify(self, proposal: _Proposal) -> None:
        proposal.origin = identity = self._identity
        proposal.seq = identity.seq = seq = identity.seq + 1
        identity.open[seq] = None

    def gather(
        self, applied: int, taken: int = 0, taken_bytes: int = 0, *, internal: bool = False
    ) -> Batch | None:
        """A batch of what waits, of clients or of the node itself, within its bounds. `applied` is
        where in the log we are; so much of the batch is taken already."""
        limits = self._limits
        live, queue = self._live, self._internal if internal else self._queue
        most, room = limits.batch_commands - taken, limits.batch_bytes - taken_bytes
        commands: list[Command] = []
        proposals: list[_Proposal] = []
        known: _Identity | None = None
        name, floor = "", 0
        while queue and len(proposals) < most and room > 0:
            proposal = queue.popleft()
            if proposal not in live:
                continue
            if not proposal.tried:
                proposal.born = applied
            elif applied - proposal.born > FORGOTTEN_AFTER // 2:
                self._finish(proposal, None, OutcomeUnknown("it went round for too long"))
                continue
            body = proposal.body
            origin = proposal.origin
            if not isinstance(origin, Command):
                if origin is not known:
                    known, name, floor = origin, origin.name, origin.floor
                origin = Command(name, proposal.seq, floor, proposal.target, body)
            commands.append(origin)
            proposals.append(proposal)
            room -= len(body)
        return Batch(commands, proposals) if proposals else None

    def again(self, batch: Batch) -> None:
        """Have its proposals gathered again, before the others."""
        for proposal in reversed(batch.proposals):
            self._queue_of(proposal).appendleft(proposal)

    def settle(self, batch: Batch, results: list[Any]) -> None:
        """A batch has been carried out."""
        finish = self._finish
        for proposal, result in zip(batch.proposals, results, strict=True):
            if type(result) is not Failure:
                finish(proposal, result, None)
            elif not result.forgotten:
                finish(proposal, None, CommandFailed(result.reason))
            else:
                self._forgotten(proposal, result)

    def _forgotten(self, proposal: _Proposal, failure: Failure) -> None:
        """It was not carried out this time. If this was the only time, it may have a new id."""
        identity = proposal.origin
        if isinstance(identity, Command) or proposal.tried > 1 or proposal not in self._live:
            once = isinstance(identity, Command) and proposal.tried <= 1
            error = (Forgotten if once else OutcomeUnknown)(failure.reason)
            self._finish(proposal, None, error)
            return
        identity.open.pop(proposal.seq, None)
        if identity is self._identity:
            self._identity = self._new_identity()
        proposal.tried = 0
        self._identify(proposal)
        self._queue_of(proposal).append(proposal)

    def _finish(self, proposal: _Proposal, value: Any, error: BaseException | None) -> None:
        live = self._live
        if proposal not in live:
            return
        del live[proposal]
        if proposal.internal:
            self._internal_live -= 1
        else:
            self._live_bytes -= len(proposal.body)
        if not isinstance(proposal.origin, Command):
            proposal.origin.open.pop(proposal.seq, None)
        inform(proposal.settle, proposal.seq, value, error)

    def refuse(self, batch: Batch, reason: str) -> None:
        """The leader would not have it."""
        for proposal in batch.proposals:
            self._fail(proposal, reason)

    def refuse_waiting(self, reason: str, unless: Callable[[list[Command]], bool]) -> None:
        """Nothing of what clients wait for can be proposed, with exceptions."""
        queued = [*self._queue]
        self._queue.clear()
        for proposal in queued:
            if unless([self._command(proposal)]):
                self._queue.append(proposal)
            else:
                self._fail(proposal, reason)

    def refuse_internal(self, reason: str) -> None:
        """Nothing that this node itself has to say can be proposed."""
        while self._internal:
            self._fail(self._internal.popleft(), reason)

    def _command(self, proposal: _Proposal) -> Command:
        origin = proposal.origin
        if isinstance(origin, Command):
            return origin
        return Command(origin.name, proposal.seq, origin.floor, proposal.target, proposal.body)

    def refuse_all(self, reason: str) -> None:
        """Nobody is left to see any of them through."""
        for proposal in [*self._live]:
            self._fail(proposal, reason)

    def sweep(self, now: float, reason: str) -> float | None:
        """Let go of those whose time is over; tell when that of the next is. All have the same
        patience, so the oldest come first."""
        for proposal in [*self._live]:
            if proposal.deadline > now:
                return proposal.deadline
            self._fail(proposal, reason)
        return None

    def _fail(self, proposal: _Proposal, reason: str) -> None:
        if proposal.tried:
            error: Exception = OutcomeUnknown(f"{reason}; it may have been carried out")
        else:
            error = StoreUnavailable(f"{reason}; it was not carried out")
        self._finish(proposal, None, error)


class Offers:
    """Batches that peers have sent to this node, which leads: what waits to become entries."""

    def __init__(self, limits: ProposalLimits) -> None:
        self._limits = limits
        self._queue: deque[tuple[bytes, Batch]] = deque()
        """Each with the bytes as they came."""
        self._bytes = 0
        self._first = False

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, data: bytes, batch: Batch) -> bool:
        """False if there is no room for it."""
        if self._bytes + len(data) > self._limits.pending_bytes:
            return False
        self._queue.append((data, batch))
        self._bytes += len(data)
        return True

    def take(self) -> Batch:
        data, batch = self._queue.popleft()
        self._bytes -= len(data)
        return batch

    def take_out(self, unless: Callable[[list[Command]], bool]) -> list[Batch]:
        """Those that are no exception."""
        batches, out = [*self._queue], []
        self._queue.clear()
        self._bytes = 0
        for data, batch in batches:
            if unless(batch.commands):
                self.add(data, batch)
            else:
                out.append(batch)
        return out

    def next_entry(self, proposals: Proposals, applied: int) -> tuple[Batch | None, bytes]:
        """What peers have sent, and what clients here propose, as one entry within its bounds; and
        its bytes, if they are as they came. Peers and clients begin in turn, so that neither keeps
        the other waiting."""
        limits, queue = self._limits, self._queue
        self._first = not self._first
        own = None if self._first else proposals.gather(applied)
        taken: list[Batch] = []
        data = b""
        count = size = 0
        if own is not None and queue:
            count, size = len(own.commands), sum(len(each.body) for each in own.commands)
        while queue:
            following, batch = queue[0]
            count, size = count + len(batch.commands), size + len(following)
            if (taken or own) and (count > limits.batch_commands or size > limits.batch_bytes):
                break
            data = following
            taken.append(self.take())
        if own is None and not queue:
            own = proposals.gather(applied, count, size)
        if own is None and not taken:
            return None, b""
        return Batch.merged(taken, own), data if own is None and len(taken) == 1 else b""
