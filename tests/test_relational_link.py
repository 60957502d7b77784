"""A link to a database: turns, cancellation, what is tried again and what is not. Virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.port import StoreURL
from doyen.stores.sql.connection import (
    Given,
    Primary,
    Row,
    SqlAddress,
    SqlConnection,
    SqlConnectionLost,
    TryAgain,
    WrongServer,
)
from doyen.stores.sql.postgresql import _PgLink
from doyen.testing import run_virtual


class Wire:
    """A connection that answers after a while, with an error if there is one to come."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.up = True
        self.sent: list[str] = []
        self.ended = asyncio.Event()


ADDRESS = SqlAddress(hosts=(("db", 1), ("spare", 1)), user=None, password=None, database="d")


class FakeLink(SqlConnection[Wire]):
    port = 1

    def __init__(self, primary: Primary | None = None) -> None:
        super().__init__("Fake", ADDRESS, 60.0, primary or Primary("who"))
        self.servers: dict[str, tuple[str, str, int, bool]] = {"db": ("first", "", 0, True)}
        self.wires: list[Wire] = []
        self.errors: list[Exception] = []
        self.connects_after_s = 1.0
        self.answers_after_s = 1.0
        self.refuses = False

    async def reach(self, host: str, port: int) -> Wire:
        if host not in self.servers:
            raise StoreUnavailable("no such host")
        await asyncio.sleep(self.connects_after_s)
        if self.refuses:
            raise StoreUnavailable("nobody there")
        self.wires.append(Wire(host))
        return self.wires[-1]

    async def execute(self, connection: Wire, text: str, given: Given) -> list[list[Row]]:
        text, who = text.removesuffix("who").removesuffix("; "), self.servers[connection.host]
        if not text:
            return [[who]]
        connection.sent.append(text)
        try:
            async with asyncio.timeout(self.answers_after_s):
                await connection.ended.wait()
        except TimeoutError:
            if self.errors:
                raise self.errors.pop(0) from None
            return [[(text,)], [self.servers[connection.host]]]
        raise OSError("hung up")

    def transaction(self, script: str, *, early: bool) -> str:
        return f"<{script}>"

    def translate(self, error: Exception) -> Exception:
        return SqlConnectionLost(str(error)) if isinstance(error, OSError) else error

    def hang_up(self, connection: Wire) -> None:
        connection.up = False
        connection.ended.set()

    def usable(self, connection: Wire) -> bool:
        return connection.up


