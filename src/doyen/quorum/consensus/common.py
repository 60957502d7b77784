"""What the smaller protocols have in common: a log, a disk, peers, and the work of a leader.

`ReplicatedServer` is the base of a core that elects, replicates and restarts, without snapshots,
changes of membership and transfers. It has no election. A protocol adds the messages, the election,
and the rule by which a follower's log agrees with the leader's. `ReplicatedServer` provides:

- **The disk.** `_persist` numbers the writes; `_stable` is the index up to which the *current* log
  is on disk. An entry that is replaced is not stable until its replacement is written, however late
  the old write is confirmed.
- **The leader's stream.** Per peer: up to where it has the leader's log on disk (`match`), and what
  is sent next. `match` is raised only by an answer of the leader's own generation.
- **Commitment.** What a majority has on disk, the leader itself included only when its own disk has
  it, and never before the leader's first entry, which commits everything that earlier leaders left.
- **Reads.** A read waits for a majority to answer a round that began after it was requested, and
  for the leader's first entry to be committed.
- **The quorum check.** A leader that has not heard from a majority for an election timeout steps
  down.

Imports `core` and the errors.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
    Compacted,
    Connected,
    CoreEvent,
    Disconnected,
    Effect,
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Message,
    Persist,
    Persisted,
    ProposalRefused,
    Propose,
    ProtocolSettings,
    ReadAsked,
    ReadReady,
    ReadRefused,
    Received,
    Recovered,
    Role,
    RoleChanged,
    Send,
    SnapshotReceived,
    SnapshotSent,
    TransferAsked,
    TransferFailed,
)


def order(name: str) -> tuple[tuple[int, int, str], ...]:
    """The order of ids: numbers within names as numbers, so that n2 comes before n10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


FRUITLESS = 12
"""The number of failed attempts after which timeouts grow no more; they are then four times as
long."""
WINDOW = 1024
"""How many entries may be in flight to a peer before it has answered for the first of them."""


class Entries(Message, frozen=True, gc=False):
    """Entries of the leader's log, the first of them at `first`."""

    first: int
    entries: tuple[LogEntry, ...]
    commit: int
    round: int


class Commit(Message, frozen=True, gc=False):
    """Everything up to `commit` is committed. Repeated, it is the heartbeat."""

    commit: int
    last: int
    """The last index sent so far."""
    round: int


class Answer(Message, frozen=True, gc=False):
    """The answer to either: the sender has everything up to `last` on disk."""

    last: int
    round: int


class Behind(Answer, frozen=True, gc=False):
    """The sender lacks what follows `last`."""


class Later(Message, frozen=True, gc=False):
    """The sender is in this generation, which is later than the receiver's."""


