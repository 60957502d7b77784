"""ASGI: a service that refuses requests with the token of an earlier term.

    app = FencingMiddleware(app, resource="orders", tokens=FileTokens("/var/lib/orders"))

Rules are in `doyen.fencing.requests`. May import errors and `_waiting` only.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, cast

from doyen._waiting import LoopEvent
from doyen.fencing.requests import HEADER, Fenced, FencedRequests, NotExecuted, Turns

__all__ = ["FencingMiddleware"]

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Scope, _Receive, _Send], Awaitable[None]]

POLICY_VIOLATION = 1008


class FencingMiddleware:
    """Refuses requests whose token is lower than one seen before.

    `app` gets `scope["doyen.token"]`, an integer. Options are those of `FencedRequests`: `tokens`,
    `resource` and `drain_s`. Answers: 428 without a token, 400 for what is not one, 412 for one of
    an earlier term. Requests that only read (GET, HEAD, OPTIONS) may come without a token.

    A websocket to a resource is refused, because it would outlive the comparison: send requests, or
    compare the token of each message in the transaction that it causes.
    """

    def __init__(self, app: _App, **options: Any) -> None:
        self._app = app
        self._rules = FencedRequests(**options)
        self._turns = Turns()

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "websocket":
            if self._rules.concerns("GET", scope["path"]) is None:
                await self._app(scope, receive, send)
            else:
                await _refuse_socket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = HEADER.encode()
        values = [value.decode("latin-1") for each, value in scope["headers"] if each == name]
        request = self._rules.read(scope["method"], scope["path"], values)
        if request is None:
            await self._app(scope, receive, send)
            return
        refusal = request if isinstance(request, NotExecuted) else await self._enter(request)
        if refusal is not None:
            await _answer(send, refusal)
            return
        fenced = cast(Fenced, request)
        try:
            await self._app({**scope, "doyen.token": fenced.token}, receive, send)
        finally:
            self._turns.leave(fenced)

    async def _enter(self, request: Fenced) -> NotExecuted | None:
        """Begin the request, or say why not."""
        entered = False
        self._turns.arrive(request)
        try:
            refusal = await self._wait_for_turn(request)
            entered = refusal is None
        finally:
            if not entered:
                self._turns.leave(request, entered=False)
        return refusal

    async def _wait_for_turn(self, request: Fenced) -> NotExecuted | None:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._rules.drain_s
        while True:
            highest = await self._see(request)
            if highest > request.token:
                return request.stale(highest)
            entered = self._turns.enter(request)
            if isinstance(entered, NotExecuted):
                return entered
            if entered:
                return None
            ended = LoopEvent()
            with self._turns.waiting(request, ended.set_soon):
                if not await ended.set_within(until - loop.time()):
                    return self._rules.too_long(request)

    async def _see(self, request: Fenced) -> int:
        see = self._rules.tokens.see
        if inspect.iscoroutinefunction(see):
            return cast(int, await see(request.resource, request.token))
        return cast(int, await asyncio.to_thread(see, request.resource, request.token))


async def _answer(send: _Send, refusal: NotExecuted, kind: str = "http.response") -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(refusal.body))]
    headers += [(name.encode(), value.encode()) for name, value in refusal.headers]
    await send({"type": f"{kind}.start", "status": refusal.status, "headers": headers})
    await send({"type": f"{kind}.body", "body": refusal.body})


async def _refuse_socket(scope: _Scope, receive: _Receive, send: _Send) -> None:
    refusal = NotExecuted(403, "a websocket cannot be fenced: send requests")
    await receive()
    if "websocket.http.response" in scope.get("extensions", {}):
        await _answer(send, refusal, "websocket.http.response")
    else:
        await send({"type": "websocket.close", "code": POLICY_VIOLATION, "reason": refusal.why})
