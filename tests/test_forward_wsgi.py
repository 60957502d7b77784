"""Forwarding to the leader by the WSGI middleware, in one process: a pool of the tests answers in
place of the leader."""

from __future__ import annotations

import io
import threading
from contextlib import nullcontext, suppress
from typing import Any

import httpcore2
import pytest
from httpcore2._backends.sync import SyncStream

import doyen
from doyen import LeadershipLost
from doyen.errors import StaleToken
from doyen.integrations import asgi, forwarding, network, wsgi
from doyen.integrations.forwarding import LAST_WORDS_S, ForwardingRules, LeaderView, SendTo
from forward_kit import ELSEWHERE, SECRET, TRUST, A, leader
from support import core_of


class SyncPool(httpcore2.ConnectionPool):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[httpcore2.Request, bytes]] = []
        self.answers: list[httpcore2.Response | Exception] = []

    def handle_request(self, request: httpcore2.Request) -> httpcore2.Response:
        answer = self.answers.pop(0)
        if isinstance(answer, httpcore2.ConnectError):
            raise answer
        self.sent.append((request, b"".join(request.stream)))  # type: ignore[arg-type]
        if isinstance(answer, Exception):
            raise answer
        return answer


def wsgi_call(app: Any, path: str = "/", method: str = "GET", **more: Any) -> tuple[str, bytes]:
    started: list[str] = []
    body = more.pop("body", b"")
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "QUERY_STRING": "",
        "wsgi.input": io.BytesIO(body),
        **({"CONTENT_LENGTH": str(len(body))} if body else {}),
        **more,
    }
    content = b"".join(app(environ, lambda status, _, error=None: started.append(status)))
    return started[-1], content


def echo(environ: Any, start_response: Any) -> list[bytes]:
    start_response("200 OK", [])
    doyen_headers = [name for name in environ if name.startswith("HTTP_DOYEN")]
    return [environ["REQUEST_METHOD"].encode(), b"" if not doyen_headers else b"forged"]


def wsgi_app(app: Any = echo, **options: Any) -> tuple[SyncPool, LeaderView, Any]:
    pool, view = SyncPool(), LeaderView("e")
    options = {"secret": SECRET, "trust": TRUST, "wait_s": 0.3, "max_waiting": 1, **options}
    return pool, view, wsgi.LeaderMiddleware(app, pool=pool, view=view, **options)


def test_wsgi_serves_as_leader() -> None:
    _, view, app = wsgi_app()
    assert wsgi_call(app, "/healthz") == ("200 OK", b"GET")
    assert wsgi_call(app)[0].startswith("503")
    with doyen.connect_blocking("memory://wsgi") as session, view.following_blocking(session):
        with session.campaign("e", meta={"address": A}) as term, view.leading(term):
            assert wsgi_call(app, HTTP_DOYEN_TOKEN="9") == ("200 OK", b"GET")
            assert wsgi_call(wsgi.LeaderRoute(view))[0] == "200 OK"
        assert wsgi_call(wsgi.LeaderRoute(view))[0].startswith("503")
        assert b"not executed" in wsgi_call(app)[1]


def test_wsgi_forwards_otherwise() -> None:
    pool, view, app = wsgi_app()
    view.observed(leader(7))
    answer = httpcore2.Response(201, headers=[(b"Date", b"now")], content=b"done")
    pool.answers = [httpcore2.ConnectError("refused"), answer]
    assert wsgi_call(app, "/\u00c3\u00a9", "POST", body=b"data") == ("201 Created", b"done")
    request, body = pool.sent[-1]
    assert (request.url.target, body) == (b"/%C3%A9", b"data")
    pool.answers = [httpcore2.ReadError("lost"), httpcore2.ReadTimeout("frozen")]
    for expected in ("502", "504"):
        status, text = wsgi_call(app, method="POST")
        assert (status[:3], b"may have been carried out" in text) == (expected, True)
    assert len(pool.sent) == 3


@pytest.mark.parametrize("target", ELSEWHERE, ids=str)
@pytest.mark.parametrize("redirect", [False, True])
def test_wsgi_refuses_a_target_without_a_slash(redirect: bool, target: bytes) -> None:
    pool, view, app = wsgi_app(redirect=redirect)
    view.observed(leader(7))
    sent = target.decode()
    assert wsgi_call(app, sent, RAW_URI=sent)[0].startswith("400")
    assert pool.sent == []
    if redirect:
        assert wsgi_call(app, "//evil.example/x")[0].startswith("307")


