"""The life of a session without a scope: open and close, waiting for a store that is down at first,
and health."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import doyen
from doyen import Session
from doyen.election import core
from doyen.election.options import SessionSettings
from doyen.errors import ConfigError, SessionClosed, StoreUnavailable, StoreUnusable
from doyen.lease.runtime import InlineRuntime
from doyen.session import ConnectOptions
from doyen.stores.memory import MemoryStore
from doyen.stores.port import Context, Store
from doyen.testing.faults import Faults
from support import Place, keepalive_of, now, virtual


@virtual
async def test_a_session_is_opened_and_closed_by_calls(place: Place) -> None:
    session = place.session()
    await session.close()  # not open: nothing to do
    assert await session.open() is session
    async with session.campaign("e", name="a"):
        assert place.holder() == "a"
    with pytest.raises(SessionClosed, match="opened once"):
        await session.open()
    await asyncio.gather(session.close(), session.close())
    await session.close()
    with pytest.raises(SessionClosed):
        await session.leader("e")


def test_a_blocking_session_is_opened_and_closed_by_calls() -> None:
    session = doyen.connect_blocking("memory://calls")
    session.close()
    with pytest.raises(SessionClosed, match="or open it"):
        session.leader("e")
    assert session.open() is session
    closers = [threading.Thread(target=session.close) for _ in range(4)]
    with pytest.raises(doyen.LeadershipLost), session.campaign("e") as term:
        for closer in closers:
            closer.start()
        assert term.wait_lost(20.0)
    for closer in closers:
        closer.join()
    session.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("doyen")]


class Down:
    """A store that cannot be reached until a time. Takes the place of `open_store`."""

    def __init__(self, place: Place, until: float, error: Exception) -> None:
        self.place = place
        self.until = until
        self.error = error
        self.tries: list[float] = []

    async def open(self, url: str, context: Context) -> Store:
        self.tries.append(now())
        if now() < self.until:
            raise self.error
        return MemoryStore(self.place.server, context)


def waiting(place: Place, wait_s: Any, **settings: Any) -> Session:
    given = SessionSettings("etcd://h1", ttl_s=6.0, wait_s=wait_s, **settings)
    return Session(given, InlineRuntime(place.clock))


@virtual
async def test_a_store_that_is_down_at_first_is_waited_for(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = Down(place, 20.0, StoreUnavailable("connection loss"))
    monkeypatch.setattr(core, "open_store", down.open)
    async with waiting(place, 30.0) as session, session.campaign("e", name="a"):
        assert 20.0 <= now() < 23.0
    assert 10 < len(down.tries) < 20
    warned = [each for each in caplog.messages if "event=store_waited_for" in each]
    assert len(warned) == 1
    assert "etcd://h1" in warned[0]
    assert "connection loss" in warned[0]


@virtual
async def test_a_store_that_stays_down_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Down(place, 1000.0, StoreUnavailable("connection loss"))
    monkeypatch.setattr(core, "open_store", down.open)
    with pytest.raises(StoreUnavailable, match=r"etcd://h1 .* within 5 s: connection loss"):
        await waiting(place, 5.0).open()
    assert now() <= 5.0
    began, down.tries = now(), []
    with pytest.raises(StoreUnavailable, match=r"^connection loss$"):
        await waiting(place, 0.0).open()
    assert (now(), len(down.tries)) == (began, 1)


@virtual
async def test_a_store_that_does_not_answer_is_given_up_in_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(url: str, context: Context) -> Store:
        await asyncio.sleep(1000.0)
        raise AssertionError

    monkeypatch.setattr(core, "open_store", silent)
    with pytest.raises(StoreUnavailable, match="within 5 s"):
        await waiting(place, 5.0).open()
    assert now() == 5.0


@virtual
async def test_what_waiting_does_not_cure_is_raised_at_once(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    down = Down(place, 1000.0, StoreUnusable("a newer schema"))
    monkeypatch.setattr(core, "open_store", down.open)
    with pytest.raises(StoreUnusable, match="a newer schema"):
        await waiting(place, 30.0).open()
    assert now() == 0.0


@pytest.mark.parametrize("wait_s", [-1, "soon", None])
def test_a_time_to_wait_is_a_number(wait_s: Any) -> None:
    with pytest.raises(ConfigError, match="wait_s is 0 s or more"):
        doyen.connect("memory://", wait_s=wait_s)


def test_the_times_of_renewals_and_requests_can_be_set() -> None:
    options: ConnectOptions = {"ttl_s": 6.0, "renew_every_s": 1.0, "request_timeout_s": 0.5}
    with doyen.connect_blocking("memory://times", **options) as session, session.campaign("e"):
        timing = keepalive_of(session).timing
    assert (timing.renew_every_s, timing.request_timeout_s) == (1.0, 0.5)
    with (
        pytest.raises(ConfigError, match="request_timeout_s must be between"),
        doyen.connect_blocking("memory://times", ttl_s=6.0, request_timeout_s=2.0),
    ):
        pass


@virtual
async def test_the_health_of_a_session(place: Place) -> None:
    faults = Faults()
    session = place.session(faults)
    with pytest.raises(SessionClosed):
        _ = session.health
    await session.open()
    assert (session.health, session.lost) == ("ok", False)
    with pytest.raises(doyen.LeadershipLost):
        async with session.campaign("e"):
            faults.cut()
            await asyncio.sleep(4.0)
            assert (session.health, session.lost) == ("unsure", False)
            await asyncio.sleep(10.0)
    assert (session.health, session.lost) == ("lost", True)
    faults.heal()
    async with session.campaign("e"):
        assert (session.health, session.lost) == ("ok", False)
    faults.cut()
    with pytest.raises(doyen.StoreError):
        await session.leader("e")
    assert (session.health, session.lost) == ("unsure", False)
    faults.heal()
    await session.leader("e")
    assert (session.health, session.lost) == ("ok", False)
    await session.close()
    assert (session.health, session.lost) == ("closed", True)


def test_while_leader_takes_every_option_and_reads_the_store_when_called(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []

    @doyen.while_leader(
        "e",
        name="a",
        meta={"port": 80},
        wait_s=20.0,
        ttl_s=6.0,
        stop_budget_s=0.5,
        renew_every_s=1.0,
        connect_wait_s=1.0,
        audit=tmp_path / "audit.jsonl",
        on_event=seen.append,
    )
    def main(term: doyen.Term, more: int) -> tuple[str, float, int]:
        return term.name, term.stop_budget_s, more

    monkeypatch.setenv("DOYEN_STORE", f"sqlite://{tmp_path}/one.db")
    assert main(7) == ("a", 0.5, 7)
    assert (tmp_path / "one.db").exists()
    assert (tmp_path / "audit.jsonl").exists()
    monkeypatch.setenv("DOYEN_STORE", f"sqlite://{tmp_path}/two.db")
    main(8)
    assert (tmp_path / "two.db").exists()
    assert {type(record.event).__name__ for record in seen} >= {"Elected", "Resigned"}
    monkeypatch.setenv("DOYEN_REQUIRE_STORE", "1")
    for name in ("DOYEN_STORE", "DATABASE_URL", "ETCDCTL_ENDPOINTS", "ZK_HOSTS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="DOYEN_REQUIRE_STORE"):
        main(9)


def test_while_leader_of_a_coroutine_function(tmp_path: Path) -> None:
    named: list[str] = []

    def url() -> str:
        named.append(f"sqlite://{tmp_path}/{len(named)}.db")
        return named[-1]

    @doyen.while_leader("e", store=url, name="a", ttl_s=6.0)
    async def main(term: doyen.Term) -> str:
        return term.name

    assert asyncio.run(main()) == asyncio.run(main()) == "a"
    assert (tmp_path / "1.db").exists()


def test_while_leader_refuses_what_is_wrong_when_it_decorates() -> None:
    wrong: Any = {"priorty": 1}
    with pytest.raises(TypeError, match=r"no option 'priorty' \(did you mean priority\?\)"):
        doyen.while_leader("e", **wrong)
    wrong = {"recipe": "queue"}
    with pytest.raises(ConfigError, match="recipe is"):
        doyen.while_leader("e", **wrong)


def test_dir_and_help_show_the_api() -> None:
    """In a fresh interpreter, where no name has been used yet."""
    program = (
        "import doyen, pydoc, sys; assert not [m for m in sys.modules if m.startswith('doyen.')];"
        "assert {*doyen.__all__} <= {*dir(doyen)};"
        "print(pydoc.render_doc(doyen, renderer=pydoc.plaintext))"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0, shown.stderr
    for name in (
        "class Session",
        "class BlockingSession",
        "connect(",
        "while_leader(",
        "candidate(",
    ):
        assert name in shown.stdout
    assert "Campaign for `election`" in shown.stdout
