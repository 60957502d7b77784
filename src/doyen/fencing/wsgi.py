"""WSGI: a service that refuses requests with the token of an earlier term.

    app = FencingMiddleware(app, resource="orders", tokens=FileTokens("/var/lib/orders"))

Rules are in `doyen.fencing.requests`; `doyen.fencing.asgi` is the same for ASGI. May import errors
only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any, cast

from doyen.fencing.requests import HEADER, Fenced, FencedRequests, NotExecuted, Turns

__all__ = ["FencingMiddleware"]

_App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
_KEY = "HTTP_" + HEADER.upper().replace("-", "_")


class WSGIFencingMiddleware:
    """Refuses requests whose token is lower than one seen before.

    `app` gets `environ["doyen.token"]`. Options and answers are those of
    `doyen.fencing.asgi.FencingMiddleware`.
    """

    def __init__(self, app: _App, **options: Any) -> None:
        self._app = app
        self._rules = FencedRequests(**options)
        self._turns = Turns()

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        # A server joins the values of a header that was sent twice by a comma, which is no digit.
        values = [environ[_KEY]] if _KEY in environ else []
        path = environ.get("PATH_INFO", "")
        request = self._rules.read(environ["REQUEST_METHOD"], path, values)
        if request is None:
            return self._app(environ, start_response)
        refusal = request if isinstance(request, NotExecuted) else self._enter(request)
        if refusal is not None:
            headers = [("content-type", "text/plain"), ("content-length", str(len(refusal.body)))]
            status = f"{refusal.status} {HTTPStatus(refusal.status).phrase}"
            start_response(status, headers + refusal.headers)
            return [refusal.body]
        fenced = cast(Fenced, request)
        try:
            body = self._app({**environ, "doyen.token": fenced.token}, start_response)
        except BaseException:
            self._turns.leave(fenced)
            raise
        return _Response(body, lambda: self._turns.leave(fenced))

    def _enter(self, request: Fenced) -> NotExecuted | None:
        """Begin the request, or say why not."""
        entered = False
        self._turns.arrive(request)
        try:
            refusal = self._wait_for_turn(request)
            entered = refusal is None
        finally:
            if not entered:
                self._turns.leave(request, entered=False)
        return refusal

    def _wait_for_turn(self, request: Fenced) -> NotExecuted | None:
        until = time.monotonic() + self._rules.drain_s
        while True:
            highest = cast(int, self._rules.tokens.see(request.resource, request.token))
            if highest > request.token:
                return request.stale(highest)
            entered = self._turns.enter(request)
            if isinstance(entered, NotExecuted):
                return entered
            if entered:
                return None
            ended = threading.Event()
            with self._turns.waiting(request, ended.set):
                if not ended.wait(max(0.0, until - time.monotonic())):
                    return self._rules.too_long(request)


class _Response:
    """The body of a response; the request has ended when it is closed."""

    def __init__(self, body: Iterable[bytes], leave: Callable[[], None]) -> None:
        self._body = body
        self._leave: Callable[[], None] | None = leave

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._body)

    def close(self) -> None:
        leave, self._leave = self._leave, None
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            if leave is not None:
                leave()


FencingMiddleware = WSGIFencingMiddleware