def virtually(test: Callable[[FakeLink], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        link = FakeLink()
        await test(link)
        await link.close()
        assert not any(wire.up for wire in link.wires)

    run_virtual(main())


def test_calls_take_turns_on_one_connection() -> None:
    async def test(link: FakeLink) -> None:
        calls = (link.read("a", {}), link.write("b", {}), link.read("c", {}))
        answers = [*await asyncio.gather(*calls)]
        assert answers == [[("a",)], [("<b>",)], [("c",)]]
        assert [wire.sent for wire in link.wires] == [["a", "<b>", "c"]]

    virtually(test)


def test_a_call_cancelled_before_its_turn_is_never_sent() -> None:
    async def test(link: FakeLink) -> None:
        first = asyncio.create_task(link.read("a", {}))
        second = asyncio.create_task(link.write("b", {}))
        await asyncio.sleep(1.5)
        second.cancel()
        await asyncio.wait({first, second})
        assert [wire.sent for wire in link.wires] == [["a"]]

    virtually(test)


def test_a_call_cancelled_later_takes_the_connection_with_it() -> None:
    """The next one gets another, at once, however long the server is silent."""

    async def test(link: FakeLink) -> None:
        link.answers_after_s = 1000
        call = asyncio.create_task(link.write("a", {}))
        await asyncio.sleep(1.5)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        link.answers_after_s = 1
        assert await link.read("b", {}) == [("b",)]
        assert [wire.sent for wire in link.wires] == [["<a>"], ["b"]]
        assert [wire.up for wire in link.wires] == [False, True]

    virtually(test)


def test_making_a_connection_outlasts_who_wanted_it_first() -> None:
    async def test(link: FakeLink) -> None:
        link.connects_after_s = 5
        for _ in range(4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await link.read("a", {})
        assert await link.read("b", {}) == [("b",)]
        assert asyncio.get_running_loop().time() == pytest.approx(6)
        assert [wire.sent for wire in link.wires] == [["b"]]

    virtually(test)


def test_what_the_database_undid_is_sent_again() -> None:
    async def test(link: FakeLink) -> None:
        link.errors = [TryAgain("deadlock")] * 3
        assert await link.write("a", {}) == [("<a>",)]
        assert link.wires[0].sent == ["<a>"] * 4
        link.errors = [TryAgain("deadlock")] * 100
        with pytest.raises(StoreUnavailable, match="20 times in favour of others"):
            await link.write("b", {})
        link.errors = []

    virtually(test)


def test_a_lost_connection_leaves_a_write_in_doubt_and_a_read_undone() -> None:
    async def test(link: FakeLink) -> None:
        link.errors = [OSError("reset"), OSError("reset")]
        with pytest.raises(OutcomeUnknown, match=r"spare:1: .*transaction under way \(reset\)"):
            await link.write("a", {})
        with pytest.raises(StoreUnavailable, match="spare:1: reset"):
            await link.read("b", {})
        assert len(link.wires) == 2
        assert await link.read("c", {}) == [("c",)]

    virtually(test)


def test_a_server_that_can_no_longer_be_written_to_is_left() -> None:
    async def test(link: FakeLink) -> None:
        link.errors = [WrongServer("a standby")]
        with pytest.raises(StoreUnavailable):
            await link.write("a", {})
        await link.write("b", {})
        assert [wire.sent for wire in link.wires] == [["<a>"], ["<b>"]]

    virtually(test)


def test_no_connection_is_no_connection_until_there_is_one() -> None:
    async def test(link: FakeLink) -> None:
        link.refuses = True
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="nobody there"):
                await link.write("a", {})
        link.refuses = False
        await link.write("a", {})

    virtually(test)


def test_a_closed_link_says_so_and_keeps_nothing() -> None:
    async def test(link: FakeLink) -> None:
        waiting = asyncio.create_task(link.read("a", {}))
        await asyncio.sleep(0.5)
        await link.close()
        with pytest.raises(StoreUnusable, match="closed"):
            await waiting
        with pytest.raises(StoreUnusable, match="closed"):
            await link.read("b", {})

    virtually(test)


def failover(*links: FakeLink, order: int) -> None:
    """Another server is the primary; the first one may be reached all the same."""
    for link in links:
        link.servers["spare"] = ("second", "system", order, True)


@pytest.mark.parametrize("call", ["read", "write"])
def test_an_answer_of_a_deposed_primary_does_not_count(call: str) -> None:
    """One link is on the new primary, the other waits for an answer of the old one."""

    async def main() -> None:
        primary = Primary("who")
        pulse, work = FakeLink(primary), FakeLink(primary)
        await pulse.read("a", {})
        pulse.answers_after_s = 10
        late = asyncio.create_task(getattr(pulse, call)("renew", {}))
        await asyncio.sleep(1)
        failover(pulse, work, order=2)
        del work.servers["db"]
        assert await work.read("b", {}) == [("b",)]
        with pytest.raises(OutcomeUnknown if call == "write" else StoreUnavailable):
            await late
        pulse.answers_after_s = 1
        await pulse.write("c", {})
        assert [wire.host for wire in pulse.wires] == ["db", "spare"], "it follows the other"
        await pulse.close()
        await work.close()

    run_virtual(main())


@pytest.mark.parametrize(("order", "ends_at"), [(2, "spare"), (0, "db")])
def test_nobody_returns_to_an_earlier_primary(order: int, ends_at: str) -> None:
    async def test(link: FakeLink) -> None:
        link.servers = {"db": ("first", "system", 1, True)}
        await link.read("a", {})
        failover(link, order=order)
        first = link.servers.pop("db")
        link.wires[-1].up = False
        if order < 1:
            with pytest.raises(StoreUnavailable, match="the primary before a failover"):
                await link.read("b", {})
        else:
            await link.read("b", {})
        link.servers["db"] = first
        link.wires[-1].up = False
        await link.read("c", {})
        assert link.wires[-1].host == ends_at

    virtually(test)


def test_a_server_that_changes_behind_a_connection_is_noticed() -> None:
    """A pooler, or an address that has moved: the answer came from a server that nobody asked."""

    async def test(link: FakeLink) -> None:
        await link.read("a", {})
        link.servers["db"] = ("second", "", 0, True)
        with pytest.raises(OutcomeUnknown, match="another server"):
            await link.write("b", {})
        await link.write("c", {})
        link.servers["db"] = ("second", "", 0, False)
        with pytest.raises(OutcomeUnknown, match="read-only"):
            await link.write("d", {})
        with pytest.raises(StoreUnavailable, match="read-only"):
            await link.write("e", {})

    virtually(test)


@pytest.mark.parametrize(
    ("url", "hosts", "user", "password", "database"),
    [
        ("x://h/d", (("h", None),), None, None, "d"),
        ("x://u:p@h:1/d", (("h", 1),), "u", "p", "d"),
        ("x://u%40e:p%2F@h1:1,h2,[::1]:3/", (("h1", 1), ("h2", None), ("::1", 3)), "u@e", "p/", ""),
        ("x://[::1]/d", (("::1", None),), None, None, "d"),
        ("x://%2Frun%2Fpg/d", (("/run/pg", None),), None, None, "d"),
        ("x:///d", (("", None),), None, None, "d"),
    ],
)
def test_addresses(
    url: str,
    hosts: tuple[tuple[str, int | None], ...],
    user: str | None,
    password: str | None,
    database: str,
) -> None:
    address = SqlAddress.of(StoreURL.parse(url))
    assert (address.hosts, address.user, address.password, address.database) == (
        hosts,
        user,
        password,
        database,
    )
    assert "p/" not in address.text(5)


def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="a port is a number"):
        SqlAddress.of(StoreURL.parse("x://h:http/d"))


def test_an_unexpected_error_does_not_end_listening(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged, and the connection is tried again: a watch must not go deaf."""

    async def main() -> None:
        url = StoreURL.parse("postgresql://db/doyen")
        link = _PgLink(url, Primary("who"), "channel", lambda path: None)
        asked: list[float] = []

        async def read(query: str, given: Given) -> list[Row]:
            asked.append(asyncio.get_running_loop().time())
            if len(asked) == 1:
                raise RuntimeError("a defect")
            return []

        monkeypatch.setattr(link, "read", read)
        listening = asyncio.create_task(link.listen(2.0))
        await asyncio.sleep(3)
        assert len(asked) > 1
        assert not listening.done()
        listening.cancel()
        await asyncio.wait({listening})

    run_virtual(main())
    (line,) = caplog.records
    assert line.levelname == "ERROR"
    assert "a defect" in (line.exc_text or "")
