"""The HTTP server of `doyen dash`: who may read and act, and what is sent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx2
import pytest

import doyen
from doyen.cli.dash import _token
from doyen.cli.up.page import ProcessPage
from doyen.errors import ConfigError, OrderFailed
from doyen.web import observation as observation_module
from doyen.web import server as server_module
from doyen.web import serving as serving_module
from doyen.web.board import Board, OpenPage
from doyen.web.observation import StoreObservation
from doyen.web.server import ASSETS, Access, make_app
from doyen.web.serving import PageListener, PageThread, listen, serve
from doyen.web.terms import ElectionRow
from support import until

TOKEN = "t" * 32
HOST = "127.0.0.1:7480"


def access(**changes: Any) -> Access:
    return Access(**{"hosts": frozenset({HOST}), "token": TOKEN, "allow_actions": True, **changes})


def client(observation: StoreObservation | None = None, **changes: Any) -> httpx2.AsyncClient:
    app = make_app(observation or StoreObservation("memory://x"), access(**changes))
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app),
        base_url=f"http://{HOST}",
    )


BEARER = {"authorization": f"Bearer {TOKEN}"}


async def test_the_page_and_its_assets_are_served_with_a_strict_policy() -> None:
    async with client() as http:
        page = await http.get("/")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "unsafe" not in page.headers["content-security-policy"]
        assert page.headers["x-content-type-options"] == "nosniff"
        for path in ASSETS.iterdir():
            asset = await http.get(f"/assets/{path.name}")
            assert asset.status_code == 200
            again = await http.get(
                f"/assets/{path.name}", headers={"if-none-match": asset.headers["etag"]}
            )
            assert again.status_code == 304
        for wrong in ("/assets/../server.py", "/assets/server.py", "/assets/%2e%2e/server.py"):
            assert (await http.get(wrong)).status_code == 404


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:7480", "127.0.0.1", "127.0.0.1:7481", "", "127.0.0.1:7480.evil"],
)
async def test_another_host_is_refused(host: str) -> None:
    """A foreign name that resolves to this address (DNS rebinding) is not ours."""
    async with client() as http:
        for path in ("/", "/assets/main.js", "/api/stream", "/api/election"):
            assert (await http.get(path, headers={"host": host})).status_code == 421


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:7481"},
        {"origin": "http://127.0.0.1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_another_origin_can_neither_read_nor_act(headers: dict[str, str]) -> None:
    async with client() as http:
        for path in ("/api/stream", "/api/election", "/api/config", "/assets/main.js"):
            assert (await http.get(path, headers={**BEARER, **headers})).status_code == 403
        acted = await http.post(
            "/api/act", json={"action": "resign"}, headers={**BEARER, **headers}
        )
        assert acted.status_code == 403


async def test_our_own_origin_is_accepted() -> None:
    async with client() as http:
        headers = {**BEARER, "origin": f"http://{HOST}", "sec-fetch-site": "same-origin"}
        found = await http.get("/api/election", headers=headers)
        assert found.status_code == 404
        assert "access-control-allow-origin" not in found.headers


@pytest.mark.parametrize(
    ("given", "allowed", "status"),
    [
        ({}, True, 401),
        ({"authorization": "Bearer wrong"}, True, 401),
        ({"authorization": ""}, True, 401),
        (BEARER, False, 403),
        (BEARER, True, 503),
    ],
)
async def test_actions_need_permission_and_the_token(
    given: dict[str, str], allowed: bool, status: int
) -> None:
    async with client(allow_actions=allowed) as http:
        asked = {"action": "resign", "name": "e", "token": 1}
        assert (await http.post("/api/act", json=asked, headers=given)).status_code == status


async def test_reading_needs_the_token_where_others_can_reach_the_server() -> None:
    async with client(reading_needs_token=True) as http:
        for path in ("/api/stream", "/api/election", "/api/config"):
            assert (await http.get(path)).status_code == 401
        assert (await http.post("/api/view", json={})).status_code == 401
        assert (await http.get("/api/election", headers=BEARER)).status_code == 404
        assert (await http.get("/")).status_code == 200, "the page itself tells nothing"


@pytest.mark.parametrize("body", [b"", b"[]", b"x" * 100_000, b"[" * 60_000])
async def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    async with client() as http:
        headers = {**BEARER, "content-type": "application/json"}
        for path in ("/api/view", "/api/act"):
            answer = await http.post(path, content=body, headers=headers)
            assert answer.status_code == 400
        answer = await http.post("/api/view", content=b"{}", headers={**BEARER})
        assert answer.status_code == 400, "a form cannot send JSON"


def test_where_the_server_listens_decides_who_may_read() -> None:
    for address, needed in (("127.0.0.1:0", False), ("0.0.0.0:0", True)):
        listener = listen(address, hosts=["dash.example"])
        with listener.socket:
            assert listener.access.reading_needs_token == needed
            assert listener.access.knows(f"localhost:{listener.port}")
            assert listener.access.knows("dash.example")
            assert not listener.access.knows("other.example")
            assert ("#token=" in listener.url) == needed
    for wrong in ("127.0.0.1", ":80", "127.0.0.1:x", "127.0.0.1:99999", "no.such.host.invalid:1"):
        with pytest.raises(ConfigError):
            listen(wrong)


def test_an_address_in_use_is_reported() -> None:
    first = listen("127.0.0.1:0")
    with first.socket, pytest.raises(ConfigError, match="choose another with --listen"):
        listen(f"127.0.0.1:{first.port}")


def test_a_token_file_is_private_and_long_enough(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    os.chmod(file, 0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        _token(file)
    os.chmod(file, 0o600)
    assert _token(file) == TOKEN
    file.write_text("short")
    with pytest.raises(ConfigError, match="16 characters"):
        _token(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        _token(tmp_path / "absent")


class Machines:
    """Processes that a page may control."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str]] = []
        self.quiet_s = 0.0

    def processes(self) -> list[dict[str, Any]]:
        return [{"name": "server1", "state": "leading", "actions": [["kill", "Kill"]]}]

    def silent_s(self) -> float:
        return self.quiet_s

    async def act(self, action: str, process: str) -> str:
        if process != "server1":
            raise OrderFailed(f"there is no process {process}")
        self.done.append((action, process))
        return f"{process} was killed"


