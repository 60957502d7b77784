"""A node's proposals, from the moment they are made until their outcome is known.

Each proposal has a request id (see `replicated`), which it keeps however often it is proposed, so
after a lost leader or a broken connection it is proposed again. `Proposals` numbers them, bounds
them, gathers waiting ones into batches, reports outcomes, and gives up those that take longer than
`patience_s`.

Commands of the node itself (ends of leases, upkeep) have a queue and a bound of their own and are
gathered first, so that no load of clients delays or refuses them.

`proposer` decides when a batch goes to the core or to the leader. When an entry that this node has
appended as leader is applied, its proposers receive the results. When it turns out not to be
committed, or a snapshot has replaced it, its proposals are proposed again under the same ids.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import (
    CommandFailed,
    ConfigError,
    OutcomeUnknown,
    SessionClosed,
    StoreUnavailable,
)
from doyen.events.log_lines import log_line
from doyen.metrics.histogram import Histogram
from doyen.quorum.consensus.core import Accepted, CoreEvent
from doyen.quorum.keyspace.commands import LargeEntryExists, encode
from doyen.quorum.node import roles
from doyen.quorum.node.leader_calls import DONE, UNKNOWN, LeaderCalls, Respond
from doyen.quorum.node.pump import Pump, call_safely
from doyen.quorum.node.replicated import (
    FORGOTTEN_AFTER,
    KEYSPACE,
    NO_MACHINE,
    Command,
    Failure,
    ReplicatedMachines,
)

log = logging.getLogger("doyen.quorum.node")

Settle = Callable[[int, Any, BaseException | None], None]
"""`settle(seq, result, error)`: called once, on the event loop, with the outcome of a proposal."""
Request = tuple[str, int, int]
"""The request id of a client that numbers its own requests: client, seq, floor."""

RESULTS_BYTES = 4 << 20
"""How much a leader sends back for a batch of a follower."""


class Forgotten(OutcomeUnknown):
    """Proposed once by this node and not carried out, because the state machine no longer knows
    the client. A client that has asked no other node may ask again under another name."""


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
    forwards: int = 8
    """Batches that a follower has sent to the leader and that are not answered yet. What is
    proposed meanwhile is gathered into the next ones. As many as `pipeline`: with fewer, a write
    waits longer at a follower than it would at the leader."""
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
    """The name and the numbers under which this node proposes commands of its own."""

    __slots__ = ("name", "open", "seq")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.open: dict[int, None] = {}
        """Numbers whose outcome is not known yet, in order."""

    @property
    def floor(self) -> int:
        return next(iter(self.open))


class _Proposal(Struct, eq=False):
    """A command whose outcome is not known yet. It refers to the client that waits for it, and so
    to the node that holds it: without the garbage collector, a node that crashed in the lab would
    never be freed."""

    target: int
    body: bytes
    settle: Settle
    deadline: float
    origin: Command | _Identity
    """The command, for a client that numbers its own requests; otherwise an identity of ours."""
    seq: int
    born: int = 0
    """How far the log was applied when it was first proposed."""
    attempts: int = 0
    """How often it was proposed, not counting attempts that certainly had no effect."""
    internal: bool = False
    """A command of the node itself."""
    spared: bool = False
    """Accepted although writes are refused."""


class Batch(Struct, eq=False):
    """The commands of one log entry, and what to call when it is applied.

    The commands of peers come first, in the order of `responses`; those of `proposals` follow."""

    commands: list[Command]
    proposals: list[_Proposal]
    responses: list[tuple[Respond, int]] = []
    """How to respond to each peer that sent a part, and how many commands are in that part."""
    generation: int = 0
    appended_at: float = 0.0
    spared: bool = False
    """A batch of a peer that is accepted although writes are refused."""

    @classmethod
    def forwarded(cls, commands: list[Command], respond: Respond) -> Batch:
        """A batch that a peer has sent."""
        return cls(commands, [], [(respond, len(commands))])

    @classmethod
    def merged(cls, forwarded: list[Batch], own: Batch | None) -> Batch:
        """One batch of what peers have sent and of this node's own proposals."""
        parts = forwarded if own is None else [*forwarded, own]
        if len(parts) == 1:
            return parts[0]
        return cls(
            [each for part in parts for each in part.commands],
            own.proposals if own else [],
            [response for part in forwarded for response in part.responses],
        )

    def parted(self, first: Callable[[Command], bool]) -> tuple[Batch, Batch]:
        """A batch of this node's own as two: the commands for which `first` holds, and the rest."""
        parts: tuple[Batch, Batch] = Batch([], []), Batch([], [])
        for command, proposal in zip(self.commands, self.proposals, strict=True):
            part = parts[0 if first(command) else 1]
            part.commands.append(command)
            part.proposals.append(proposal)
        return parts

    def attempted(self) -> None:
        """Its commands are proposed again."""
        for proposal in self.proposals:
            proposal.attempts += 1

    def not_carried_out(self) -> None:
        """The latest attempt certainly had no effect."""
        for proposal in self.proposals:
            proposal.attempts -= 1

    def respond(self, status: int, reason: str = "") -> None:
        """Respond to the peers that sent parts of it."""
        for respond, _ in self.responses:
            respond(status, reason.encode())


