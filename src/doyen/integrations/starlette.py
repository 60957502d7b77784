"""Starlette and FastAPI: an application that campaigns while it runs.

    leader = Leadership("billing")
    app = FastAPI(lifespan=leader.lifespan)

    @leader.task
    async def pay(term: Term) -> None: ...

    @app.post("/invoices")
    async def invoice(term: Annotated[Term, Depends(leader)]) -> None: ...

The lifespan connects and campaigns in the background, again after each loss. The rules:

- The tasks run while this process leads. They are cancelled when the term ends, and no other
  candidate is elected before they have ended, unless that takes longer than the stop budget.
- A task may return; leadership goes on. `LeadershipLost` and `StaleToken` end the term, and the
  process campaigns again. Any other exception is a failure: the process resigns, so that another
  takes over, and campaigns no more; `failure` and `health` report it, and the lifespan raises it
  when it ends. With `on_failure="exit"` the process ends as on SIGTERM.
- The term is released when the lifespan ends. Servers end it only when all requests have been
  served, so SIGTERM releases it at once, before the handler of the server is called.

Needs the extra `starlette`. Imports the session, terms and `doyen.integrations.forwarding`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Literal, TypeVar, Unpack

from doyen._waiting import outlast
from doyen.election.options import CampaignOptions, CampaignSettings
from doyen.errors import ConfigError, LeadershipLost, SessionClosed, StaleToken
from doyen.events.log_lines import log_line
from doyen.integrations import needing
from doyen.integrations.forwarding import LeaderView
from doyen.integrations.signals import release_on_sigterm
from doyen.session import Session, connect
from doyen.term import Term

with needing("starlette"):
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response

__all__ = ["Leadership"]

log = logging.getLogger("doyen")
LeaderTask = Callable[[Term], Awaitable[object]]
T = TypeVar("T", bound=LeaderTask)
OnFailure = Literal["unhealthy", "exit"]


class Leadership:
    """Leadership of an election, for an application of Starlette or FastAPI.

        leader = Leadership("billing", "postgresql://db/app")
        app = FastAPI(lifespan=leader.lifespan)

    `store` is a URL as for `connect`, or a function that returns a session, for further options:
    `lambda: doyen.connect(URL, ttl_s=5)`. Options are those of `Session.campaign`. The object is
    also a dependency, `Depends(leader)`: see `__call__`.
    """

    def __init__(
        self,
        election: str,
        store: str | Callable[[], Session] | None = None,
        *,
        on_failure: OnFailure = "unhealthy",
        **options: Unpack[CampaignOptions],
    ) -> None:
        CampaignSettings.of(election, options)  # mistakes are reported here
        if on_failure not in ("unhealthy", "exit"):
            raise ConfigError(f'on_failure is "unhealthy" or "exit", not {on_failure!r}')
        self.view = LeaderView(election)
        """Who leads, as this process knows it; for `doyen.integrations.asgi.LeaderMiddleware`."""
        self.failure: Exception | None = None
        """What ended the candidacy of this process: the exception of a task, or of the store."""
        self._store = store
        self._on_failure = on_failure
        self._options = options
        self._tasks: list[LeaderTask] = []
        self._session: Session | None = None
        self._ending = False

    def task(self, function: T) -> T:
        """Have a coroutine function run with the term whenever this process leads.

        @leader.task
        async def pay(term: doyen.Term) -> None:
            while True:
                await pay_next_invoice(fencing_token=term.token)
        """
        suits: bool = inspect.iscoroutinefunction(function)
        if not suits:
            raise ConfigError(
                f"a task of a leader is a coroutine function, not {function!r}: call blocking code"
                " with asyncio.to_thread, and have it look at term.valid"
            )
        self._tasks.append(function)
        return function

    @property
    def leads(self) -> bool:
        """Whether this process may rely on being the leader. Any thread, never blocks."""
        return self.view.leads

    @property
    def session(self) -> Session:
        """The session, while the application runs, for locks, queries and other elections."""
        if self._session is None:
            raise SessionClosed("the application does not run: pass `lifespan` to it")
        return self._session

    async def __call__(self) -> Term:
        """The term of this process; otherwise the response is 503 with `Retry-After`.

            @app.post("/invoices")
            async def invoice(term: Annotated[Term, Depends(leader)]) -> None: ...

        The term is valid when the request begins. Its end does not end the request: call
        `term.check()` before a step that only a leader may take, and fence writes with its token.
        """
        term = self.view.term
        if term is None or not term.valid:
            raise HTTPException(
                503, "not executed: this process does not lead", headers={"Retry-After": "1"}
            )
        return term

    async def health(self, request: Request) -> Response:
        """Responds 200, or 503 once a task has failed: the endpoint of a liveness probe.

            app.add_route("/healthz", leader.health)

        A process that does not lead is healthy, and so is one whose store cannot be reached.
        """
        if self.failure is None:
            return PlainTextResponse("ok\n")
        kind = type(self.failure).__name__
        return PlainTextResponse(f"the candidacy has failed: {kind}; see the log\n", 503)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """Campaign while the context lasts. An application with a lifespan of its own enters it
        there: `async with leader.lifespan(app): yield`."""
        if self._session is not None:
            raise SessionClosed("this lifespan runs already: one object serves one application")
        server_handler = signal.getsignal(signal.SIGTERM)
        store = self._store
        session = store() if callable(store) else connect(store)
        async with _opened(session, server_handler), self.view.following(session):
            self._session, self.failure, self._ending = session, None, False
            campaigning = asyncio.create_task(self._campaign(session))
            restore = release_on_sigterm(server_handler, partial(self._end_soon, campaigning))
            try:
                yield
            finally:
                restore()
                self._end(campaigning)
                try:
                    await asyncio.wait({campaigning})
                finally:  # a cancellation arrives after the tasks have ended
                    await outlast(campaigning)
                    self._session = None
        if self.failure is not None:
            raise self.failure

    def _end_soon(self, campaigning: asyncio.Task[None]) -> None:
        """In a signal handler."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            campaigning.get_loop().call_soon_threadsafe(self._end, campaigning)

    def _end(self, campaigning: asyncio.Task[None]) -> None:
        if not self._ending:  # a second cancellation could interrupt how the tasks stop
            self._ending = True
            campaigning.cancel()

    async def _campaign(self, session: Session) -> None:
        try:
            async for campaign in session.campaigns(self.view.election, **self._options):
                async with campaign as term:
                    with self.view.leading(term):
                        await self._lead(term)
                if self._ending:
                    return
        except Exception as error:
            self.failure = error
            line = log_line(
                event="candidacy_failed",
                election=self.view.election,
                effect="this process does not campaign any more",
                remedy="restart it",
            )
            log.exception("%s", line)
            if self._on_failure == "exit" and not self._ending:
                os.kill(os.getpid(), signal.SIGTERM)

    async def _lead(self, term: Term) -> None:
        """Run the tasks until the loss, or the end of the lifespan, cancels them."""
        failures: tuple[BaseException, ...] = ()
        try:
            async with asyncio.TaskGroup() as group:
                for task in self._tasks:
                    group.create_task(_run(task, term), name=f"{term.election}-{_name(task)}")
                await asyncio.Event().wait()
        except* (LeadershipLost, StaleToken):
            pass
        except* Exception as errors:
            failures = errors.exceptions
            if len(failures) > 1:
                raise
        if failures:
            raise failures[0]


@contextlib.asynccontextmanager
async def _opened(session: Session, server_handler: object) -> AsyncIterator[None]:
    """The session is open while the context lasts. SIGTERM ends the wait for a store that does not
    answer: the server would notice it only when the application has started."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    opening, given_up = True, False

    def give_up() -> None:
        nonlocal given_up
        if opening and task is not None:
            given_up = True
            task.cancel()

    def give_up_soon() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(give_up)

    restore = release_on_sigterm(server_handler, give_up_soon)
    try:
        await session.open()
    except asyncio.CancelledError:
        if not given_up or task is None or task.uncancel():
            raise
        raise SessionClosed("SIGTERM came before the store had answered") from None
    finally:
        opening = False
        restore()
    try:
        yield
    finally:
        await session.close()


async def _run(task: LeaderTask, term: Term) -> None:
    await task(term)


def _name(task: LeaderTask) -> str:
    return getattr(task, "__name__", "task")