@asynccontextmanager
async def served(url: str, **options: Any) -> AsyncIterator[tuple[PageListener, StoreObservation]]:
    """The real server on a free port, in this loop."""
    listener, observation = (
        listen("127.0.0.1:0", allow_actions=True),
        StoreObservation(url, **options),
    )
    ready = asyncio.Event()
    serving = asyncio.ensure_future(serve(observation, listener, ready.set))
    try:
        await ready.wait()
        yield listener, observation
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


class Reader:
    """Reads the stream of a page."""

    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.rows: dict[str, Any] = {}
        self.topics: dict[str, Any] = {}

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(60):
            while not condition(self):
                line = await anext(self._lines)
                if line.startswith("data: "):
                    message = json.loads(line[6:])
                    self.rows |= {row["key"]: row for row in message.pop("rows", [])}
                    self.topics |= message


async def test_a_page_over_http_sees_a_term_and_transfers_it(store: str) -> None:
    async with served(store, controls=Machines()) as (listener, observation):
        headers = {"authorization": f"Bearer {listener.access.token}"}
        base = f"http://127.0.0.1:{listener.port}"
        async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=60) as http:
            async with http.stream("GET", "/api/stream") as stream, doyen.connect(store) as session:
                reader = Reader(stream.aiter_lines())
                await reader.until(lambda seen: seen.topics.get("may_act"))

                async def stand(name: str) -> None:
                    async for campaign in session.campaigns("e", name=name, meta={"host": "h1"}):
                        async with campaign:
                            await asyncio.sleep(60)

                standing = [asyncio.ensure_future(stand("a"))]
                await until(lambda: "elections/e" in observation.board.rows)
                standing.append(asyncio.ensure_future(stand("b")))
                await reader.until(lambda seen: seen.rows.get("elections/e", {}).get("line") == 1)
                row = reader.rows["elections/e"]
                page = {"page": reader.topics["page"], "keys": ["elections/e"]}
                assert (await http.post("/api/view", json=page)).status_code == 200
                await reader.until(lambda seen: row["lease"] in seen.topics["leases"])
                found = (await http.get("/api/election", params={"key": "elections/e"})).json()
                assert found["leader"] == {"name": "a", "meta": {"host": "h1"}}
                assert [each["name"] for each in found["line"]] == ["b"]

                asked = {"action": "transfer", "kind": "elections", "name": "e", "to": "b"}
                stale = await http.post("/api/act", json={**asked, "token": row["token"] - 1})
                assert stale.status_code == 409
                assert "nothing was done" in stale.json()["error"]
                done = await http.post("/api/act", json={**asked, "token": row["token"]})
                assert done.status_code == 200, done.text
                await reader.until(lambda seen: seen.rows["elections/e"]["leader"] == "b")
                # An observer that missed the order learns of it from the trail.
                await reader.until(
                    lambda seen: seen.rows["elections/e"]["terms"][0][4] == "transferred"
                )

                killed = await http.post("/api/act", json={"action": "kill", "process": "server1"})
                assert killed.json() == {"done": "server1 was killed"}
                wrong = await http.post("/api/act", json={"action": "kill", "process": "x"})
                assert wrong.status_code == 409
                forged = {"action": "resign", "event": "x", "by": "nobody", "a\nb": 1}
                for bad in (
                    {"action": "none"},
                    {},
                    {"action": "resign"},
                    {"action": "move"},
                    forged,
                ):
                    assert (await http.post("/api/act", json=bad)).status_code == 400
                for task in standing:
                    task.cancel()
                await asyncio.gather(*standing, return_exceptions=True)
            await until(lambda: not observation.board.pages)