class _Results(Struct, array_like=True):
    values: list[Any]
    failures: dict[int, Failure]


_encode = Encoder().encode
_decode = Decoder(_Results).decode


_NOT_SENT = Failure(
    "it was carried out, but its result is too large to be sent to the node that proposed it:"
    " propose on the leader, or give back less"
)
"""Takes the place of a result that a leader does not send. Nodes recognise it by its text, which
earlier releases send too."""


def encode_results(results: list[Any]) -> bytes:
    """A batch's results, for the node that it came from. They fit into a frame: what is too large
    is left out, and the texts of failures, which an application's machine may make of any length,
    are cut."""
    failures = {at: each for at, each in enumerate(results) if type(each) is Failure}
    values = [None if at in failures else each for at, each in enumerate(results)]
    # Checked first: in version 1, results of creates may be much larger together.
    size = sum(len(each) for each in values if type(each) is bytes)
    data = b"" if size > RESULTS_BYTES else _encode(_Results(values, failures))
    if not data or len(data) > RESULTS_BYTES:
        fair = RESULTS_BYTES // len(values)
        for at, failure in failures.items():
            failures[at] = Failure(failure.reason[: fair // 4], failure.forgotten)
        for at, each in enumerate(values):
            if (len(each) if type(each) is bytes else len(_encode(each))) > fair:
                values[at], failures[at] = None, _NOT_SENT
        data = _encode(_Results(values, failures))
    return data


def decode_results(data: bytes, commands: Sequence[Command]) -> list[Any]:
    """The results of these commands, which the leader has sent."""
    results = _decode(data)
    for at, failure in results.failures.items():
        results.values[at] = failure
        if failure == _NOT_SENT and (key := roles.created_key(commands[at])) is not None:
            # Only a refused create has a large result: the entry, which this node can read itself.
            results.values[at] = encode(LargeEntryExists(key))
    return results.values


class Proposals:
    """The proposals of one node."""

    def __init__(
        self,
        pump: Pump,
        machine: ReplicatedMachines,
        leader_calls: LeaderCalls,
        incarnation: str,
        limits: ProposalLimits,
    ) -> None:
        """`incarnation` tells this run of this node from every other."""
        self._pump = pump
        self._machine = machine
        self._timed_out = leader_calls.timed_out
        self._name = f"{pump.id}/{incarnation}"
        self._identities = 0
        self._limits = limits
        self._identity = self._new_identity()
        self._live: dict[_Proposal, None] = {}
        """All whose outcome is not known, the oldest first."""
        self._live_bytes = 0
        self.queue: deque[_Proposal] = deque()
        """Commands of clients that wait to be gathered."""
        self.internal: deque[_Proposal] = deque()
        """Commands of the node itself that wait to be gathered."""
        self._internal_live = 0
        self._sweeper: asyncio.TimerHandle | None = None
        self.commits = Histogram()
        """How long entries that this node appended as leader took to be committed and applied."""
        self.appended: dict[int, Batch] = {}
        """Entries that this node has appended as leader and not yet applied, by index."""
        self._appending: Batch | None = None
        self._refusal = ""
        self._large: dict[tuple[str, int], Any] = {}
        """Large results of this node's own proposals that it has carried out itself, until their
        outcome is known."""
        self._awaited: dict[tuple[str, int], _Proposal] = {}
        """Proposals that the leader has carried out and whose results it did not send."""
        machine.on_large = self._large_result
        pump.carry_out[Accepted] = self._accepted
        pump.on_end.append(self._end)

    def __len__(self) -> int:
        return len(self._live)

    async def propose(self, target: int, body: bytes, *, request: Request | None = None) -> Any:
        """Have the state machine `target` carry out `body` on every node; return its result.
        Raises `CommandFailed` with the machine's own error; `StoreUnavailable` if it was certainly
        not carried out; `OutcomeUnknown` if that is not known after `patience_s`.
        """
        future: asyncio.Future[Any] = self._pump.loop.create_future()

        def settle(_: int, value: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        self.submit(target, body, settle, request)
        return await future

    def submit(
        self,
        target: int,
        body: bytes,
        settle: Settle,
        request: Request | None = None,
        *,
        internal: bool = False,
    ) -> None:
        """`propose` with a callback. `internal` commands are those of the node itself."""
        pump, limits = self._pump, self._limits
        if pump.stopping or pump.ended:
            raise SessionClosed(f"node {pump.id} is stopping; ask another")
        if target not in self._machine.targets:
            raise ConfigError(NO_MACHINE)
        if type(body) is not bytes:
            # Anything else would differ on this node from what the others read out of the log.
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
                    f"{self._internal_live} commands of node {pump.id} itself are under way already"
                )
            self._internal_live += 1
        elif live >= limits.pending_commands or self._live_bytes + size > limits.pending_bytes:
            raise StoreUnavailable(
                f"{live} proposals are under way on node {pump.id} already; wait for some of them"
            )
        deadline = pump.now() + limits.patience_s
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
            self.internal.append(proposal)
        else:
            self._live_bytes += size
            self.queue.append(proposal)
        self._submitted()

    def submit_writes(
        self, client: str, floor: int, ids: Sequence[int], bodies: Sequence[bytes], settle: Settle
    ) -> bool:
        """`submit`, for commands of one client for the keyspace, without a call for each. Returns
        False, and does nothing, if some of them have to be refused."""
        pump, limits, live, queue = self._pump, self._limits, self._live, self.queue
        size = sum(map(len, bodies))
        if (
            pump.stopping
            or pump.ended
            or len(live) - self._internal_live + len(bodies) > limits.pending_commands
            or self._live_bytes + size > limits.pending_bytes
            or size > limits.command_bytes
        ):
            return False
        deadline = pump.now() + limits.patience_s
        for seq, body in zip(ids, bodies, strict=True):
            command = Command(client, seq, floor, KEYSPACE, body)
            proposal = _Proposal(KEYSPACE, body, settle, deadline, command, seq)
            live[proposal] = None
            queue.append(proposal)
        self._live_bytes += size
        self._submitted()
        return True

    def submit_all(self, target: int, waiting: Sequence[tuple[bytes, Settle]]) -> bool:
        """`submit`, for commands with their callbacks, without a call for each. Returns False, and
        does nothing, if some of them have to be refused."""
        pump, limits, live, queue = self._pump, self._limits, self._live, self.queue
        if {type(body) for body, _ in waiting} != {bytes}:
            return False
        sizes = [len(body) for body, _ in waiting]
        size = sum(sizes)
        if (
            pump.stopping
            or pump.ended
            or target not in self._machine.targets
            or len(live) - self._internal_live + len(sizes) > limits.pending_commands
            or self._live_bytes + size > limits.pending_bytes
            or max(sizes) > limits.command_bytes
        ):
            return False
        deadline = pump.now() + limits.patience_s
        identity = self._identity
        unknown = identity.open
        seq = identity.seq
        for body, settle in waiting:
            seq += 1
            unknown[seq] = None
            proposal = _Proposal(target, body, settle, deadline, identity, seq)
            live[proposal] = None
            queue.append(proposal)
        identity.seq = seq
        self._live_bytes += size
        self._submitted()
        return True

    def _submitted(self) -> None:
        pump = self._pump
        if self._sweeper is None:
            self._sweeper = pump.loop.call_later(self._limits.patience_s, self._sweep)
        if not pump.flushing:
            pump.flushing = True
            pump.loop.call_soon(pump.flush)

    def _queue_of(self, proposal: _Proposal) -> deque[_Proposal]:
        return self.internal if proposal.internal else self.queue

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
        """A batch of waiting proposals, of clients or of the node itself, within the bounds of an
        entry, of which so much is taken already; counts as an attempt. `applied` is the index that
        this node has applied."""
        limits = self._limits
        live, queue = self._live, self.internal if internal else self.queue
        most, room = limits.batch_commands - taken, limits.batch_bytes - taken_bytes
        commands: list[Command] = []
        proposals: list[_Proposal] = []
        known: _Identity | None = None
        name, floor = "", 0
        while queue and len(proposals) < most and room > 0:
            proposal = queue.popleft()
            if proposal not in live:
                continue
            if not proposal.attempts:
                proposal.born = applied
            elif applied - proposal.born > FORGOTTEN_AFTER // 2:
                text = "proposed again and again for too long; it may have been carried out"
                self._finish(proposal, None, OutcomeUnknown(text))
                continue
            proposal.attempts += 1
            body = proposal.body
            origin = proposal.origin
            if type(origin) is not Command:
                if origin is not known:
                    assert isinstance(origin, _Identity)
                    known, name, floor = origin, origin.name, origin.floor
                origin = Command(name, proposal.seq, floor, proposal.target, body)
            commands.append(origin)
            proposals.append(proposal)
            room -= len(body)
        return Batch(commands, proposals) if proposals else None

    def retry(self, batch: Batch) -> None:
        """Have its proposals gathered again, before the others."""
        for proposal in reversed(batch.proposals):
            self._queue_of(proposal).appendleft(proposal)

    def settle(self, batch: Batch, results: list[Any]) -> None:
        """A batch has been carried out."""
        if batch.responses:
            start = 0
            for respond, count in batch.responses:
                respond(DONE, encode_results(results[start : start + count]))
                start += count
            results = results[start:]
        live = self._live
        simple = not (self._large or self._awaited)
        for proposal, result in zip(batch.proposals, results, strict=True):
            if type(result) is Failure:
                self._failed(proposal, result)
            elif proposal in live:
                if proposal.internal or not simple:
                    self._finish(proposal, result, None)
                    continue
                # `_finish`, without a call for each.
                del live[proposal]
                origin = proposal.origin
                if type(origin) is _Identity:
                    origin.open.pop(proposal.seq, None)
                self._live_bytes -= len(proposal.body)
                try:
                    proposal.settle(proposal.seq, result, None)
                except Exception:
                    log.exception(log_line(event="callback_failed"))

    def _large_result(self, command: Command, result: Any) -> None:
        """This node has carried out a command, as every node does. If it is its own, a leader may
        not send it the result."""
        identity, key = self._identity, (command.client, command.seq)
        if (proposal := self._awaited.pop(key, None)) is not None:
            self._finish(proposal, result, None)
        elif command.client == identity.name and command.seq in identity.open:
            self._large[key] = result

    def _failed(self, proposal: _Proposal, failure: Failure) -> None:
        origin = proposal.origin
        if failure == _NOT_SENT and isinstance(origin, _Identity) and proposal in self._live:
            key = origin.name, proposal.seq
            if key in self._large:
                self._finish(proposal, self._large[key], None)
            else:
                self._awaited[key] = proposal
            return
        if not failure.forgotten:
            self._finish(proposal, None, CommandFailed(failure.reason))
            return
        # It was not carried out this time. If this was the only attempt, it may have a new id.
        identity = proposal.origin
        if isinstance(identity, Command) or proposal.attempts > 1 or proposal not in self._live:
            once = isinstance(identity, Command) and proposal.attempts <= 1
            error = (Forgotten if once else OutcomeUnknown)(failure.reason)
            self._finish(proposal, None, error)
            return
        identity.open.pop(proposal.seq, None)
        if identity is self._identity:
            self._identity = self._new_identity()
        proposal.attempts = 0
        self._identify(proposal)
        self._queue_of(proposal).append(proposal)
        self._pump.flush_soon()

    def _finish(self, proposal: _Proposal, value: Any, error: BaseException | None) -> None:
        live = self._live
        if proposal not in live:
            return
        del live[proposal]
        if proposal.internal:
            self._internal_live -= 1
        else:
            self._live_bytes -= len(proposal.body)
        if isinstance(proposal.origin, _Identity):
            proposal.origin.open.pop(proposal.seq, None)
            if self._large or self._awaited:
                key = proposal.origin.name, proposal.seq
                self._large.pop(key, None)
                self._awaited.pop(key, None)
        call_safely(proposal.settle, proposal.seq, value, error)

    def refuse(self, batch: Batch, reason: str) -> None:
        """The leader refused a batch."""
        for proposal in batch.proposals:
            self._fail(proposal, reason)

    def refuse_waiting(self, reason: str, unless: Callable[[list[Command]], bool]) -> None:
        """Refuse the waiting commands of clients, except some. `unless` is called once for each of
        them, however often this is."""
        queued = [*self.queue]
        self.queue.clear()
        for proposal in queued:
            if proposal not in self._live:
                continue
            if proposal.spared or unless([self._command(proposal)]):
                proposal.spared = True
                self.queue.append(proposal)
            else:
                self._fail(proposal, reason)

    def refuse_internal(self, reason: str) -> None:
        """Refuse the waiting commands of the node itself."""
        while self.internal:
            self._fail(self.internal.popleft(), reason)

    def _command(self, proposal: _Proposal) -> Command:
        origin = proposal.origin
        if isinstance(origin, Command):
            return origin
        return Command(origin.name, proposal.seq, origin.floor, proposal.target, proposal.body)

    def _end(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for proposal in [*self._live]:
            self._fail(proposal, f"node {self._pump.id} has stopped")

    def _sweep(self) -> None:
        """Give up the proposals whose time is over. All have the same patience, so the oldest come
        first. Those that still wait leave their queue: without a leader, nothing else empties it.
        """
        self._sweeper = None
        now, reason = self._pump.now(), self._timed_out()
        live = self._live
        for proposal in [*live]:
            if proposal.deadline > now:
                wait_s = max(proposal.deadline - now, 1e-3)
                self._sweeper = self._pump.loop.call_later(wait_s, self._sweep)
                break
            self._fail(proposal, reason)
        for queue in (self.queue, self.internal):
            while queue and queue[0] not in live:
                queue.popleft()

    def _fail(self, proposal: _Proposal, reason: str) -> None:
        if proposal.attempts:
            error: Exception = OutcomeUnknown(f"{reason}; it may have been carried out")
        else:
            error = StoreUnavailable(f"{reason}; it was not carried out")
        self._finish(proposal, None, error)

    # Entries that this node has appended as leader.

    def append(self, event: CoreEvent, batch: Batch) -> str | None:
        """Have the core append an entry. Returns why it refused, or None; then `batch` is settled
        when the entry is applied."""
        self._appending, self._refusal = batch, ""
        self._pump.step(event)
        if self._appending is None:
            return None
        self._appending = None
        return self._refusal or f"node {self._pump.id} is not leading"

    def _accepted(self, effect: Accepted) -> None:
        batch = self._appending
        if batch is not None:
            batch.generation = effect.generation
            batch.appended_at = self._pump.now()
            before, self.appended[effect.index] = self.appended.get(effect.index), batch
            self._appending = None
            if before is not None:  # of an earlier leadership: another leader has removed it
                self.propose_again(before)

    def raises_version(self) -> bool:
        """Whether a command that raises the cluster's version waits to be appended or applied."""
        appended = (command for batch in self.appended.values() for command in batch.commands)
        waiting: Iterable[_Proposal | Command] = chain(self.internal, appended)
        return any(roles.raises_version(each.target, each.body) for each in waiting)

    def refused(self, reason: str) -> bool:
        """The core refused something. False if that was not an entry."""
        self._refusal = reason
        return self._appending is not None

    def entered(self, generation: int, index: int) -> None:
        """An entry of this later generation is applied at `index`: entries of earlier generations
        do not follow."""
        self._lost(lambda at, batch: at >= index and batch.generation < generation)

    def replaced(self, index: int) -> None:
        """A snapshot has replaced everything up to `index`: the results there are not known."""
        self._lost(lambda at, _: at <= index)

    def _lost(self, lost: Callable[[int, Batch], bool]) -> None:
        for at in [at for at, batch in self.appended.items() if lost(at, batch)]:
            self.propose_again(self.appended.pop(at))

    def propose_again(self, batch: Batch) -> None:
        """What became of its entry is not known."""
        batch.respond(UNKNOWN)
        self.retry(batch)
        self._pump.flush_soon()


class ForwardedBatches:
    """Batches that peers have sent to this node, which leads, and that are not in the log yet."""

    def __init__(self, limits: ProposalLimits) -> None:
        self._limits = limits
        self.queue: deque[tuple[bytes, Batch]] = deque()
        """Each with its bytes as they were received."""
        self._bytes = 0
        self._first = False

    def add(self, data: bytes, batch: Batch) -> bool:
        """False if there is no room for it."""
        if self._bytes + len(data) > self._limits.pending_bytes:
            return False
        self.queue.append((data, batch))
        self._bytes += len(data)
        return True

    def take(self) -> Batch:
        data, batch = self.queue.popleft()
        self._bytes -= len(data)
        return batch

    def take_out(self, unless: Callable[[list[Command]], bool]) -> list[Batch]:
        """Remove and return all batches, except some. `unless` is called once for each of them,
        however often this is."""
        batches, out = [*self.queue], []
        self.queue.clear()
        self._bytes = 0
        for data, batch in batches:
            if batch.spared or unless(batch.commands):
                batch.spared = True
                self.add(data, batch)
            else:
                out.append(batch)
        return out

    def next_entry(self, proposals: Proposals, applied: int) -> tuple[Batch | None, bytes]:
        """One batch, within the bounds of an entry, of what peers have sent and of this node's own
        proposals; and its bytes, if it is exactly one that was received. Peers and this node's
        clients come first in turn, so that neither delays the other."""
        limits, queue = self._limits, self.queue
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
