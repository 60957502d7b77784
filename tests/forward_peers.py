"""Processes behind the forwarding middleware, on real servers: uvicorn with Starlette, or gunicorn.

    with Peers(url, "asgi", tmp_path) as peers:
        peers.leader().kill()

Every execution appends a line to one file, the ledger, with the id of the request, the token of the
term under which it was executed, and the process. The file is fenced, because a process that is
frozen in the middle of a request goes on with it when it wakes.

This file is also what the servers load.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import doyen
from doyen.fencing import GuardedFile
from doyen.integrations.forwarding import LeaderView
from frozen import freeze_group

ELECTION = "service"
SECRET = "a secret of the processes"
TTL_S = 1.5
WAIT_S = 10.0
ANSWER_S = 20.0
PATIENCE_S = 40.0
HERE = Path(__file__)


def settings() -> dict[str, Any]:
    given: dict[str, Any] = json.loads(os.environ["FORWARD_PEER"])
    return given


def options(given: dict[str, Any]) -> dict[str, Any]:
    chosen: dict[str, Any] = {"secret": SECRET, "trust": given["trust"], "wait_s": WAIT_S}
    return {**chosen, "answer_s": ANSWER_S}


def execute(given: dict[str, Any], request: str, term: doyen.Term) -> tuple[int, str]:
    """Execute a request. Returns status and text of the response."""
    try:
        line = f"{request} {term.token} {os.getpid()}\n"
        GuardedFile(given["ledger"]).append(term, line.encode())
    except doyen.StaleToken as refusal:
        return 409, f"not executed: {refusal}"
    return 200, str(term.token)


def asgi() -> Any:
    """The application of a process on uvicorn."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Mount, Route, WebSocketRoute
    from starlette.websockets import WebSocket

    from doyen.integrations.asgi import LeaderMiddleware, LeaderRoute

    given = settings()
    view = LeaderView(ELECTION)

    async def campaign(session: doyen.Session) -> None:
        meta = {"address": given["address"]}
        async for campaign in session.campaigns(ELECTION, name=given["address"], meta=meta):
            async with campaign as term:
                with view.leading(term):
                    await term.lost()

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        session = doyen.connect(given["store"], ttl_s=TTL_S)
        async with session as session, view.following(session):
            campaigning = asyncio.create_task(campaign(session))
            yield
            campaigning.cancel()
            await asyncio.wait({campaigning})

    async def do(request: Request) -> Response:
        await request.body()
        status, text = execute(given, request.query_params["id"], request.scope["doyen.term"])
        return PlainTextResponse(text, status)

    async def hang(request: Request) -> Response:
        execute(given, request.query_params["id"], request.scope["doyen.term"])
        await asyncio.Event().wait()
        raise AssertionError

    async def upload(request: Request) -> Response:
        size = 0
        async for chunk in request.stream():
            if size == 0:
                execute(given, request.query_params["id"], request.scope["doyen.term"])
            size += len(chunk)
        return PlainTextResponse(f"{size} from {request.headers['host']}")

    async def download(request: Request) -> Response:
        async def chunks() -> AsyncIterator[bytes]:
            yield b"first"
            await asyncio.Event().wait()

        return StreamingResponse(chunks())

    async def sockets(socket: WebSocket) -> None:
        await socket.accept(subprotocol=(socket.scope["subprotocols"] or [None])[0])
        execute(given, socket.query_params["id"], socket.scope["doyen.term"])
        while (message := await socket.receive())["type"] == "websocket.receive":
            if message.get("text") == "bye":
                await socket.close(4001, "as asked")
                return
            text = message.get("text")
            await (socket.send_bytes(message["bytes"]) if text is None else socket.send_text(text))

    routes = [
        Route("/do", do, methods=["POST"]),
        Route("/hang", hang, methods=["POST"]),
        Route("/upload", upload, methods=["POST"]),
        Route("/download", download),
        WebSocketRoute("/ws", sockets),
    ]
    leader_only = Starlette(routes=routes)
    middleware = LeaderMiddleware(leader_only, view=view, **options(given))
    all_routes = [Route("/leader", LeaderRoute(view)), Mount("/", middleware)]
    return Starlette(routes=all_routes, lifespan=lifespan)