async def test_a_store_that_cannot_be_opened_is_shown_as_unreachable() -> None:
    observation = StoreObservation("doyen://127.0.0.1:1")
    running = asyncio.ensure_future(observation.run())
    try:
        await until(lambda: "health" in observation.board.topics, 20)
        health = observation.board.topics["health"]
        assert not health["reachable"]
        assert health["as_of"] is None
        assert health["error"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_store_that_takes_long_to_answer_is_no_page_without_a_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The page is told that the server is there, and that the store has not answered yet, before
    the first attempt to open it has ended."""
    for module, name in ((observation_module, "SILENT_S"), (server_module, "ALIVE_S")):
        monkeypatch.setattr(module, name, 0.05)
    monkeypatch.setattr(serving_module, "TRIED_S", 0.05)
    monkeypatch.setattr(StoreObservation, "_observe", lambda _: asyncio.Event().wait())
    async with (
        served("memory://x") as (listener, _),
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{listener.port}", timeout=60) as http,
        http.stream("GET", "/api/stream") as stream,
    ):
        lines = stream.aiter_lines()
        reader = Reader(lines)
        await reader.until(lambda seen: "health" in seen.topics)
        assert reader.topics["health"]["error"] == "it has not answered yet"
        async for line in lines:
            if line.startswith(": "):
                break


def move_away(path: Path) -> None:
    for file in path.parent.glob(f"{path.name}*"):
        file.rename(file.with_name(f"away-{file.name}"))


async def test_a_store_whose_file_was_replaced_is_opened_again(tmp_path: Path) -> None:
    """Nobody would see the changes in the other file; what was in the first one is gone."""
    path = tmp_path / "x.db"
    observation, url = StoreObservation(f"sqlite://{path}"), f"sqlite://{path}"
    rows = observation.board.rows

    def health() -> dict[str, Any]:
        return {"error": "", **observation.board.topics.get("health", {})}

    async def lead(election: str) -> None:
        async with doyen.connect(url) as session, session.campaign(election, name="a"):
            await until(lambda: f"elections/{election}" in rows, 20)

    async with doyen.connect(url):
        pass
    running = asyncio.ensure_future(observation.run())
    try:
        await lead("first")
        move_away(path)
        await until(lambda: "removed or replaced" in health()["error"], 20)
        assert not health()["reachable"]
        assert health()["as_of"] is not None
        await lead("second")
        assert list(rows) == ["elections/second"]
        assert health()["reachable"]
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_page_of_processes_whose_terminal_has_stopped_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("doyen.cli.up.page.ACT_WITHIN_S", 0.01)
    cluster = MagicMock(candidates=[], quorum=None)
    page = ProcessPage(cluster)
    with pytest.raises(OrderFailed, match="does not respond; nothing was done"):
        await page.act("kill", "server1")
    page.tick()
    cluster.kill.assert_not_called()
    assert page.silent_s() < 5


async def test_processes_that_are_not_looked_at_any_more_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("doyen.web.hub.FAILING_S", 0.0)
    machines = Machines()
    async with served("memory://x", controls=machines) as (_, observation):

        def stale() -> list[str]:
            health = observation.board.topics.get("health", {})
            return [part for part, *_ in health.get("stale", ["unknown"])]

        await until(lambda: stale() == [])
        machines.quiet_s = 10.0
        await until(lambda: stale() == ["processes"])


async def test_processes_are_acted_upon_while_the_store_cannot_be_opened() -> None:
    machines = Machines()
    async with client(StoreObservation("memory://x", controls=machines)) as http:
        asked = {"action": "kill", "process": "server1"}
        done = await http.post("/api/act", json=asked, headers=BEARER)
        assert done.json() == {"done": "server1 was killed"}


def test_a_page_that_ends_is_noticed() -> None:
    listener = listen("127.0.0.1:0")
    thread = PageThread(lambda: StoreObservation("nosuch://x"), listener)
    with listener.socket:
        with suppress(ConfigError):  # at the start, or a moment later
            thread.start()
        thread._thread.join(30)
    assert "the page has ended" in thread.address
    assert "nosuch" in thread.address
    thread.stop()


async def test_a_page_that_stops_reading_costs_its_names_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is queued for it: what it missed is sent when it reads again, in its newest state."""
    made = 0
    whole = Board.message

    def counted(self: Board, page: OpenPage) -> bytes | None:
        nonlocal made
        message = whole(self, page)
        made += len(message or b"")
        return message

    monkeypatch.setattr(Board, "message", counted)
    monkeypatch.setattr("doyen.web.server.COALESCE_S", 0.0)
    async with served("memory://x") as (listener, observation):
        board = observation.board
        for number in range(1000):
            row = ElectionRow("elections", f"e{number}-{'x' * 150}")
            board.rows[row.key] = row
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(("127.0.0.1", listener.port))
        host = f"Host: 127.0.0.1:{listener.port}"
        stuck.sendall(f"GET /api/stream HTTP/1.1\r\n{host}\r\n\r\n".encode())
        await until(lambda: board.pages)
        (page,) = board.pages.values()
        for _ in range(60):
            for key in board.rows:
                board.row_changed(key)
            await asyncio.sleep(0.002)
        assert len(page.rows) == len(board.rows)
        every = sum(len(board._row(key)) for key in board.rows)
        assert made < 30 * every, "what does not fit into the buffers of the kernel is not made"
        stuck.close()
        await until(lambda: not board.pages)
