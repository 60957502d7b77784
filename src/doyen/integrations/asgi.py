"""ASGI: requests are served by the leader, and forwarded to it by the others.

    app = LeaderMiddleware(app, view=view, secret=SECRET, trust=ADDRESSES)

Rules are in `doyen.integrations.forwarding`. Bodies are streamed in both directions, one chunk at a
time, so a slow reader slows its writer. When the term ends, requests and websockets that are being
served are ended with it. A websocket at a process that does not lead is closed (1013): its client
connects again. The HTTP library is httpcore2, which sends a request once and follows no redirects.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpcore2

from doyen.events.log_lines import log_line
from doyen.integrations.forwarding import (
    ForwardingRules,
    Headers,
    LeaderView,
    RefuseRequest,
    SendTo,
    ServeHere,
    ambiguous,
    framed,
    passed_on,
    without_doyen,
)
from doyen.term import Term

__all__ = ["LeaderMiddleware", "LeaderRoute"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, SendMessage], Awaitable[None]]

SERVICE_RESTART, TRY_AGAIN_LATER = 1012, 1013
CONNECT_S = 2.0
"""How long a connection to the leader may take."""
AGAIN_S = 0.2
"""How long to wait before a leader that refused a connection is tried again."""
UNSENT = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.UnsupportedProtocol,
)
"""Errors after which no byte of the request was sent."""
log = logging.getLogger("doyen")


class LeaderMiddleware:
    """Serves requests while this process leads, and forwards them to the leader otherwise.

    `app` gets `scope["doyen.term"]`, whose token fences what it writes. Paths in `local`, and the
    lifespan, are always served by `app`. Further options are those of `ForwardingRules`.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        pool: httpcore2.AsyncConnectionPool | None = None,
        **options: Any,
    ) -> None:
        self._app = app
        self._rules = ForwardingRules(**options)
        self._pool = pool
        self._waiting = 0

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await self._lifespan(scope, receive, send)
        elif kind not in ("http", "websocket") or scope["path"] in self._rules.local:
            await self._app(_stripped(scope), receive, send)
        elif kind == "http" and ambiguous(scope["headers"]):
            await _answer(send, 400, "the length of the request is stated in more than one way")
        else:
            await self._lead_or_forward(scope, receive, send)

    async def _lifespan(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            if self._pool is not None:
                await self._pool.aclose()

    async def _lead_or_forward(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        rules, view = self._rules, self._rules.view
        method, target = scope.get("method", "GET").encode(), _target(scope)
        forwarded = rules.read(scope["headers"], method, target)
        until = asyncio.get_running_loop().time() + (rules.wait_s if forwarded is None else 0.0)
        while True:
            seen = view.state
            decision = rules.decide(forwarded)
            if isinstance(decision, ServeHere):
                await self._serve(decision.term, scope, receive, send)
                return
            again_s = rules.wait_s
            if isinstance(decision, SendTo):
                if scope["type"] == "websocket":
                    await _refuse(
                        scope, receive, send, RefuseRequest(503, "this process does not lead")
                    )
                    return
                if rules.redirect:
                    location = decision.origin.encode() + target
                    await _answer(send, 307, "another leads", [(b"location", location)])
                    return
                why = await self._forward(decision, scope, receive, send)
                if why is None:
                    return
                again_s = AGAIN_S
            else:
                why = decision.why
            if isinstance(decision, RefuseRequest):
                await _refuse(scope, receive, send, decision)
                return
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                await _refuse(scope, receive, send, RefuseRequest(503, why))
                return
            if self._waiting >= rules.max_waiting:
                await _refuse(
                    scope, receive, send, RefuseRequest(503, f"{why}, and many requests wait")
                )
                return
            self._waiting += 1
            try:
                await view.changed(seen, min(left_s, again_s))
            finally:
                self._waiting -= 1

    async def _serve(self, term: Term, scope: Scope, receive: Receive, send: SendMessage) -> None:
        """Run the application, and end it with the term."""
        started = ended = accepted = False

        async def sending(message: Message) -> None:
            nonlocal started, ended, accepted
            term.check()  # nothing is answered after the term
            started = started or message["type"] == "http.response.start"
            accepted = accepted or message["type"] == "websocket.accept"
            ended = message["type"] == "websocket.close" or (
                message["type"] == "http.response.body" and not message.get("more_body", False)
            )
            await send(message)

        inner = {**_stripped(scope), "doyen.term": term}
        serving = asyncio.ensure_future(self._app(inner, receive, sending))
        loop = asyncio.get_running_loop()

        def lost() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(serving.cancel)

        term.on_end(lost)
        try:
            await asyncio.wait({serving})
        except asyncio.CancelledError:
            serving.cancel()
            await asyncio.wait({serving})
            raise
        finally:
            term._forget(lost)
        failed = serving.cancelled() or serving.exception() is not None
        if not failed:
            return
        if term.valid or ended:
            if not serving.cancelled():
                serving.result()
            return
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": SERVICE_RESTART})
        elif not started:
            await _answer(send, 503, "the term ended; the request may have been carried out")
        else:
            raise term.loss()  # the server closes the connection: the response is incomplete

    async def _forward(
        self, to: SendTo, scope: Scope, receive: Receive, send: SendMessage
    ) -> str | None:
        """Send the request to the leader. Returns the reason if no byte of it was sent."""
        method, target = scope["method"].encode(), _target(scope)
        # HTTP/2 needs no header for a body.
        has_body = framed(scope["headers"]) or scope.get("http_version", "1.1")[0] != "1"
        headers = self._rules.outgoing(to, scope["headers"], method, target, body=has_body)
        body = _Body(receive, whole=not has_body)
        request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=to.scheme.encode(), host=to.host.encode(), port=to.port, target=target
            ),
            headers=headers,
            content=body.chunks() if has_body else b"",
            extensions={"timeout": {"connect": CONNECT_S, "pool": CONNECT_S}},
        )
        if self._pool is None:
            self._pool = httpcore2.AsyncConnectionPool(retries=0, max_connections=1000)
        started = False
        gone = asyncio.ensure_future(body.disconnected())
        passing = asyncio.current_task()
        assert passing is not None
        gone.add_done_callback(lambda done: done.cancelled() or passing.cancel())
        try:
            response = await self._pool.handle_async_request(request)
            try:
                await send(
                    {
                        "type": "http.response.start",
                        "status": response.status,
                        "headers": passed_on([(n.lower(), v) for n, v in response.headers]),
                    }
                )
                started = True
                async for chunk in response.aiter_stream():
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await response.aclose()
        except UNSENT as error:
            if started or body.begun:
                raise
            return f"the leader cannot be reached: {error}"
        except (
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
        ) as error:
            log.warning("%s", log_line(event="forwarding_failed", to=to.origin, error=error))
            if started:
                raise
            await _answer(
                send, 502, "the leader did not answer; the request may have been carried out"
            )
        except asyncio.CancelledError:
            if not gone.done() or gone.cancelled() or passing.cancelling() > 1:
                raise
            passing.uncancel()  # the client has gone, and nobody waits for an answer
        finally:
            gone.cancel()
        return None


