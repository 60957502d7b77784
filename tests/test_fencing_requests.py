"""Services that refuse stale tokens: each rule, for ASGI and for WSGI, and for each place in which
the highest token can be kept. A service that compares only when a request arrives is seen to let a
stale write through."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from doyen.errors import ConfigError
from doyen.fencing import FileTokens, MemoryTokens, SeenTokens, SQLTokens, asgi, wsgi
from doyen.fencing.requests import Fenced, NotExecuted, Turns

Place = Callable[[Path], SeenTokens]


def in_a_table(path: Path) -> SQLTokens:
    tokens = SQLTokens(lambda: closing(sqlite3.connect(path / "app.db", timeout=30)))
    tokens.create()
    return tokens


class Coroutine:
    """A place of the service's own."""

    def __init__(self) -> None:
        self._tokens = MemoryTokens()

    async def see(self, resource: str, token: int) -> int:
        return self._tokens.see(resource, token)


PLACES: dict[str, Place] = {
    "memory": lambda path: MemoryTokens(),
    "files": FileTokens,
    "table": in_a_table,
}
each_place = pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)


@each_place
def test_the_highest_token_of_each_resource_is_kept(place: Place, tmp_path: Path) -> None:
    tokens = place(tmp_path)
    seen = [tokens.see("a", 7), tokens.see("a", 6), tokens.see("b/c", 1), tokens.see("a", 8)]
    assert [*seen, tokens.see("a", 8), tokens.see("b/c", 2)] == [7, 7, 1, 8, 8, 2]


@pytest.mark.parametrize("place", [FileTokens, in_a_table])
def test_what_is_kept_survives_a_restart(place: Place, tmp_path: Path) -> None:
    place(tmp_path).see("a", 7)
    assert place(tmp_path).see("a", 6) == 7


@each_place
def test_many_threads_see_a_token_that_never_goes_back(place: Place, tmp_path: Path) -> None:
    tokens = place(tmp_path)
    highest = 0
    lock = threading.Lock()

    def see(token: int) -> None:
        nonlocal highest
        with lock:
            before = highest
        seen = tokens.see("a", token)
        assert isinstance(seen, int)
        assert seen >= max(before, token)
        with lock:
            highest = max(highest, seen)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(see, [token * 7 % 40 for token in range(40)]))
    assert tokens.see("a", 0) == 39


class Answer(NamedTuple):
    status: int
    body: str
    headers: dict[str, str]