def wsgi() -> Any:
    """The application of a process on gunicorn."""
    from doyen.integrations.wsgi import LeaderMiddleware, LeaderRoute

    given = settings()
    view = LeaderView(ELECTION)

    def lead() -> None:
        meta = {"address": given["address"]}
        with (
            doyen.connect_blocking(given["store"], ttl_s=TTL_S) as session,
            view.following_blocking(session),
        ):
            for campaign in session.campaigns(ELECTION, name=given["address"], meta=meta):
                with (
                    contextlib.suppress(doyen.LeadershipLost),
                    campaign as term,
                    view.leading(term),
                ):
                    term.wait_lost()

    threading.Thread(target=lead, daemon=True).start()

    def service(environ: Any, start_response: Any) -> Iterator[bytes]:
        body = environ["wsgi.input"]
        request = environ["QUERY_STRING"].removeprefix("id=")
        term = environ["doyen.term"]
        if environ["PATH_INFO"] == "/nowhere":
            start_response("404 Not Found", [("content-length", "7")])
            yield b"" if environ["REQUEST_METHOD"] == "HEAD" else b"nowhere"
            return
        if environ["PATH_INFO"] == "/download":
            start_response("200 OK", [])
            yield b"first"
            while True:
                term.check()
                time.sleep(0.01)
        read = len(body.read(1))
        status, text = execute(given, request, term)
        while environ["PATH_INFO"] == "/hang":
            time.sleep(0.01)
        if environ["PATH_INFO"] == "/upload":
            text = f"{read + len(body.read())} from {environ['HTTP_HOST']}"
        start_response(f"{status} Executed or not", [("content-type", "text/plain")])
        yield text.encode()

    route = LeaderRoute(view)
    middleware = LeaderMiddleware(service, view=view, **options(given))

    def app(environ: Any, start_response: Any) -> Any:
        chosen = route if environ["PATH_INFO"] == "/leader" else middleware
        return chosen(environ, start_response)

    return app


class Answer(NamedTuple):
    """What a client was told. Status 0: the connection ended without an answer."""

    status: int
    text: str
    took_s: float


class Execution(NamedTuple):
    """A line of the ledger."""

    request: str
    token: int
    pid: int


class Peer:
    """One process."""

    def __init__(self, store: str, kind: str, ledger: Path, port: int, trust: list[str]) -> None:
        self.kind, self.port, self._store = kind, port, store
        self.was_frozen = self.is_frozen = False
        self.address = f"http://127.0.0.1:{port}"
        self.socket = f"ws://127.0.0.1:{port}"
        given = {"store": store, "ledger": str(ledger), "address": self.address, "trust": trust}
        command = [sys.executable, "-m"]
        if kind == "asgi":
            command += ["uvicorn", "--factory", "forward_peers:asgi", "--log-level", "warning"]
            command += ["--port", str(port), "--timeout-graceful-shutdown", "1"]
        else:
            command += ["gunicorn", "forward_peers:wsgi()", "-b", f"127.0.0.1:{port}"]
            command += ["--threads", "16", "--log-level", "warning", "--no-control-socket"]
        path = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "FORWARD_PEER": json.dumps(given), "PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, cwd=HERE.parent, env=environment, start_new_session=True
        )

    def signal(self, number: int) -> None:
        """To the process and its workers."""
        os.killpg(self._process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    @contextlib.contextmanager
    def killed(self) -> Iterator[None]:
        self.kill()
        yield

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        self.was_frozen = self.is_frozen = True
        freeze_group(self._process.pid, self._store)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)
            self.is_frozen = False

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        self._process.wait()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def get(self, path: str, within_s: float = 2.0) -> int:
        """The status of a GET request; 0 without an answer."""
        try:
            with urllib.request.urlopen(self.address + path, timeout=within_s) as response:
                return int(response.status)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        except OSError:
            return 0

    def post(self, path: str, data: bytes = b"") -> Answer:
        began = time.monotonic()
        request = urllib.request.Request(self.address + path, data, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                status, text = error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            status, text = 0, str(error)
        return Answer(status, text, time.monotonic() - began)


class Peers:
    """Several processes of one service."""

    def __init__(self, store: str, kind: str, folder: Path, count: int = 3) -> None:
        self.store, self.ledger = store, folder / "ledger"
        ports = free_ports(count)
        trust = [f"http://127.0.0.1:{port}" for port in ports]
        self.all = [Peer(store, kind, self.ledger, port, trust) for port in ports]

    def __enter__(self) -> Self:
        try:
            for peer in self.all:
                poll(lambda peer=peer: peer.get("/leader") in (200, 503))
            self.leader()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for peer in self.all:
            peer.close()

    def leader(self, *, but: Peer | None = None) -> Peer:
        """Wait until a process serves as the leader."""

        def find() -> Peer | None:
            leading = [each for each in self.all if each is not but and each.get("/leader") == 200]
            return leading[0] if leading else None

        found: Peer = poll(find)
        return found

    def follower(self, *, but: Peer | None = None) -> Peer:
        leader = self.leader(but=but)
        return next(each for each in self.all if each.alive and each not in (leader, but))

    def executions(self) -> list[Execution]:
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [
            Execution(request, int(token), int(pid))
            for request, token, pid in (line.split() for line in lines)
        ]


def poll(find: Any) -> Any:
    """Wait until `find` returns something."""
    until = time.monotonic() + PATIENCE_S
    while not (found := find()):
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.02)
    return found


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in bound:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in bound]
