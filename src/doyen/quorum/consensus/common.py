"""What the smaller protocols have in common: a log, a disk, peers, and the work of a leader.

`ReplicatedServer` is the frame of a core that elects, replicates and restarts, and no more: no
snapshots, no change of membership, no transfer. It knows nothing of elections. A protocol adds the
messages, who may lead, and when a follower's log agrees with the leader's; `ReplicatedServer` keeps
the following for it.

- **The disk.** `_persist` numbers what is written; `_stable` is the index up to which *this* log is
  on disk. Whatever is cut off and written anew is not stable until the new writing is, however late
  the word of the old one comes.
- **The leader's stream.** Per peer: up to where it has the leader's log on disk (`match`), and what
  goes next. `match` may only be raised by an answer given in the leader's own generation.
- **Commitment.** What a majority has on disk, the leader itself included only when its own disk has
  it, and never before the leader's first entry, with which it ends whatever earlier leaders left.
- **Reads.** A read waits for a majority to answer a round that began after it was asked, and for
  the leader's first entry to be committed.
- **The quorum check.** A leader that has not heard from a majority for an election timeout is none.

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

__all__ = ["WINDOW", "Peer", "ReplicatedServer", "order"]


def order(name: str) -> tuple[tuple[int, int, str], ...]:
    """The order of ids: numbers within names as numbers, so that n2 comes before n10."""
    return tuple(
        (0, int(part), "") if part.isdecimal() else (1, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    )


FRUITLESS = 12
"""After so many attempts in vain patience grows no more: it is four times what it was."""
WINDOW = 1024
"""How many entries may be on their way to a peer before it has answered for the first of them."""


class Peer:
    """What a leader knows of another server."""

    __slots__ = (
        *("again", "back", "heard", "low", "match"),
        *("name", "next", "origin", "round", "synced"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.match = 0
        self.next = 1
        self.origin = 0
        """After which index the stream to it began."""
        self.again = -inf
        """Until when it need not be sent the same once more."""
        self.back = -inf
        self.low = 0
        """Until when the stream to it goes back only if it is further than here."""
        self.heard = -inf
        self.round = 0
        self.synced = True
        """Whether its log is a beginning of the leader's, so that it may be sent the rest."""


