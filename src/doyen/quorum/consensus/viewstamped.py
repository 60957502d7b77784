"""Viewstamped replication, revisited, with its view on disk.

    normal        the primary of view v is server v mod n, so there is no election: it has the
                  others prepare operations, and sends them what is committed.
    view change   a server that misses the primary sends the others the view that it wants instead.
                  When a majority wants it, a server *enters* the view, on disk, takes no part in
                  earlier ones any more, and sends the new primary how far its log goes, and in
                  which view it last was normal. Of a majority's logs, the new primary takes the one
                  with the greatest (last normal view, op number).
    start view    the others make their logs the primary's, then write that they are normal in the
                  view, then acknowledge.

The paper's servers keep nothing on disk and ask one another after a crash, so they cannot recover
when all crash at once. Here the view, the last normal view and the log are on disk. A server does
not lead a view that it was in before a crash: the disk may lack the last part of what it sent
there. Nor does it lead a view again that it has led and given up.

An established primary that hears of a later view wants the next one of its own. Wanting a view
binds no server: one that is cut off wants the same view for ever, without effect on the others, and
servers whose primary is alive ignore it. The core's `generation` is the view entered. Logs are
brought into step from the last entry that both have of the same view, so no uncommitted entry of an
earlier view survives in a later one.
"""

from __future__ import annotations

from msgspec import Struct

from doyen.quorum.consensus.common import (
    WINDOW,
    Answer,
    Behind,
    Commit,
    Entries,
    Later,
    Peer,
    ReplicatedServer,
)
from doyen.quorum.consensus.core import (
    CoreEvent,
    Effect,
    Elapsed,
    LogEntry,
    Message,
    Role,
)

STALE = 3
"""For how many heartbeats it counts that a server wants a view."""


class ViewState(Struct, frozen=True, array_like=True):
    """What a server keeps on disk besides its log."""

    view: int = 0
    normal: int = 0
    """The last view in which this server's log was made the primary's."""


class StartViewChange(Message, frozen=True, gc=False):
    """The sender misses the primary, and wants this view."""

    answer: bool
    """Whether it answers another; it is then not answered again."""


class DoViewChange(Message, frozen=True, gc=False):
    """The sender has entered this view, which the receiver leads. Its log was last normal then, and
    ends here."""

    normal: int
    op: int


class StartView(Message, frozen=True, gc=False):
    """This view has begun, and its log ends here."""

    op: int
    op_view: int
    commit: int


class GetState(Message, frozen=True, gc=False):
    """The logs may agree up to here: send what follows."""

    agreed: int


class NewState(Message, frozen=True, gc=False):
    """A piece of the log, which follows `previous`."""

    previous: int
    previous_view: int
    entries: tuple[LogEntry, ...]


class Prepare(Entries, frozen=True, gc=False):
    """New operations, the first of them numbered `first`."""


class PrepareOk(Answer, frozen=True, gc=False):
    """The sender has everything up to `last` on disk."""


MESSAGES = (
    StartViewChange
    | DoViewChange
    | StartView
    | GetState
    | NewState
    | Prepare
    | PrepareOk
    | Commit
    | Behind
    | Later
)
STATE = ViewState


