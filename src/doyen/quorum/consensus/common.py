"""What the smaller protocols have in common: a log, a disk, peers, and the work of a leader.

    ReplicatedLog      a server's log, and how much of it is on disk
    ElectionTimer      how long a server waits for its leader, and for an attempt to get one
    Peer, Followers    what a leader knows of one server, and what a majority of them has answered
    Follower           a server's state and messages, and how it follows a leader
    ReplicatedServer   what it does as a leader: replication, commitment, reads

`ReplicatedServer` is the base of a core that elects, replicates and restarts, without snapshots,
changes of membership and transfers. It has no election. A protocol adds the messages, the election,
and the rule by which a follower's log agrees with the leader's.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import Any

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
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
    TransferAsked,
    TransferRefused,
)


def order(name: str) -> tuple[tuple[int, int, str], ...]:
    """The order of ids: numbers within names as numbers, so that n2 comes before n10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


FRUITLESS = 12
"""Failed attempts after which timeouts grow no more. They are then four times as long."""
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


class ReplicatedLog(list[LogEntry]):
    """A server's log, from index 1 on, and how much of it is on disk and committed."""

    __slots__ = ("_writing", "commit", "durable", "effects", "stable", "token")

    def __init__(self, entries: Sequence[LogEntry], effects: list[Effect]) -> None:
        super().__init__(entries)
        self.commit = 0
        """The server's; nothing up to it is ever cut off."""
        self.token = 0
        """Of the last write."""
        self.durable = 0
        """The token up to which writes are on disk."""
        self.stable = len(entries)
        """The index up to which the *current* log is on disk. An entry that is replaced is not
        stable until its replacement is written, however late the old write is confirmed."""
        self.effects = effects
        self._writing: deque[tuple[int, int]] = deque()

    def position(self) -> tuple[int, int]:
        """Generation and index of the last entry: how far the log goes, in this order."""
        return (self[-1].generation, len(self)) if self else (0, 0)

    def generation_at(self, index: int) -> int:
        return self[index - 1].generation if index else 0

    def agreed(self, index: int, generation: int) -> int:
        """`index`, if the entry there is of this generation, so that the logs agree up to it;
        otherwise an earlier index at which they may agree."""
        if index > len(self):
            return len(self)
        if index <= self.commit or self[index - 1].generation == generation:
            return index
        wrong = self[index - 1].generation
        while index > self.commit and self[index - 1].generation == wrong:
            index -= 1
        return index

    def write(
        self,
        state: Any = None,
        first: int = 0,
        entries: Sequence[LogEntry] = (),
        keep: bool = False,
    ) -> int:
        """Write to disk, and return the token to wait for."""
        self.token += 1
        self.effects.append(Persist(self.token, state, first, entries, keep))
        self._writing.append((self.token, len(self)))
        return self.token

    def written(self, token: int) -> bool:
        """Everything up to this token is on disk. Returns whether more of the log is stable."""
        self.durable = token
        writing, before = self._writing, self.stable
        while writing and writing[0][0] <= token:
            self.stable = writing.popleft()[1]
        return self.stable != before

    def add(self, entries: Sequence[LogEntry]) -> None:
        """Append these, and write them."""
        first = len(self) + 1
        self.extend(entries)
        self.write(None, first, entries)

    def take(self, previous: int, generation: int, entries: Sequence[LogEntry]) -> int:
        """Append these after `previous`, if the logs agree there; return up to where they agree, or
        may agree. Entries that are there already stay, and so do those behind them: the message may
        be an old one. Only a contradiction cuts the log."""
        place = previous
        if place > len(self) or (place > self.commit and self[place - 1].generation != generation):
            return self.agreed(previous, generation)
        for entry in entries:
            if place >= len(self) or self[place].generation != entry.generation:
                self.cut(place)
                self.add(entries[place - previous :])
                break
            place += 1
        return previous + len(entries)

    def cut(self, length: int) -> bool:
        """Cut the log after this index. Nothing beyond counts as written, whatever the disk
        confirms later. Returns whether there was anything."""
        if length >= len(self):
            return False
        if length < self.commit:
            raise RuntimeError(f"committed entries would be cut off at {length}")
        del self[length:]
        self.stable = min(self.stable, length)
        self._writing = deque((token, min(last, length)) for token, last in self._writing)
        return True

    def shorten(self, length: int) -> None:
        """Cut the log after this index, on disk too."""
        if self.cut(length):
            self.write(None, length + 1)