class Peer:
    """What a leader knows of another server."""

    __slots__ = (
        *("heard", "match", "name", "next", "origin"),
        *("resend_at", "rewind_at", "rewound_to", "round", "synced"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.match = 0
        self.next = 1
        self.origin = 0
        """The index after which the stream to it began."""
        self.resend_at = -inf
        """Until when the same is not sent to it again."""
        self.rewind_at = -inf
        self.rewound_to = 0
        """Until `rewind_at`, the stream to it goes back only below this index."""
        self.heard = -inf
        self.round = 0
        self.synced = True
        """Whether its log is a prefix of the leader's, so that it may be sent the rest."""


class ReplicatedServer:
    """The base of a small protocol's core."""

    snapshots = False
    """Whether a server may start from a snapshot. If not, the driver takes none."""
    carrier: type[Entries] = Entries
    heartbeat: type[Commit] = Commit
    answer: type[Answer] = Answer

    def __init__(
        self,
        id: str,  # noqa: A002
        membership: Membership,
        recovered: Recovered,
        *,
        settings: ProtocolSettings,
        jitter: Callable[[], float],
        now: float,
    ) -> None:
        _check(id, membership, recovered)
        self.id = id
        self.membership = self.founders = membership
        self.role = Role.LOOKING
        self.generation = 0
        self.leader: str | None = None
        self.commit = 0
        self.next_deadline = now
        self.log: list[LogEntry] = list(recovered.entries)
        self._settings = settings
        self._jitter = jitter
        self._now = now
        self._majority = membership.majority
        self._names = sorted(membership.voters, key=order)
        self._rank = {name: rank for rank, name in enumerate(self._names)}
        self._peers = {name: Peer(name) for name in membership.voters if name != id}
        self._unreachable: set[str] = set()
        self._effects: list[Effect] = []
        self._token = 0
        self._durable = 0
        self._stable = len(self.log)
        self._writing: deque[tuple[int, int]] = deque()
        self._state_token = 0
        """A follower answers heartbeats once this is on disk."""
        self._floor = 0
        self._attempts = 0
        """Attempts to get a leader since one last committed something, the current one included."""
        self._round = 0
        self._reads: deque[tuple[int, int, int]] = deque()
        self._announced: tuple[Role, int, str | None] = (Role.LOOKING, 0, None)
        self._timeout = self._draw_timeout()
        """How long a follower waits for its leader."""
        self._alive_until = now
        """Until when the followed leader is assumed to be alive."""
        self._patience = now
        """Until when an attempt to get a leader may take."""
        self._hear: dict[type[Message], Callable[[Peer, Any], None]] = {}
        self._on: dict[type[CoreEvent], Callable[[Any], None]] = {
            Received: self._received,
            Elapsed: self._elapsed,
            Persisted: self._persisted,
            Propose: self._proposed,
            ReadAsked: self._read_asked,
            Connected: self._connected,
            Disconnected: self._disconnected,
            TransferAsked: self._transfer_asked,
            ChangeAsked: self._change_asked,
            Compacted: self._nothing,
            SnapshotSent: self._nothing,
            SnapshotReceived: self._nothing,
        }
        self._restore(recovered.state)

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Process one event and return what has to be done, in order."""
        self._now = now
        self._on[type(event)](event)
        effects = self._effects
        self._effects = []
        return effects

    # To be implemented by a protocol.

    def _restore(self, state: Any) -> None:
        """Initialise the protocol's own part. `state` was on disk; None at the first start."""
        raise NotImplementedError

    def _due(self) -> None:
        """The deadline has come, and this server does not lead."""
        raise NotImplementedError

    def _in_step(self, peer: Peer, message: Message) -> bool:
        """Whether the message is of this server's leader, and this log is a prefix of its own."""
        raise NotImplementedError

    def _look(self) -> None:
        """Give up the leader, and look for one."""
        raise NotImplementedError

    def _written(self) -> None:
        """More is on disk, and this server does not lead."""

    def _peer_lost(self, peer: Peer) -> None:
        """The connection to the peer has ended."""
        if peer.name == self.leader:
            self._look()

    # Events.

    def _received(self, event: Received) -> None:
        peer = self._peers.get(event.peer)
        hear = self._hear.get(type(event.message))
        # Only members are listened to, and not a peer that uses this server's own name.
        if peer is not None and hear is not None:
            hear(peer, event.message)

    def _elapsed(self, event: Elapsed) -> None:
        if self._now < self.next_deadline:
            return
        if self.role is Role.LEADING:
            self._beat()
        else:
            self._due()

    def _persisted(self, event: Persisted) -> None:
        writing = self._writing
        stable = self._stable
        while writing and writing[0][0] <= event.token:
            stable = writing.popleft()[1]
        self._durable = event.token
        if stable != self._stable:
            self._stable = stable
            if self.role is Role.LEADING:
                self._decide()
        self._written()

    def _connected(self, event: Connected) -> None:
        self._unreachable.discard(event.peer)

    def _disconnected(self, event: Disconnected) -> None:
        peer = self._peers.get(event.peer)
        if peer is not None:
            self._unreachable.add(event.peer)
            self._peer_lost(peer)

    def _proposed(self, event: Propose) -> None:
        if self.role is not Role.LEADING:
            self._effects.append(ProposalRefused("this server does not lead"))
            return
        self._append(LogEntry(self.generation, EntryKind.COMMANDS, event.data))
        self._effects.append(Accepted(len(self.log), self.generation))

    def _transfer_asked(self, event: TransferAsked) -> None:
        self._effects.append(TransferFailed("this protocol cannot transfer leadership"))

    def _change_asked(self, event: ChangeAsked) -> None:
        self._effects.append(ProposalRefused("this protocol's membership is fixed"))

    def _nothing(self, event: CoreEvent) -> None:
        pass

    # Sending and writing.

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        self._effects.append(Send(peer.name, message, after))

    def _send_all(self, message: Message, after: int = 0) -> None:
        for peer in self._peers.values():
            self._send(peer, message, after)

    def _persist(
        self,
        state: Any = None,
        first: int = 0,
        entries: Sequence[LogEntry] = (),
        keep: bool = False,
    ) -> int:
        """Write, and return the token to wait for."""
        self._token += 1
        self._effects.append(Persist(self._token, state, first, entries, keep))
        self._writing.append((self._token, len(self.log)))
        return self._token

    def _cut(self, length: int) -> None:
        """Cut the log after this index. Nothing beyond counts as written, whatever the disk
        confirms later."""
        if length < self.commit:
            raise RuntimeError(f"{self.id}: committed entries would be cut off at {length}")
        del self.log[length:]
        self._stable = min(self._stable, length)
        self._writing = deque((token, min(last, length)) for token, last in self._writing)

    def _last(self) -> tuple[int, int]:
        """Generation and index of the last entry: how far the log goes, in this order."""
        return (self.log[-1].generation, len(self.log)) if self.log else (0, 0)

    def _generation_at(self, index: int) -> int:
        return self.log[index - 1].generation if index else 0

    def _agreed(self, index: int, generation: int) -> int:
        """`index`, if the entry there is of this generation, so that the logs agree up to it;
        otherwise an earlier index at which they may agree."""
        log = self.log
        if index > len(log):
            return len(log)
        if index <= self.commit or log[index - 1].generation == generation:
            return index
        wrong = log[index - 1].generation
        while index > self.commit and log[index - 1].generation == wrong:
            index -= 1
        return index

    def _take(self, previous: int, entries: Sequence[LogEntry]) -> None:
        """Append these after `previous`. Entries that are there already stay, and so do those
        behind them: the message may be an old one. Only a contradiction cuts the log."""
        log = self.log
        place = previous
        for entry in entries:
            if place >= len(log) or log[place].generation != entry.generation:
                break
            place += 1
        new = entries[place - previous :]
        if not new:
            return
        if place < len(log):
            self._cut(place)
        log.extend(new)
        self._persist(first=place + 1, entries=new)

    def _commit_to(self, index: int) -> None:
        if index > self.commit:
            self._attempts = 0
            first = self.commit + 1
            self.commit = index
            self._effects.append(Committed(first, tuple(self.log[first - 1 : index])))

    def _set_role(self, role: Role, leader: str | None) -> None:
        """Set the role; emit `RoleChanged` if it differs."""
        if self.role is Role.LEADING and role is not Role.LEADING:
            self._effects.extend(ReadRefused(token) for token, _, _ in self._reads)
            self._reads.clear()
        self.role, self.leader = role, leader
        now = (role, self.generation, leader)
        if now != self._announced:
            self._announced = now
            self._effects.append(RoleChanged(*now))

    def _draw_timeout(self) -> float:
        """An election timeout."""
        return self._settings.election_timeout_s * (1 + self._jitter() / 2)

    def _lengthened(self, patience_s: float) -> float:
        """The timeout, longer with every failed attempt: messages may be slower than assumed."""
        return patience_s * (1 + min(max(0, self._attempts - 1), FRUITLESS) / 4)

    # Following.

    def leader_of(self, generation: int) -> str:
        """The server that leads this generation, where its number determines that."""
        return self._names[generation % len(self._names)]

    def _leader_lives(self) -> bool:
        if self.role is Role.LEADING:
            return True
        return self.role is Role.FOLLOWING and self._now < self._alive_until

    def _follow(self, leader: Peer) -> None:
        """The leader was heard from."""
        if self.leader != leader.name:
            self._timeout = self._draw_timeout()
            self._set_role(Role.FOLLOWING, leader.name)
        self._alive_until = self._now + self._settings.election_timeout_s
        self.next_deadline = self._now + self._timeout

    def _hear_entries(self, peer: Peer, message: Entries) -> None:
        if not self._in_step(peer, message):
            return
        known = len(self.log)
        if message.first > known + 1:
            self._send(peer, Behind(self.generation, known, message.round))
            return
        new = message.entries[known + 1 - message.first :]
        if new:
            self.log.extend(new)
            self._persist(first=known + 1, entries=new)
        self._commit_to(min(message.commit, len(self.log)))
        reply = self.answer(self.generation, len(self.log), message.round)
        self._send(peer, reply, after=self._token)

    def _hear_commit(self, peer: Peer, message: Commit) -> None:
        if not self._in_step(peer, message):
            return
        known = len(self.log)
        self._commit_to(min(message.commit, known))
        if message.last > known:
            self._send(peer, Behind(self.generation, known, message.round))
        elif self._durable >= self._state_token:
            self._send(peer, self.answer(self.generation, self._stable, message.round))

    # Leading.

    def _carry(self, first: int, entries: tuple[LogEntry, ...]) -> Message:
        """The message that carries these entries (or none: a heartbeat), the commit index and the
        round to a follower."""
        if entries:
            return self.carrier(self.generation, first, entries, self.commit, self._round)
        return self.heartbeat(self.generation, self.commit, first - 1, self._round)

    def _lead(self) -> None:
        """Lead in this generation."""
        for peer in self._peers.values():
            peer.heard = self._now
            peer.round = 0
            self._prepare(peer)
            peer.origin = peer.next - 1
        self._round = 0
        self._floor = len(self.log) + 1
        self._set_role(Role.LEADING, self.id)
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._append(LogEntry(self.generation, EntryKind.NOTHING, b""))

    def _prepare(self, peer: Peer) -> None:
        """Initialise what is known of a peer's log: nothing, unless the election has shown more."""
        peer.match = 0
        peer.next = len(self.log) + 1

    def _append(self, entry: LogEntry) -> None:
        """Append to the leader's log: send it to the peers, and write it to disk meanwhile."""
        self.log.append(entry)
        for peer in self._peers.values():
            self._stream(peer)
        self._persist(first=len(self.log), entries=(entry,))

    def _stream(self, peer: Peer) -> None:
        """Send the peer what it has not been sent, as far as the window allows."""
        log = self.log
        end = min(len(log), max(peer.match, peer.origin) + WINDOW) if peer.synced else 0
        while peer.next <= end:
            first = peer.next
            entries = self._piece(first, end)
            peer.next = first + len(entries)
            self._send(peer, self._carry(first, entries))

    def _piece(self, first: int, end: int) -> tuple[LogEntry, ...]:
        """The entries from `first` to `end` that go into one message."""
        log = self.log
        if first == end:
            return (log[first - 1],)
        size = 0
        last = first - 1
        while last < end and size < self._settings.message_bytes:
            size += len(log[last].data) + 16
            last += 1
        return tuple(log[first - 1 : last])

    def _beat(self) -> None:
        """Send heartbeats, and check that a majority still follows."""
        if not self._supported(self._settings.election_timeout_s):
            self._look()
            return
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._begin_round()
        if not self._peers:
            self._confirm()

    def _supported(self, within_s: float) -> bool:
        """Whether a majority has answered, as followers, within this time."""
        since = self._now - within_s
        heard = 1
        for peer in self._peers.values():
            heard += peer.heard > since
        return heard >= self._majority

    def _established(self) -> bool:
        """Whether this server leads, has committed something in this generation, and is still
        followed. A server that has only just been elected may have a rival in a later
        generation."""
        return (
            self.role is Role.LEADING
            and self.commit >= self._floor
            and self._supported(2 * self._settings.heartbeat_s)
        )

    def _begin_round(self) -> None:
        self._round += 1
        self._send_commit()

    def _send_commit(self) -> None:
        """Send the followers the commit index and the round."""
        for peer in self._peers.values():
            if peer.synced:
                self._send(peer, self._carry(peer.next, ()))

    def _leads(self, peer: Peer, message: Message) -> bool:
        """Whether the message answers this leader in this generation."""
        return self.role is Role.LEADING and message.generation == self.generation and peer.synced

    def _hear_answer(self, peer: Peer, message: Answer) -> None:
        if self._leads(peer, message):
            self._answered(peer, message.last, message.round)

    def _hear_behind(self, peer: Peer, message: Answer) -> None:
        """A follower lacks what follows `last`."""
        if not self._leads(peer, message):
            return
        last = message.last
        if last + 1 < peer.next and self._may_go_back(peer, last):
            peer.origin = last
            peer.next = last + 1
        self._answered(peer, 0, message.round)

    def _answered(self, peer: Peer, match: int, round_: int) -> None:
        """A follower has answered in this generation: it has the log up to `match` on disk."""
        peer.heard = self._now
        if round_ > peer.round:
            peer.round = round_
            if self._reads:
                self._confirm()
        if match > peer.match:
            peer.match = match
            if peer.next <= match:
                peer.next = match + 1
            if match > self.commit:
                self._decide()
        if peer.next <= len(self.log):
            self._stream(peer)

    def _may_go_back(self, peer: Peer, last: int) -> bool:
        """Whether to send a peer again what follows `last`: at once if that is further back than
        before, otherwise twice in a heartbeat at most. A peer reports a gap for every message that
        overtakes another, and twice where the network repeats messages; without a limit, resending
        would not end."""
        if self._now >= peer.rewind_at:
            peer.rewind_at = self._now + self._settings.heartbeat_s / 2
        elif last >= peer.rewound_to:
            return False
        peer.rewound_to = last
        return True

    def _decide(self) -> None:
        """Commit what a majority has on disk."""
        matches = [peer.match for peer in self._peers.values()]
        matches.append(self._stable)
        matches.sort()
        index = matches[-self._majority]
        if index > self.commit and index >= self._floor:
            self._commit_to(index)
            self._send_commit()
            if self._reads:
                self._confirm()

    # Reading.

    def _read_asked(self, event: ReadAsked) -> None:
        if self.role is not Role.LEADING:
            self._effects.append(ReadRefused(event.token))
            return
        begin = not self._peers or self._round == self._confirmed()
        # A round that has begun may have been answered before this read was requested.
        self._reads.append((event.token, max(self.commit, self._floor), self._round + 1))
        if begin:
            self._begin_round()
            self._confirm()

    def _confirmed(self) -> int:
        """The latest round that a majority has answered."""
        rounds = [peer.round for peer in self._peers.values()]
        rounds.append(self._round)
        rounds.sort()
        return rounds[-self._majority]

    def _confirm(self) -> None:
        """Answer the reads whose round is confirmed, and begin the round that the others need."""
        confirmed = self._confirmed()
        reads = self._reads
        while reads and reads[0][2] <= confirmed and reads[0][1] <= self.commit:
            token, index, _ = reads.popleft()
            self._effects.append(ReadReady(token, index))
        if reads and reads[-1][2] > self._round == confirmed:
            self._begin_round()


def _check(id: str, membership: Membership, recovered: Recovered) -> None:  # noqa: A002
    voters = membership.voters
    if len(set(voters)) != len(voters):
        twice = sorted({name for name in voters if voters.count(name) > 1})
        raise ConfigError(f"two servers share an id: {', '.join(twice)}; give each its own")
    if id not in voters:
        raise ConfigError(f"{id!r} is not among the voters ({', '.join(voters)}); add it to them")
    if membership.learners:
        raise ConfigError("this protocol has no learners: make them voters, or use raft")
    if recovered.snapshot is not None:
        raise ConfigError(
            "this protocol cannot start from a snapshot: use raft with this data directory"
        )
