"""Applications of Starlette and FastAPI that campaign: their lifespan, tasks and dependency, on the
real frameworks in virtual time, and on uvicorn with real processes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from fastapi import Depends, FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.websockets import WebSocket

import doyen
from doyen import LeadershipLost, SessionClosed, StaleToken, Term
from doyen.errors import ConfigError
from doyen.integrations.asgi import LeaderMiddleware, LeaderRoute
from doyen.integrations.starlette import Leadership
from doyen.testing.faults import Faults
from forward_kit import SECRET, Pool, call, http_scope
from forward_peers import free_ports
from framework_crew import PROMPT_S, crew
from support import (
    STOP_BUDGET_S,
    TTL_S,
    Place,
    now,
    run_in_place,
    soon,
    until,
    until_blocking,
    virtual,
)

A, B = "http://a:80", "http://b:80"


class Process:
    """A FastAPI application with one task, as one process runs it."""

    def __init__(
        self, place: Place, name: str, faults: Faults | None = None, **options: Any
    ) -> None:
        self.name, self.working = name, False
        self.leader = Leadership("e", lambda: place.session(faults), name=name, **options)
        self.app = FastAPI(lifespan=self.leader.lifespan)
        self.lines: list[tuple[float, str]] = []
        self.terms: list[Term] = []
        self.stop_s = 0.0
        self.fails = asyncio.Event()
        self.error: Exception = RuntimeError("the work failed")
        self.leader.task(self.work)
        depends = Depends(self.leader)

        @self.app.get("/token")
        async def token(term: Term = depends) -> int:
            return term.token

        @self.app.websocket("/socket")
        async def accept(socket: WebSocket, term: Term = depends) -> None:
            await socket.accept()

        self.app.add_route("/healthz", self.leader.health)
        self.app.routes.append(Route("/leader", LeaderRoute(self.leader.view)))

    async def work(self, term: Term) -> None:
        self.terms.append(term)
        self.lines.append((now(), "begins"))
        self.working = True
        try:
            await self.fails.wait()
            self.fails.clear()
            raise self.error
        finally:
            try:
                await asyncio.sleep(self.stop_s)
            finally:
                self.working = False
                self.lines.append((now(), "ended"))

    def running(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """Run the lifespan of the application, as a server does."""
        return self.app.router.lifespan_context(self.app)

    async def accepts(self) -> bool:
        """Whether a request would be accepted."""
        try:
            await self.leader()
        except HTTPException:
            return False
        return True

    async def get(self, path: bytes = b"/token") -> int:
        return (await call(self.app, path))[0]


def in_line(place: Place, name: str) -> bool:
    return place.line()[-1:] == [name]


@contextlib.asynccontextmanager
async def two(place: Place) -> AsyncIterator[tuple[Process, Process]]:
    """Two processes, of which the first leads."""
    a, b = Process(place, "a"), Process(place, "b")
    async with contextlib.AsyncExitStack() as running:
        for each in (a, b):
            await running.enter_async_context(each.running())
            await until(partial(in_line, place, each.name))
        await until(lambda: a.terms)
        yield a, b


@virtual
async def test_the_leader_gets_its_term_and_the_others_answer_503(place: Place) -> None:
    async with two(place) as (a, b):
        assert (await call(a.app, b"/token"))[:2] == (200, b"%d" % a.terms[0].token)
        status, body, headers = await call(b.app, b"/token")
        assert (status, headers[b"retry-after"]) == (503, b"1")
        assert b"not executed" in body
        assert (a.leader.leads, b.leader.leads) == (True, False)
        assert (await a.get(b"/leader"), await b.get(b"/leader")) == (200, 503)
        assert (await a.get(b"/healthz"), await b.get(b"/healthz")) == (200, 200)
        leader = await a.leader.session.leader("e")
        assert leader is not None
        assert leader.name == "a"
    with pytest.raises(SessionClosed, match="does not run"):
        _ = a.leader.session


@virtual
async def test_the_end_of_the_lifespan_hands_over_at_once(place: Place) -> None:
    a, b = Process(place, "a"), Process(place, "b")
    async with contextlib.AsyncExitStack() as running:
        async with a.running():
            await until(lambda: a.leader.leads)
            await running.enter_async_context(b.running())
            await until(lambda: place.line() == ["a", "b"])
            ends = now()
        await until(lambda: b.terms)
        assert b.lines[0][0] - ends <= 0.05
        assert [line for _, line in a.lines] == ["begins", "ended"]
        assert await a.get() == 503


@virtual
async def test_a_leader_that_stops_its_tasks_answers_503(place: Place) -> None:
    async with two(place) as (a, b):
        a.stop_s = STOP_BUDGET_S / 2
        resigning = asyncio.create_task(b.leader.session.resign("e"))
        await until(lambda: not a.terms[0].valid)
        assert a.working
        assert (await a.get(), await b.get()) == (503, 503)
        await resigning


@virtual
async def test_nobody_else_leads_before_the_tasks_have_ended(place: Place) -> None:
    async with two(place) as (a, b):
        a.stop_s = STOP_BUDGET_S / 2
        await b.leader.session.resign("e")
        await until(lambda: b.terms)
        assert await b.get() == 200
        assert a.lines[1][1] == "ended"
        assert a.lines[1][0] <= b.lines[0][0]


async def trouble(place: Place, seed: int) -> int:
    """Three processes that are cut off, stopped, started and ordered to resign. At no time do tasks
    run in two of them, or do two accept requests. Returns how many terms there were."""
    chance = random.Random(seed)
    faults = [Faults(seed=seed + number) for number in range(3)]
    processes = [Process(place, name, each) for name, each in zip("abc", faults, strict=True)]
    running: dict[str, asyncio.Event] = {}
    found: list[str] = []

    async def run(process: Process, stop: asyncio.Event) -> None:
        async with process.running():
            await stop.wait()

    def stopped(name: str, _: object) -> None:
        del running[name]

    async def judge() -> None:
        while True:
            working = [each.name for each in processes if each.working]
            leading = [each.name for each in processes if await each.accepts()]
            if len(working) > 1 or len(leading) > 1:
                found.append(f"tasks of {working} and requests of {leading} at {now()}")
            await asyncio.sleep(0.05)

    judging = asyncio.create_task(judge())
    async with asyncio.TaskGroup() as group:
        for _ in range(40):
            process = chance.choice(processes)
            process.stop_s = chance.uniform(0.0, 0.8 * STOP_BUDGET_S)
            match chance.randrange(4):
                case 0 | 1 if process.name not in running:
                    stop = running[process.name] = asyncio.Event()
                    faults["abc".index(process.name)].heal()
                    lasting = group.create_task(run(process, stop))
                    lasting.add_done_callback(partial(stopped, process.name))
                case 1 if process.working:
                    process.error = LeadershipLost("found out by the task")
                    process.fails.set()
                case 2 if process.name in running:
                    running[process.name].set()
                case 3 if process.name in running:
                    cut = faults["abc".index(process.name)]
                    cut.cut()
                    soon(chance.uniform(0.5, 2 * TTL_S), cut.heal)
            await asyncio.sleep(chance.uniform(0.0, 4.0))
        for each in faults:
            each.heal()
        for stop in [*running.values()]:
            stop.set()
    judging.cancel()
    assert not found
    terms = sorted((term for each in processes for term in each.terms), key=lambda t: t.ended_at)
    tokens = [term.token for term in terms]
    assert tokens == sorted({*tokens})
    return len(tokens)


async def trouble_through(seed: int, place: Place) -> None:
    assert await trouble(place, seed) > 3


@pytest.mark.parametrize("seed", range(6))
def test_at_most_one_process_works_and_accepts_requests(seed: int) -> None:
    run_in_place(partial(trouble_through, seed))


def test_tasks_that_outlive_their_term_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken rule: the tasks are cancelled without waiting for them."""

    async def lead(self: Leadership, term: Term) -> None:
        tasks = [asyncio.ensure_future(task(term)) for task in self._tasks]
        try:
            await asyncio.Event().wait()
        finally:
            for task in tasks:
                task.cancel()

    monkeypatch.setattr(Leadership, "_lead", lead)
    with pytest.raises(AssertionError, match="tasks of"):
        run_in_place(partial(trouble_through, 0))