class Viewstamped(ReplicatedServer):
    """One replica."""

    carrier = Prepare
    answer = PrepareOk

    def _restore(self, state: ViewState | None) -> None:
        super()._restore(state)
        state = state or ViewState()
        self.generation = state.view
        self.normal = state.normal
        self._barred = state.view
        """This server no longer leads views up to here."""
        self.wanted = 0
        """The view that it wants, if later than the one it is in."""
        self._wants: dict[str, tuple[int, float]] = {}
        """The view that each of the others wants, and when it has said so."""
        self._wants_from = self._now
        """Until then, what others want may be old and does not count. What they still want, they
        repeat with each heartbeat."""
        self._reports: dict[str, tuple[int, int]] = {}
        """On the primary of the view entered: how far each server's log goes."""
        self._source: str | None = None
        """The server whose log the new primary is taking."""
        self._fetched = 0
        """The index up to which it may have that already."""
        self._started_token = 0
        self._hear = {
            StartViewChange: self._hear_start_view_change,
            DoViewChange: self._hear_do_view_change,
            StartView: self._hear_start_view,
            GetState: self._hear_get_state,
            NewState: self._hear_new_state,
            Prepare: self._hear_entries,
            PrepareOk: self._hear_prepare_ok,
            Commit: self._hear_commit,
            Behind: self._hear_behind,
            Later: self._hear_later,
        }

    def _state(self) -> ViewState:
        return ViewState(self.generation, self.normal)

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        # After a pause of this process, it reads messages that have waited in its connections.
        since = self.next_deadline if type(event) is Elapsed else self._now
        if now - since > STALE * self._settings.heartbeat_s:
            self._wants_from = now + self._settings.heartbeat_s
        return super().handle(event, now)

    # Wanting another view.

    def _look(self) -> None:
        self._want(self.generation + 1)

    def _want(self, view: int) -> None:
        """Want this view, or the first after it whose primary is not known to be gone."""
        if self.role is Role.LEADING:
            self._barred = self.generation
        self._set_role(Role.LOOKING, None)
        for _ in self._names:
            leader = self.leader_of(view)
            if leader in self._unreachable or (leader == self.id and view <= self._barred):
                view += 1
        self.wanted = view
        self._wants = {}
        self._ask()

    def _set_role(self, role: Role, leader: str | None) -> None:
        if role is not Role.LOOKING:
            # Whatever was wanted meanwhile, a server that has entered a later view is listened to.
            self.wanted = self.generation
        super()._set_role(role, leader)

    def _ask(self) -> None:
        self._send_all(StartViewChange(self.wanted, False))
        self.next_deadline = self._now + self._settings.heartbeat_s
        self._count_wants()

    def _hear_start_view_change(self, peer: Peer, message: StartViewChange) -> None:
        if self._now < self._wants_from or (self._leader_lives() and peer.name != self.leader):
            return
        view = message.generation
        if self.role is not Role.LOOKING:
            self._want(max(view, self.generation + 1))
        self._wants[peer.name] = view, self._now
        if view > max(self.wanted, self.generation):
            self.wanted = view
            self._send_all(StartViewChange(view, False))
        elif not message.answer:
            self._send(peer, StartViewChange(max(self.wanted, self.generation), True))
        self._count_wants()

    def _count_wants(self) -> None:
        if self.wanted > self.generation:
            # It is said again with each heartbeat. One that has said it earlier may have found its
            # primary again since, and would be drawn away from it.
            since = self._now - STALE * self._settings.heartbeat_s
            same = 1 + sum(view >= self.wanted and at >= since for view, at in self._wants.values())
            if same >= self._majority:
                self._enter(self.wanted)

    def _enter(self, view: int) -> None:
        """Take no part in earlier views any more."""
        self.generation = self.wanted = view
        self._reports = {}
        self._source = None
        self._started_token = 0
        for peer in self._peers.values():
            peer.resend_at = self._now
        self._set_role(Role.LOOKING, None)
        self._state_token = self.log.write(self._state())
        self._progress()
        self._report()

    def _progress(self) -> None:
        self._timer.patience = self._now + self._timer.draw()
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _report(self) -> None:
        """Send the primary of the entered view how far this log goes."""
        primary = self._peers.get(self.leader_of(self.generation))
        if primary is not None:
            message = DoViewChange(self.generation, self.normal, len(self.log))
            self._send(primary, message, after=self.log.token)

    def _due(self) -> None:
        if self.role is Role.FOLLOWING:
            self._look()
        elif self.wanted > self.generation:
            self._ask()
        elif self._now >= self._timer.patience:
            self._look()
        else:
            self.next_deadline = self._now + self._settings.heartbeat_s
            if self._source is not None:
                self._fetch(self._fetched)
            elif self.normal < self.generation:
                self._report()

    def _peer_lost(self, peer: Peer) -> None:
        if peer.name == self.leader_of(self.generation) and self.role is not Role.LEADING:
            self._look()

    def _hear_later(self, peer: Peer, message: Later) -> None:
        view = message.generation
        if view <= max(self.generation, self.wanted):
            return
        if self._established():
            # That view was entered and not completed: no other primary is needed.
            while self.leader_of(view) != self.id:
                view += 1
        self._want(view)

    # Beginning a view, on its primary.

    def _hear_do_view_change(self, peer: Peer, message: DoViewChange) -> None:
        view = message.generation
        if self.leader_of(view) != self.id or view <= self._barred:
            return
        if view > self.generation:
            self._enter(view)
        if view == self.generation and self.role is not Role.LEADING:
            self._reports[peer.name] = (message.normal, message.op)
            self._count_reports()

    def _written(self) -> None:
        if self.role is not Role.LOOKING or self.generation <= self._barred:
            return
        if self._started_token:
            if self.log.durable >= self._started_token:
                self._started_token = 0
                self._lead()
                self._start_others()
        elif self.leader_of(self.generation) == self.id and self.log.durable >= self._state_token:
            self._reports[self.id] = (self.normal, len(self.log))
            self._count_reports()

    def _count_reports(self) -> None:
        if self._source is not None or self._started_token or self.id not in self._reports:
            return
        if len(self._reports) >= self._majority:
            self._progress()
            best = self._best()
            if best == self.id:
                self._start()
            else:
                self._source = best
                self._fetch(min(len(self.log), self._reports[best][1]))

    def _best(self) -> str:
        """The server whose log a view begins with: this one, unless another's is longer."""
        return max(self._reports, key=lambda name: (self._reports[name], name == self.id))

    def _fetch(self, agreed: int) -> None:
        """Take over the longest log. Its owner has entered the view, so it does not change."""
        assert self._source is not None
        self._fetched = agreed
        self._send(self._peers[self._source], GetState(self.generation, agreed))

    def _start(self) -> None:
        """The log is the view's. Once that is on disk, lead."""
        self._source = None
        self._settle()
        self._started_token = self.log.token

    def _settle(self) -> None:
        """Be normal in this view. The log that makes it so has been written before."""
        self.normal = self.generation
        self._state_token = self.log.write(self._state())

    def _prepare(self, peer: Peer) -> None:
        peer.synced = False

    def _beat(self) -> None:
        super()._beat()
        if self.role is Role.LEADING:
            self._start_others()

    def _start_view(self) -> StartView:
        op = len(self.log)
        return StartView(self.generation, op, self.log.generation_at(op), self.commit)

    def _start_others(self) -> None:
        message = self._start_view()
        for peer in self._peers.values():
            if not peer.synced:
                self._send(peer, message)

    # The state of another server's log.

    def _hear_get_state(self, peer: Peer, message: GetState) -> None:
        if message.generation != self.generation:
            return
        if self.role is Role.LEADING:
            peer.heard = self._now
        elif self.leader_of(self.generation) != peer.name or self.normal == self.generation:
            return
        agreed = min(message.agreed, len(self.log))
        if self._now >= peer.resend_at or (
            agreed < peer.origin and self._may_go_back(peer, agreed)
        ):
            peer.origin = agreed
            peer.next = agreed + 1
            self._pump(peer)
        elif agreed > peer.origin:
            peer.origin = agreed
            peer.next = max(peer.next, agreed + 1)
            if peer.next <= len(self.log):
                self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send as much of the log as the window allows and, after all of it, its end."""
        peer.resend_at = self._now + 2 * self._settings.heartbeat_s
        end = min(len(self.log), peer.origin + WINDOW)
        while True:
            previous = peer.next - 1
            entries = self._piece(peer.next, end) if peer.next <= end else ()
            peer.next += len(entries)
            state = NewState(self.generation, previous, self.log.generation_at(previous), entries)
            self._send(peer, state, after=self.log.token)
            if peer.next > end:
                break
        if self.role is Role.LEADING and end == len(self.log):
            self._send(peer, self._start_view())

    def _hear_new_state(self, peer: Peer, message: NewState) -> None:
        view = message.generation
        if view != self.generation or self.normal == view or self.role is not Role.LOOKING:
            return
        if peer.name not in (self._source, self.leader_of(view)):
            return
        self._progress()
        agreed = self.log.take(message.previous, message.previous_view, message.entries)
        if peer.name == self._source:
            op = self._reports[peer.name][1]
            if agreed == message.previous + len(message.entries) == op:
                self.log.shorten(op)
                self._start()
            else:
                self._fetch(agreed)
        elif agreed < message.previous or message.entries:
            self._send(peer, GetState(view, agreed))

    # Normal operation, on a replica.

    def _hear_start_view(self, peer: Peer, message: StartView) -> None:
        if not self._from_leader(peer, message):
            return
        if self.normal < self.generation:
            agreed = self.log.agreed(message.op, message.op_view)
            self._progress()
            if agreed < message.op:
                self._send(peer, GetState(self.generation, agreed))
                return
            self.log.shorten(message.op)
            self._settle()
        self._follow(peer)
        self._commit_to(min(message.commit, len(self.log)))
        self._send(peer, PrepareOk(self.generation, len(self.log), 0), after=self.log.token)

    def _in_step(self, peer: Peer, message: Message) -> bool:
        if not self._from_leader(peer, message) or self.normal != self.generation:
            return False
        self._follow(peer)
        return True

    # Normal operation, on the primary.

    def _hear_prepare_ok(self, peer: Peer, message: PrepareOk) -> None:
        if self.role is not Role.LEADING or message.generation != self.generation:
            return
        if not peer.synced:
            peer.synced = True
            peer.match = 0
            peer.next = message.last + 1
        self._answered(peer, message.last, message.round)
