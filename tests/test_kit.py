"""The stores' kit: URLs, the life of stores and watches, failover, batches."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Awaitable, Callable, Sequence

import pytest

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.kit import url as options
from doyen.stores.kit.batches import Batches
from doyen.stores.kit.failover import answer_within, failover
from doyen.stores.kit.lifecycle import GuardedStore, WatchHandle, begun_again
from doyen.stores.kit.streams import write_joined
from doyen.stores.port import StoreURL
from doyen.testing import run_virtual


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


class Calls:
    """Calls of batches: each waits until the test ends it."""

    def __init__(self, *, most: int = 3, in_flight: int = 1) -> None:
        self.sent: list[list[int]] = []
        self.ends: list[asyncio.Future[Sequence[int | BaseException]]] = []
        self.batches = Batches(self._send, most=most, in_flight=in_flight)

    async def _send(self, requests: Sequence[int]) -> Sequence[int | BaseException]:
        self.sent.append([*requests])
        self.ends.append(asyncio.get_running_loop().create_future())
        return await self.ends[-1]

    async def ask(self, *requests: int) -> list[asyncio.Task[int]]:
        """Make requests in one turn of the loop, and let what can be sent be sent."""
        asked = [asyncio.ensure_future(self.batches.ask(request)) for request in requests]
        await turns()
        return asked


class Particular(Exception):
    """An exception that cannot be made from its arguments."""

    def __init__(self, *, reason: str) -> None:
        super().__init__(reason)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_requests_share_calls_and_those_beyond_the_limit_wait() -> None:
    calls = Calls()
    asked = await calls.ask(1, 2, 3, 4) + await calls.ask(5)
    assert calls.sent == [[1, 2, 3]]
    calls.ends[0].set_result([10, StoreUnavailable("no"), 30])
    await turns()
    assert calls.sent == [[1, 2, 3], [4, 5]]
    calls.ends[1].set_result([40, 50])
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [*map(str, outcomes)] == ["10", "no", "30", "40", "50"]


async def test_a_batch_whose_callers_gave_up_is_cancelled_before_the_next_begins() -> None:
    calls = Calls(in_flight=2)
    first, second = await calls.ask(1, 2)
    (waiting,) = await calls.ask(3)
    first.cancel()
    await turns()
    assert not calls.ends[0].cancelled()
    second.cancel()
    (late,) = await calls.ask(4)
    assert calls.ends[0].cancelled()
    assert calls.sent == [[1, 2], [3], [4]]
    calls.ends[1].set_result([30])
    calls.ends[2].set_result([40])
    assert (await waiting, await late) == (30, 40)


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda call: call.set_exception(OutcomeUnknown("late")), OutcomeUnknown),
        (lambda call: call.set_exception(UnicodeDecodeError("utf-8", b"", 0, 1, "")), ValueError),
        (lambda call: call.set_exception(Particular(reason="x")), Particular),
        (lambda call: call.set_result([1]), OutcomeUnknown),
        (lambda call: call.cancel(), OutcomeUnknown),
    ],
)
async def test_every_caller_of_a_batch_gets_an_outcome(
    end: Callable[[asyncio.Future[Sequence[int | BaseException]]], object],
    expected: type[Exception],
) -> None:
    calls = Calls()
    asked = await calls.ask(1, 2, 3)
    end(calls.ends[0])
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(outcome, expected) for outcome in outcomes)


async def test_requests_that_are_begun_are_sent_without_a_caller_that_waits() -> None:
    calls = Calls(in_flight=2)
    begun = calls.batches.begin([1, 2])
    await turns()
    assert calls.sent == [[1, 2]]
    given_up = calls.batches.begin([3, 4])
    await turns()
    given_up.cancel()
    await turns()
    assert calls.ends[1].cancelled()
    calls.ends[0].set_result([10, StoreUnavailable("no")])
    with pytest.raises(StoreUnavailable):
        await begun
    assert await calls.batches.begin([]) == []
    (alone,) = await calls.ask(5)
    calls.ends[2].set_result([50])
    assert await alone == 50


async def test_requests_in_flight_fail_when_batches_are_closed() -> None:
    calls = Calls()
    asked = [asyncio.ensure_future(calls.batches.ask(1))]
    await asyncio.sleep(0)
    await calls.batches.close()
    assert isinstance((await asyncio.gather(*asked, return_exceptions=True))[0], OutcomeUnknown)


@pytest.mark.parametrize("lost", [True, False])
async def test_what_cannot_be_written_is_not_waited_for(lost: bool) -> None:
    """Without `write_joined` the loop of Python 3.12 and 3.13 never rests after this."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    descriptor = ours.fileno()
    write_joined(writer)
    if lost:
        writer.transport.abort()
        await asyncio.sleep(0)
    writer.writelines([b"", b"a", b"b"] if lost else [b"", b""])
    loop = asyncio.get_running_loop()
    registered = loop._selector.get_map().get(descriptor)  # type: ignore[attr-defined]
    assert registered is None or not registered.events & selectors.EVENT_WRITE
    writer.close()
    theirs.close()


def test_what_notifies_watches_begins_again_after_a_defect(
    caplog: pytest.LogCaptureFixture,
) -> None:
    begun = 0

    async def work() -> None:
        nonlocal begun
        begun += 1
        if begun < 3:
            raise RuntimeError("a defect")
        if begun == 4:
            await asyncio.sleep(1000)

    async def main() -> None:
        await begun_again(work, "queries")
        assert begun == 3
        assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
        task = asyncio.ensure_future(begun_again(work, "queries"))
        await asyncio.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run_virtual(main())
