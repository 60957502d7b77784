"""A node's proposals, from the moment they are made until their outcome is known.

Each proposal has a request id (see `replicated`), which it keeps however often it is proposed, so
after a lost leader or a broken connection it is proposed again. `Proposals` numbers them, bounds
them, gathers waiting ones into batches, reports outcomes, and gives up those that take longer than
`patience_s`. Commands that are submitted together are one proposal, so that what is done for each
of them is little.

Commands of the node itself (ends of leases, upkeep) have a queue and a bound of their own and are
gathered first, so that no load of clients delays or refuses them.

`proposer` decides when a batch goes to the core or to the leader. When an entry that this node has
appended as leader is applied, its proposers receive the results. When it turns out not to be
committed, or a snapshot has replaced it, its proposals are proposed again under the same ids; those
of the node itself only if it leads in the same generation still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

from msgspec import Struct, structs
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import (
    CommandFailed,
    ConfigError,
    DoyenError,
    OutcomeUnknown,
    SessionClosed,
    StoreUnavailable,
)
from doyen.metrics.histogram import Histogram
from doyen.quorum.consensus.core import Accepted, CoreEvent, ProposalRefused
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

Settle = Callable[[Any, Any, BaseException | None], None]
"""`settle(tag, result, error)`: called once, on the event loop, with the outcome of a command. The
tag is what was submitted with it."""
SettleAll = Callable[[Sequence[Any], Sequence[Any]], None]
"""`settle_all(tags, results)`: called instead, if all commands of a proposal were carried out."""
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
    """Entries of this node that may be under way before further proposals are gathered into the
    next one."""
    journal_bytes: int = 64 << 20
    """Bytes that may wait for a leader's own disk; beyond, clients' writes are refused."""
    apply_commands: int = 2048
    """Commands that are applied in one turn of the loop, to the end of an entry."""
    snapshot_entries: int = 100_000
    snapshot_bytes: int = 16 << 20
    """A snapshot is taken after so many entries, or so many bytes, of the log."""


class _Identity:
    """The name and the numbers under which this node proposes commands of its own."""

    __slots__ = ("_floor", "name", "open", "seq")

    def __init__(self, name: str) -> None:
        self.name = name
        self.seq = 0
        self.open: set[int] = set()
        """Numbers whose outcome is not known yet."""
        self._floor = 1

    @property
    def floor(self) -> int:
        """The outcomes of all lower numbers are known. Counted up, since finding the first of many
        takes long."""
        while self._floor <= self.seq and self._floor not in self.open:
            self._floor += 1
        return self._floor


class _Proposal(Struct, eq=False):
    """Commands that were submitted together, and whose outcome is not known yet. It refers to the
    client that waits for it, and so to the node that holds it. The garbage collector therefore has
    to track it, or a node that crashed in the lab would never be freed."""

    target: int
    bodies: Sequence[bytes]
    tags: Sequence[Any]
    settle: Settle
    deadline: float
    origin: tuple[str, int] | _Identity
    """The name and the floor of a client that numbers its own requests; otherwise an identity of
    ours."""
    seqs: Sequence[int]
    size: int
    """Of the bodies, in bytes."""
    settle_all: SettleAll | None = None
    born: int = 0
    """How far the log was applied when it was first proposed."""
    attempts: int = 0
    """How often it was proposed, not counting attempts that certainly had no effect."""
    internal: bool = False
    """A command of the node itself."""
    generation: int = 0
    """The generation that such a command was submitted in, and is proposed in only."""
    spared: bool = False
    """Accepted although writes are refused."""

    def commands(self) -> Iterable[Command]:
        origin = self.origin
        name, floor = (origin.name, origin.floor) if isinstance(origin, _Identity) else origin
        return map(
            Command, repeat(name), self.seqs, repeat(floor), repeat(self.target), self.bodies
        )


def _parts(proposal: _Proposal) -> list[_Proposal]:
    """Its commands as proposals of their own."""
    if len(proposal.bodies) == 1:
        return [proposal]
    return [
        structs.replace(proposal, bodies=(body,), tags=(tag,), seqs=(seq,), size=len(body))
        for body, tag, seq in zip(proposal.bodies, proposal.tags, proposal.seqs, strict=True)
    ]


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
    failures: dict[int, Failure] = {}
    values = [*results]
    sized = results
    if {*map(type, results)} != {bytes}:
        failures = {at: each for at, each in enumerate(results) if type(each) is Failure}
        values = [None if at in failures else each for at, each in enumerate(results)]
        sized = [each for each in values if type(each) is bytes]
    # Checked first: in version 1, results of creates may be much larger together.
    size = sum(map(len, sized))
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
        self._live_commands = 0
        """Their commands, without those of the node itself."""
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
        return self._live_commands + self._internal_live

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
        tag: Any = None,
        internal: bool = False,
    ) -> None:
        """`propose` with a callback, which receives the tag; that of a request is its number.
        `internal` commands are those of the node itself."""
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
        live = self._live_commands
        if internal:
            if self._internal_live >= limits.internal_commands:
                raise StoreUnavailable(
                    f"{self._internal_live} commands of node {pump.id} itself are under way already"
                )
        elif live >= limits.pending_commands or self._live_bytes + size > limits.pending_bytes:
            raise StoreUnavailable(
                f"{live} proposals are under way on node {pump.id} already; wait for some of them"
            )
        deadline = pump.now() + limits.patience_s
        client, seq, floor = request or ("", 0, 0)
        tags = (tag if request is None else seq,)
        proposal = _Proposal(target, (body,), tags, settle, deadline, (client, floor), (seq,), size)
        if request is None:
            proposal.internal, proposal.generation = internal, pump.core.generation
            self._identify(proposal)
        self._submit(proposal)

    def submit_writes(
        self,
        client: str,
        floor: int,
        ids: Sequence[int],
        bodies: Sequence[bytes],
        settle: Settle,
        settle_all: SettleAll,
    ) -> bool:
        """`submit`, for commands of one client for the keyspace, which are tagged by their ids.
        Returns False, and does nothing, if some of them have to be refused."""
        return self._submit_all(KEYSPACE, bodies, ids, settle, settle_all, (client, floor))

    def submit_all(
        self,
        target: int,
        bodies: Sequence[bytes],
        tags: Sequence[Any],
        settle: Settle,
        settle_all: SettleAll,
    ) -> bool:
        """`submit`, for several commands. Returns False, and does nothing, if some of them have to
        be refused."""
        if {*map(type, bodies)} != {bytes} or target not in self._machine.targets:
            return False
        return self._submit_all(target, bodies, tags, settle, settle_all, None)

    def _submit_all(
        self,
        target: int,
        bodies: Sequence[bytes],
        tags: Sequence[Any],
        settle: Settle,
        settle_all: SettleAll,
        origin: tuple[str, int] | None,
    ) -> bool:
        pump, limits = self._pump, self._limits
        size = sum(map(len, bodies))
        if (
            pump.stopping
            or pump.ended
            or self._live_commands + len(bodies) > limits.pending_commands
            or self._live_bytes + size > limits.pending_bytes
            or size > limits.command_bytes
        ):
            return False
        deadline = pump.now() + limits.patience_s
        most = limits.batch_commands
        for at in range(0, len(bodies), most):
            some, theirs = bodies[at : at + most], tags[at : at + most]
            if len(bodies) > most:
                size = sum(map(len, some))
            proposal = _Proposal(
                target, some, theirs, settle, deadline, origin or ("", 0), theirs, size, settle_all
            )
            if origin is None:
                self._identify(proposal)
            self._submit(proposal)
        return True

    def _submit(self, proposal: _Proposal) -> None:
        self._live[proposal] = None
        if proposal.internal:
            self._internal_live += 1
        else:
            self._live_commands += len(proposal.bodies)
            self._live_bytes += proposal.size
        self._queue_of(proposal).append(proposal)
        self._submitted()

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
        first = identity.seq + 1
        identity.seq += len(proposal.bodies)
        proposal.seqs = seqs = range(first, identity.seq + 1)
        identity.open.update(seqs)

    def gather(
        self, applied: int, taken: int = 0, taken_bytes: int = 0, *, internal: bool = False
    ) -> Batch | None:
        """A batch of waiting proposals, of clients or of the node itself, within the bounds of an
        entry, of which so much is taken already; counts as an attempt. `applied` is the index that
        this node has applied.

        A command of the node itself that was submitted in an earlier generation has failed. It may
        be wrong now: a version that all members supported, say, and one that does not was added."""
        limits, generation = self._limits, self._pump.core.generation
        live, queue = self._live, self.internal if internal else self.queue
        most, room = limits.batch_commands - taken, limits.batch_bytes - taken_bytes
        commands: list[Command] = []
        proposals: list[_Proposal] = []
        while queue and room > 0:
            proposal = queue[0]
            if proposal in live and len(commands) + len(proposal.bodies) > most:
                break
            queue.popleft()
            if proposal not in live:
                continue
            if internal and proposal.generation != generation:
                self._fail(proposal, f"node {self._pump.id} leads in another generation")
                continue
            if not proposal.attempts:
                proposal.born = applied
            elif applied - proposal.born > FORGOTTEN_AFTER // 2:
                text = "proposed again and again for too long; it may have been carried out"
                self._finish(proposal, OutcomeUnknown, text)
                continue
            proposal.attempts += 1
            commands += proposal.commands()
            proposals.append(proposal)
            room -= proposal.size
        return Batch(commands, proposals) if proposals else None

    def retry(self, batch: Batch) -> None:
        """Have its proposals gathered again, before the others."""
        for proposal in reversed(batch.proposals):
            self._queue_of(proposal).appendleft(proposal)

    def settle(self, batch: Batch, results: list[Any]) -> None:
        """A batch has been carried out."""
        if len(results) != len(batch.commands):
            raise RuntimeError(f"{len(results)} results of {len(batch.commands)} commands")
        if batch.responses:
            start = 0
            for respond, count in batch.responses:
                respond(DONE, encode_results(results[start : start + count]))
                start += count
            results = results[start:]
        live, proposals, start = self._live, batch.proposals, 0
        if Failure in {*map(type, results)}:
            proposals = self._divide(proposals)
        for proposal in proposals:
            end = start + len(proposal.bodies)
            some, start = results[start:end], end
            if proposal not in live:
                continue
            if type(some[0]) is Failure:
                self._failed(proposal, some[0])
            else:
                self._carried_out(proposal, some)

    def _divide(self, proposals: Sequence[_Proposal]) -> list[_Proposal]:
        """One proposal for each command of these. They replace the live ones in `_live`, which is
        rebuilt once, because it may be long."""
        divided = [*map(_parts, proposals)]
        places = dict(zip(proposals, divided, strict=True))
        live = [part for each in self._live for part in places.get(each, (each,))]
        self._live.clear()
        self._live.update(dict.fromkeys(live))
        return [*chain(*divided)]

    def parted(self, batch: Batch, first: Callable[[Command], bool]) -> tuple[Batch, Batch]:
        """A batch of this node's own as two: the commands for which `first` holds, and the rest."""
        parts = Batch([], []), Batch([], [])
        for command, one in zip(batch.commands, self._divide(batch.proposals), strict=True):
            if one in self._live:
                part = parts[0 if first(command) else 1]
                part.commands.append(command)
                part.proposals.append(one)
        return parts

    def _large_result(self, command: Command, result: Any) -> None:
        """This node has carried out a command, as every node does. If it is its own, a leader may
        not send it the result."""
        identity, key = self._identity, (command.client, command.seq)
        if (proposal := self._awaited.pop(key, None)) is not None:
            self._carried_out(proposal, (result,))
        elif command.client == identity.name and command.seq in identity.open:
            self._large[key] = result

    def _failed(self, proposal: _Proposal, failure: Failure) -> None:
        """A proposal of one command was not carried out, or its result is not there."""
        origin, seq = proposal.origin, proposal.seqs[0]
        if failure == _NOT_SENT and isinstance(origin, _Identity):
            key = origin.name, seq
            if key in self._large:
                self._carried_out(proposal, (self._large[key],))
            else:
                self._awaited[key] = proposal
            return
        if not failure.forgotten:
            self._finish(proposal, CommandFailed, failure.reason)
            return
        # It was not carried out this time. If this was the only attempt, it may have a new id.
        if not isinstance(origin, _Identity) or proposal.attempts > 1:
            once = not isinstance(origin, _Identity) and proposal.attempts <= 1
            kind = Forgotten if once else OutcomeUnknown
            self._finish(proposal, kind, failure.reason)
            return
        origin.open.discard(seq)
        if origin is self._identity:
            self._identity = self._new_identity()
        proposal.attempts = 0
        self._identify(proposal)
        self._queue_of(proposal).append(proposal)
        self._pump.flush_soon()

    def _carried_out(self, proposal: _Proposal, results: Sequence[Any]) -> None:
        self._ended(proposal)
        if proposal.settle_all is not None:
            call_safely(proposal.settle_all, proposal.tags, results)
            return
        for tag, result in zip(proposal.tags, results, strict=True):
            call_safely(proposal.settle, tag, result, None)

    def _finish(self, proposal: _Proposal, error: type[DoyenError], text: str) -> None:
        """Report an error for each command of a proposal."""
        if proposal in self._live:
            self._ended(proposal)
            for tag in proposal.tags:
                call_safely(proposal.settle, tag, None, error(text))

    def _ended(self, proposal: _Proposal) -> None:
        """The outcome of a proposal is known."""
        del self._live[proposal]
        if proposal.internal:
            self._internal_live -= 1
        else:
            self._live_commands -= len(proposal.bodies)
            self._live_bytes -= proposal.size
        origin = proposal.origin
        if type(origin) is _Identity:
            origin.open.difference_update(proposal.seqs)
            if self._large or self._awaited:
                for seq in proposal.seqs:
                    self._large.pop((origin.name, seq), None)
                    self._awaited.pop((origin.name, seq), None)

    def refuse(self, batch: Batch, reason: str) -> None:
        """The leader refused a batch."""
        for proposal in batch.proposals:
            self._fail(proposal, reason)

    def refuse_waiting(self, reason: str, unless: Callable[[list[Command]], bool]) -> None:
        """Refuse the waiting commands of clients, except some. `unless` is called once for each of
        them, however often this is."""
        queued = [*self.queue]
        self.queue.clear()
        for one in self._divide(queued):
            if one not in self._live:
                continue
            if one.spared or unless([*one.commands()]):
                one.spared = True
                self.queue.append(one)
            else:
                self._fail(one, reason)

    def refuse_internal(self, reason: str) -> None:
        """Refuse the waiting commands of the node itself."""
        while self.internal:
            self._fail(self.internal.popleft(), reason)

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
            self._finish(proposal, OutcomeUnknown, f"{reason}; it may have been carried out")
        else:
            self._finish(proposal, StoreUnavailable, f"{reason}; it was not carried out")

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
        waiting = [proposal.commands() for proposal in self.internal]
        commands = chain(*waiting, *(batch.commands for batch in self.appended.values()))
        return any(roles.raises_version(each.target, each.body) for each in commands)

    def refused(self, effect: ProposalRefused) -> None:
        self._refusal = effect.reason

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
