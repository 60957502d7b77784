"""Reads that are current on any node.

A read asks up to where the log has to be applied: the core, on the node that leads, or that node,
on any other. All reads of one turn of the loop share one question. Each is told when the machine
of this very node has come to that index.

Nothing here sends; the driver does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from doyen.quorum.consensus.core import Core, CoreEvent, ReadAsked, ReadReady, ReadRefused, Role

__all__ = ["LinearizableReads", "ReadsOwner"]

Reader = Callable[[int], None]
"""Told the index that has to be applied."""


class ReadsOwner(Protocol):
    """What the driver does for this."""

    core: Core

    def tell_core(self, event: CoreEvent) -> None: ...

    def start_task(self, work: Coroutine[Any, Any, Any]) -> None: ...

    def flush_soon(self) -> None: ...

    def flush_after_pause(self) -> None: ...


class LinearizableReads:
    """Those of one node, and those that peers ask it about while it leads."""

    def __init__(self, owner: ReadsOwner, ask: Callable[[str], Awaitable[int | None]]) -> None:
        """`ask` has a peer, which leads, say the index; None if it did not."""
        self._owner = owner
        self._ask = ask
        self._waiting: list[Reader] = []
        self._rounds: dict[int, list[Reader]] = {}
        self._round = 0
        self._asking = False

    def add(self, reader: Reader) -> None:
        self._waiting.append(reader)
        self._owner.flush_soon()

    def clear(self) -> None:
        self._waiting.clear()
        self._rounds.clear()

    def flush(self) -> None:
        """One question for everyone who reads in this turn."""
        core = self._owner.core
        if not self._waiting:
            return
        if core.role is Role.LEADING:
            self._round += 1
            self._rounds[self._round], self._waiting = self._waiting, []
            self._owner.tell_core(ReadAsked(self._round))
        elif core.leader is not None and not self._asking:
            self._asking = True
            readers, self._waiting = self._waiting, []
            self._owner.start_task(self._ask_leader(core.leader, readers))

    def ready(self, effect: ReadReady) -> None:
        for ready in self._rounds.pop(effect.token, ()):
            ready(effect.index)

    def refused(self, effect: ReadRefused) -> None:
        self._again(self._rounds.pop(effect.token, []))

    def _again(self, readers: list[Reader]) -> None:
        self._waiting = readers + self._waiting
        self._owner.flush_after_pause()

    async def _ask_leader(self, leader: str, readers: list[Reader]) -> None:
        index = await self._ask(leader)
        self._asking = False
        if index is None:
            self._again(readers)
            return
        for ready in readers:
            ready(index)
        if self._waiting:
            self._owner.flush_soon()
