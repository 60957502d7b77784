"""Scopes that join on entry and leave on exit: membership in a group, ownership of shards.

They are the bridges from the caller's loop or thread to doyen's loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from doyen.election.core import SessionCore
from doyen.errors import SessionClosed
from doyen.lease.runtime import ThreadRuntime

__all__ = ["BlockingJoining", "Joining"]

V = TypeVar("V")


class Joins(Protocol):
    """What is joined and left on doyen's loop."""

    async def join(self) -> None: ...

    async def leave(self) -> None:
        """Also called if `join` has failed."""


class _JoinScope(Generic[V]):
    def __init__(self, core: SessionCore, make: Callable[[], tuple[Joins, V]]) -> None:
        """`make` is called on entry. It returns what joins, and what the scope yields."""
        self._core = core
        self._make = make
        self._joined: Joins | None = None

    def _begin(self) -> tuple[Joins, V]:
        if self._joined is not None:
            raise SessionClosed("the scope of a member is entered once; make another")
        self._core.check_open()
        self._joined, yielded = self._make()
        self._core.runtime.retain()
        return self._joined, yielded


class Joining(_JoinScope[V]):
    """A scope for asyncio. Made by `Session.member` and `Session.own_shards`."""

    async def __aenter__(self) -> V:
        runtime = self._core.runtime
        joined, yielded = self._begin()
        try:
            await runtime.do(self._core.run(joined.join))
        except BaseException:
            runtime.start(joined.leave())
            runtime.release()
            raise
        return yielded

    async def __aexit__(self, *_: object) -> None:
        assert self._joined is not None
        try:
            if self._core.runtime.pid == os.getpid():
                await self._core.runtime.finish(self._joined.leave())
        finally:
            self._core.runtime.release()


class BlockingJoining(_JoinScope[V]):
    """A scope for code without asyncio. Made by `BlockingSession.member` and `own_shards`."""

    def __enter__(self) -> V:
        runtime = self._core.runtime
        assert isinstance(runtime, ThreadRuntime)
        joined, yielded = self._begin()
        try:
            runtime.do_blocking(self._core.run(joined.join))
        except BaseException:
            runtime.finish_blocking(joined.leave())
            runtime.release()
            raise
        return yielded

    def __exit__(self, *_: object) -> None:
        runtime = self._core.runtime
        assert self._joined is not None
        assert isinstance(runtime, ThreadRuntime)
        try:
            if runtime.pid == os.getpid():
                runtime.finish_blocking(self._joined.leave())
        finally:
            runtime.release()
