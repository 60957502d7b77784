"""Serves pages of the lab on this machine, and runs what a reader does on them.

What a reader does is a fault of the plan: a link that is cut, a server that is killed, one message
that is dropped. The server runs the plan again with it. Up to that instant the run is the same, and
from there on the real core shows what it does. The server keeps nothing: a page sends its whole
plan, and its address contains it.

It listens on this machine only. As on the page of a store, `Host` and `Origin` of every request
must be its own (`doyen.web.server.Guard`), so that no foreign page can read or run anything. The
policy of a page allows its own script and connections to this server, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from doyen.errors import ConfigError
from doyen.lab import runner
from doyen.lab.pages.film import record_run, record_scenario
from doyen.lab.pages.page import page
from doyen.lab.plan import Fault, Latencies, Plan
from doyen.lab.protocols import PROTOCOLS
from doyen.lab.scenarios import SCENARIOS
from doyen.web.server import Access, Guard, error_response, json_object
from doyen.web.serving import PageListener, http_server

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
POLICY = "frame-ancestors 'none'"
"""For all pages. The rest of the policy is in each page, with the hashes of its parts."""


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
            raise ConfigError(
                f"{fault.kind!r} cannot be done here: choose one of {', '.join(KINDS)}"
            )
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


@dataclass
class PlayServer:
    """The routes."""

    saved: Mapping[str, Plan]
    _one: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One run at a time: each takes a processor for itself."""

    def app(self, access: Access) -> ASGIApp:
        routes = [
            Route("/", self._index),
            Route("/scenario/{name}", self._scenario),
            Route("/play/{protocol}", self._play),
            Route("/saved/{number:int}", self._saved),
            Route("/run", self._run, methods=["POST"]),
        ]

        async def refused(_: Request, error: Exception) -> Response:
            return error_response(400, str(error))

        served = Starlette(routes=routes, exception_handlers={ConfigError: refused})
        return Guard(served, access, POLICY)

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
            return error_response(404, "there is no such scenario")
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
            return error_response(404, "there is no such run")
        plan = self.saved[names[number]]
        if plan.world != "cores":  # whole nodes can be watched only
            _, _, film = await self._record(record_run, plan)
            return _html({**film, "home": "/"})
        return _html(await self._record(played_film, PlayedRun(saved=names[number]), self.saved))

    async def _run(self, request: Request) -> Response:
        run = _converted(await json_object(request), strict=True)
        return Response(
            msgspec.json.encode(await self._record(played_film, run, self.saved)),
            media_type="application/json",
        )


def _converted(asked: Mapping[str, Any], *, strict: bool) -> PlayedRun:
    try:
        return msgspec.convert(asked, PlayedRun, strict=strict)
    except msgspec.ValidationError as error:
        raise ConfigError(f"this is not a run: {error}") from error


def _summary(plan: Plan) -> str:
    return f"{plan.protocol}, {plan.nodes} nodes, seed {plan.seed}, {len(plan.faults)} faults"


def _html(film: dict[str, Any], name: str = "player") -> Response:
    return Response(page(film, name=name, connect=True), media_type="text/html; charset=utf-8")


async def serve(
    listener: PageListener, saved: Mapping[str, Plan], ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until cancelled."""
    if listener.access.reading_needs_token:
        raise ConfigError("the lab serves this machine only: listen on 127.0.0.1")
    server = http_server(PlayServer(saved).app(listener.access), ready)
    serving = asyncio.ensure_future(server.serve(sockets=[listener.socket]))
    try:
        await asyncio.wait({serving})
    finally:
        server.should_exit = True
        await asyncio.wait({serving})