def test_a_term_that_is_over_and_accepts_requests_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken rule: the validity of the term is not looked at."""

    kept: dict[Leadership, Term] = {}

    async def last_known(self: Leadership) -> Term:
        term = self.view.term or kept.get(self)
        if term is None:
            raise HTTPException(503)
        return kept.setdefault(self, term)

    monkeypatch.setattr(Leadership, "__call__", last_known)
    with pytest.raises(AssertionError, match="requests of"):
        run_in_place(partial(trouble_through, 0))


@virtual
async def test_after_a_loss_the_process_campaigns_again(place: Place) -> None:
    a = Process(place, "a")
    async with a.running():
        await until(lambda: a.terms)
        place.end_lease(a.leader.session)
        await until(lambda: len(a.terms) == 2)
        assert a.terms[0].token < a.terms[1].token
        assert not a.terms[0].valid
        assert await a.get() == 200
        assert [line for _, line in a.lines] == ["begins", "ended", "begins"]


@virtual
async def test_a_task_that_fails_is_reported_and_another_process_leads(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = asyncio.Event()
    with pytest.raises(RuntimeError, match="the work failed"):
        async with two(place) as (a, b):

            @b.leader.task
            async def another(term: Term) -> None:
                try:
                    await asyncio.Event().wait()
                finally:
                    stopped.set()

            await b.leader.session.resign("e")
            await until(lambda: b.terms)
            failed_at = now()
            b.fails.set()
            await until(lambda: len(a.terms) == 2)
            assert a.lines[-1][0] - failed_at <= 0.05
            assert stopped.is_set()
            assert b.leader.failure is b.error
            assert (await b.get(), await b.get(b"/healthz")) == (503, 503)
            await asyncio.sleep(60)
            assert place.line() == ["a"]
    (record,) = [each for each in caplog.records if "candidacy_failed" in each.message]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


@virtual
async def test_several_tasks_that_fail_are_all_reported(place: Place) -> None:
    leader = Leadership("e", place.session)
    both = asyncio.Barrier(2)

    async def fails(term: Term) -> None:
        await both.wait()
        raise ValueError(str(term.token))

    leader.task(fails)
    leader.task(fails)
    with pytest.raises(ExceptionGroup) as raised:
        async with leader.lifespan():
            await until(lambda: leader.failure)
    assert [type(each) for each in raised.value.exceptions] == [ValueError, ValueError]


@pytest.mark.parametrize("error", [LeadershipLost("soon"), StaleToken("a later term has written")])
@virtual
async def test_a_task_that_finds_its_term_over_ends_it(place: Place, error: Exception) -> None:
    a = Process(place, "a")
    a.error = error
    async with a.running():
        await until(lambda: a.terms)
        a.fails.set()
        await until(lambda: len(a.terms) == 2)
        assert a.leader.failure is None


@virtual
async def test_tasks_may_end_their_cancellation_in_leadership_lost(place: Place) -> None:
    leader = Leadership("e", place.session)
    terms: list[Term] = []

    @leader.task
    async def work(term: Term) -> None:
        terms.append(term)
        try:
            await asyncio.Event().wait()
        finally:
            raise LeadershipLost("stopped")

    async with leader.lifespan():
        await until(lambda: terms)
        place.end_lease(leader.session)
        await until(lambda: len(terms) == 2)
    assert leader.failure is None
    assert len(terms) == 2


@virtual
async def test_leadership_goes_on_when_a_task_returns(place: Place) -> None:
    leader = Leadership("e", place.session)
    migrated: list[int] = []

    @leader.task
    async def migrate(term: Term) -> None:
        migrated.append(term.token)

    async with leader.lifespan():
        await until(lambda: migrated)
        await asyncio.sleep(60)
        assert leader.leads
        assert len(migrated) == 1


@virtual
async def test_a_lifespan_may_run_again_but_not_twice_at_a_time(place: Place) -> None:
    a = Process(place, "a")
    for _ in range(2):
        a.terms.clear()
        async with a.running():
            await until(lambda: a.terms)
            with pytest.raises(SessionClosed, match="runs already"):
                async with a.running():
                    pass
            assert await a.get() == 200


@virtual
async def test_a_lifespan_that_is_cancelled_waits_for_its_tasks(place: Place) -> None:
    a = Process(place, "a")
    a.stop_s = STOP_BUDGET_S / 2

    async def serve() -> None:
        async with a.running():
            await until(lambda: a.terms)

    serving = asyncio.create_task(serve())
    await until(lambda: a.leader._ending)
    assert a.working
    serving.cancel()
    await asyncio.wait({serving})
    assert serving.cancelled()
    assert not a.working
    assert place.line() == []


@virtual
async def test_starlette_and_a_lifespan_of_its_own(place: Place) -> None:
    leader = Leadership("e", place.session)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with leader.lifespan(app):
            yield

    async def token(request: Request) -> Response:
        return PlainTextResponse(str((await leader()).token))

    app = Starlette(lifespan=lifespan, routes=[Route("/", token)])
    assert (await call(app))[0] == 503
    messages: asyncio.Queue[Any] = asyncio.Queue()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    serving = asyncio.create_task(app({"type": "lifespan", "state": {}}, messages.get, send))
    await messages.put({"type": "lifespan.startup"})
    await until(lambda: leader.leads)
    assert (await call(app))[0] == 200
    await messages.put({"type": "lifespan.shutdown"})
    await serving
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


@virtual
async def test_a_websocket_is_refused_where_nobody_leads(place: Place) -> None:
    a = Process(place, "a")
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {**http_scope(b"/socket", kind="websocket"), "subprotocols": []}
    scope["extensions"] = {"websocket.http.response": {}}
    await a.app(dict(scope), receive, send)
    assert (sent[0]["type"], sent[0]["status"]) == ("websocket.http.response.start", 503)
    sent.clear()
    async with a.running():
        await until(lambda: a.leader.leads)
        await a.app(dict(scope), receive, send)
        assert sent[0]["type"] == "websocket.accept"


@virtual
async def test_the_middleware_forwards_with_the_same_view(place: Place) -> None:
    pool = Pool()
    async with contextlib.AsyncExitStack() as running:
        apps = {}
        for name, address in (("a", A), ("b", B)):
            process = Process(place, name, meta={"address": address})
            await running.enter_async_context(process.running())
            await until(partial(in_line, place, name))
            options: Any = {"view": process.leader.view, "secret": SECRET, "trust": {A, B}}
            apps[name] = pool.apps[address] = LeaderMiddleware(process.app, pool=pool, **options)
        assert (await call(apps["b"], b"/token"))[0] == 200
        assert len(pool.sent) == 1


def test_sigterm_ends_the_wait_for_a_store(caplog: pytest.LogCaptureFixture) -> None:
    """The server notes the signal, and looks at that only when the application has started."""
    noted: list[int] = []
    leader = Leadership("e", lambda: doyen.connect("redis://127.0.0.1:9", wait_s=60))

    async def start() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            starting = group.create_task(
                contextlib.AsyncExitStack().enter_async_context(leader.lifespan())
            )
            waited_for = partial(until_blocking, lambda: "store_waited_for" in caplog.text)
            await asyncio.to_thread(waited_for)
            signal.raise_signal(signal.SIGTERM)
            await asyncio.wait({starting})

    handler = signal.signal(signal.SIGTERM, lambda number, _: noted.append(number))
    try:
        with pytest.RaisesGroup(pytest.RaisesExc(SessionClosed, match="SIGTERM came before")):
            asyncio.run(start())
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert noted == [signal.SIGTERM]


def test_mistakes_are_reported_when_the_object_is_made() -> None:
    with pytest.raises(ConfigError, match="on_failure"):
        Leadership("e", on_failure="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Leadership("")
    with pytest.raises(ConfigError, match="coroutine function"):
        Leadership("e").task(print)  # type: ignore[type-var]


@pytest.mark.parametrize("module", ["asgi", "wsgi"])
def test_a_missing_library_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "httpcore2", None)
    monkeypatch.delitem(sys.modules, f"doyen.integrations.{module}", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'doyen\[forward\]'"):
        import_module(f"doyen.integrations.{module}")


@pytest.mark.parametrize("module", ["apscheduler", "celery", "flask", "rq", "starlette"])
def test_a_missing_framework_is_named_with_its_extra(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in [each for each in sys.modules if each.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, each)
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"doyen.integrations.{module}", raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'doyen\[{module}\]'"):
        import_module(f"doyen.integrations.{module}")


def get(port: int, path: str) -> int:
    """The status of a GET request; 0 without an answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


