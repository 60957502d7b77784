"""Forwarding to the leader, in one process and in virtual time: applications call each other by
a pool of the tests instead of sockets. Each rule of `doyen.integrations.forwarding` is a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpcore2
import pytest
from websockets.headers import build_host

from doyen import LeadershipLost, Term
from doyen.errors import ConfigError
from doyen.integrations import asgi, forwarding
from doyen.integrations.forwarding import ForwardingRules, LeaderView, SendTo
from doyen.model import Leader
from forward_kit import ELSEWHERE, SECRET, TRUST, A, B, Exchange, Pool, call, http_scope, leader
from support import Place, until, virtual


class App:
    """Says what it got: the token of its term, its headers, and the body."""

    def __init__(self) -> None:
        self.scopes: list[Any] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        headers = [(b"x-app", b"1"), (b"connection", b"close")]
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            more = True
            while more:
                message = await receive()
                more = message["more_body"]
                body = {"type": "http.response.body", "body": message["body"], "more_body": more}
                await send(body)


class Peer:
    """One process: a view, an application, and the middleware."""

    def __init__(self, pool: Pool, address: str, app: Any = None, **options: Any) -> None:
        self.view = LeaderView("e")
        self.app = app or App()
        options = {"secret": SECRET, "trust": TRUST, **options}
        self.middleware = asgi.LeaderMiddleware(self.app, pool=pool, view=self.view, **options)
        pool.apps[address] = self.middleware


async def leading(place: Place, use: Callable[[Term], Any]) -> None:
    session = await place.open()
    async with session.campaign("e", name="a", meta={"address": A}) as term:
        await use(term)


@virtual
async def test_the_leader_serves_and_the_others_forward(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        other = await place.open()
        async with b.view.following(other):
            await until(lambda: b.view.leader)
            with a.view.leading(term):
                assert (await call(a.middleware))[0] == 200
                status, body, headers = await call(
                    b.middleware, b"/x?y=1", "POST", [(b"content-length", b"2")], chunks(b"hi")
                )
        assert (status, body) == (200, b"hi")
        assert b"connection" not in headers
        assert a.app.scopes[-1]["doyen.term"] is term
        assert b.app.scopes == []
        (sent,) = pool.sent
        assert dict(sent.headers)[b"doyen-token"] == b"%d" % term.token
        assert dict(sent.headers)[b"doyen-hops"] == b"1"
        assert sent.url.target == b"/x?y=1"

    await leading(place, use)


async def chunks(*data: bytes) -> AsyncIterator[bytes]:
    for chunk in data:
        yield chunk


@virtual
async def test_bodies_are_streamed_both_ways_at_the_pace_of_the_reader(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    produced = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal produced
        while True:
            produced += 1
            yield b"x"

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            scope = http_scope(b"/", "POST", [(b"transfer-encoding", b"chunked")])
            exchange = Exchange(b.middleware, scope, endless())
            response = await exchange.response()
            stream = response.aiter_stream()
            for _ in range(10):
                await anext(stream)
            await asyncio.sleep(10)
            assert 10 <= produced < 30
            exchange.task.cancel()
            await asyncio.wait({exchange.task})

    await leading(place, use)


@virtual
async def test_headers_of_doyen_are_dropped_unless_they_are_signed(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    forged = [(b"doyen-token", b"999999"), (b"doyen-hops", b"2"), (b"doyen-signature", b"0" * 64)]
    forged += [(b"doyen_token", b"999999"), (b"doyen_-hops", b"2")]  # for WSGI these are the same

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            for peer in (a, b):
                assert (await call(peer.middleware, headers=forged))[0] == 200
            for scope in a.app.scopes:
                assert not [name for name, _ in scope["headers"] if name.startswith(b"doyen")]
            assert not [name for name, _ in pool.sent[0].headers if name.startswith(b"doyen_")]
            await call(a.middleware, b"/healthz", headers=forged)
            assert a.app.scopes[-1]["headers"] == []

    await leading(place, use)


@virtual
async def test_a_signature_holds_for_one_request_only(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    b.view.observed(leader(1_000_000))
    assert (await call(b.middleware, b"/x"))[0] == 503
    signed = [each for each in pool.sent[0].headers if each[0].startswith(b"doyen-")]

    async def use(term: Term) -> None:
        with a.view.leading(term):
            status, body, _ = await call(a.middleware, b"/x", headers=signed)
            assert (status, b"later leader" in body) == (503, True)
            assert (await call(a.middleware, b"/other", headers=signed))[0] == 200
            assert (await call(a.middleware, b"/x", "DELETE", headers=signed))[0] == 200

    await leading(place, use)


@virtual
async def test_requests_for_an_earlier_term_are_served_and_for_a_later_one_not(
    place: Place,
) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        with a.view.leading(term):
            for token, status in [(term.token - 1, 200), (term.token, 200), (term.token + 1, 503)]:
                b.view.observed(leader(token))
                assert (await call(b.middleware))[0] == status
            assert len(a.app.scopes) == 2

    await leading(place, use)


@pytest.mark.parametrize(
    "address",
    [
        7,
        "http://169.254.169.254:80",
        "http://a",
        "a:80",
        "ftp://a:80",
        "http://user@a:80",
        "http://a:80/path",
        "http://a:80?x",
        "http://a:99999",
    ],
    ids=str,
)
@virtual
async def test_nothing_is_sent_to_an_address_that_is_not_trusted(
    place: Place, address: object
) -> None:
    pool = Pool()
    b = Peer(pool, B)
    b.view.observed(leader(7, address))
    status, body, _ = await call(b.middleware)
    assert (status, body.startswith(b"not executed: ")) == (503, True)
    assert pool.sent == []


def test_trust_and_a_secret_are_required() -> None:
    view = LeaderView("e")
    with pytest.raises(TypeError):
        ForwardingRules(view=view, secret=SECRET)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="16 bytes"):
        ForwardingRules(view=view, secret="short", trust=TRUST)
    with pytest.raises(ConfigError, match="not a string"):
        ForwardingRules(view=view, secret=SECRET, trust=A)


def test_processes_with_different_secrets_are_reported_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (
        ForwardingRules(view=LeaderView("e"), secret=f"{SECRET} {each}", trust=TRUST)
        for each in "ab"
    )
    to = SendTo(leader(7), "http", "a", 80, 1)

    def received(*, secret_of: ForwardingRules) -> object:
        return ours.read(secret_of.outgoing(to, [], b"GET", b"/", body=False), b"GET", b"/")

    assert received(secret_of=ours) is not None
    assert ours.read([(b"doyen-token", b"7")], b"GET", b"/") is None
    assert caplog.messages == []
    for _ in range(3):
        assert received(secret_of=theirs) is None
    (line,) = caplog.messages
    assert "event=forwarding_unverified election=e" in line
    assert "set the same secret in all processes" in line
    assert "more=" not in line
    monkeypatch.setattr(forwarding, "WARN_EVERY_S", 0.0)
    received(secret_of=theirs)
    assert caplog.messages[1] == f"{line} more=2"


@virtual
async def test_a_loop_ends_after_two_hops(place: Place) -> None:
    """Each process believes that the other leads."""
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    a.view.observed(leader(8, B))
    b.view.observed(leader(7, A))
    status, body, _ = await call(b.middleware)
    assert (status, b"forwarded 2 times" in body) == (508, True)
    assert len(pool.sent) == 2


@virtual
async def test_a_request_is_forwarded_again_only_to_a_later_leader(place: Place) -> None:
    """The address in the record leads to a process that does not lead: an address that several
    processes share, or a leader that has not begun to serve."""
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    a.view.observed(leader(7))
    b.view.observed(leader(7))
    began = asyncio.get_running_loop().time()
    status, body, _ = await call(b.middleware)
    assert (status, b"leads to this process, which does not lead" in body) == (503, True)
    assert len(pool.sent) == 1
    assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)


@virtual
async def test_a_leader_that_is_known_to_others_before_it_serves_is_waited_for(
    place: Place,
) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        a.view.observed(leader(term.token))
        b.view.observed(leader(term.token))
        requests = [asyncio.create_task(call(each.middleware)) for each in (a, b)]
        await asyncio.sleep(0.5)
        with a.view.leading(term):
            assert [(await each)[0] for each in requests] == [200, 200]
        assert len(pool.sent) == 2

    await leading(place, use)


@virtual
async def test_a_former_leader_forwards_to_its_successor(place: Place) -> None:
    """Another process has not noticed yet, and sends to the former leader."""
    pool = Pool()
    a, b, c = Peer(pool, A), Peer(pool, B), Peer(pool, "http://c:80", trust={A, B})

    async def before(term: Term) -> None:
        with a.view.leading(term):
            pass
        for each in (a, b, c):
            each.view.observed(leader(term.token))
        status, body, _ = await call(a.middleware)
        assert (status, b"the term of this process has ended" in body) == (503, True)

    await leading(place, before)
    request = asyncio.create_task(call(c.middleware))
    await asyncio.sleep(0.5)

    async def after(term: Term) -> None:
        with b.view.leading(term):
            a.view.observed(leader(term.token, B))
            assert (await request)[0] == 200
        assert [dict(each.headers)[b"doyen-hops"] for each in pool.sent] == [b"1", b"2"]

    await leading(place, after)


@virtual
async def test_an_address_that_is_published_later_is_waited_for(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        with a.view.leading(term):
            b.view.observed(leader(term.token, None))
            request = asyncio.create_task(call(b.middleware))
            await asyncio.sleep(1)
            b.view.observed(leader(term.token, A))
            assert (await request)[0] == 200

    await leading(place, use)
    b.view.observed(leader(9, None))
    status, body, _ = await call(b.middleware)
    assert (status, b"has no address" in body) == (503, True)


class Frozen:
    """Takes requests, and never answers; or only begins to."""

    def __init__(self, *, starts: bool) -> None:
        self._starts = starts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._starts:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.Event().wait()


@pytest.mark.parametrize("starts", [False, True])
@virtual
async def test_nobody_waits_for_a_leader_that_was_replaced(place: Place, starts: bool) -> None:
    pool = Pool()
    b = Peer(pool, B)
    pool.apps[A] = Frozen(starts=starts)
    b.view.observed(leader(7))
    request = asyncio.create_task(call(b.middleware, method="POST"))
    await asyncio.sleep(30)
    assert not request.done()
    b.view.observed(leader(8, B))
    await asyncio.sleep(1)
    assert not request.done()
    if starts:
        with pytest.raises(httpcore2.RemoteProtocolError, match="replaced"):
            await request
    else:
        status, body, _ = await request
        assert (status, b"may have been carried out" in body) == (502, True)
    assert len(pool.sent) == 1
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()


@virtual
async def test_a_client_that_goes_before_the_end_of_its_request_is_not_waited_for(
    place: Place,
) -> None:

    class Patient(Pool):
        """Waits for an answer even if the request could not be written, as httpcore does."""

        async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
            with suppress(httpcore2.WriteError):
                async for _ in request.stream:  # type: ignore[union-attr]
                    pass
            await asyncio.Event().wait()
            raise AssertionError

    b = Peer(Patient(), B)
    b.view.observed(leader(7))
    messages = [
        {"type": "http.request", "body": b"half", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    scope = http_scope(b"/", "POST", [(b"content-length", b"8")])
    async with asyncio.timeout(1):
        await b.middleware(scope, receive, None)  # type: ignore[arg-type]
    assert messages == []


@virtual
async def test_a_request_waits_for_a_leader_and_is_sent_once(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    waiting = asyncio.create_task(call(b.middleware))
    await asyncio.sleep(1)
    assert not waiting.done()

    async def use(term: Term) -> None:
        with a.view.leading(term):
            b.view.observed(leader(term.token))
            assert (await waiting)[0] == 200
        assert len(pool.sent) == 1

    await leading(place, use)


@virtual
async def test_waiting_is_bounded_in_time_and_number(place: Place) -> None:
    b = Peer(Pool(), B, wait_s=3, max_waiting=2)
    began = asyncio.get_running_loop().time()
    waiting = [asyncio.create_task(call(b.middleware)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    status, body, _ = await call(b.middleware)
    assert (status, b"many requests wait" in body) == (503, True)
    assert [(await each)[0] for each in waiting] == [503, 503]
    assert asyncio.get_running_loop().time() - began == pytest.approx(3)


@virtual
async def test_a_leader_that_refuses_connections_is_tried_again(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            app = pool.apps.pop(A)
            waiting = asyncio.create_task(call(b.middleware))
            await asyncio.sleep(1)
            pool.apps[A] = app
            assert (await waiting)[0] == 200
            assert len(pool.sent) == 1

    await leading(place, use)


@pytest.mark.parametrize("body", [None, b"data"])
@virtual
async def test_a_process_that_comes_to_lead_serves_what_it_could_not_forward(
    place: Place, body: bytes | None
) -> None:
    b = Peer(Pool(), B)
    b.view.observed(leader(0))
    headers = [] if body is None else [(b"content-length", b"4")]
    data = None if body is None else chunks(body)
    request = asyncio.create_task(call(b.middleware, method="POST", headers=headers, body=data))
    await asyncio.sleep(1)

    async def use(term: Term) -> None:
        with b.view.leading(term):
            assert (await request)[:2] == (200, body or b"")

    await leading(place, use)


@pytest.mark.parametrize("error", [httpcore2.ReadError, httpcore2.RemoteProtocolError])
@virtual
async def test_nothing_is_sent_again_that_may_have_been_carried_out(
    place: Place, error: type[Exception]
) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    pool.fails.append(error("the connection was lost"))

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            status, body, _ = await call(b.middleware, method="POST")
        assert (status, b"may have been carried out" in body) == (502, True)
        assert len(pool.sent) == 1

    await leading(place, use)


class Streaming:
    """Never ends a response, nor a websocket."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.accept"})
        elif scope["path"] == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled += 1