class ReplicatedServer:
    """The frame of a small protocol's core. See the module."""

    snapshots = False
    """Whether a server may find a snapshot on its disk: whoever drives it takes none, then."""

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
        self._peers = {name: Peer(name) for name in membership.voters if name != id}
        self._gone: set[str] = set()
        self._effects: list[Effect] = []
        self._token = 0
        self._durable = 0
        self._stable = len(self.log)
        self._writing: deque[tuple[int, int]] = deque()
        self._floor = 0
        self._attempts = 0
        """To have a leader, since one last led for long enough to decide something; that under way
        included."""
        self._round = 0
        self._reads: deque[tuple[int, int, int]] = deque()
        self._announced: tuple[Role, int, str | None] = (Role.LOOKING, 0, None)
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

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Take in one event, and say what has to be done about it, in order."""
        self._now = now
        self._on[type(event)](event)
        effects = self._effects
        self._effects = []
        return effects

    # What a protocol fills in.

    def _due(self) -> None:
        """The deadline has come, and this server does not lead."""
        raise NotImplementedError

    def _carry(self, peer: Peer, first: int, entries: tuple[LogEntry, ...]) -> Message:
        """The message that brings a follower these entries (or none: a heartbeat), what is
        committed, and the round."""
        raise NotImplementedError

    def _look(self) -> None:
        """Have no leader, and look for one."""
        raise NotImplementedError

    def _written(self) -> None:
        """More is on disk, and this server does not lead."""

    def _lost_sight(self, peer: Peer) -> None:
        """The connection to the peer has ended."""
        if peer.name == self.leader:
            self._look()

    # Events.

    def _received(self, event: Received) -> None:
        peer = self._peers.get(event.peer)
        hear = self._hear.get(type(event.message))
        # A stranger has no voice, and least of all one who calls itself by our own name.
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
        self._gone.discard(event.peer)

    def _disconnected(self, event: Disconnected) -> None:
        peer = self._peers.get(event.peer)
        if peer is not None:
            self._gone.add(event.peer)
            self._lost_sight(peer)

    def _proposed(self, event: Propose) -> None:
        if self.role is not Role.LEADING:
            self._effects.append(ProposalRefused("this server does not lead"))
            return
        self._append(LogEntry(self.generation, EntryKind.COMMANDS, event.data))
        self._effects.append(Accepted(len(self.log), self.generation))

    def _transfer_asked(self, event: TransferAsked) -> None:
        self._effects.append(TransferFailed("this protocol cannot hand leadership over"))

    def _change_asked(self, event: ChangeAsked) -> None:
        self._effects.append(ProposalRefused("this protocol's membership is fixed"))

    def _nothing(self, event: CoreEvent) -> None:
        pass

    # Saying and writing.

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        self._effects.append(Send(peer.name, message, after))

    def _tell_all(self, message: Message, after: int = 0) -> None:
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
        """Keep the log up to here. Nothing beyond counts as written any more, whatever the disk
        has yet to say of it."""
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
        """`index`, if an entry of this generation stands there, and so the same log up to it; else
        an earlier one at which it may be worth trying."""
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
        """Have these after `previous`. What stands there already stays, and what is behind it too:
        the message may be an old one. Only a contradiction cuts the log."""
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

    def _turn(self, role: Role, leader: str | None) -> None:
        """Be this now, and say so if it is new."""
        if self.role is Role.LEADING and role is not Role.LEADING:
            self._effects.extend(ReadRefused(token) for token, _, _ in self._reads)
            self._reads.clear()
        self.role, self.leader = role, leader
        now = (role, self.generation, leader)
        if now != self._announced:
            self._announced = now
            self._effects.append(RoleChanged(*now))

    def _draw(self) -> float:
        """An election timeout."""
        return self._settings.election_timeout_s * (1 + self._jitter() / 2)

    def _grown(self, patience_s: float) -> float:
        """Longer with every attempt that came to nothing: messages may be slower than supposed."""
        return patience_s * (1 + min(max(0, self._attempts - 1), FRUITLESS) / 4)

    # Leading.

    def _lead(self) -> None:
        """Lead in this generation."""
        for peer in self._peers.values():
            peer.heard = self._now
            peer.round = 0
            self._prepare(peer)
            peer.origin = peer.next - 1
        self._round = 0
        self._floor = len(self.log) + 1
        self._turn(Role.LEADING, self.id)
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._append(LogEntry(self.generation, EntryKind.NOTHING, b""))

    def _prepare(self, peer: Peer) -> None:
        """What is known of a peer's log when one begins to lead: nothing, unless the election has
        told."""
        peer.match = 0
        peer.next = len(self.log) + 1

    def _append(self, entry: LogEntry) -> None:
        """Add to the leader's log: to the peers first, and to the disk meanwhile."""
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
            self._send(peer, self._carry(peer, first, entries))

    def _piece(self, first: int, end: int) -> tuple[LogEntry, ...]:
        """What goes into one message of the entries from `first` to `end`."""
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
        """A heartbeat is due; so is the question whether anybody is there to hear it."""
        if not self._supported(self._settings.election_timeout_s):
            self._look()
            return
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._begin_round()
        if not self._peers:
            self._confirm()

    def _supported(self, within_s: float) -> bool:
        """Whether a majority has answered, as followers do, within this time."""
        since = self._now - within_s
        heard = 1
        for peer in self._peers.values():
            heard += peer.heard > since
        return heard >= self._majority

    def _established(self) -> bool:
        """Whether we lead, have decided something in this generation, and are still followed. One
        that has only just begun to may have a rival who has, too."""
        return (
            self.role is Role.LEADING
            and self.commit >= self._floor
            and self._supported(2 * self._settings.heartbeat_s)
        )

    def _begin_round(self) -> None:
        self._round += 1
        self._tell_news()

    def _tell_news(self) -> None:
        """Tell the followers what is committed, and which round it is."""
        for peer in self._peers.values():
            if peer.synced:
                self._send(peer, self._carry(peer, peer.next, ()))

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

    def _missing(self, peer: Peer, last: int, round_: int) -> None:
        """A follower lacks what comes after `last`."""
        if last + 1 < peer.next and self._may_go_back(peer, last):
            peer.origin = last
            peer.next = last + 1
        self._answered(peer, 0, round_)

    def _may_go_back(self, peer: Peer, last: int) -> bool:
        """At once if it is further than before, else twice in a heartbeat at most. A peer says what
        it lacks of every message that has overtaken another, and says it twice where the network
        repeats messages: if each word had all of it sent again, there would be no end to it."""
        if self._now >= peer.back:
            peer.back = self._now + self._settings.heartbeat_s / 2
        elif last >= peer.low:
            return False
        peer.low = last
        return True

    def _decide(self) -> None:
        """Commit what a majority has on disk."""
        matches = [peer.match for peer in self._peers.values()]
        matches.append(self._stable)
        matches.sort()
        index = matches[-self._majority]
        if index > self.commit and index >= self._floor:
            self._commit_to(index)
            self._tell_news()
            if self._reads:
                self._confirm()

    # Reading.

    def _read_asked(self, event: ReadAsked) -> None:
        if self.role is not Role.LEADING:
            self._effects.append(ReadRefused(event.token))
            return
        begin = not self._peers or self._round == self._confirmed()
        # A round that is under way may have been answered before this read was asked.
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
        """Answer the reads whose time has come; the others' round begins as soon as it may."""
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
        raise ConfigError("this protocol cannot start from a snapshot: use raft with this folder")