class ElectionTimer:
    """How long a server waits for its leader, and for an attempt to get one."""

    def __init__(self, timeout_s: float, jitter: Callable[[], float], now: float) -> None:
        self.timeout_s = timeout_s
        self.jitter = jitter
        self.attempts = 0
        """Attempts to get a leader since one last committed something, the current one included."""
        self.wait_s = self.draw()
        """How long a follower waits for its leader."""
        self.alive_until = now
        """Until when the followed leader is assumed to be alive."""
        self.patience = now
        """Until when an attempt to get a leader may take."""

    def draw(self) -> float:
        """An election timeout."""
        return self.timeout_s * (1 + self.jitter() / 2)

    def lengthened(self, patience_s: float) -> float:
        """The timeout, longer with every failed attempt: messages may be slower than assumed."""
        return patience_s * (1 + min(max(0, self.attempts - 1), FRUITLESS) / 4)


class Peer:
    """What a leader knows of another server."""

    __slots__ = (
        *("heard", "match", "name", "next", "origin"),
        *("resend_at", "rewind_at", "rewound_to", "round", "synced"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.match = 0
        """Up to where it has the leader's log on disk, by its answers in this generation."""
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


class Followers:
    """What a majority has answered to a leader, and the reads that wait for it."""

    def __init__(self, peers: Collection[Peer], majority: int) -> None:
        self.peers = peers
        self.majority = majority
        self.round = 0
        """The latest round of heartbeats. Every heartbeat begins one."""
        self.reads: deque[tuple[int, int, int]] = deque()
        """Their tokens, the index that has to be committed for each, and the round, which began
        after the read was requested, that a majority has to answer."""

    def heard(self, since: float) -> bool:
        """Whether a majority has answered, as followers, since then."""
        return 1 + sum([peer.heard > since for peer in self.peers]) >= self.majority

    def stored(self, own: int) -> int:
        """The index up to which a majority has the log on disk; the leader has it up to `own`."""
        matches = [peer.match for peer in self.peers]
        matches.append(own)
        matches.sort()
        return matches[-self.majority]

    def serve(self, commit: int, effects: list[Effect]) -> bool:
        """Answer the reads that can be answered. Returns whether others need a new round."""
        rounds = [peer.round for peer in self.peers]
        rounds.append(self.round)
        rounds.sort()
        confirmed = rounds[-self.majority]
        reads = self.reads
        while reads and reads[0][2] <= confirmed and reads[0][1] <= commit:
            token, index, _ = reads.popleft()
            effects.append(ReadReady(token, index))
        return bool(reads) and reads[-1][2] > self.round == confirmed


class Follower:
    """A server's state and messages, and how it follows a leader."""

    snapshots = False
    """Whether a server may start from a snapshot. If not, the driver takes none."""
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
        self._effects: list[Effect] = []
        self.log = ReplicatedLog(recovered.entries, self._effects)
        self._settings = settings
        self._timer = ElectionTimer(settings.election_timeout_s, jitter, now)
        self._now = now
        self._majority = membership.majority
        self._names = sorted(membership.voters, key=order)
        self._rank = {name: rank for rank, name in enumerate(self._names)}
        self._peers = {name: Peer(name) for name in membership.voters if name != id}
        self._unreachable: set[str] = set()
        self._state_token = 0
        """A follower answers heartbeats once this is on disk."""
        self._announced: tuple[Role, int, str | None] = (Role.LOOKING, 0, None)
        self._hear: dict[type[Message], Callable[[Peer, Any], None]] = {}
        self._on: dict[type[CoreEvent], Callable[[Any], None]] = {}
        self._restore(recovered.state)

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Process one event and return what has to be done, in order."""
        self._now = now
        if type(event) is Received:
            peer = self._peers.get(event.peer)
            hear = self._hear.get(type(event.message))
            # Only members are listened to, and not a peer that uses this server's own name.
            if peer is not None and hear is not None:
                hear(peer, event.message)
        elif (on := self._on.get(type(event))) is not None:  # not an event of snapshots
            on(event)
        effects = self._effects
        self._effects = self.log.effects = []
        return effects

    # To be implemented by a protocol.

    def _restore(self, state: Any) -> None:
        """Initialise the protocol's own part. `state` was on disk; None at the first start."""
        raise NotImplementedError

    def _enter(self, generation: int) -> None:
        """Enter a later generation."""
        raise NotImplementedError

    def _in_step(self, peer: Peer, message: Message) -> bool:
        """Whether the message is of this server's leader, and this log is a prefix of its own."""
        raise NotImplementedError

    # Messages and roles.

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        self._effects.append(Send(peer.name, message, after))

    def _send_all(self, message: Message, after: int = 0) -> None:
        for peer in self._peers.values():
            self._send(peer, message, after)

    def _set_role(self, role: Role, leader: str | None) -> None:
        """Set the role; emit `RoleChanged` if it differs."""
        self.role, self.leader = role, leader
        now = (role, self.generation, leader)
        if now != self._announced:
            self._announced = now
            self._effects.append(RoleChanged(*now))

    def leader_of(self, generation: int) -> str:
        """The server that leads this generation, where its number determines that."""
        return self._names[generation % len(self._names)]

    def _leader_lives(self) -> bool:
        alive = self.role is Role.FOLLOWING and self._now < self._timer.alive_until
        return alive or self.role is Role.LEADING

    def _from_leader(self, peer: Peer, message: Message) -> bool:
        """Whether the message is of the leader of the generation that this server is in, or now
        enters. Only for protocols in which the generation determines its leader."""
        generation = message.generation
        if generation == self.generation and peer.name == self.leader:
            return True
        if generation < self.generation:
            self._send(peer, Later(self.generation), after=self.log.token)
            return False
        if self.leader_of(generation) != peer.name:
            return False
        if generation > self.generation:
            self._enter(generation)
        return True

    def _follow(self, leader: Peer) -> None:
        """The leader was heard from."""
        timer = self._timer
        if self.leader != leader.name:
            timer.wait_s = timer.draw()
            self._set_role(Role.FOLLOWING, leader.name)
        timer.alive_until = self._now + timer.timeout_s
        self.next_deadline = self._now + timer.wait_s

    def _commit_to(self, index: int) -> None:
        if index > self.commit:
            self._timer.attempts = 0
            first = self.commit + 1
            self.commit = self.log.commit = index
            self._effects.append(Committed(first, tuple(self.log[first - 1 : index])))

    def _hear_entries(self, peer: Peer, message: Entries) -> None:
        if not self._in_step(peer, message):
            return
        log = self.log
        known = len(log)
        if message.first > known + 1:
            self._send(peer, Behind(self.generation, known, message.round))
            return
        if new := message.entries[known + 1 - message.first :]:
            log.add(new)
        self._commit_to(min(message.commit, len(log)))
        reply = self.answer(self.generation, len(log), message.round)
        self._send(peer, reply, after=log.token)

    def _hear_commit(self, peer: Peer, message: Commit) -> None:
        if not self._in_step(peer, message):
            return
        log = self.log
        known = len(log)
        self._commit_to(min(message.commit, known))
        if message.last > known:
            self._send(peer, Behind(self.generation, known, message.round))
        elif log.durable >= self._state_token:
            self._send(peer, self.answer(self.generation, log.stable, message.round))


class ReplicatedServer(Follower):
    """What a server does as a leader. The base of a small protocol's core."""

    carrier: type[Entries] = Entries
    heartbeat: type[Commit] = Commit

    def _restore(self, state: Any) -> None:
        self._followers = Followers(self._peers.values(), self._majority)
        self._floor = 0
        """The index of the leader's first entry."""
        self._on = {
            Elapsed: self._elapsed,
            Persisted: self._persisted,
            Propose: self._proposed,
            ReadAsked: self._read_asked,
            Connected: self._connected,
            Disconnected: self._disconnected,
            TransferAsked: lambda event: self._effects.append(
                TransferRefused(event.token, "this protocol cannot transfer leadership")
            ),
            ChangeAsked: lambda _: self._effects.append(
                ProposalRefused("this protocol's membership is fixed")
            ),
        }

    # To be implemented by a protocol.

    def _due(self) -> None:
        """The deadline has come, and this server does not lead."""
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

    def _elapsed(self, event: Elapsed) -> None:
        if self._now < self.next_deadline:
            return
        if self.role is Role.LEADING:
            self._beat()
        else:
            self._due()

    def _persisted(self, event: Persisted) -> None:
        if self.log.written(event.token) and self.role is Role.LEADING:
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

    def _read_asked(self, event: ReadAsked) -> None:
        if self.role is not Role.LEADING:
            self._effects.append(ReadRefused(event.token))
            return
        # A round that has begun may have been answered before this read was requested.
        index, round_ = max(self.commit, self._floor), self._followers.round + 1
        self._followers.reads.append((event.token, index, round_))
        self._confirm()

    # Leading.

    def _carry(self, first: int, entries: tuple[LogEntry, ...]) -> Message:
        """The message that carries these entries (or none: a heartbeat), the commit index and the
        round to a follower."""
        commit, round_ = self.commit, self._followers.round
        if entries:
            return self.carrier(self.generation, first, entries, commit, round_)
        return self.heartbeat(self.generation, commit, first - 1, round_)

    def _lead(self) -> None:
        """Lead in this generation."""
        self._floor = len(self.log) + 1
        for peer in self._peers.values():
            peer.heard = self._now
            peer.round = peer.match = 0
            peer.next = self._floor
            self._prepare(peer)
            peer.origin = peer.next - 1
        self._followers.round = 0
        self._set_role(Role.LEADING, self.id)
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._append(LogEntry(self.generation, EntryKind.NOTHING, b""))

    def _prepare(self, peer: Peer) -> None:
        """Note what the election has shown of the peer's log."""

    def _set_role(self, role: Role, leader: str | None) -> None:
        if self.role is Role.LEADING and role is not Role.LEADING:
            reads = self._followers.reads
            self._effects.extend(ReadRefused(token) for token, _, _ in reads)
            reads.clear()
        super()._set_role(role, leader)

    def _append(self, entry: LogEntry) -> None:
        """Append to the leader's log: send it to the peers, and write it to disk meanwhile."""
        self.log.append(entry)
        for peer in self._peers.values():
            self._stream(peer)
        self.log.write(None, len(self.log), (entry,))

    def _stream(self, peer: Peer) -> None:
        """Send the peer what it has not been sent, as far as the window allows."""
        end = min(len(self.log), max(peer.match, peer.origin) + WINDOW) if peer.synced else 0
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
        """Send heartbeats; step down if no majority has answered for an election timeout."""
        if not self._followers.heard(self._now - self._settings.election_timeout_s):
            self._look()
            return
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._begin_round()

    def _established(self) -> bool:
        """Whether this server leads, has committed something in this generation, and is still
        followed. A server that has only just been elected may have a rival in a later
        generation."""
        return (
            self.role is Role.LEADING
            and self.commit >= self._floor
            and self._followers.heard(self._now - 2 * self._settings.heartbeat_s)
        )

    def _begin_round(self) -> None:
        self._followers.round += 1
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

    def _answered(self, peer: Peer, match: int, round_: int) -> None:
        """A follower has answered in this generation: it has the log up to `match` on disk."""
        peer.heard = self._now
        if round_ > peer.round:
            peer.round = round_
            if self._followers.reads:
                self._confirm()
        if match > peer.match:
            peer.match = match
            if peer.next <= match:
                peer.next = match + 1
            if match > self.commit:
                self._decide()
        if peer.next <= len(self.log):
            self._stream(peer)

    def _decide(self) -> None:
        """Commit what a majority has on disk, but nothing before the leader's first entry, which
        commits everything that earlier leaders left."""
        index = self._followers.stored(self.log.stable)
        if index > self.commit and index >= self._floor:
            self._commit_to(index)
            self._send_commit()
            if self._followers.reads:
                self._confirm()

    def _confirm(self) -> None:
        """Answer the reads that can be answered, and begin the round that the others need."""
        while self._followers.serve(self.commit, self._effects):
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
