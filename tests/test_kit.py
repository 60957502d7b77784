"""The stores' kit: URLs, the life of stores and watches, failover."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.kit import url as options
from doyen.stores.kit.failover import answer_within, failover
from doyen.stores.kit.lifecycle import GuardedStore, WatchHandle
from doyen.stores.port import StoreURL


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is not a host"),
        ("h1,,h2", "'' is not a host"),
        ("::1", "'::1' is not a host"),
        ("[::1", "is not a host"),
        ("h1:http", "a port is a number from 1 to 65535, not 'http'"),
        ("h1:65536", "a port is a number from 1 to 65535, not '65536'"),
    ],
)
def test_malformed_hosts_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("[", r"\[")):
        options.hosts(StoreURL.parse(f"x://{text}/path"), 1)


def test_an_empty_host_has_a_name_where_that_is_permitted() -> None:
    (host,) = options.hosts(StoreURL.parse("x:///path"), 1, empty="localhost")
    assert host == ("localhost", 1)


def test_whole_numbers_are_not_rounded() -> None:
    url = StoreURL.parse(f"x://h?n={2**53 + 1}&m=1.5")
    assert options.whole_number(url, "n") == 2**53 + 1
    with pytest.raises(ConfigError, match=r"m is a whole number of 0 or more, not '1\.5'"):
        options.whole_number(url, "m")
    with pytest.raises(ConfigError, match="n is a whole number from 0 to 9, not"):
        options.whole_number(url, "n", high=9)


@pytest.mark.parametrize("text", ["nan", "inf", "", "0", "61", "x"])
def test_numbers_have_bounds(text: str) -> None:
    with pytest.raises(ConfigError, match=r"t is a number from 0\.1 to 60, not"):
        options.number(StoreURL.parse(f"x://h?t={text}"), "t", 3, 0.1, 60)


def test_when_files_turn_tls_on() -> None:
    assert options.tls_files(StoreURL.parse("x://h")) is None
    assert options.tls_files(StoreURL.parse("x://h?ca=f")) == options.TLSFiles("f", None, None)
    with pytest.raises(ConfigError, match="go with tls=true"):
        options.tls_files(StoreURL.parse("x://h?ca=f"), implied=False)
    for given in ("key=f", "cert=f"):
        with pytest.raises(ConfigError, match="cert and key go together"):
            options.tls_files(StoreURL.parse(f"x://h?tls=true&{given}"))
    combined = options.tls_files(StoreURL.parse("x://h?cert=f"), combined=True)
    assert combined == options.TLSFiles(None, "f", None)


async def test_a_cancelled_close_is_completed_by_the_next() -> None:
    class Slow(GuardedStore):
        async def _release(self) -> None:
            reached.append("begun")
            await proceed.wait()
            reached.append("ended")

    Slow.__abstractmethods__ = frozenset()
    reached: list[str] = []
    proceed = asyncio.Event()
    store = Slow()  # type: ignore[abstract]
    closing = asyncio.ensure_future(store.close())
    while not reached:  # noqa: ASYNC110 (no event)
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait({closing})
    proceed.set()
    await store.close()
    assert reached == ["begun", "ended"]


async def test_a_watch_that_is_closed_before_it_has_begun_fails() -> None:
    closed: list[WatchHandle] = []
    watch = WatchHandle("scope", lambda: None, closed.append)
    beginning = asyncio.ensure_future(watch.wait_begun())
    await asyncio.sleep(0)
    watch.close()
    watch.close()
    with pytest.raises(StoreUnusable, match="closed"):
        await beginning
    assert closed == [watch]


async def test_notifications_of_one_turn_are_one_and_failing_callbacks_are_contained() -> None:
    notified: list[int] = []

    def notify() -> None:
        notified.append(1)
        raise ValueError

    watch = WatchHandle("scope", notify, lambda watch: None)
    for _ in range(3):
        watch.notify_soon()
    await asyncio.sleep(0)
    assert notified == [1]
    watch.notify_soon()
    watch.close()
    await asyncio.sleep(0)
    assert notified == [1]


def member(outcomes: dict[str, Exception]) -> Callable[[str], Awaitable[str]]:
    async def attempt(name: str) -> str:
        if name in outcomes:
            raise outcomes[name]
        return name

    return attempt


async def test_failover() -> None:
    away, lost = StoreUnavailable("a is away"), OutcomeUnknown("b is lost")
    assert await failover("abc", member({"a": away, "b": lost})) == "c"
    with pytest.raises(OutcomeUnknown, match="b is lost"):
        await failover("abc", member({"a": away, "b": lost}), repeatable=False)
    with pytest.raises(StoreUnavailable, match="no server: a is away; b is lost"):
        await failover("ab", member({"a": away, "b": lost}), summary="no server: ")
    with pytest.raises(StoreUnavailable, match=r"s does not answer within 0\.01 s"):
        async with answer_within(0.01, "s"):
            await asyncio.Event().wait()
