"""Multi-Paxos: a log of slots, each decided by Paxos, with one first phase for all of them.

    doubt       a server that misses the leader asks which others do. It does not prepare alone.
    prepare     with a ballot of its own, later than any it has heard of, a proposer asks for
                promises. An acceptor promises, on disk, to accept no values of earlier ballots, and
                sends what it has accepted in the slots that are still open to the proposer, and in
                which ballots.
    take over   with the promises of a majority, the proposer proposes in its own ballot: in each
                open slot the value accepted in the highest ballot, and a no-op where none was
                reported.
    outbid      an established leader that hears of a later ballot prepares one later still.
    accept      new values take the next slots. An acceptor accepts them in any order, so its log
                may have gaps until a leader fills them.
    chosen      what a majority has accepted in one ballot, without a gap before it.

A ballot is k · n + r for the server ranked r of n: no two servers share one, and the ballot names
its leader. It is the core's `generation`: the latest promised ballot.

An entry keeps the generation in which it was first proposed, however often later leaders propose it
again, so that its proposer can recognise it. The ballot in which it was *accepted* is kept beside
the log, in runs of slots with the same ballot. A gap is an entry of generation 0, which no leader
has. Slots known to be chosen count as accepted in the latest promised ballot, since nothing else
can be chosen there.
"""

from __future__ import annotations

from msgspec import Struct

from doyen.quorum.consensus.common import (
    Answer,
    Behind,
    Commit,
    Entries,
    Later,
    Peer,
    ReplicatedServer,
)
from doyen.quorum.consensus.core import EntryKind, LogEntry, Message, Role

GAP = LogEntry(0, EntryKind.NOTHING, b"")
REPORTED_AT_ONCE = 16
"""How many promises answer one `Prepare`, if the accepted values do not fit into one message."""


class AcceptorState(Struct, frozen=True, array_like=True):
    """What an acceptor keeps on disk besides its log."""

    promised: int = 0
    accepted: tuple[tuple[int, int], ...] = ()
    """(slot, ballot): from this slot up to the next such pair, values were accepted in this
    ballot."""


class Doubt(Message, frozen=True, gc=False):
    """The sender misses the leader. `generation` is its latest promised ballot."""

    answer: bool
    """Whether it answers another `Doubt`. Only answers count: a server that cannot be heard must
    not prepare a ballot, with which it would depose a healthy leader when it comes back."""


class Prepare(Message, frozen=True, gc=False):
    """Requests a promise of this ballot, and what the receiver has accepted from slot `first`
    on. The answer is one promise, or several if that does not fit into one message."""

    first: int


class Promise(Message, frozen=True, gc=False):
    """The sender promises. From slot `first` on, it has accepted these values in these ballots; its
    last slot is `last`."""

    first: int
    ballots: tuple[int, ...]
    entries: tuple[LogEntry, ...]
    last: int


class Accept(Entries, frozen=True, gc=False):
    """Requests that these values are accepted in this ballot."""


class Chosen(Commit, frozen=True, gc=False):
    """Every slot up to `commit` is decided. Repeated, it is the heartbeat."""


class AcceptOk(Answer, frozen=True, gc=False):
    """The sender has accepted every slot up to `last` in this ballot, or knows it to be decided."""


MESSAGES = Doubt | Prepare | Promise | Accept | Chosen | AcceptOk | Behind | Later
STATE = AcceptorState


