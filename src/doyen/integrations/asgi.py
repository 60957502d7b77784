"""ASGI: requests are served by the leader, and forwarded to it by the others.

    app = LeaderMiddleware(app, view=view, secret=SECRET, trust=ADDRESSES)

Rules are in `doyen.integrations.forwarding`. Bodies are streamed in both directions, one chunk at a
time, so a slow reader slows its writer. When the term ends, requests and websockets that are being
served are ended with it. The HTTP library is httpcore2, which sends a request once and follows no
redirects. Websockets are forwarded message by message (`doyen.integrations.sockets`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Protocol
from urllib.parse import quote

from doyen.errors import ConfigError, LeadershipLost

try:
    import httpcore2
except ModuleNotFoundError as error:
    raise ConfigError("forwarding needs httpcore2: pip install 'doyen[forward]'") from error

from doyen.events.log_lines import log_line
from doyen.integrations.forwarding import (
    AGAIN_S,
    IDLE_S,
    LAST_WORDS_S,
    ForwardingRules,
    Headers,
    LeaderView,
    RefuseRequest,
    SendTo,
    ServeHere,
    framed,
    malformed,
    returned,
    without_doyen,
)
from doyen.integrations.network import UNSENT, UNWRITTEN, Network
from doyen.term import Term

__all__ = ["LeaderMiddleware", "LeaderRoute"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, SendMessage], Awaitable[None]]

SERVICE_RESTART, TRY_AGAIN_LATER = 1012, 1013
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
        elif (refused := malformed(scope["headers"], _target(scope))) is not None:
            await _reply(scope, send, 400, refused, [])
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
        incoming = _Incoming(receive)
        if scope["type"] == "websocket":
            await incoming.receive()  # websocket.connect
        until = asyncio.get_running_loop().time() + rules.patience_s(forwarded)
        while True:
            seen = view.state
            decision = rules.decide(forwarded)
            if isinstance(decision, ServeHere):
                await self._serve(decision.term, scope, incoming.from_the_beginning, send)
                return
            again_s = rules.wait_s
            if isinstance(decision, SendTo):
                if rules.redirect:
                    location = (b"location", decision.origin.encode() + target)
                    await _reply(scope, send, 307, "another leads", [location])
                    return
                why = await self._forward(decision, scope, incoming.receive, send)
                if why is None:
                    return
                again_s = AGAIN_S
            else:
                why = decision.why
            if isinstance(decision, RefuseRequest):
                await _refuse(scope, send, decision)
                return
            left_s = until - asyncio.get_running_loop().time()
            if left_s <= 0:
                await _refuse(scope, send, RefuseRequest(503, why))
                return
            if self._waiting >= rules.max_waiting:
                await _refuse(scope, send, RefuseRequest(503, f"{why}, and many requests wait"))
                return
            self._waiting += 1
            try:
                await view.changed(seen, min(left_s, again_s))
            finally:
                self._waiting -= 1

    async def _serve(self, term: Term, scope: Scope, receive: Receive, send: SendMessage) -> None:
        """Run the application, and end it with the term."""
        started = ended = False

        async def sending(message: Message) -> None:
            nonlocal started, ended
            term.check()  # no response is sent after the term
            started = started or message["type"] == "http.response.start"
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
        failure = None if serving.cancelled() else serving.exception()
        if term.valid or ended:
            if failure is not None:
                raise failure
            return
        if failure is not None and not isinstance(failure, LeadershipLost):
            log.warning("%s", log_line(event="request_failed", term=term), exc_info=failure)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": SERVICE_RESTART})
        elif not started:
            await _answer(send, 503, "the term ended; the request may have been carried out")
        else:
            raise term.loss()  # the server closes the connection: the response is incomplete

    async def _forward(
        self, to: SendTo, scope: Scope, receive: Receive, send: SendMessage
    ) -> str | None:
        """Send the request to the leader. Returns the reason if no byte of it was sent.

        Given up if the client goes, or if the leader is replaced and does not answer."""
        passing: Passing
        if scope["type"] == "websocket":
            from doyen.integrations.sockets import PassedSocket

            passing = PassedSocket(self._rules, to, _target(scope), scope, receive, send)
        else:
            if self._pool is None:
                self._pool = httpcore2.AsyncConnectionPool(
                    retries=0,
                    max_connections=1000,
                    keepalive_expiry=IDLE_S,
                    network_backend=Network(),
                )
            passing = _PassedRequest(self._rules, to, self._pool, scope, receive, send)
        exchange = asyncio.ensure_future(passing.run())
        gone = asyncio.ensure_future(passing.client_gone())
        outlived = asyncio.ensure_future(self._outlived(to))
        tasks = {exchange, gone, outlived}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not exchange.cancelled():
            return exchange.result()
        if not gone.cancelled():
            gone.result()
            return None  # the client has gone
        log.warning("%s", log_line(event="forwarding_failed", to=to.origin, error="replaced"))
        await passing.fail(502, "the leader was replaced before it answered")
        return None

    async def _outlived(self, to: SendTo) -> None:
        """Wait until the leader has been replaced, and has had time to answer."""
        await self._rules.view.replaced(to.leader)
        await asyncio.sleep(LAST_WORDS_S)


class Passing(Protocol):
    """A request or a websocket that is passed on to the leader."""

    async def run(self) -> str | None:
        """Pass it on. Returns the reason if no byte of it was sent."""
        ...

    async def client_gone(self) -> None:
        """Wait until the client has gone."""
        ...

    async def fail(self, status: int, why: str) -> None:
        """Answer that it may have been carried out."""
        ...


class _ClientGone(Exception):
    """The client has gone before the end of its request."""


class _PassedRequest:
    """A request that is passed on to the leader."""

    def __init__(
        self,
        rules: ForwardingRules,
        to: SendTo,
        pool: httpcore2.AsyncConnectionPool,
        scope: Scope,
        receive: Receive,
        send: SendMessage,
    ) -> None:
        self._to, self._pool, self._send = to, pool, send
        self._timeouts = rules.timeouts
        method, target = scope["method"].encode(), _target(scope)
        # HTTP/2 needs no header for a body.
        has_body = framed(scope["headers"]) or scope.get("http_version", "1.1")[0] != "1"
        client = scope.get("client")
        headers = rules.outgoing(
            to,
            scope["headers"],
            method,
            target,
            body=has_body,
            client=client and client[0],
            scheme=scope.get("scheme", "http"),
        )
        self._body = _Body(receive, whole=not has_body)
        self._request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=to.scheme.encode(), host=to.host.encode(), port=to.port, target=target
            ),
            headers=headers,
            content=self._body.chunks() if has_body else b"",
            extensions={"timeout": self._timeouts, "trace": self._trace},
        )
        self._started = self._unwritten = False

    async def _trace(self, event: str, info: object) -> None:
        self._unwritten = self._unwritten or event.endswith(UNWRITTEN)

    async def run(self) -> str | None:
        try:
            response = await self._pool.handle_async_request(self._request)
            try:
                headers = returned(response.headers)
                start = {"type": "http.response.start", "status": response.status}
                self._started = True
                await self._send({**start, "headers": headers})
                async for chunk in response.aiter_stream():
                    body = {"type": "http.response.body", "body": chunk, "more_body": True}
                    await self._send(body)
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await response.aclose()
        except UNSENT as error:
            if self._started or self._body.begun:
                raise
            return f"the leader cannot be reached: {error}"
        except _ClientGone:
            pass
        except httpcore2.TimeoutException as error:
            await self.fail(504, "the leader did not answer in time", error)
        except (httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            if self._unwritten and isinstance(error, httpcore2.LocalProtocolError):
                await _answer(self._send, 400, f"not executed: it cannot be passed on: {error}")
            else:
                await self.fail(502, "the leader did not answer", error)
        return None

    async def client_gone(self) -> None:
        await self._body.disconnected()

    async def fail(self, status: int, why: str, error: Exception | None = None) -> None:
        if error is not None:
            log.warning("%s", log_line(event="forwarding_failed", to=self._to.origin, error=error))
        if self._started:  # the server closes the connection: the response is incomplete
            raise error or httpcore2.RemoteProtocolError(why)
        await _answer(self._send, status, f"{why}; the request may have been carried out")


class _Incoming:
    """The messages of a client. Attempts to forward receive the first ones, which do not have any
    data yet; if this process becomes the leader meanwhile, the application receives them too."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._received: deque[Message] = deque()

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] != "websocket.receive" and not message.get("body"):
            self._received.append(message)
        return message

    async def from_the_beginning(self) -> Message:
        return self._received.popleft() if self._received else await self._receive()


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
                raise _ClientGone  # httpcore would ignore its own WriteError, and wait
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

    It is not a readiness probe: a process that does not lead is ready too.
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
    """Path and query as they were sent: without the prefix that the server was told to add."""
    path: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    root = scope.get("app_root_path", scope.get("root_path", "")).encode()
    query: bytes = scope.get("query_string", b"")
    path = path.partition(b"?")[0]
    inner = path.removeprefix(root)
    if inner.startswith(b"/"):  # otherwise the prefix is a part of a longer name, or all
        path = inner
    return path + (b"?" + query if query else b"")


async def _refuse(scope: Scope, send: SendMessage, why: RefuseRequest) -> None:
    await _reply(scope, send, why.status, f"not executed: {why.why}", [(b"retry-after", b"1")])


async def _reply(scope: Scope, send: SendMessage, status: int, text: str, headers: Headers) -> None:
    if scope["type"] == "websocket":
        await deny(scope, send, status, text, headers)
    else:
        await _answer(send, status, text, headers)


async def deny(scope: Scope, send: SendMessage, status: int, text: str, headers: Headers) -> None:
    """Refuse a websocket: with a response where the server can send one, else by closing it."""
    if "websocket.http.response" in (scope.get("extensions") or {}):
        await _answer(send, status, text, headers, kind="websocket.http.response")
    else:
        reason = text.encode()[:120].decode(errors="ignore")
        await send({"type": "websocket.close", "code": TRY_AGAIN_LATER, "reason": reason})


async def _answer(
    send: SendMessage,
    status: int,
    text: str,
    headers: Headers | None = None,
    kind: str = "http.response",
) -> None:
    body = text.encode() + b"\n"
    framing = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
    start = {"type": f"{kind}.start", "status": status}
    await send({**start, "headers": framing + (headers or [])})
    await send({"type": f"{kind}.body", "body": body})
