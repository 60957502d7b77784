"""The pump: hands events to a consensus core and carries out the effects that it returns.

    peers, disk, timer, proposals ──▶ step ──▶ core ──▶ effects, in order

`step` is the only place where events reach the core. Every kind of effect has one function that
carries it out (`carry_out`); the classes that own the functions register them.

- **Order.** Effects are carried out in the order in which the core returned them. A `Send` that
  has to wait for the disk is held until the journal reports its token; the core receives
  `Persisted` only after the held messages have left.
- **Turns.** `flush_soon` runs `flush` once per turn of the event loop, so everything that was
  proposed in one turn is handled together.
- **Failure.** An exception in the core or in an effect leaves an unknown state, so it ends the
  node (`fail`).

Knows no threads, files or sockets.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from math import inf
from typing import Any

from doyen.errors import DoyenError, SessionClosed
from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import Core, CoreEvent, Elapsed, Persist, Persisted, Send
from doyen.quorum.node.journal import FileJournal
from doyen.quorum.node.peers import Peers

log = logging.getLogger("doyen.quorum.node")

RETRY_S = 0.02
"""Pause before a retry, unless the leader changes sooner."""


def call_safely(callback: Callable[..., None], *arguments: Any) -> bool:
    """Call a callback of other code; an exception in it is logged and does not end the node. False
    if it raised one."""
    try:
        callback(*arguments)
    except Exception:
        log.exception(log_line(event="callback_failed"))
        return False
    return True


class NodeTasks:
    """The tasks of a node, what they wait for, and its end."""

    def __init__(self, id: str, abort: Callable[[BaseException], None]) -> None:  # noqa: A002
        """`abort` ends the process."""
        self.id = id
        self.loop = asyncio.get_running_loop()
        self.on_end: list[Callable[[], None]] = []
        self.stopping = False
        self.ended = False
        self._abort = abort
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._role_changed: asyncio.Future[None] = self.loop.create_future()

    def role_changed(self) -> None:
        """Wake everything that waits in `pause`."""
        changed, self._role_changed = self._role_changed, self.loop.create_future()
        changed.set_result(None)

    async def pause(self, within_s: float = RETRY_S) -> None:
        """Wait for a change of role, or for this time."""
        await asyncio.wait({self._role_changed}, timeout=within_s)

    def check_open(self) -> None:
        if self.stopping or self.ended:
            raise SessionClosed(f"node {self.id} is stopping; ask another")

    def start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run this until the node ends. An exception in it ends the node."""
        task = self.loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the node and the process: its state, or what is on its disk, is unknown."""
        if not self.ended:
            trace = None if isinstance(error, OSError | DoyenError) else error
            line = log_line(event="node_failed", node=self.id, error=error)
            log.critical("%s", line, exc_info=trace)
            self.end()
            self._abort(error)

    def end(self) -> None:
        """Stop at once, as if the process were killed."""
        self.ended = True
        for task in [*self._tasks]:
            task.cancel()
        for call in self.on_end:
            call()
        if not self._role_changed.done():
            self._role_changed.set_result(None)


class Pump(NodeTasks):
    """Moves one node's consensus core. Lives on one event loop and is called only from there."""

    def __init__(
        self,
        core: Core,
        journal: FileJournal,
        transport: Peers,
        clock: Clock,
        abort: Callable[[BaseException], None],
    ) -> None:
        super().__init__(core.id, abort)
        self.core = core
        self.now = clock.now
        self.carry_out: dict[type, Callable[[Any], None]] = {Persist: journal.persist}
        """For every kind of effect except `Send`."""
        self.flush: Callable[[], None] = lambda: None
        self.flushing = False
        """Whether a flush is scheduled for this turn of the loop. `flush` resets it."""
        self.disk_full = False
        """Whether the journal was full in the last step."""
        self.on_disk: Callable[[], None] = lambda: None
        """Called before a step if the journal has become full, or has room again."""
        self.on_membership: Callable[[], None] = lambda: None
        """Called after a step in which the core's membership has changed."""
        self._membership = core.membership
        self._journal = journal
        self._transport = transport
        self._events: deque[CoreEvent] = deque()
        self._stepping = False
        self.after_step: list[Callable[[], None]] = []
        """What to call once when the effects of the current step have been carried out."""
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._durable = 0
        """The last token that the journal has reported."""
        self._held: deque[Send] = deque()
        self._retry: asyncio.TimerHandle | None = None

    def step(self, event: CoreEvent) -> None:
        """Hand an event to the core and carry out the effects."""
        if self.ended:
            return
        self._events.append(event)
        if self._stepping:
            return
        if self._journal.full is not self.disk_full:
            self.on_disk()
        self._stepping = True
        core, carry_out, events, held = self.core, self.carry_out, self._events, self._held
        send = self._transport.send
        try:
            while events:
                durable = self._durable
                while held and held[0].after <= durable:
                    waited = held.popleft()
                    send(waited.peer, waited.message)
                for effect in core.handle(events.popleft(), self.now()):
                    if type(effect) is not Send:
                        carry_out[type(effect)](effect)
                    elif effect.after > durable:
                        held.append(effect)
                    else:
                        send(effect.peer, effect.message)
        except Exception as error:  # noqa: BLE001 - a defect: the state is unknown
            self.fail(error)
            return
        finally:
            self._stepping = False
        if core.next_deadline < self._timer_at:
            self.set_timer()
        if core.membership is not self._membership:
            self._membership = core.membership
            self.on_membership()
        if self.after_step:
            calls, self.after_step = self.after_step, []
            for call in calls:
                call()

    def persisted(self, token: int) -> None:
        """Everything up to this token is on disk."""
        self._durable = token
        self.step(Persisted(token))

    def set_timer(self) -> None:
        """Set the timer to the core's deadline. A timer that fires too early does no harm."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = self.core.next_deadline
        if self._timer_at == inf:
            self._timer = None
            return
        wait_s = max(self._timer_at - self.now(), 1e-6)
        self._timer = self.loop.call_later(wait_s, self._elapsed)

    def _elapsed(self) -> None:
        self._timer = None
        self._timer_at = inf
        if self.now() >= self.core.next_deadline:
            self.step(Elapsed())
        if self._timer_at == inf and not self.ended:
            self.set_timer()

    def flush_soon(self) -> None:
        """Run `flush`, once in this turn of the loop."""
        if not self.flushing and not self.ended:
            self.flushing = True
            self.loop.call_soon(self.flush)

    def flush_after_pause(self) -> None:
        if self._retry is None and not self.ended:
            self._retry = self.loop.call_later(RETRY_S, self._flush_retry)

    def _flush_retry(self) -> None:
        self._retry = None
        self.flush_soon()

    def end(self) -> None:
        for timer in (self._timer, self._retry):
            if timer is not None:
                timer.cancel()
        super().end()
