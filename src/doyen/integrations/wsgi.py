"""WSGI: requests are served by the leader, and forwarded to it by the others.

    app = LeaderMiddleware(app, view=view, secret=SECRET, trust=ADDRESSES)

Rules are in `doyen.integrations.forwarding`; `doyen.integrations.asgi` is the same for ASGI. A
request occupies its thread while it is forwarded. Two processes with one thread each that forward
to each other would wait for each other for up to `answer_s`, so run several threads.

A WSGI application cannot be interrupted. When the term ends, its response is cut off at the next
chunk; check `environ["doyen.term"].valid`, and fence what it writes.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from doyen.errors import ConfigError, LeadershipLost

try:
    import httpcore2
except ModuleNotFoundError as error:
    raise ConfigError("forwarding needs httpcore2: pip install 'doyen[forward]'") from error

from doyen.events.log_lines import log_line
from doyen.integrations.forwarding import (
    AGAIN_S,
    IDLE_S,
    ForwardingRules,
    Headers,
    LeaderView,
    RefuseRequest,
    SendTo,
    ServeHere,
    framed,
    malformed,
    returned,
)
from doyen.integrations.network import UNSENT, UNWRITTEN, BlockingNetwork
from doyen.term import Term

__all__ = ["LeaderMiddleware", "LeaderRoute"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
WSGIApp = Callable[[Environ, StartResponse], Iterable[bytes]]

CHUNK = 64 * 1024
log = logging.getLogger("doyen")


class WSGILeaderMiddleware:
    """Serves requests while this process leads, and forwards them to the leader otherwise.

    `app` gets `environ["doyen.term"]`. Options as for `doyen.integrations.asgi.LeaderMiddleware`.
    """

    def __init__(
        self, app: WSGIApp, *, pool: httpcore2.ConnectionPool | None = None, **options: Any
    ) -> None:
        self._app = app
        self._rules = ForwardingRules(**options)
        self._network = BlockingNetwork()
        self._pool = pool or httpcore2.ConnectionPool(
            retries=0,
            max_connections=1000,
            keepalive_expiry=IDLE_S,
            network_backend=self._network,
        )
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
        refused = malformed(headers, target)
        if refused is not None:
            return _answer(start_response, 400, refused)
        if _endless(environ):
            return _answer(start_response, 411, "the length of the request is not stated")
        until = time.monotonic() + rules.patience_s(forwarded)
        while True:
            seen = view.state
            decision = rules.decide(forwarded)
            if isinstance(decision, ServeHere):
                environ["doyen.term"] = decision.term
                return self._serve(decision.term, environ, start_response)
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

    def _serve(
        self, term: Term, environ: Environ, start_response: StartResponse
    ) -> Iterable[bytes]:
        try:
            body = self._app(environ, start_response)
        except Exception as error:
            if term.valid:
                raise
            return _ended(term, error, start_response)
        return _during(term, body, start_response)

    def _forward(
        self, to: SendTo, headers: Headers, environ: Environ, start_response: StartResponse
    ) -> tuple[Iterable[bytes] | None, str]:
        """Send the request to the leader. Returns the response, or why no byte was sent."""
        method, target = environ["REQUEST_METHOD"].encode(), _target(environ)
        begun = unwritten = False

        def trace(event: str, info: object) -> None:
            nonlocal unwritten
            unwritten = unwritten or event.endswith(UNWRITTEN)

        def chunks() -> Iterator[bytes]:
            nonlocal begun
            begun = True
            length = environ.get("CONTENT_LENGTH")
            left = int(length) if length else sys.maxsize
            while left and (chunk := environ["wsgi.input"].read(min(left, CHUNK))):
                yield chunk
                left -= len(chunk)

        has_body = framed(headers)
        request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=to.scheme.encode(), host=to.host.encode(), port=to.port, target=target
            ),
            headers=self._rules.outgoing(
                to,
                headers,
                method,
                target,
                body=has_body,
                client=environ.get("REMOTE_ADDR"),
                scheme=environ.get("wsgi.url_scheme", "http"),
            ),
            content=chunks() if has_body else b"",
            extensions={"timeout": self._rules.timeouts, "trace": trace},
        )
        self._network.give_up_when(self._rules.view.outlived(to.leader))
        try:
            response = self._pool.handle_request(request)
        except UNSENT as error:
            if begun:
                raise
            return None, f"the leader cannot be reached: {error}"
        except _FAILED as error:
            if unwritten and isinstance(error, httpcore2.LocalProtocolError):
                why = f"not executed: it cannot be passed on: {error}"
                return _answer(start_response, 400, why), ""
            return _failed(start_response, to, error), ""
        start_response(
            _status(response.status),
            [
                (name.decode("latin-1"), value.decode("latin-1"))
                for name, value in returned(response.headers)
            ],
        )
        return _Streamed(response, to, start_response), ""


_FAILED = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)


def _failed(
    start_response: StartResponse, to: SendTo, error: Exception, *, started: bool = False
) -> Iterable[bytes]:
    log.warning("%s", log_line(event="forwarding_failed", to=to.origin, error=error))
    late = isinstance(error, httpcore2.TimeoutException)
    why = f"the leader did not answer{' in time' if late else ''}"
    why += "; the request may have been carried out"
    status = 504 if late else 502
    return _answer(start_response, status, why, error=sys.exc_info() if started else None)


class _Streamed:
    """The body of a response, closed with it. If it fails before anything of it has been sent, the
    response is replaced by an error."""

    def __init__(
        self, response: httpcore2.Response, to: SendTo, start_response: StartResponse
    ) -> None:
        self._response = response
        self._to = to
        self._start_response = start_response

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from self._response.iter_stream()
        except _FAILED as error:
            # Raises the error again if the headers have been sent.
            yield from _failed(self._start_response, self._to, error, started=True)

    def close(self) -> None:
        self._response.close()


def _during(term: Term, body: Iterable[bytes], start_response: StartResponse) -> Iterator[bytes]:
    """The body of a response. When the term ends it is cut off; if nothing of it has been sent, it
    is replaced."""
    try:
        for chunk in body:
            term.check()
            yield chunk
        term.check()  # a response may have no body
    except Exception as error:
        if term.valid:
            raise
        yield from _ended(term, error, start_response)
    finally:
        close = getattr(body, "close", None)
        if close is not None:
            close()


def _ended(term: Term, error: Exception, start_response: StartResponse) -> Iterable[bytes]:
    """The answer to a request whose application failed after the end of the term. Raises the error
    again if the headers have been sent."""
    if not isinstance(error, LeadershipLost):
        log.warning("%s", log_line(event="request_failed", term=term), exc_info=error)
    why = "the term ended; the request may have been carried out"
    return _answer(start_response, 503, why, error=sys.exc_info())


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


def _endless(environ: Environ) -> bool:
    """Whether there is a body whose end the server does not mark."""
    coded = "HTTP_TRANSFER_ENCODING" in environ
    return coded and not environ.get("wsgi.input_terminated")


def _target(environ: Environ) -> bytes:
    """Path and query. The path as it was sent, if the server tells; PATH_INFO has it without
    percent-encoding, in which `%2F` is `/`."""
    path = (environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1")
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    sent = str(environ.get("RAW_URI") or environ.get("REQUEST_URI") or "")
    target = sent.partition("?")[0].encode("latin-1", "replace")
    if not sent.isascii() or not sent.isprintable() or unquote_to_bytes(target) != path:
        target = quote(path, safe="/:@!$&'()*+,;=~-._").encode()
    target = target or b"/"
    return target + b"?" + query if query else target


def _answer(
    start_response: StartResponse,
    status: int,
    text: str,
    *headers: tuple[str, str],
    error: Any = None,
) -> list[bytes]:
    body = text.encode() + b"\n"
    framing = [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))]
    start_response(_status(status), [*framing, *headers], *([error] if error else []))
    return [body]


def _status(code: int) -> str:
    try:
        return f"{code} {HTTPStatus(code).phrase}"
    except ValueError:
        return f"{code} Unknown"
