"""Serves pages of the lab on this machine, and runs what a reader does on them.

What a reader does is a fault of the plan: a link that is cut, a server that is killed, one message
that is dropped. The server runs the plan again with it. Up to that instant the run is the same, and
from there on the real core shows what it does. The server keeps nothing: a page sends its whole
plan, and its address contains it.

Who may use it:

- The `Host` of a request must be the address at which this server listens, so that a foreign page
  whose name resolves to this machine (DNS rebinding) reads nothing.
- A request with an `Origin` must come from one of this server's own pages, and so must whatever a
  browser declares to be of another site.
- The policy of every page allows its own script and connections to this server, and nothing else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from doyen.errors import ConfigError
from doyen.lab import runner
from doyen.lab.pages.film import record_run, record_scenario
from doyen.lab.pages.page import page
from doyen.lab.plan import Fault, Latencies, Plan
from doyen.lab.protocols import PROTOCOLS
from doyen.lab.scenarios import SCENARIOS

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
except ModuleNotFoundError as error:
    raise ConfigError(
        f"doyen lab play needs {error.name}, which is not installed: pip install 'doyen[web]'"
    ) from error

BODY_BYTES = 64 * 1024
SHORTEST_S = 8.0
"""How long a run is at least."""
AFTERWARDS_S = 6.0
"""How long a run continues after the last thing that the reader did."""
LONGEST_S = 120.0
KINDS = (
    *("crash", "power", "pause", "partition", "oneway", "reset", "slow", "loss"),
    *("rate", "jump", "stall", "drop", "transfer"),
)
"""What a reader can do."""
HEADERS = [
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]


class PlayedRun(Struct, kw_only=True, forbid_unknown_fields=True):
    """A run as a page requests it."""

    protocol: str = "raft"
    nodes: Annotated[int, Meta(ge=1, le=9)] = 5
    seed: Annotated[int, Meta(ge=0, le=1 << 31)] = 1
    saved: str = ""
    """The saved run that it begins with, if any."""
    faults: Annotated[list[Fault], Meta(max_length=100)] = []


def plan_of(run: PlayedRun, saved: Mapping[str, Plan]) -> Plan:
    """The plan of a requested run. Raises `ConfigError` if the lab does not run it."""
    for fault in run.faults:
        if fault.kind not in KINDS:
            raise ConfigError(f"{fault.kind!r} cannot be done here: choose of {', '.join(KINDS)}")
        if fault.at > LONGEST_S or (fault.kind != "drop" and fault.amount > 10):
            raise ConfigError(f"the fault {fault.kind!r} at {fault.at:g} s is beyond the limits")
    if run.saved:
        if run.saved not in saved:
            raise ConfigError(f"there is no saved run {run.saved!r}")
        plan = saved[run.saved]
    else:
        plan = Plan(
            protocol=run.protocol,
            nodes=run.nodes,
            seed=run.seed,
            for_s=SHORTEST_S,
            clients=1,
            pause_s=0.4,
            latencies=Latencies(latency_s=0.02, spread=0.25),
        )
    last = max((fault.at for fault in run.faults), default=0.0)
    for_s = max(plan.for_s, last + AFTERWARDS_S if run.faults else 0.0)
    plan = plan.replace(for_s=for_s, faults=(*plan.faults, *run.faults))
    runner.check_plan(plan, "this run")
    return plan


def played_film(run: PlayedRun, saved: Mapping[str, Plan]) -> dict[str, Any]:
    """The film of a requested run, in which the reader can do something."""
    plan = plan_of(run, saved)
    outcome, narration, film = record_run(plan)
    run = msgspec.structs.replace(run, protocol=plan.protocol, nodes=plan.nodes, seed=plan.seed)
    film["play"] = {
        "url": "/run",
        "run": msgspec.to_builtins(run),
        "file": runner.encoded(outcome, narration).decode(),
    }
    return {**film, "home": "/"}


class OwnPagesOnly:
    """Refuses requests that do not come from this server's own pages."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        if scope["type"] == "http":
            refusal = self._refusal(Request(scope))
            await (self._app if refusal is None else refusal)(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return _error(421, "this server is not reached under that name: use its own address")
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{hosts[0].lower()}":
            return _error(403, "requests of other origins are refused")
        site = headers.get("sec-fetch-site", "none")
        if site not in ("none", "same-origin") and request.url.path != "/":
            return _error(403, "requests of other sites are refused")
        return None


def _error(status: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=status)


@dataclass
class PlayServer:
    """The routes."""

    saved: Mapping[str, Plan]
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One run at a time: each takes a processor for itself."""

    def app(self, hosts: frozenset[str]) -> ASGIApp:
        routes = [
            Route("/", self._index),
            Route("/scenario/{name}", self._scenario),
            Route("/play/{protocol}", self._play),
            Route("/saved/{number:int}", self._saved),
            Route("/run", self._run, methods=["POST"]),
        ]

        async def refused(_: Request, error: Exception) -> Response:
            return _error(400, str(error))

        return OwnPagesOnly(
            Starlette(routes=routes, exception_handlers={ConfigError: refused}), hosts
        )

    async def _record(self, make: Callable[..., Any], *arguments: Any) -> Any:
        async with self._one:
            return await run_in_threadpool(make, *arguments)

    async def _index(self, _: Request) -> Response:
        film = {
            "title": "Runs to watch, and to change",
            "play": [
                {"href": f"/play/{name}", "name": name, "text": "five servers; do what you like"}
                for name in PROTOCOLS
            ],
            "saved": [
                {"href": f"/saved/{number}", "name": Path(name).name, "text": _summary(plan)}
                for number, (name, plan) in enumerate(self.saved.items())
            ],
            "scenarios": [
                {"href": f"/scenario/{name}", "name": name, "text": each.title}
                for name, each in SCENARIOS.items()
            ],
        }
        return _html(film, "index")

    async def _scenario(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in SCENARIOS:
            return _error(404, "there is no such scenario")
        _, film = await self._record(record_scenario, name)
        return _html({**film, "home": "/"})

    async def _play(self, request: Request) -> Response:
        asked = {**request.query_params, "protocol": request.path_params["protocol"]}
        run = _converted(asked, strict=False)
        return _html(await self._record(played_film, run, self.saved))

    async def _saved(self, request: Request) -> Response:
        names = list(self.saved)
        number: int = request.path_params["number"]
        if number >= len(names):
            return _error(404, "there is no such run")
        plan = self.saved[names[number]]
        if plan.world != "cores":  # whole nodes can be watched only
            _, _, film = await self._record(record_run, plan)
            return _html({**film, "home": "/"})
        return _html(await self._record(played_film, PlayedRun(saved=names[number]), self.saved))

    async def _run(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != "application/json":
            raise ConfigError("the body of a request is application/json")
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                raise ConfigError("the request is too large")
        run = _converted(body, strict=True)
        return Response(
            msgspec.json.encode(await self._record(played_film, run, self.saved)),
            media_type="application/json",
        )


def _converted(asked: Any, *, strict: bool) -> PlayedRun:
    try:
        if isinstance(asked, bytes):
            return msgspec.json.decode(asked, type=PlayedRun)
        return msgspec.convert(asked, PlayedRun, strict=strict)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"this is not a run: {error}") from error


def _summary(plan: Plan) -> str:
    return f"{plan.protocol}, {plan.nodes} nodes, seed {plan.seed}, {len(plan.faults)} faults"


def _html(film: dict[str, Any], name: str = "player") -> Response:
    return Response(page(film, name=name, connect=True), media_type="text/html; charset=utf-8")


def serve(
    host: str,
    port: int,
    saved: Mapping[str, Plan],
    ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until interrupted. `ready` is called with the address."""
    with _listening(host, port) as listener:
        port = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        hosts = frozenset(f"{name}:{port}" for name in ("localhost", "127.0.0.1", "[::1]", shown))
        server = _Server(
            uvicorn.Config(
                PlayServer(saved).app(hosts),
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                timeout_graceful_shutdown=1,
            )
        )
        server.ready = lambda: ready(f"http://{shown}:{port}/")
        server.run(sockets=[listener])
    return 0


class _Server(uvicorn.Server):
    ready: Callable[[], None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready()


def _listening(host: str, port: int) -> socket.socket:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        if host != "localhost":
            raise ConfigError(
                f"{host!r} is not an address of this machine, such as 127.0.0.1"
            ) from error
        address = ipaddress.ip_address("127.0.0.1")
    if address.is_unspecified:
        raise ConfigError(f"name one address to listen on, not {host}: pages are bound to it")
    family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((str(address), port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose --port"
        ) from error
    return listener