class _Body:
    """The body of a request that is forwarded, and whether its client has gone."""

    def __init__(self, receive: Receive, *, whole: bool) -> None:
        self._receive = receive
        self._whole = asyncio.Event()
        if whole:
            self._whole.set()
        self.begun = False

    async def chunks(self) -> AsyncIterator[bytes]:
        self.begun = True
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise httpcore2.WriteError("the client has gone before the end of its request")
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body", False):
                self._whole.set()
                return

    async def disconnected(self) -> None:
        """Wait until the client has gone, after the end of its request."""
        await self._whole.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass


class LeaderRoute:
    """Answers 200 while this process leads and 503 otherwise, for load balancers.

    It is not a readiness probe: a process that does not lead is ready all the same.
    """

    def __init__(self, view: LeaderView) -> None:
        self._view = view

    async def __call__(self, scope: Scope, receive: Receive, send: SendMessage) -> None:
        if self._view.leads:
            await _answer(send, 200, "this process leads")
        else:
            await _answer(send, 503, "this process does not lead")


def _stripped(scope: Scope) -> Scope:
    return {**scope, "headers": without_doyen(scope["headers"])}


def _target(scope: Scope) -> bytes:
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    query: bytes = scope.get("query_string", b"")
    return path.partition(b"?")[0] + (b"?" + query if query else b"")


async def _refuse(scope: Scope, receive: Receive, send: SendMessage, why: RefuseRequest) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": why.why[:120]})
    else:
        await _answer(send, why.status, f"not executed: {why.why}", [(b"retry-after", b"1")])


async def _answer(
    send: SendMessage, status: int, text: str, headers: Headers | None = None
) -> None:
    body = text.encode() + b"\n"
    framing = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
    await send(
        {"type": "http.response.start", "status": status, "headers": framing + (headers or [])}
    )
    await send({"type": "http.response.body", "body": body})