@pytest.mark.parametrize("server", [{}, {"RAW_URI": "/a%2Fb%20c"}, {"REQUEST_URI": "/other"}])
def test_asgi_and_wsgi_sign_the_same(server: dict[str, str]) -> None:
    """A path with `%2F`, which WSGI does not tell from `/`: what one forwards, the other serves."""
    _, view, _ = wsgi_app()
    rules = ForwardingRules(view=view, secret=SECRET, trust=TRUST)
    view.observed(leader(7))
    send = rules.decide(None)
    assert isinstance(send, SendTo)
    by_wsgi = wsgi._target({"PATH_INFO": "/a/b c", "QUERY_STRING": "q=%2F", **server})
    by_asgi = asgi._target({"path": "/a/b c", "raw_path": b"/a%2Fb%20c", "query_string": b"q=%2F"})
    assert by_asgi == b"/a%2Fb%20c?q=%2F"
    assert by_wsgi == (by_asgi if "RAW_URI" in server else b"/a/b%20c?q=%2F")
    for sent, received in ((by_asgi, by_wsgi), (by_wsgi, by_asgi)):
        headers = rules.outgoing(send, [], b"GET", sent, body=False)
        assert rules.read(headers, b"GET", received) == (7, 1)
        assert rules.read(headers, b"GET", received + b"2") is None


def test_a_blocking_view_follows_for_the_duration_of_its_scope() -> None:
    view, threads = LeaderView("e"), threading.active_count()
    with doyen.connect_blocking("memory://view") as session:
        with session.campaign("e", meta={"address": A}) as term:
            with view.following_blocking(session):
                assert view.changed_blocking((None, None), 10)
                assert view.leader is not None
                assert view.leader.token == term.token
            assert view.leader is None
        with session.campaign("e"):
            assert not view.changed_blocking((None, None), 0.05), "nobody observes any more"
        assert not core_of(session).calls.reachability._observers
    assert threading.active_count() <= threads + 1  # doyen's thread may be in use elsewhere


def test_wsgi_does_not_execute_what_cannot_be_written() -> None:
    """Such as a request whose method is none. If it was written, it may have been carried out."""
    _, view, app = wsgi_app()
    view.observed(leader(7))
    with httpcore2.ConnectionPool(network_backend=httpcore2.MockBackend([])) as pool:
        app._pool = pool
        for method, status in (("G(T", "400"), ("GET", "502")):
            got, body = wsgi_call(app, method=method)
            assert (got[:3], body.startswith(b"not executed")) == (status, status == "400")


def test_wsgi_reads_no_further_than_the_body() -> None:
    """The input of some servers has no end while the connection is open."""
    pool, view, app = wsgi_app()
    view.observed(leader(7))
    pool.answers = [httpcore2.Response(200, content=b"") for _ in range(2)]
    for length, read in (("0", b""), ("4", b"data")):
        more: dict[str, Any] = {
            "CONTENT_LENGTH": length,
            "wsgi.input": io.BytesIO(b"dataGET / HTTP/1.1"),
        }
        assert wsgi_call(app, method="POST", **more)[0] == "200 OK"
        assert pool.sent[-1][1] == read
    assert wsgi_call(app, CONTENT_LENGTH="+1")[0].startswith("400")
    assert wsgi_call(app, HTTP_TRANSFER_ENCODING="chunked")[0].startswith("411")


@pytest.mark.parametrize("sent", [False, True])
def test_wsgi_cuts_off_what_a_leader_serves_when_its_term_ends(sent: bool) -> None:
    """A response of which nothing has been sent is replaced."""

    def slow(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        if sent:
            yield b"begun"
        environ["end"]()
        yield b"late"

    _, view, app = wsgi_app(slow)
    started: list[str] = []
    received: list[bytes] = []

    def start_response(status: str, headers: Any, error: Any = None) -> None:
        if error is not None and received:
            raise error[1]
        started.append(status)

    with (
        suppress(LeadershipLost),
        doyen.connect_blocking("memory://wsgi") as session,
        session.campaign("e") as term,
        view.leading(term),
    ):
        environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "end": lambda: term._lose("over")}
        received.extend(app(environ, start_response))
    if sent:
        assert (started, received) == (["200 OK"], [b"begun"])
    else:
        assert [status[:3] for status in started] == ["200", "503"]
        assert b"may have been carried out" in received[0]


