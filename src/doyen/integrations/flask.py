"""Flask: an application that campaigns while it runs.

    app = Flask(__name__)
    leader = Leadership("billing", app=app)

    @leader.task
    def pay(term: Term) -> None: ...

    @app.post("/invoices")
    @leader.required
    def invoice() -> str: ...

The rules are those of `doyen.integrations.background`. With gunicorn, its hooks open the leadership
in each worker (`doyen.integrations.gunicorn`). On other servers it is opened by the first request
that a process serves, or by `leader.open()`.

Needs the extra `flask`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, Unpack

from doyen.blocking import BlockingSession
from doyen.election.options import CampaignOptions
from doyen.integrations import needing
from doyen.integrations.background import BackgroundLeadership, OnFailure
from doyen.term import Term

with needing("flask"):
    from flask import Flask, request
    from werkzeug.exceptions import ServiceUnavailable

__all__ = ["Leadership"]

P = ParamSpec("P")
R = TypeVar("R")


class FlaskLeadership(BackgroundLeadership):
    """Leadership of an election, for an application of Flask.

        leader = Leadership("billing", "postgresql://db/app", app=app)

    `store` is a URL as for `connect`, or a function that returns a session, for further options:
    `lambda: doyen.connect_blocking(URL, ttl_s=5)`. Options are those of `Session.campaign`. For
    an application that is made by a function, leave out `app` and call `init_app`.
    """

    def __init__(
        self,
        election: str,
        store: str | Callable[[], BlockingSession] | None = None,
        *,
        app: Flask | None = None,
        on_failure: OnFailure = "unhealthy",
        **options: Unpack[CampaignOptions],
    ) -> None:
        super().__init__(election, store, on_failure=on_failure, **options)
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask) -> None:
        """Have the first request open the leadership, if nothing else does."""
        app.extensions.setdefault("doyen", {})[self.election] = self
        app.before_request(self._before_request)

    def _before_request(self) -> None:
        if self._mine is None:
            self.open_for_request(request.environ.get("SERVER_SOFTWARE", ""))

    def __call__(self) -> Term:
        """The term of this process; otherwise the response is 503 with `Retry-After`.

            @app.post("/invoices")
            def invoice() -> str:
                return f"token {leader().token}"

        The term is valid when the request begins. Its end does not end the request: call
        `term.check()` before a step that only a leader may take, and fence writes with its token.
        """
        term = self.term
        if term is None or not term.valid:
            raise ServiceUnavailable("not executed: this process does not lead", retry_after=1)
        return term

    def required(self, view: Callable[P, R]) -> Callable[P, R]:
        """Serve a view in the leader only. The others respond 503.

        @app.post("/invoices")
        @leader.required
        def invoice() -> str: ...
        """

        @functools.wraps(view)
        def required(*args: P.args, **kwargs: P.kwargs) -> R:
            self()
            return view(*args, **kwargs)

        return required

    def health(self) -> tuple[str, int]:
        """Responds 200, or 503 once a task has failed: the view of a liveness probe.

            app.add_url_rule("/healthz", view_func=leader.health)

        A process that does not lead is healthy, and so is one whose store cannot be reached.
        """
        if self.failure is None:
            return "ok\n", 200
        return f"the candidacy has failed: {type(self.failure).__name__}; see the log\n", 503


Leadership = FlaskLeadership