@virtual
async def test_the_end_of_the_term_ends_what_is_being_served(place: Place) -> None:
    app = Streaming()
    a = Peer(Pool(), A, app)
    session = await place.open()
    socket: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        socket.append(message)

    with suppress(LeadershipLost):
        async with session.campaign("e") as term:
            with a.view.leading(term):
                plain = asyncio.create_task(call(a.middleware, b"/"))
                stream = asyncio.create_task(call(a.middleware, b"/stream"))
                scope = http_scope(kind="websocket")
                ws = asyncio.create_task(a.middleware(scope, receive, send))
                await asyncio.sleep(1)
                place.end_lease(session)
                await asyncio.sleep(100)
    await ws
    status, body, _ = await plain
    assert (status, b"may have been carried out" in body) == (503, True)
    with pytest.raises(httpcore2.RemoteProtocolError, match="no longer leads"):
        await stream
    assert [message.get("code") for message in socket] == [None, 1012]
    assert app.cancelled == 3
    assert (await call(asgi.LeaderRoute(a.view)))[0] == 503


@pytest.mark.parametrize("checks", [False, True])
@virtual
async def test_a_response_without_a_body_is_not_sent_after_the_term(
    place: Place, checks: bool
) -> None:

    async def empty(scope: Any, receive: Any, send: Any) -> None:
        scope["doyen.term"]._lose("over")
        if checks:
            scope["doyen.term"].check()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    a = Peer(Pool(), A, empty)
    session = await place.open()
    with suppress(LeadershipLost):
        async with session.campaign("e") as term:
            with a.view.leading(term):
                answering = asyncio.create_task(call(a.middleware))
                await asyncio.wait({answering})
    status, body, _ = await answering
    assert (status, b"may have been carried out" in body) == (503, True)


