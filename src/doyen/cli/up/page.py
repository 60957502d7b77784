"""The page beside `doyen up`: what `doyen dash` shows, with keys that kill and freeze processes.

The page is served on a thread of its own. Processes are started, killed and frozen by one thread
only, so what a page asks for is carried out by the next `tick`.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from doyen.cli.up.cluster import CandidateGroup, CandidateProcess
from doyen.cli.up.live import state_of
from doyen.cli.up.quorum import NodeProcess
from doyen.errors import OrderFailed
from doyen.stores.choice import without_password

if TYPE_CHECKING:
    from doyen.web.serving import PageThread

__all__ = ["ProcessPage", "open_page"]

ACT_WITHIN_S = 10.0
"""How long the other thread may take to carry out an action. It waits while its terminal does."""


class _Asked(NamedTuple):
    action: str
    process: str
    done: Future[str]


class ProcessPage:
    """The processes of `doyen up`, for the thread of the page. `tick` is called by the other."""

    def __init__(self, cluster: CandidateGroup) -> None:
        self._cluster = cluster
        self._asked: SimpleQueue[_Asked] = SimpleQueue()
        self._seen: list[dict[str, Any]] = []
        self._seen_at = time.monotonic()
        cluster.after_tick = self.tick

    def processes(self) -> list[dict[str, Any]]:
        """As of the last tick."""
        return self._seen

    def silent_s(self) -> float:
        """How long ago the last tick was."""
        return time.monotonic() - self._seen_at

    async def act(self, action: str, process: str) -> str:
        """Have the other thread carry out an action."""
        done: Future[str] = Future()
        self._asked.put(_Asked(action, process, done))
        try:
            async with asyncio.timeout(ACT_WITHIN_S):
                return await asyncio.wrap_future(done)
        except TimeoutError:  # which has cancelled it
            raise OrderFailed(
                "`doyen up` does not respond; nothing was done: its terminal may be stopped"
            ) from None

    def tick(self) -> None:
        """Carry out what was asked for, and look at all processes."""
        while True:
            try:
                asked = self._asked.get_nowait()
            except Empty:
                break
            if not asked.done.set_running_or_notify_cancel():
                continue
            try:
                asked.done.set_result(self._do(asked.action, asked.process))
            except OrderFailed as error:
                asked.done.set_exception(error)
        cluster = self._cluster
        nodes = cluster.quorum.servers if cluster.quorum is not None else []
        self._seen = [*map(self._candidate, cluster.candidates), *map(self._node, nodes)]
        self._seen_at = time.monotonic()

    def _do(self, action: str, name: str) -> str:
        cluster, quorum = self._cluster, self._cluster.quorum
        for candidate in cluster.candidates:
            if candidate.name != name:
                continue
            if action == "ask":
                if candidate is not cluster.leader:
                    raise OrderFailed(f"{name} does not lead at present; nothing was done")
                cluster.resign(candidate)
                return f"{name} was asked to resign"
            _needs_life(candidate.alive, name)
            {"kill": cluster.kill, "freeze": cluster.freeze, "thaw": cluster.thaw}[action](
                candidate
            )
            return f"{name}: {_DONE[action]}"
        for node in quorum.servers if quorum is not None else ():
            if node.name == name and quorum is not None and action != "ask":
                _needs_life(node.alive, name)
                {"kill": quorum.kill, "freeze": quorum.freeze, "thaw": quorum.thaw}[action](node)
                return f"node {name}: {_DONE[action]}"
        raise OrderFailed(f"there is no process {name!r}")

    def _candidate(self, candidate: CandidateProcess) -> dict[str, Any]:
        state = state_of(self._cluster, candidate)
        actions = _actions(candidate.alive, candidate.frozen_at is not None)
        if state.label == "leading":
            actions.append(["ask", "Resign"])
        return {
            "name": candidate.name,
            "state": state.label.partition(" ")[0],
            "label": state.label,
            "detail": state.detail,
            "actions": actions,
        }

    def _node(self, node: NodeProcess) -> dict[str, Any]:
        frozen = node.frozen_at is not None
        label = "frozen" if frozen else node.role if node.alive else "dead"
        leads = f"generation {node.generation}" if label == "leading" else ""
        return {
            "name": node.name,
            "state": label,
            "label": f"node, {label}",
            "detail": leads,
            "actions": _actions(node.alive, frozen),
        }


_DONE = {
    "kill": "killed; it is started again in a second",
    "freeze": "frozen; it is thawed after a while",
    "thaw": "thawed",
}


def _actions(alive: bool, frozen: bool) -> list[list[str]]:
    if not alive:
        return []
    return [["kill", "Kill"], ["thaw", "Thaw"] if frozen else ["freeze", "Freeze"]]


def _needs_life(alive: bool, name: str) -> None:
    if not alive:
        raise OrderFailed(f"{name} does not run at present; nothing was done")


def open_page(cluster: CandidateGroup, listen_on: str) -> PageThread:
    """Serve the page of a demonstration. Returns the thread, to be stopped."""
    from doyen.web.observation import StoreObservation
    from doyen.web.serving import PageThread, listen

    listener = listen(listen_on, allow_actions=True)
    controls = ProcessPage(cluster)
    audit: list[Path] = [candidate.audit for candidate in cluster.candidates]

    def observation() -> StoreObservation:
        shown = without_password(cluster.store)
        return StoreObservation(cluster.store, shown_url=shown, audit=audit, controls=controls)

    thread = PageThread(observation, listener)
    thread.start()
    return thread
