"""The HTTP server of the page: assets, the stream of changes, details and actions.

Who may do what:

- The `Host` of every request must be a name under which this server is meant to be reached. A
  foreign page that has its own name resolve to this address (DNS rebinding) is refused by that.
- A request with an `Origin`, or one that the browser declares as cross-site, is refused unless it
  comes from this server's own page.
- Actions need `--allow-actions` and the token, in a header that no form or link can set. Where the
  server is reachable from other machines, reading needs the token as well.
- The content security policy lets the page load and connect to nothing but this server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from doyen.errors import ConfigError, DoyenError, OrderFailed, StoreError
from doyen.model import Claim, json_text
from doyen.web.actions import act
from doyen.web.observation import StoreObservation
from doyen.web.panels import config_detail
from doyen.web.terms import clipped, value_text

__all__ = ["Access", "Guard", "error_response", "json_object", "make_app"]

ASSETS = Path(__file__).parent / "assets"
COALESCE_S = 0.015
"""The shortest time between two messages to one page."""
ALIVE_S = 1.0
"""The longest time without a message: a store that takes long to answer is not a page without a
server."""
BODY_BYTES = 64 * 1024
LINE = 200
"""How many candidates of a line a page is sent."""
META = 4000
NO_TOKEN = "the token is missing or wrong: open the address as printed"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
]
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """Who may reach the server, and what for."""

    hosts: frozenset[str]
    """Values of the `Host` header that are accepted: with a port, or without for any port."""
    token: str
    allow_actions: bool = False
    reading_needs_token: bool = False

    def knows(self, host: str) -> bool:
        """
        >>> access = Access(hosts=frozenset({"localhost:80", "dash.example"}), token="")
        >>> [access.knows(each) for each in ("localhost:80", "localhost:81", "dash.example:8")]
        [True, False, True]
        """
        host = host.lower()
        name, colon, port = host.rpartition(":")
        return host in self.hosts or (bool(colon) and port.isdecimal() and name in self.hosts)

    def has_token(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        return bool(self.token) and hmac.compare_digest(given.encode(), self.token.encode())


class Guard:
    """Refuses requests from elsewhere, and adds the headers that every response has."""

    def __init__(self, app: ASGIApp, access: Access, policy: str = POLICY) -> None:
        self._app = app
        self._access = access
        self._headers = [*HEADERS, (b"content-security-policy", policy.encode())]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        refusal = self._refusal(Request(scope))
        app = self._app if refusal is None else refusal
        await app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        headers = request.headers
        host = headers.get("host", "")
        if len(headers.getlist("host")) != 1 or not self._access.knows(host):
            return error_response(
                421, f"this server is not reached as {clipped(host, 100)!r}; start it with --host"
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2].lower() != host.lower():
            return error_response(403, "requests of other origins are refused")
        foreign = headers.get("sec-fetch-site", "none") not in ("none", "same-origin")
        if foreign and request.url.path != "/":
            return error_response(403, "requests of other sites are refused")
        return None


def error_response(status: int, text: str) -> Response:
    """A response that says why a request was not carried out."""
    return _json({"error": text}, status)


def _json(value: Any, status: int = 200) -> Response:
    # In ASCII: names of others may have surrogates, which UTF-8 cannot encode.
    return Response(json_text(value), status, media_type="application/json")


@cache
def _assets() -> dict[str, tuple[bytes, str, str]]:
    """The assets of the package: content, type and tag."""
    return {
        path.name: (content, TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')
        for path in sorted(ASSETS.iterdir())
        if path.suffix in TYPES
        for content in [path.read_bytes()]
    }


class _Server:
    """The routes."""

    def __init__(self, observation: StoreObservation, access: Access) -> None:
        self._observation = observation
        self._access = access

    def routes(self) -> list[Route]:
        reading = self._reading
        return [
            Route("/", self._asset),
            Route("/assets/{name}", self._asset),
            Route("/api/stream", reading(self._stream)),
            Route("/api/view", reading(self._view), methods=["POST"]),
            Route("/api/election", reading(self._election)),
            Route("/api/config", reading(self._config)),
            Route("/api/act", self._act, methods=["POST"]),
        ]

    def _reading(
        self, serve: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            if self._access.reading_needs_token and not self._access.has_token(request):
                return error_response(401, NO_TOKEN)
            return await serve(request)

        return guarded

    async def _asset(self, request: Request) -> Response:
        found = _assets().get(request.path_params.get("name", "index.html"))
        if found is None:
            return error_response(404, "there is no such file")
        content, kind, tag = found
        headers = {"cache-control": "no-cache", "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=kind, headers=headers)

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(
            self._messages(request),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    async def _messages(self, request: Request) -> AsyncIterator[bytes]:
        board = self._observation.board
        page = board.open_page()
        access = self._access
        may = access.allow_actions and access.has_token(request)
        why = "" if may else "no token" if access.allow_actions else "read-only"
        hello = {"store": self._observation.shown_url, "may_act": may, "why": why}
        try:
            yield f"event: hello\ndata: {json.dumps(hello)}\n\n".encode()
            while not board.closed:
                try:
                    async with asyncio.timeout(ALIVE_S):
                        await page.wake.wait()
                except TimeoutError:
                    yield b": the server is there\n\n"
                    continue
                page.wake.clear()
                message = board.message(page)
                if message is not None:
                    yield message
                    await asyncio.sleep(COALESCE_S if page.caught_up else 0)
        finally:
            board.close_page(page)

    async def _view(self, request: Request) -> Response:
        asked = await json_object(request)
        page = self._observation.board.pages.get(str(asked.get("page")))
        keys = asked.get("keys")
        if page is None or not isinstance(keys, list):
            return error_response(404, "this page is not open")
        page.show(str(key) for key in keys)
        hub = self._observation.hub
        if hub is not None:
            hub.shown_changed()
        return _json({})

    async def _election(self, request: Request) -> Response:
        observation = self._observation
        row = observation.board.rows.get(request.query_params.get("key", ""))
        if row is None:
            return error_response(404, "there is no such election")
        claim = None if row.record is None else Claim.decode(row.record.value)
        lease = row.record.lease if row.record is not None else None
        hub = observation.hub
        samples = [] if hub is None or lease is None else [*hub.samples.get(lease, ())]
        return _json(
            {
                "key": row.key,
                "name": row.name,
                "leader": None if claim is None else {"name": claim.name, "meta": _meta(claim)},
                "line": [
                    {"name": each.name, "rank": each.rank, "meta": _meta(each)}
                    for each in row.waiting[:LINE]
                ],
                "samples": samples,
            }
        )

    async def _config(self, request: Request) -> Response:
        hub = self._observation.hub
        name, version = request.query_params.get("name", ""), request.query_params.get("version")
        if hub is None:
            return error_response(503, "the store does not answer")
        try:
            number = int(version) if version and version.isdecimal() else None
            found = await config_detail(hub, name, number)
        except StoreError as error:
            return error_response(503, str(error))
        except ConfigError as error:
            return error_response(400, str(error))
        return error_response(404, "there is none") if found is None else _json(found)

    async def _act(self, request: Request) -> Response:
        if not self._access.allow_actions:
            return error_response(403, "actions are off: start the server with --allow-actions")
        if not self._access.has_token(request):
            return error_response(401, NO_TOKEN)
        session, controls = self._observation.session, self._observation.controls
        by = request.client.host if request.client else "?"
        try:
            done = await act(session, controls, await json_object(request), by=by)
        except ConfigError as error:
            return error_response(400, str(error))
        except OrderFailed as error:
            return error_response(409, str(error))
        except DoyenError as error:
            return error_response(503, str(error))
        return _json({"done": done})


def _meta(claim: Claim) -> dict[str, str]:
    return {
        clipped(str(name), 100): clipped(value_text(value), META)
        for name, value in list(claim.meta.items())[:50]
    }


async def json_object(request: Request) -> dict[str, Any]:
    """The JSON object of a request. Raises `ConfigError` if there is none."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise ConfigError("the body of a request is application/json")
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                break
        asked = json.loads(body) if len(body) <= BODY_BYTES else None
    except (ValueError, RecursionError, ClientDisconnect) as error:
        raise ConfigError("the body of the request is not JSON") from error
    if len(body) > BODY_BYTES:
        raise ConfigError("the request is too large")
    if not isinstance(asked, dict):
        raise ConfigError("the body of the request is not an object")
    return asked


def make_app(observation: StoreObservation, access: Access) -> ASGIApp:
    """The ASGI application of the page."""
    routes = _Server(observation, access).routes()

    async def refused(_request: Request, error: Exception) -> Response:
        return error_response(400, str(error))

    return Guard(Starlette(routes=routes, exception_handlers={ConfigError: refused}), access)