@pytest.mark.parametrize("error", [OSError(113, "no route to host"), TimeoutError(), None])
@virtual
async def test_a_websocket_waits_like_a_request_if_the_leader_cannot_be_reached(
    place: Place, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    async def connecting(self: Any) -> Any:
        if error is not None:
            raise error
        await asyncio.sleep(1000)

    monkeypatch.setattr("websockets.asyncio.client.connect.open_tcp_connection", connecting)
    b = Peer(Pool(), B, wait_s=3)
    b.view.observed(Leader("e", "a", 7, {"address": A}))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await b.middleware(http_scope(kind="websocket"), receive, send)
    assert sent[0]["reason"].startswith("not executed: the leader cannot be reached")


@virtual
async def test_websockets_without_a_leader_are_refused_and_health_is_served(place: Place) -> None:
    b = Peer(Pool(), B, wait_s=0)
    socket: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        socket.append(message)

    await b.middleware(http_scope(kind="websocket"), receive, send)
    assert [message["code"] for message in socket] == [1013]
    denying = http_scope(kind="websocket") | {"extensions": {"websocket.http.response": {}}}
    await b.middleware(denying, receive, send)
    assert socket[1]["status"] == 503
    assert socket[2]["body"] == b"not executed: there is no leader\n"
    assert (await call(b.middleware, b"/healthz"))[0] == 200
    await b.middleware({"type": "lifespan"}, receive, send)
    assert b.app.scopes[-1]["type"] == "lifespan"


@pytest.mark.parametrize(
    "headers",
    [
        [(b"content-length", b"1"), (b"content-length", b"2")],
        [(b"content-length", b"1"), (b"transfer-encoding", b"chunked")],
        [(b"content-length", b"+1")],
    ],
    ids=str,
)
@virtual
async def test_a_body_of_two_lengths_is_refused(place: Place, headers: Any) -> None:
    pool = Pool()
    b = Peer(pool, B)
    b.view.observed(leader(7))
    assert (await call(b.middleware, method="POST", headers=headers))[0] == 400
    assert pool.sent == []


@virtual
async def test_headers_of_one_connection_are_not_passed_on(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            headers = [(b"connection", b"x-own, keep-alive"), (b"x-own", b"1"), (b"te", b"gzip")]
            await call(b.middleware, headers=[*headers, (b"host", b"h"), (b"x-kept", b"1")])
        names = {name for name, _ in a.app.scopes[0]["headers"]}
        assert names == {b"host", b"x-kept", b"x-forwarded-proto"}

    await leading(place, use)


@virtual
async def test_followers_can_redirect_instead(place: Place) -> None:
    b = Peer(Pool(), B, redirect=True)
    b.view.observed(leader(7))
    status, _, headers = await call(b.middleware, b"/x?y=1")
    assert (status, headers[b"location"]) == (307, b"http://a:80/x?y=1")


@pytest.mark.parametrize("headers", [[], [(b"host", b"h"), (b"connection", b"host")]], ids=str)
@virtual
async def test_a_request_without_host_gets_that_of_the_leader(place: Place, headers: Any) -> None:
    """HTTP/1.0 does not require it, and HTTP/1.1, by which requests are forwarded, does."""
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            await call(b.middleware, headers=headers)
        assert dict(a.app.scopes[0]["headers"])[b"host"] == b"a:80"

    await leading(place, use)


TWO_HOSTS = [(b"host", b"h"), (b"host", b"h")]


@pytest.mark.parametrize(("headers", "status"), [(TWO_HOSTS, 400), (TWO_HOSTS[:1], 502)])
@virtual
async def test_a_request_that_cannot_be_written_is_not_executed(
    place: Place, headers: Any, status: int
) -> None:
    """If it was written, it may have been carried out."""
    b = Peer(Pool(), B)
    b.view.observed(leader(7))
    backend = httpcore2.AsyncMockBackend([])
    async with httpcore2.AsyncConnectionPool(network_backend=backend) as pool:
        b.middleware._pool = pool
        got, body, _ = await call(b.middleware, headers=headers)
    assert (got, body.startswith(b"not executed")) == (status, status == 400)


async def handshake(
    app: Any, target: bytes = b"/", headers: Any = (), **more: Any
) -> list[dict[str, Any]]:
    """What a server is told that can answer a websocket's handshake with a response."""
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = http_scope(target, headers=headers, kind="websocket")
    await app(scope | {"extensions": {"websocket.http.response": {}}} | more, receive, send)
    return sent


@pytest.mark.parametrize("target", ELSEWHERE, ids=str)
@pytest.mark.parametrize("redirect", [False, True])
@virtual
async def test_a_target_without_a_slash_is_refused(
    place: Place, redirect: bool, target: bytes
) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B, redirect=redirect)

    async def use(term: Term) -> None:
        b.view.observed(leader(term.token))
        with a.view.leading(term):
            for each in (a, b):
                status, body, headers = await call(each.middleware, target)
                assert (status, b"does not begin with" in body) == (400, True)
                assert b"location" not in headers
                assert (await handshake(each.middleware, target))[0]["status"] == 400
        assert pool.sent == []
        assert a.app.scopes == []

    await leading(place, use)


@virtual
async def test_a_target_with_two_slashes_leads_to_the_leader(place: Place) -> None:
    pool = Pool()
    a, b = Peer(pool, A), Peer(pool, B)
    c = Peer(pool, "http://c:80", redirect=True)

    async def use(term: Term) -> None:
        for each in (b, c):
            each.view.observed(leader(term.token))
        with a.view.leading(term):
            assert (await call(b.middleware, b"//evil.example/x"))[0] == 200
        assert (pool.sent[0].url.host, pool.sent[0].url.target) == (b"a", b"//evil.example/x")
        (start, _) = await handshake(c.middleware, b"//evil.example/x")
        assert dict(start["headers"])[b"location"] == b"http://a:80//evil.example/x"

    await leading(place, use)


@pytest.mark.parametrize(
    ("sent", "target"), [(b"/p/x", b"/x"), (b"/p", b"/p"), (b"/p@x", b"/p@x"), (b"/x", b"/x")]
)
def test_a_prefix_is_removed_where_a_path_remains(sent: bytes, target: bytes) -> None:
    scope = http_scope(sent) | {"root_path": "/p"}
    assert asgi._target(scope) == target


@pytest.mark.parametrize("host", [b"h:port", b"h:99999", b"[", b"a/b", b"u:1@h", b":80"], ids=str)
@virtual
async def test_a_websocket_whose_host_is_malformed_is_refused(place: Place, host: bytes) -> None:
    b = Peer(Pool(), B)
    b.view.observed(leader(7))
    start, body = await handshake(b.middleware, headers=[(b"host", host)])
    assert (start["status"], body["body"].startswith(b"not executed: ")) == (400, True)


@virtual
async def test_a_websocket_with_a_target_that_is_no_uri_is_refused(place: Place) -> None:
    b = Peer(Pool(), B)
    b.view.observed(leader(7))
    assert (await handshake(b.middleware, b"/x#y"))[0]["status"] == 400


@pytest.mark.parametrize(
    ("address", "headers", "host"),
    [(A, [(b"host", b"h:81")], "h:81"), (A, [], "a"), ("http://[::1]:81", [], "[::1]:81")],
)
@virtual
async def test_the_leader_sees_the_host_of_a_websocket(
    place: Place, address: str, headers: Any, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or its own, if the client has stated none."""
    seen: list[str] = []

    async def connecting(self: Any) -> Any:
        uri = self.ws_uri
        seen.append(build_host(uri.host, uri.port, uri.secure))
        raise ConnectionRefusedError

    monkeypatch.setattr("websockets.asyncio.client.connect.open_tcp_connection", connecting)
    b = Peer(Pool(), B, wait_s=0, trust={address})
    b.view.observed(leader(7, address))
    await handshake(b.middleware, headers=headers)
    assert seen == [host]
