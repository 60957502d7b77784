"""A connection to a database: turns, cancellation, retries, failover. In virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.lease.clock import VirtualClock
from doyen.stores.kit.failover import ConnectionLost
from doyen.stores.kit.url import Host
from doyen.stores.port import Context, StoreURL
from doyen.stores.sql.connection import (
    Given,
    Primary,
    Row,
    ServerConnection,
    SqlConnection,
    SqlEngine,
    TransactionUndone,
    WrongServer,
)
from doyen.stores.sql.psycopg_engine import PsycopgEngine, keep_connected
from doyen.stores.sql.store import RelationalStore
from doyen.testing import run_virtual


class FakeConnection(ServerConnection):
    """A connection that responds after a while, with an error if there is one to come."""

    def __init__(self, engine: FakeEngine, host: str) -> None:
        self.engine = engine
        self.host = host
        self.up = True
        self.sent: list[str] = []
        self.ended = asyncio.Event()

    @property
    def usable(self) -> bool:
        return self.up

    async def execute(self, text: str, given: Given) -> list[list[Row]]:
        engine = self.engine
        text, identity = text.removesuffix("who").removesuffix("; "), engine.servers[self.host]
        if not text:
            return [[identity]]
        self.sent.append(text)
        try:
            async with asyncio.timeout(engine.answers_after_s):
                await self.ended.wait()
        except TimeoutError:
            if engine.errors:
                raise engine.errors.pop(0) from None
            return [[(text,)], [engine.servers[self.host]]]
        raise OSError("hung up")

    def hang_up(self) -> None:
        self.up = False
        self.ended.set()


class FakeEngine(SqlEngine):
    name = "Fake"

    def __init__(self, url: str = "x://db:1,spare:1/d?connect_timeout_s=60") -> None:
        super().__init__(StoreURL.parse(url), 5)
        self.servers: dict[str, tuple[str, str, int, bool]] = {"db": ("first", "", 0, True)}
        self.connections: list[FakeConnection] = []
        self.errors: list[Exception] = []
        self.connects_after_s = 1.0
        self.answers_after_s = 1.0
        self.refuses = False

    async def connect(self, host: Host) -> FakeConnection:
        if host.name not in self.servers:
            raise StoreUnavailable("no such host")
        await asyncio.sleep(self.connects_after_s)
        if self.refuses:
            raise StoreUnavailable("connection refused")
        self.connections.append(FakeConnection(self, host.name))
        return self.connections[-1]

    def transaction(self, script: str, *, early: bool) -> str:
        return f"<{script}>"

    def translate(self, error: Exception) -> Exception:
        return ConnectionLost(str(error)) if isinstance(error, OSError) else error


def virtually(test: Callable[[SqlConnection, FakeEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = FakeEngine()
        connection = SqlConnection(engine, Primary("who"))
        await test(connection, engine)
        await connection.close()
        assert not any(each.up for each in engine.connections)

    run_virtual(main())


def test_calls_take_turns_on_one_connection() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        calls = (connection.read("a", {}), connection.write("b", {}), connection.read("c", {}))
        answers = [*await asyncio.gather(*calls)]
        assert answers == [[("a",)], [("<b>",)], [("c",)]]
        assert [each.sent for each in engine.connections] == [["a", "<b>", "c"]]

    virtually(test)


def test_a_call_cancelled_before_its_turn_is_never_sent() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        first = asyncio.create_task(connection.read("a", {}))
        second = asyncio.create_task(connection.write("b", {}))
        await asyncio.sleep(1.5)
        second.cancel()
        await asyncio.wait({first, second})
        assert [each.sent for each in engine.connections] == [["a"]]

    virtually(test)


def test_a_call_cancelled_later_drops_the_connection() -> None:
    """The next call gets another connection at once, however long the server is silent."""

    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.answers_after_s = 1000
        call = asyncio.create_task(connection.write("a", {}))
        await asyncio.sleep(1.5)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        engine.answers_after_s = 1
        assert await connection.read("b", {}) == [("b",)]
        assert [each.sent for each in engine.connections] == [["<a>"], ["b"]]
        assert [each.up for each in engine.connections] == [False, True]

    virtually(test)


def test_connecting_goes_on_when_its_first_caller_gives_up() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.connects_after_s = 5
        for _ in range(4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await connection.read("a", {})
        assert await connection.read("b", {}) == [("b",)]
        assert asyncio.get_running_loop().time() == pytest.approx(6)
        assert [each.sent for each in engine.connections] == [["b"]]

    virtually(test)


def test_a_transaction_that_was_rolled_back_is_retried() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.errors = [TransactionUndone("deadlock")] * 3
        assert await connection.write("a", {}) == [("<a>",)]
        assert engine.connections[0].sent == ["<a>"] * 4
        engine.errors = [TransactionUndone("deadlock")] * 100
        with pytest.raises(StoreUnavailable, match="20 times because of others"):
            await connection.write("b", {})
        engine.errors = []

    virtually(test)


def test_after_a_lost_connection_the_outcome_of_a_write_is_unknown() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.errors = [OSError("reset"), OSError("reset")]
        with pytest.raises(OutcomeUnknown, match=r"spare:1: .*during a transaction \(reset\)"):
            await connection.write("a", {})
        with pytest.raises(StoreUnavailable, match="spare:1: reset"):
            await connection.read("b", {})
        assert len(engine.connections) == 2
        assert await connection.read("c", {}) == [("c",)]

    virtually(test)


def test_a_server_that_can_no_longer_be_written_to_is_left() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.errors = [WrongServer("a standby")]
        with pytest.raises(StoreUnavailable):
            await connection.write("a", {})
        await connection.write("b", {})
        assert [each.sent for each in engine.connections] == [["<a>"], ["<b>"]]

    virtually(test)


def test_calls_fail_until_there_is_a_connection() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.refuses = True
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="connection refused"):
                await connection.write("a", {})
        engine.refuses = False
        await connection.write("a", {})

    virtually(test)


def test_calls_on_a_closed_connection_fail() -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        waiting = asyncio.create_task(connection.read("a", {}))
        await asyncio.sleep(0.5)
        await connection.close()
        with pytest.raises(StoreUnusable, match="closed"):
            await waiting
        with pytest.raises(StoreUnusable, match="closed"):
            await connection.read("b", {})

    virtually(test)


def test_a_look_at_leases_that_gets_no_response_blocks_other_calls_for_a_third_of_the_ttl() -> None:
    """As when a connection was lost in an outage and nothing says so. Calls wait for their turn."""

    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.answers_after_s = engine.connects_after_s = 0.01
        loop, context = asyncio.get_running_loop(), Context(VirtualClock(), lambda event: None)
        names = dict.fromkeys(
            ("meta", "leases", "entries", "changes", "clock", "numbering", "incarnation"), ""
        )
        store = RelationalStore(
            names, context, logs=False, connection=connection, renewals=connection, poll_s=None
        )
        await store.grant(1.5)
        engine.answers_after_s = 1000
        store._observer.follow(["lease"])
        await asyncio.sleep(0.01)
        engine.answers_after_s = 0.01
        began, answered = loop.time(), False
        while not answered:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.25):
                    answered = bool(await connection.read("a", {}))
        assert loop.time() - began < 0.6
        await store.close()

    virtually(test)


def failover(*engines: FakeEngine, order: int) -> None:
    """Make another server the primary. The first one can still be reached."""
    for engine in engines:
        engine.servers["spare"] = ("second", "system", order, True)


@pytest.mark.parametrize("call", ["read", "write"])
def test_a_response_of_a_deposed_primary_does_not_count(call: str) -> None:
    """One connection leads to the new primary, the other waits for a response of the old one."""

    async def main() -> None:
        primary = Primary("who")
        one, two = FakeEngine(), FakeEngine()
        renewals, other = SqlConnection(one, primary), SqlConnection(two, primary)
        await renewals.read("a", {})
        one.answers_after_s = 10
        late = asyncio.create_task(getattr(renewals, call)("renew", {}))
        await asyncio.sleep(1)
        failover(one, two, order=2)
        del two.servers["db"]
        assert await other.read("b", {}) == [("b",)]
        with pytest.raises(OutcomeUnknown if call == "write" else StoreUnavailable):
            await late
        one.answers_after_s = 1
        await renewals.write("c", {})
        assert [each.host for each in one.connections] == ["db", "spare"], (
            "it follows the other connection"
        )
        await renewals.close()
        await other.close()

    run_virtual(main())


@pytest.mark.parametrize(("order", "ends_at"), [(2, "spare"), (0, "db")])
def test_an_earlier_primary_is_refused(order: int, ends_at: str) -> None:
    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        engine.servers = {"db": ("first", "system", 1, True)}
        await connection.read("a", {})
        failover(engine, order=order)
        first = engine.servers.pop("db")
        engine.connections[-1].up = False
        if order < 1:
            with pytest.raises(StoreUnavailable, match="the primary before a failover"):
                await connection.read("b", {})
        else:
            await connection.read("b", {})
        engine.servers["db"] = first
        engine.connections[-1].up = False
        await connection.read("c", {})
        assert engine.connections[-1].host == ends_at

    virtually(test)


def test_a_server_that_changes_behind_a_connection_is_noticed() -> None:
    """A pooler or a moved address: the response comes from another server than before."""

    async def test(connection: SqlConnection, engine: FakeEngine) -> None:
        await connection.read("a", {})
        engine.servers["db"] = ("second", "", 0, True)
        with pytest.raises(OutcomeUnknown, match="another server"):
            await connection.write("b", {})
        await connection.write("c", {})
        engine.servers["db"] = ("second", "", 0, False)
        with pytest.raises(OutcomeUnknown, match="read-only"):
            await connection.write("d", {})
        with pytest.raises(StoreUnavailable, match="read-only"):
            await connection.write("e", {})

    virtually(test)


@pytest.mark.parametrize(
    ("url", "hosts", "login", "database"),
    [
        ("x://h/d", [("h", 5)], ("", None), "d"),
        ("x://u:p@h:1/d", [("h", 1)], ("u", "p"), "d"),
        ("x://u%40e:p%2F@h1:1,h2,[::1]:3/", [("h1", 1), ("h2", 5), ("::1", 3)], ("u@e", "p/"), ""),
        ("x://[::1]/d", [("::1", 5)], ("", None), "d"),
        ("x://%2Frun%2Fpg/d", [("/run/pg", 5)], ("", None), "d"),
        ("x:///d", [("", 5)], ("", None), "d"),
    ],
)
def test_addresses(
    url: str, hosts: list[tuple[str, int]], login: tuple[str, str | None], database: str
) -> None:
    engine = FakeEngine(url)
    assert ([*engine.hosts], engine.database) == (hosts, database)
    assert (engine.user, engine.password) == login
    assert "p/" not in engine.where


def test_a_wrong_port_is_refused() -> None:
    with pytest.raises(ConfigError, match="a port is a number"):
        FakeEngine("x://h:http/d")


def test_an_unexpected_error_does_not_end_listening(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is logged and retried: watches must go on being notified, soon after a long outage too."""

    async def main() -> None:
        url = StoreURL.parse("postgresql://db/doyen")
        engine = PsycopgEngine(url, "channel", lambda path: None)
        connection = SqlConnection(engine, Primary("who"))
        asked: list[float] = []

        async def read(query: str, given: Given) -> list[Row]:
            asked.append(asyncio.get_running_loop().time())
            raise RuntimeError("a defect") if len(asked) == 1 else StoreUnavailable("an outage")

        monkeypatch.setattr(connection, "read", read)
        listening = asyncio.create_task(keep_connected(connection, engine, 2.0))
        await asyncio.sleep(60)
        assert max(later - earlier for earlier, later in pairwise(asked)) <= 0.5
        assert not listening.done()
        listening.cancel()
        await asyncio.wait({listening})

    run_virtual(main())
    (line,) = caplog.records
    assert (line.levelname, line.message) == ("ERROR", "event=listening_failed server=db:5432")
    assert "a defect" in (line.exc_text or "")