class Service:
    """A service behind the middleware. `request` makes a request, on a thread of its own."""

    def __init__(self, kind: str, handler: Callable[[int | None], None], **options: Any) -> None:
        options = {"tokens": MemoryTokens(), "resource": "orders", **options}
        self._kind, self._handler = kind, handler
        self.threads = ThreadPoolExecutor(8)
        self._loop = asyncio.new_event_loop()
        self._looping = threading.Thread(target=self._loop.run_forever)
        self._looping.start()
        self.app: Any
        if kind == "asgi":
            self.app = asgi.FencingMiddleware(self._asgi, **options)
        else:
            self.app = wsgi.FencingMiddleware(self._wsgi, **options)

    def request(self, method: str, *tokens: str, path: str = "/") -> Answer:
        if self._kind == "wsgi":
            return self._call_wsgi(method, tokens, path)
        call = self._call_asgi(method, tokens, path)
        return asyncio.run_coroutine_threadsafe(call, self._loop).result(30)

    def close(self) -> None:
        self.threads.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._looping.join()
        self._loop.close()

    async def _asgi(self, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.to_thread(self._handler, scope.get("doyen.token"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    def _wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        self._handler(environ.get("doyen.token"))
        start_response("200 OK", [])
        return [b"done"]

    async def _call_asgi(self, method: str, tokens: tuple[str, ...], path: str) -> Answer:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "http.request", "body": b"", "more_body": False}

        headers = [(b"fencing-token", token.encode()) for token in tokens]
        scope = {"type": "http", "method": method, "path": path, "headers": headers}
        await self.app(scope, receive, send)
        answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Answer(sent[0]["status"], sent[1]["body"].decode(), answered)

    def _call_wsgi(self, method: str, tokens: tuple[str, ...], path: str) -> Answer:
        started: list[Any] = []
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path}
        if tokens:
            environ["HTTP_FENCING_TOKEN"] = ",".join(tokens)
        body = self.app(environ, lambda *answer: started.append(answer))
        content = b"".join(body).decode()
        if hasattr(body, "close"):
            body.close()
        return Answer(int(started[0][0][:3]), content, dict(started[0][1]))


Start = Callable[..., Service]


@pytest.fixture(params=["asgi", "wsgi"])
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    services: list[Service] = []

    def start(handler: Callable[[int | None], None], **options: Any) -> Service:
        service = Service(request.param, handler, **options)
        services.append(service)
        return service

    yield start
    for service in services:
        service.close()


@each_place
def test_a_stale_token_is_refused_with_the_cause(
    start: Start, place: Place, tmp_path: Path
) -> None:
    executed: list[int | None] = []
    service = start(executed.append, tokens=place(tmp_path))
    assert service.request("POST", "7").status == 200
    assert service.request("PUT", "8").status == 200
    status, body, headers = service.request("POST", "7")
    assert (status, headers["fencing-token"]) == (412, "8")
    assert body == (
        "not executed: 'orders' refuses token 7, because it has seen the later token 8\n"
    )
    assert executed == [7, 8]


GARBAGE = ["", "seven", "-1", "7.0", "+7", " 7", "\N{SUPERSCRIPT SEVEN}", str(2**63)]


@pytest.mark.parametrize("tokens", [*((each,) for each in GARBAGE), ("7", "7")], ids=ascii)
def test_what_is_not_a_token_is_refused(start: Start, tokens: tuple[str, ...]) -> None:
    executed: list[int | None] = []
    status, body, _ = start(executed.append).request("POST", *tokens)
    assert (status, "must be one integer" in body, executed) == (400, True, [])


def test_without_a_token_one_can_only_read(start: Start) -> None:
    executed: list[int | None] = []
    service = start(executed.append)
    for method in ("POST", "PUT", "PATCH", "DELETE", "PROPFIND"):
        status, body, _ = service.request(method)
        assert (status, "need the token" in body) == (428, True)
    assert executed == []
    for method in ("GET", "HEAD", "OPTIONS"):
        assert service.request(method).status == 200


def test_reading_with_a_token_has_earlier_ones_refused(start: Start) -> None:
    service = start(lambda token: None)
    assert service.request("GET", "8").status == 200
    assert service.request("POST", "7").status == 412
    assert service.request("GET", "7").status == 412


def test_a_service_can_have_several_resources_and_some_without_a_token(start: Start) -> None:
    def resource(method: str, path: str) -> str | None:
        return None if path == "/login" else path

    service = start(lambda token: None, resource=resource)
    assert service.request("POST", "8", path="/a").status == 200
    assert service.request("POST", "1", path="/b").status == 200
    assert service.request("POST", path="/login").status == 200
    assert service.request("POST", "7", path="/a").status == 412


def test_a_later_token_waits_for_requests_with_earlier_ones(start: Start) -> None:
    """A handler was admitted with token 7, and is paused before its write. It writes before the
    request with token 8 is executed, not after."""
    wrote: list[int | None] = []
    begun, go_on = threading.Event(), threading.Event()

    def handler(token: int | None) -> None:
        if token == 7:
            begun.set()
            assert go_on.wait(30)
        wrote.append(token)

    service = start(handler)
    earlier = service.threads.submit(service.request, "POST", "7")
    assert begun.wait(30)
    later = service.threads.submit(service.request, "POST", "8")
    waiters = service.app._turns._waiters
    while not waiters and not later.done():
        pass
    assert service.request("POST", "7").status == 412
    go_on.set()
    assert (earlier.result(30).status, later.result(30).status) == (200, 200)
    assert wrote == [7, 8]


def test_a_service_that_only_compares_lets_a_stale_write_through(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Turns, "enter", lambda self, request: True)
    monkeypatch.setattr(Turns, "leave", lambda self, request, **_: None)
    with pytest.raises(AssertionError, match=r"412|\[8, 7\]"):
        test_a_later_token_waits_for_requests_with_earlier_ones(start)


def test_nothing_is_kept_of_resources_without_requests(start: Start) -> None:
    service = start(lambda token: None, resource=lambda method, path: path)
    for number in range(20):
        service.request("POST", "7", path=f"/{number}")
        assert service.request("POST", "6", path=f"/{number}").status == 412
        service.request("GET", "8", path=f"/{number}")
    assert not service.app._turns._turns


def test_a_token_that_was_compared_before_a_later_one_came_is_refused() -> None:
    turns, earlier, later = Turns(), Fenced("r", 7, True), Fenced("r", 8, True)
    turns.arrive(earlier)  # and is the highest so far
    turns.arrive(later)
    assert turns.enter(later) is True
    turns.leave(later)
    refused = turns.enter(earlier)
    assert isinstance(refused, NotExecuted)
    assert refused.highest == 8
    turns.leave(earlier, entered=False)
    assert not turns._turns


def test_requests_that_only_read_are_not_waited_for(start: Start) -> None:
    """Such as a stream of events that the former leader has not closed."""
    begun, go_on = threading.Event(), threading.Event()

    def handler(token: int | None) -> None:
        if token == 7:
            begun.set()
            assert go_on.wait(30)

    service = start(handler)
    reading = service.threads.submit(service.request, "GET", "7")
    assert begun.wait(30)
    assert service.request("POST", "8").status == 200
    go_on.set()
    assert reading.result(30).status == 200


def test_one_that_reads_with_a_later_token_waits_for_earlier_writes(start: Start) -> None:
    order: list[int | None] = []
    begun, go_on = threading.Event(), threading.Event()

    def handler(token: int | None) -> None:
        if token == 7:
            begun.set()
            assert go_on.wait(30)
        order.append(token)

    service = start(handler)
    writing = service.threads.submit(service.request, "POST", "7")
    assert begun.wait(30)
    reading = service.threads.submit(service.request, "GET", "8")
    while not service.app._turns._waiters and not reading.done():
        pass
    go_on.set()
    assert (writing.result(30).status, reading.result(30).status) == (200, 200)
    assert order == [7, 8]


def test_waiting_for_earlier_requests_is_bounded(start: Start) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def handler(token: int | None) -> None:
        if token == 7:
            begun.set()
            assert go_on.wait(30)

    service = start(handler, drain_s=0)
    earlier = service.threads.submit(service.request, "POST", "7")
    assert begun.wait(30)
    status, body, headers = service.request("POST", "8")
    assert (status, "have not ended within 0 s" in body) == (503, True)
    assert headers["retry-after"] == "1"
    go_on.set()
    assert earlier.result(30).status == 200
    assert service.request("POST", "8").status == 200
    assert service.request("POST", "7").status == 412


def test_a_handler_that_fails_keeps_nobody_waiting(start: Start) -> None:
    def handler(token: int | None) -> None:
        if token == 7:
            raise RuntimeError("broken")

    service = start(handler, drain_s=0)
    with pytest.raises(RuntimeError, match="broken"):
        service.request("POST", "7")
    assert service.request("POST", "8").status == 200


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="drain_s"):
        asgi.FencingMiddleware(None, tokens=MemoryTokens(), resource="a", drain_s=-1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="must have a method `see`"):
        asgi.FencingMiddleware(None, tokens={}, resource="a")  # type: ignore[arg-type]


def test_a_service_can_keep_tokens_by_a_coroutine() -> None:
    service = Service("asgi", lambda token: None, tokens=Coroutine())
    assert [service.request("POST", token).status for token in ("7", "6")] == [200, 412]
    service.close()


def test_websockets_of_a_resource_are_refused() -> None:
    reached: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    middleware = asgi.FencingMiddleware(
        app, tokens=MemoryTokens(), resource=lambda method, path: path if path == "/a" else None
    )

    async def connect(path: str, extensions: dict[str, Any]) -> list[Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {"type": "websocket.connect"}

        scope = {"type": "websocket", "path": path, "headers": [], "extensions": extensions}
        await middleware(scope, receive, send)
        return sent

    assert asyncio.run(connect("/a", {}))[0]["code"] == 1008
    denied = asyncio.run(connect("/a", {"websocket.http.response": {}}))
    assert (denied[0]["status"], b"cannot be fenced" in denied[1]["body"]) == (403, True)
    assert asyncio.run(connect("/b", {})) == []
    assert reached == ["websocket"]
