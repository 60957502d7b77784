"""What the tests of many stores share: fixtures of servers, and opening a store of a kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import pytest

from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, open_store

S = TypeVar("S", bound=Store)


def run_within(work: Coroutine[Any, Any, None], within_s: float = 60.0) -> None:
    """Run a test on a loop of its own, for a limited time."""
    asyncio.run(asyncio.wait_for(work, within_s))


def refused(url: str, kind: type[Exception], match: str) -> None:
    """Check that a store cannot be opened at a URL, for this reason."""
    with pytest.raises(kind, match=match):
        asyncio.run(open_store(url, Context(SystemClock(), lambda event: None)))


def shared(
    start: Callable[[], AbstractContextManager[Any]],
    scope: Literal["function", "module", "session"] = "module",
) -> Any:
    """A server, started for the first test that needs it and closed after the last. The fixture has
    the name of the variable to which it is assigned."""

    @pytest.fixture(scope=scope)
    def server() -> Iterator[Any]:
        with start() as server:
            yield server

    return server


def store_url(*engines: str) -> Any:
    """The URL of a store on each of these engines. Servers are the fixtures of these names."""

    @pytest.fixture(params=engines)
    def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
        if request.param == "sqlite":
            return f"sqlite://{tmp_path}/doyen.db"
        return str(request.getfixturevalue(request.param).url)

    return url


def opening(kind: type[S]) -> Callable[[str], AbstractAsyncContextManager[S]]:
    """Opens a store of this kind at a URL, and closes it."""

    @asynccontextmanager
    async def opened(url: str) -> AsyncIterator[S]:
        store = await open_store(url, Context(SystemClock(), lambda event: None))
        assert isinstance(store, kind)
        try:
            yield store
        finally:
            await store.close()

    return opened