class Paxos(ReplicatedServer):
    """One server: proposer, acceptor and learner."""

    carrier = Accept
    heartbeat = Chosen
    answer = AcceptOk

    def _restore(self, state: AcceptorState | None) -> None:
        super()._restore(state)
        state = state or AcceptorState()
        self.generation = state.promised
        self._runs = state.accepted
        self._ballots = _ballots(state.accepted, self.log)
        """The ballot in which each slot of the log was accepted."""
        self._seen = self.generation
        """The latest ballot that this server has heard of."""
        self._doubters: set[str] = set()
        self._stand_at = self._now
        self._promise_token = 0
        """While preparing: this server's own promise counts once this is on disk."""
        self._reported: dict[str, int] = {}
        """The servers that have promised, and the slot up to which their accepted values are
        known."""
        self._awaited: dict[str, int] = {}
        """Per server, how many more promises answer the last `Prepare`."""
        self._complete: set[str] = set()
        """The servers whose accepted values are all known."""
        self._found: dict[int, tuple[int, LogEntry]] = {}
        """Per open slot, the value reported in the highest ballot."""
        self._known = 0
        """The index up to which this log is the leader's: decided, or accepted in its ballot."""
        self._hear = {
            Doubt: self._hear_doubt,
            Prepare: self._hear_prepare,
            Promise: self._hear_promise,
            Accept: self._hear_accept,
            Chosen: self._hear_chosen,
            AcceptOk: self._hear_answer,
            Behind: self._hear_behind,
            Later: self._hear_later,
        }

    def _state(self) -> AcceptorState:
        return AcceptorState(self.generation, self._runs)

    # Doubting the leader.

    def _look(self) -> None:
        self._set_role(Role.LOOKING, None)
        self._promise_token = 0
        self._doubters = set()
        self._timer.patience = self._now + 2 * self._timer.draw()
        # Two servers that prepare at once void each other's ballots, so they wait longer every
        # time.
        spread = self._settings.heartbeat_s * 2 ** min(self._timer.attempts, 5) / 2
        self._stand_at = self._now + self._timer.jitter() * spread
        self._ask()

    def _ask(self) -> None:
        self._send_all(Doubt(self.generation, False))
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._consider()

    def _due(self) -> None:
        if self.role is Role.FOLLOWING or self._now >= self._timer.patience:
            self._look()
        elif self._promise_token:
            self.next_deadline = self._now + self._settings.heartbeat_s
            self._prepare_others()
        elif self._now >= self._stand_at and self._stand_at == self.next_deadline:
            self._consider()
            self.next_deadline = self._now + self._settings.heartbeat_s
        else:
            self._ask()

    def _hear_doubt(self, peer: Peer, message: Doubt) -> None:
        self._seen = max(self._seen, message.generation)
        if self.role is Role.LEADING and message.generation <= self.generation:
            self._send(peer, self._carry(peer.next, ()))
        elif self.leader == peer.name and message.generation >= self.generation:
            self._look()
        if self.role is not Role.LOOKING:
            return
        if message.answer:
            self._doubters.add(peer.name)
            self._consider()
        else:
            self._send(peer, Doubt(self.generation, True))

    def _consider(self) -> None:
        """Prepare if enough others doubt, but not all at the same instant."""
        if self._promise_token or 1 + len(self._doubters) < self._majority:
            return
        if self._now >= self._stand_at:
            self._become_candidate()
        else:
            self.next_deadline = min(self.next_deadline, self._stand_at)

    # The first phase.

    def _become_candidate(self) -> None:
        self._timer.attempts += 1
        n = len(self._names)
        ballot = self._seen // n * n + self._rank[self.id]
        if ballot <= self._seen:
            ballot += n
        self._enter(ballot)
        self._promise_token = self.log.token
        self._reported = {}
        self._awaited = {}
        self._complete = set()
        self._found = {}
        self._timer.patience = self._now + self._timer.draw()
        self._prepare_others()

    def _enter(self, ballot: int) -> None:
        """Accept no values of earlier ballots any more."""
        self._promise_token = 0
        self.generation = ballot
        self._seen = max(self._seen, ballot)
        self._known = self.commit
        self._set_role(Role.LOOKING, None)
        self.log.write(self._state())

    def _prepare_others(self) -> None:
        """Also sent to those that have answered completely: hearing from this server keeps them
        waiting."""
        for name, peer in self._peers.items():
            message = Prepare(self.generation, self._reported.get(name, self.commit) + 1)
            self._awaited[name] = REPORTED_AT_ONCE
            self._send(peer, message, after=self._promise_token)
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _hear_prepare(self, peer: Peer, message: Prepare) -> None:
        self._seen = max(self._seen, message.generation)
        another_leads = self._leader_lives() and self.leader != peer.name
        if not another_leads and self._from_leader(peer, message) and self.role is Role.LOOKING:
            # It gets the time to win, whichever others still doubt.
            self._timer.patience = self._stand_at = self._now + self._timer.draw()
            self.next_deadline = self._timer.patience
            self._report(peer, max(1, message.first))

    def _report(self, peer: Peer, first: int) -> None:
        last = len(self.log)
        for _ in range(REPORTED_AT_ONCE):
            entries = self._piece(first, last) if first <= last else ()
            ballots = tuple(self._ballots[first - 1 : first - 1 + len(entries)])
            promise = Promise(self.generation, first, ballots, entries, last)
            self._send(peer, promise, after=self.log.token)
            first += len(entries)
            if first > last:
                return

    def _hear_promise(self, peer: Peer, message: Promise) -> None:
        if message.generation != self.generation or not self._promise_token:
            return
        upto = self._reported.get(peer.name, self.commit)
        if peer.name in self._complete or message.first != upto + 1:
            return
        for slot, (ballot, entry) in enumerate(
            zip(message.ballots, message.entries, strict=True), message.first
        ):
            if entry.generation:
                self._find(slot, ballot, entry)
        self._timer.patience = self._now + self._timer.draw()
        upto += len(message.entries)
        self._reported[peer.name] = upto
        self._awaited[peer.name] -= 1
        if upto >= message.last:
            self._complete.add(peer.name)
            self._written()
        elif not self._awaited[peer.name]:
            self._awaited[peer.name] = REPORTED_AT_ONCE
            self._send(peer, Prepare(self.generation, upto + 1))

    def _find(self, slot: int, ballot: int, entry: LogEntry) -> None:
        """Of the values accepted in a slot, only that of the highest ballot may have been
        chosen."""
        if slot not in self._found or ballot > self._found[slot][0]:
            self._found[slot] = (ballot, entry)

    def _written(self) -> None:
        """Lead with the promises of a majority; this server's own counts once it is on disk."""
        promised = 0 < self._promise_token <= self.log.durable
        if promised and 1 + len(self._complete) >= self._majority:
            self._take_over()

    def _take_over(self) -> None:
        """Propose again whatever may have been chosen, and fill the gaps."""
        self._promise_token = 0
        for slot in range(self.commit + 1, len(self.log) + 1):
            if self.log[slot - 1].generation:
                self._find(slot, self._ballots[slot - 1], self.log[slot - 1])
        first = self.commit + 1
        top = max(self._found, default=self.commit)
        nothing = (0, LogEntry(self.generation, EntryKind.NOTHING, b""))
        entries = [self._found.get(slot, nothing)[1] for slot in range(first, top + 1)]
        self.log.cut(self.commit)
        del self._ballots[self.commit :]
        self.log.extend(entries)
        self._ballots.extend([self.generation] * len(entries))
        self._found = {}
        self._runs = self._count_runs()
        self.log.write(self._state(), first=first, entries=tuple(entries))
        self._lead()

    def _count_runs(self) -> tuple[tuple[int, int], ...]:
        runs = [(1, self.generation)]
        for slot in range(self.commit + 1, len(self.log) + 1):
            ballot = self._ballots[slot - 1]
            if ballot != runs[-1][1] and self.log[slot - 1].generation:
                runs.append((slot, ballot))
        return tuple(runs)

    # The second phase, on an acceptor.

    def _in_step(self, peer: Peer, message: Message) -> bool:
        if not self._from_leader(peer, message):
            return False
        self._promise_token = 0
        self._follow(peer)
        return True

    def _hear_accept(self, peer: Peer, message: Accept) -> None:
        if not self._in_step(peer, message):
            return
        self._accept(message.first, message.entries)
        self._learn(message.first)
        self._commit_to(min(message.commit, self._known))
        if message.first > self._known:
            self._send(peer, Behind(self.generation, self._known, message.round))
        else:
            reply = AcceptOk(self.generation, self._known, message.round)
            self._send(peer, reply, after=self.log.token)

    def _accept(self, first: int, entries: tuple[LogEntry, ...]) -> None:
        """Write values in these slots, whatever was there, unless that is decided or the same."""
        log, ballots, ballot = self.log, self._ballots, self.generation
        skip = 0
        for slot in range(first, min(first + len(entries), len(log) + 1)):
            if slot > self._known and (ballots[slot - 1] != ballot or not log[slot - 1].generation):
                break
            skip += 1
        first += skip
        entries = entries[skip:]
        if not entries:
            return
        if first > len(log) + 1:
            entries = (GAP,) * (first - 1 - len(log)) + entries
            first = len(log) + 1
        end = first - 1 + len(entries)
        log[first - 1 : end] = entries
        ballots[first - 1 : end] = [ballot] * len(entries)
        state = None
        if not self._runs or self._runs[-1][1] != ballot or first < self._runs[-1][0]:
            self._runs = self._count_runs()
            state = self._state()
        self.log.write(state, first, entries, keep=True)

    def _learn(self, first: int) -> None:
        """Determine how far this log is the leader's now."""
        log, ballots, ballot = self.log, self._ballots, self.generation
        if first <= self._known + 1:
            known = self._known
            while known < len(log) and ballots[known] == ballot and log[known].generation:
                known += 1
            self._known = known

    def _hear_chosen(self, peer: Peer, message: Chosen) -> None:
        if not self._in_step(peer, message):
            return
        self._commit_to(min(message.commit, self._known))
        if message.last > self._known:
            self._send(peer, Behind(self.generation, self._known, message.round))
        else:
            last = self._known if self.log.durable == self.log.token else 0
            self._send(peer, AcceptOk(self.generation, last, message.round))

    # The second phase, on the leader.

    def _prepare(self, peer: Peer) -> None:
        peer.next = self.commit + 1

    def _append(self, entry: LogEntry) -> None:
        self._ballots.append(self.generation)
        super()._append(entry)

    def _hear_later(self, peer: Peer, message: Later) -> None:
        self._seen = max(self._seen, message.generation)
        if message.generation <= self.generation:
            return
        if self._established():
            # That ballot was prepared and not completed. The followers promise this server a later
            # one, and need no other leader.
            self._become_candidate()
        elif self.role is Role.LEADING or self._promise_token:
            self._look()


def _ballots(runs: tuple[tuple[int, int], ...], log: list[LogEntry]) -> list[int]:
    """The ballot of every slot; a gap was accepted in none."""
    ballots = [0] * len(log)
    for number, (first, ballot) in enumerate(runs):
        end = runs[number + 1][0] - 1 if number + 1 < len(runs) else len(log)
        for slot in range(first, min(end, len(log)) + 1):
            if log[slot - 1].generation:
                ballots[slot - 1] = ballot
    return ballots
