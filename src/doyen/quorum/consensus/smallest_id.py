"""The majority vote for the smallest id, made safe.

The textbook's vote: in each round every server votes for the smallest id it knows to be up; a
server with a majority leads, and a round without a winner is followed by another. If ids alone
decide, two servers that know of different ones elect two leaders, and a leader whose log is shorter
than others' undoes what was committed. Here, the id only decides *which server campaigns first*:

    look      a server without a leader sends that to all, and how far its log goes; others without
              a leader answer in kind. No server campaigns before a majority is known to be looking.
    stand     of the servers known to be up, the one with the longest log, and among equals the
              smallest id, begins a new generation and asks for votes. If it does not win, the next
              one campaigns, after a timeout that grows with the id and with every failed attempt,
              since messages may be slower than assumed.
    vote      once per generation, for a server whose log is at least as long, and on disk before it
              is sent; not at all while a leader is alive.
    lead      with the votes of a majority, its own included once that is on disk. An established
              leader that hears of a later generation begins the next one.

The leader's log is streamed to the followers; each message names the entry that must precede it.
Only an entry of the leader's own generation is committed by counting.

The order of ids compares numbers within names as numbers: n2 comes before n10.
"""

from __future__ import annotations

from msgspec import Struct

from doyen.quorum.consensus.common import Answer, Peer, ReplicatedServer
from doyen.quorum.consensus.core import LogEntry, Message, Role


class VoterState(Struct, frozen=True, array_like=True):
    """What a server keeps on disk: its generation, and its vote in it."""

    generation: int = 0
    vote: str | None = None


class Looking(Message, frozen=True, gc=False):
    """The sender has no leader, and its log ends here."""

    last_generation: int
    last: int
    answer: bool
    """Whether it answers another `Look`; it is then not answered again."""


class Stand(Message, frozen=True, gc=False):
    """Requests a vote in this generation; the sender's log ends here."""

    last_generation: int
    last: int


class Vote(Message, frozen=True, gc=False):
    """The answer to `Stand`."""

    granted: bool


class Append(Message, frozen=True, gc=False):
    """Entries of the leader that follow `previous`. Without any, a heartbeat."""

    previous: int
    previous_generation: int
    entries: tuple[LogEntry, ...]
    commit: int
    round: int


class Appended(Answer, frozen=True, gc=False):
    """The sender's log on disk is the leader's up to here. In a later generation than the leader's,
    it means that the receiver leads no more."""


class Missing(Answer, frozen=True, gc=False):
    """The entries do not follow the sender's log: begin after `last`."""


MESSAGES = Looking | Stand | Vote | Append | Appended | Missing
STATE = VoterState