def test_leaders_on_uvicorn_are_killed_terminated_and_fail(tmp_path: Path) -> None:
    with contextlib.ExitStack() as ends, crew("starlette", tmp_path, 0) as crewed:
        ports = {crewed.start("--port", str(port)).pid: port for port in free_ports(3)}
        processes = {each.pid: each for each in crewed.processes}
        until_blocking(
            lambda: all(get(port, "/token") in (200, 503) for port in ports.values()), within_s=60
        )
        until_blocking(lambda: [get(port, "/token") for port in ports.values()].count(200) == 1)
        killed = crewed.next_term()
        crewed.signal(killed, signal.SIGKILL)
        terminated = crewed.next_term(killed)
        port = ports[terminated.pid]
        until_blocking(lambda: get(port, "/token") == 200)
        # Servers end requests before the lifespan. This one lasts as long as the term.
        hanging = ends.enter_context(ThreadPoolExecutor()).submit(get, port, "/hang")
        until_blocking(lambda: get(port, "/hangs") == 200)
        took_s, failed = crewed.hand_over(terminated)
        assert took_s < PROMPT_S
        assert crewed.ended_before(terminated, failed)
        assert hanging.result() == 200
        assert get(ports[failed.pid], "/fail") == 200
        for term in (terminated, failed):
            assert processes[term.pid].wait(20) in (0, -signal.SIGTERM)
        assert {killed.pid, terminated.pid, failed.pid} == {*processes}
        crewed.judge()
