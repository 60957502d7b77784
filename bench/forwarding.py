"""What doyen adds to a request: the middleware on the leader, that of a service that refuses stale
tokens, and the dependency `Depends(leader)` of FastAPI.

The same application is called with and without it, alternately, without a server in
between, whose cost would hide the difference. The figure is processor time: on the leader the
middleware waits for nothing, and other processes on the machine do not count.
"""

from __future__ import annotations

import asyncio
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, FastAPI

import doyen
from bench.figures import Figure, spread
from doyen.fencing import FileTokens, MemoryTokens
from doyen.fencing import asgi as fenced_asgi
from doyen.fencing import wsgi as fenced_wsgi
from doyen.integrations import asgi, wsgi
from doyen.integrations.starlette import Leadership
from doyen.term import Term

__all__ = ["forwarding"]

LIMIT_MS = 0.2
DEPENDENCY_LIMIT_MS = 0.1
HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"user-agent", b"Mozilla/5.0 (X11; Linux x86_64; rv:128.0) Gecko/20100101 Firefox/128.0"),
    (b"accept", b"application/json"),
    (b"accept-encoding", b"gzip, deflate, br"),
    (b"content-type", b"application/json"),
    (b"content-length", b"2"),
    (b"authorization", b"Bearer 0123456789abcdef0123456789abcdef"),
    (b"cookie", b"session=0123456789abcdef0123456789abcdef"),
]


async def app(scope: Any, receive: Any, send: Any) -> None:
    """An application that does nothing."""
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def wsgi_app(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    return [environ["wsgi.input"].read(2)]


async def called(app: Any, more: list[tuple[bytes, bytes]]) -> None:
    """One request to an ASGI application."""

    async def receive() -> Any:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        pass

    await app(
        {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/orders",
            "raw_path": b"/orders",
            "query_string": b"id=7",
            "headers": [*HEADERS, *more],
        },
        receive,
        send,
    )


def wsgi_called(app: Any, more: list[tuple[bytes, bytes]]) -> None:
    """One request to a WSGI application."""
    environ: dict[str, Any] = {
        "HTTP_" + name.decode().upper().replace("-", "_"): value.decode()
        for name, value in [*HEADERS, *more]
    }
    environ["CONTENT_LENGTH"] = environ.pop("HTTP_CONTENT_LENGTH")
    environ |= {"REQUEST_METHOD": "POST", "PATH_INFO": "/orders", "QUERY_STRING": "id=7"}
    environ["wsgi.input"] = io.BytesIO(b"{}")
    body = app(environ, lambda status, headers: None)
    b"".join(body)
    if hasattr(body, "close"):
        body.close()


def fastapi_apps(leader: Leadership) -> tuple[FastAPI, FastAPI]:
    """An application without and one with the dependency."""
    bare, depending = FastAPI(), FastAPI()

    @bare.post("/orders")
    async def order() -> None: ...

    @depending.post("/orders")
    async def order_of_leader(term: Annotated[Term, Depends(leader)]) -> None:
        term.check()

    return bare, depending


class Measured(NamedTuple):
    """Milliseconds for a request, of each round."""

    elapsed: list[float]
    processor: list[float]


def forwarding(*, rounds: int = 100, calls: int = 100) -> list[Figure]:
    """The time that forwarding, fencing and `Depends(leader)` add to a request."""
    dependency = Leadership("bench")
    view = dependency.view
    options: dict[str, Any] = {
        "view": view,
        "secret": "a secret of the processes",
        "trust": {"http://127.0.0.1:8000"},
    }
    with (
        tempfile.TemporaryDirectory(prefix="doyen-bench-") as folder,
        doyen.connect_blocking(f"sqlite://{folder}/doyen.db") as session,
        view.following_blocking(session),
        session.campaign("bench") as term,
        view.leading(term),
    ):
        token = [(b"fencing-token", b"%d" % term.token)]
        memory: dict[str, Any] = {"resource": "orders", "tokens": MemoryTokens()}
        files: dict[str, Any] = {"resource": "orders", "tokens": FileTokens(folder)}
        leader = asgi.LeaderMiddleware(app, **options)
        wsgi_leader = wsgi.LeaderMiddleware(wsgi_app, **options)
        fenced = fenced_asgi.FencingMiddleware(app, **memory)
        wsgi_fenced = fenced_wsgi.FencingMiddleware(wsgi_app, **files)

        def added(name: str, bare: Any, wrapped: Any, limit: float | None = LIMIT_MS) -> Figure:
            call = wsgi_called if bare is wsgi_app else called
            request = partial(call, more=token if "fencing" in name else [])
            before, after = asyncio.run(_alternate(rounds, calls, request, bare, wrapped))
            return _figure(name, before, after, limit)

        figures = [
            added("forwarding, ASGI, on the leader", app, leader),
            added("forwarding, WSGI, on the leader", wsgi_app, wsgi_leader),
            added("fencing, ASGI, tokens in memory", app, fenced, None),
            added("fencing, WSGI, tokens in files", wsgi_app, wsgi_fenced, None),
            added("Depends(leader), FastAPI", *fastapi_apps(dependency), DEPENDENCY_LIMIT_MS),
        ]
        term.check()
    return figures


async def _alternate(
    rounds: int, calls: int, request: Callable[[Any], Any], *applications: Any
) -> list[Measured]:
    """Make requests to each application in turn."""
    measured = [Measured([], []) for _ in applications]
    for _ in range(rounds):
        for taken, application in zip(measured, applications, strict=True):
            began, busy = time.perf_counter(), time.process_time()
            for _ in range(calls):
                result = request(application)
                if result is not None:
                    await result
            taken.elapsed.append((time.perf_counter() - began) / calls * 1e3)
            taken.processor.append((time.process_time() - busy) / calls * 1e3)
    return measured


def _figure(name: str, bare: Measured, wrapped: Measured, limit: float | None) -> Figure:
    rounds = zip(bare.processor, wrapped.processor, strict=True)
    added = [after - before for before, after in rounds]
    return Figure(
        name=name,
        value=max(0.0, statistics.median(added)),
        unit="ms of processor, p50",
        limit=limit,
        details={
            "with_ms": spread(wrapped.processor, 3),
            "without_ms": spread(bare.processor, 3),
            "elapsed_ms": spread(wrapped.elapsed, 3),
        },
    )