class SmallestId(ReplicatedServer):
    """One server of the vote for the smallest id."""

    def _restore(self, state: VoterState | None) -> None:
        super()._restore(state)
        state = state or VoterState()
        self.generation = state.generation
        self.vote = state.vote
        self._present: dict[str, tuple[int, int]] = {}
        """The servers known to be looking in this round, and how far their logs go."""
        self._answered_by: set[str] = set()
        """Those of them that have heard this server: a server that is not heard must not begin a
        generation, with which it would depose a healthy leader when it comes back."""
        self._votes: set[str] = set()
        self._vote_token = 0
        """This server's own vote counts once this is on disk; 0 if it does not campaign."""
        self._gathered = self._now
        """Until when to wait for other servers before deciding which one should campaign."""
        self._hear = {
            Looking: self._hear_looking,
            Stand: self._hear_stand,
            Vote: self._hear_vote,
            Append: self._hear_append,
            Appended: self._hear_appended,
            Missing: self._hear_behind,
        }

    # Looking for one another.

    def _look(self) -> None:
        self._set_role(Role.LOOKING, None)
        self._new_round()

    def _new_round(self) -> None:
        """Forget which servers were up, and ask again. A candidate remains one: its votes may yet
        come."""
        self._present = {self.id: self.log.position()}
        self._answered_by = {self.id}
        self._gathered = self._now + self._settings.heartbeat_s
        stagger = self._rank[self.id] / len(self._rank)
        timer = self._timer
        patience_s = timer.timeout_s * (0.5 + 0.5 * stagger + 0.5 * timer.jitter())
        timer.patience = self._now + timer.lengthened(patience_s)
        self.next_deadline = self._gathered
        self._send_all(self._looking(answer=False))
        self._judge()

    def _looking(self, answer: bool) -> Looking:
        return Looking(self.generation, *self.log.position(), answer)

    def _due(self) -> None:
        if self.role is Role.FOLLOWING:
            self._look()
        elif self._now < self._timer.patience:
            self._judge()
            if self.role is Role.LOOKING:
                self._send_all(self._looking(answer=False))
                beat_at = self._now + self._settings.heartbeat_s
                self.next_deadline = min(beat_at, self._timer.patience)
        else:
            # A round without a winner: the server whose timeout ends first campaigns, and the
            # voters decide.
            if len(self._answered_by) >= self._majority and not self._vote_token:
                self._become_candidate()
            else:
                self._abandon()
            self._new_round()

    def _hear_looking(self, peer: Peer, message: Looking) -> None:
        if self.role is Role.LEADING:
            self._send(peer, self._carry(peer.next, ()))
        elif self.leader == peer.name and message.generation >= self.generation:
            self._look()
        if self.role is not Role.LOOKING:
            return
        self._present[peer.name] = (message.last_generation, message.last)
        if message.answer:
            self._answered_by.add(peer.name)
        else:
            self._send(peer, self._looking(answer=True))
        self._judge()

    def _judge(self) -> None:
        """Campaign if this server is the one to do so, and enough others are looking."""
        if self._vote_token or len(self._answered_by) < self._majority:
            return
        complete = len(self._present.keys() | self._unreachable) == len(self._rank)
        if (self._now >= self._gathered or complete) and self._first_to_stand() == self.id:
            self._become_candidate()

    def _first_to_stand(self) -> str:
        furthest = max(self._present.values())
        return min(
            (name for name, last in self._present.items() if last == furthest),
            key=self._rank.__getitem__,
        )

    # Voting.

    def _state(self) -> VoterState:
        return VoterState(self.generation, self.vote)

    def _enter(self, generation: int, vote: str | None = None) -> None:
        """Enter this generation, having voted for this server or for none."""
        self._timer.attempts += generation > self.generation
        self.generation, self.vote = generation, vote
        self._abandon()
        self.log.write(self._state())

    def _abandon(self) -> None:
        self._votes = set()
        self._vote_token = 0

    def _become_candidate(self) -> None:
        self._enter(self.generation + 1, self.id)
        self._set_role(Role.LOOKING, None)
        self._vote_token = self.log.token
        self._send_all(Stand(self.generation, *self.log.position()), after=self.log.token)

    def _written(self) -> None:
        if self._vote_token and self.log.durable >= self._vote_token:
            self._count(self.id)

    def _hear_stand(self, peer: Peer, message: Stand) -> None:
        if self._leader_lives() and self.leader != peer.name:
            return
        newer = message.generation > self.generation
        vote = None if newer else self.vote
        granted = (
            message.generation >= self.generation
            and vote in (None, peer.name)
            and self._far_enough(message)
        )
        if newer or (granted and vote is None):
            self._enter(message.generation, peer.name if granted else None)
            self._look_on()
        self._send(peer, Vote(self.generation, granted), after=self.log.token)

    def _look_on(self) -> None:
        """Another server campaigns: give it the time to win."""
        self._set_role(Role.LOOKING, None)
        timer = self._timer
        timer.patience = max(timer.patience, self._now + timer.lengthened(timer.draw()))
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _far_enough(self, candidate: Stand) -> bool:
        """Whether the candidate's log is at least as long as this one."""
        return (candidate.last_generation, candidate.last) >= self.log.position()

    def _hear_vote(self, peer: Peer, message: Vote) -> None:
        if message.generation > self.generation:
            self._overtaken(message.generation)
        elif message.granted and message.generation == self.generation and self._vote_token:
            self._count(peer.name)

    def _count(self, voter: str) -> None:
        self._votes.add(voter)
        if len(self._votes) >= self._majority:
            self._abandon()
            self._lead()

    def _overtaken(self, generation: int) -> None:
        """Other servers are in a later generation."""
        if self._established():
            # That generation was begun and not completed: the followers of this server enter the
            # next one.
            self.generation = generation
            self._present = {self.id: self.log.position()}
            self._answered_by = {self.id}
            self._become_candidate()
            self._look_on()
        else:
            self._enter(generation)
            self._look()

    # Replicating.

    def _carry(self, first: int, entries: tuple[LogEntry, ...]) -> Message:
        previous, round_ = first - 1, self._followers.round
        before = self.log.generation_at(previous)
        return Append(self.generation, previous, before, entries, self.commit, round_)

    def _hear_append(self, peer: Peer, message: Append) -> None:
        if message.generation < self.generation:
            self._send(peer, Appended(self.generation, 0, 0), after=self.log.token)
            return
        if message.generation > self.generation:
            self._enter(message.generation)
        self._abandon()
        self._follow(peer)
        log, previous = self.log, message.previous
        agreed = log.take(previous, message.previous_generation, message.entries)
        if agreed < previous:
            self._send(peer, Missing(self.generation, agreed, message.round))
            return
        self._commit_to(min(message.commit, agreed))
        if message.entries:
            self._send(peer, Appended(self.generation, agreed, message.round), after=log.token)
        else:
            match = min(previous, log.stable)
            self._send(peer, Appended(self.generation, match, message.round))

    def _hear_appended(self, peer: Peer, message: Appended) -> None:
        if message.generation > self.generation:
            self._overtaken(message.generation)
        else:
            self._hear_answer(peer, message)
