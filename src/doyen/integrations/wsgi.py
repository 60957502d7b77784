"""WSGI: requests are served by the leader, and forwarded to it by the others.

    app = LeaderMiddleware(app, view=view, secret=SECRET, trust=ADDRESSES)

Rules are in `doyen.integrations.forwarding`; `doyen.integrations.asgi` is the same for ASGI. A
request occupies its worker while it is forwarded. Two processes with one worker each that forward
to each other would wait for each other, so run several workers or threads. A forwarded request
never waits for an election.

A WSGI application cannot be interrupted. When the term ends, its response is cut off at the next
chunk; check `environ["doyen.term"].valid`, and fence what it writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import httpcore2

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
)
from doyen.term import Term

__all__ = ["LeaderMiddleware", "LeaderRoute"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]

CONNECT_S = 2.0
AGAIN_S = 0.2
CHUNK = 64 * 1024
UNSENT = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.UnsupportedProtocol,
)
_REASONS = {200: "OK", 307: "Temporary Redirect", 400: "Bad Request", 502: "Bad Gateway"}
_REASONS |= {503: "Service Unavailable", 508: "Loop Detected"}


class WSGILeaderMiddleware:
    """Serves requests while this process leads, and forwards them to the leader otherwise.

    `app` gets `environ["doyen.term"]`. Options as for `doyen.integrations.asgi.LeaderMiddleware`.
    """

    def __init__(
        self, app: WSGIApp, *, pool: httpcore2.ConnectionPool | None = None, **options: Any
    ) -> None:
        self._app = app
        self._rules = ForwardingRules(**options)
        self._pool = pool or httpcore2.ConnectionPool(retries=0, max_connections=1000)
        self._waiting = threading.Semaphore(self._rules.max_waiting)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        rules, view = self._rules, self._rules.view
        headers = _headers(environ)
        method, target = environ["REQUEST_METHOD"].encode(), _target(environ)
        forwarded = rules.read(headers, method, target)
        for name in [name for name in environ if name.startswith("HTTP_DOYEN_")]:
            del environ[name]
        if environ.get("PATH_INFO", "") in rules.local:
            return self._app(environ, start_response)
        if ambiguous(headers):
            why = "the length of the request is stated in more than one way"
            return _answer(start_response, 400, why)
        until = time.monotonic() + (rules.wait_s if forwarded is None else 0.0)
        while True:
            seen = view.state
            decision = rules.decide(forwarded)
            if isinstance(decision, ServeHere):
                environ["doyen.term"] = decision.term
                return _during(decision.term, self._app(environ, start_response))
            again_s = rules.wait_s
            if isinstance(decision, SendTo):
                if rules.redirect:
                    location = (decision.origin.encode() + target).decode("latin-1")
                    return _answer(start_response, 307, "another leads", ("Location", location))
                answer, why = self._forward(decision, headers, environ, start_response)
                if answer is not None:
                    return answer
                again_s = AGAIN_S
            else:
                why = decision.why
            left_s = until - time.monotonic()
            if isinstance(decision, RefuseRequest) or left_s <= 0:
                status = decision.status if isinstance(decision, RefuseRequest) else 503
                return _answer(start_response, status, f"not executed: {why}", ("Retry-After", "1"))
            if not self._waiting.acquire(blocking=False):
                why = f"not executed: {why}, and many requests wait"
                return _answer(start_response, 503, why, ("Retry-After", "1"))
            try:
                view.changed_blocking(seen, min(left_s, again_s))
            finally:
                self._waiting.release()

    def _forward(
        self, to: SendTo, headers: Headers, environ: Environ, start_response: StartResponse
    ) -> tuple[Iterable[bytes] | None, str]:
        """Send the request to the leader. Returns the response, or why no byte was sent."""
        method, target = environ["REQUEST_METHOD"].encode(), _target(environ)
        begun = False

        def chunks() -> Iterator[bytes]:
            nonlocal begun
            begun = True
            left = int(environ.get("CONTENT_LENGTH") or 0) or None
            while chunk := environ["wsgi.input"].read(CHUNK if left is None else min(left, CHUNK)):
                yield chunk
                if left is not None:
                    left -= len(chunk)
                    if not left:
                        return

        has_body = framed(headers)
        request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=to.scheme.encode(), host=to.host.encode(), port=to.port, target=target
            ),
            headers=self._rules.outgoing(to, headers, method, target, body=has_body),
            content=chunks() if has_body else b"",
            extensions={"timeout": {"connect": CONNECT_S, "pool": CONNECT_S}},
        )
        try:
            response = self._pool.handle_request(request)
        except UNSENT as error:
            if begun:
                raise
            return None, f"the leader cannot be reached: {error}"
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException):
            why = "the leader did not answer; the request may have been carried out"
            return _answer(start_response, 502, why), ""
        passed = passed_on([(name.lower(), value) for name, value in response.headers])
        start_response(
            f"{response.status} {_REASONS.get(response.status, 'From the Leader')}",
            [(name.decode("latin-1"), value.decode("latin-1")) for name, value in passed],
        )
        return _Streamed(response), ""


class _Streamed:
    """The body of a response, closed with it."""

    def __init__(self, response: httpcore2.Response) -> None:
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._response.iter_stream())

    def close(self) -> None:
        self._response.close()


def _during(term: Term, body: Iterable[bytes]) -> Iterator[bytes]:
    """The body of a response, cut off when the term ends."""
    try:
        for chunk in body:
            term.check()
            yield chunk
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()


class WSGILeaderRoute:
    """Answers 200 while this process leads and 503 otherwise, for load balancers."""

    def __init__(self, view: LeaderView) -> None:
        self._view = view

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        if self._view.leads:
            return _answer(start_response, 200, "this process leads")
        return _answer(start_response, 503, "this process does not lead")


LeaderMiddleware = WSGILeaderMiddleware
LeaderRoute = WSGILeaderRoute


def _headers(environ: Environ) -> Headers:
    headers = [
        (name[5:].replace("_", "-").lower().encode("latin-1"), str(value).encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    special = [name for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)]
    return headers + [
        (name.replace("_", "-").lower().encode(), environ[name].encode("latin-1"))
        for name in special
    ]


def _target(environ: Environ) -> bytes:
    from urllib.parse import quote

    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    query = environ.get("QUERY_STRING", "")
    target = quote(path.encode("latin-1"), safe="/:@!$&'()*+,;=~-._") or "/"
    return (f"{target}?{query}" if query else target).encode("latin-1")


def _answer(
    start_response: StartResponse, status: int, text: str, *headers: tuple[str, str]
) -> list[bytes]:
    body = text.encode() + b"\n"
    framing = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
    start_response(f"{status} {_REASONS[status]}", [*framing, *headers])
    return [body]