@pytest.mark.parametrize("sent", [False, True])
def test_wsgi_replaces_a_forwarded_response_of_which_nothing_was_sent(sent: bool) -> None:
    """A server sends the headers with the first bytes. Before that, an error can still be told."""

    def broken() -> Any:
        if sent:
            yield b"begun"
        raise httpcore2.ReadError("the leader was replaced")

    pool, view, app = wsgi_app()
    view.observed(leader(7))
    pool.answers = [httpcore2.Response(200, content=broken())]
    started: list[str] = []
    received: list[bytes] = []

    def start_response(status: str, headers: Any, error: Any = None) -> None:
        if error is not None and received:
            raise error[1]
        started.append(status)

    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "wsgi.input": io.BytesIO()}
    with pytest.raises(httpcore2.ReadError) if sent else nullcontext():
        received.extend(app(environ, start_response))
    if sent:
        assert (started, received) == (["200 OK"], [b"begun"])
    else:
        assert [status[:3] for status in started] == ["200", "502"]
        assert b"may have been carried out" in received[0]


def served_with_the_term_lost(app: Any) -> tuple[str, bytes]:
    """What a client gets from an application that makes its leader lose the term: `lose`."""
    _, view, middleware = wsgi_app(app)
    with (
        suppress(LeadershipLost),
        doyen.connect_blocking("memory://wsgi") as session,
        session.campaign("e") as term,
        view.leading(term),
    ):
        answer = wsgi_call(middleware, lose=lambda: term._lose("over"))
    return answer


def wsgi_empty(environ: Any, start_response: Any) -> list[bytes]:
    environ["lose"]()
    start_response("204 No Content", [])
    return []


def wsgi_checks(environ: Any, start_response: Any) -> list[bytes]:
    environ["lose"]()
    environ["doyen.term"].check()
    return []


def wsgi_writes(environ: Any, start_response: Any) -> list[bytes]:
    environ["lose"]()
    raise StaleToken("a later leader has written")


@pytest.mark.parametrize("app", [wsgi_empty, wsgi_checks, wsgi_writes])
def test_wsgi_answers_503_however_the_end_of_the_term_shows(app: Any) -> None:
    """In a response without a body, and in an exception that ends the application's call."""
    status, text = served_with_the_term_lost(app)
    assert (status[:3], b"may have been carried out" in text) == ("503", True)


def test_wsgi_raises_what_an_application_raises_during_its_term() -> None:
    def broken(environ: Any, start_response: Any) -> list[bytes]:
        raise LeadershipLost("of another election")

    _, view, app = wsgi_app(broken)
    with (
        doyen.connect_blocking("memory://wsgi") as session,
        session.campaign("e") as term,
        view.leading(term),
        pytest.raises(LeadershipLost, match="another election"),
    ):
        wsgi_call(app)


class Clock:
    """Time that passes while a socket is waited for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Socket:
    """Accepts so many bytes, and none after that."""

    def __init__(self, clock: Clock, accepts: int) -> None:
        self.clock, self.accepts = clock, accepts
        self.accepted = b""

    def settimeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def send(self, data: memoryview) -> int:
        part = bytes(data[: min(1000, self.accepts - len(self.accepted))])
        if not part:
            self.clock.now += self.timeout_s
            raise TimeoutError("timed out")
        self.accepted += part
        return len(part)


@pytest.mark.parametrize("replaced", [False, True])
def test_wsgi_gives_up_a_body_that_a_replaced_leader_does_not_accept(
    replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was not replaced may take `answer_s` for each part of it."""
    clock = Clock()
    monkeypatch.setattr(network, "time", clock)
    monkeypatch.setattr(forwarding, "time", clock)
    view = LeaderView("e")
    view.observed(leader(8 if replaced else 7))
    blocking = network.BlockingNetwork()
    blocking.give_up_when(view.outlived(leader(7)))
    socket: Any = Socket(clock, 2500)
    stream = network._BlockingStream(SyncStream(socket), blocking)
    stream.write(bytes(2000), 60.0)
    assert (len(socket.accepted), clock.now) == (2000, 1000.0)
    with pytest.raises(httpcore2.NetworkError if replaced else httpcore2.WriteTimeout):
        stream.write(bytes(2000), 60.0)
    assert len(socket.accepted) == 2500
    waited_s = clock.now - 1000.0
    assert waited_s == pytest.approx(LAST_WORDS_S if replaced else 60.0, abs=1.0)
