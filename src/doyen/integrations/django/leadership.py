"""Web processes of Django that campaign while they run.

    leader = Leadership("billing")

    @leader.task
    def pay(term: Term) -> None: ...

    @leader.required
    def invoice(request: HttpRequest) -> HttpResponse: ...

The rules are those of `doyen.integrations.background`. With gunicorn, its hooks open the leadership
in each worker (`doyen.integrations.gunicorn`). On other servers it is opened by the first request
that a process serves, if the application is in `INSTALLED_APPS`, or by `leader.open()`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, Unpack, cast

from django.http import HttpRequest, HttpResponse

from doyen.blocking import BlockingSession
from doyen.election.options import CampaignOptions
from doyen.integrations.background import BackgroundLeadership, OnFailure, all_made
from doyen.term import Term

__all__ = ["DjangoLeadership"]

View = TypeVar("View", bound=Callable[..., Any])


class DjangoLeadership(BackgroundLeadership):
    """Leadership of an election, for the web processes of Django.

        leader = Leadership("billing")

    `store` is a URL as for `connect`, or a function that returns a session; by default it is that
    of the settings. Options are those of `Session.campaign`.
    """

    def __init__(
        self,
        election: str,
        store: str | Callable[[], BlockingSession] | None = None,
        *,
        on_failure: OnFailure = "unhealthy",
        **options: Unpack[CampaignOptions],
    ) -> None:
        super().__init__(election, store or _of_settings, on_failure=on_failure, **options)

    def required(self, view: View) -> View:
        """Serve a view in the leader only. The others respond 503 with `Retry-After`.

            @leader.required
            def invoice(request: HttpRequest) -> HttpResponse:
                return HttpResponse(f"token {request.doyen_term.token}")

        `request.doyen_term` is the term, which is valid when the request begins. Its end does not
        end the request: call `check()` before a step that only a leader may take, and fence writes
        with its token.
        """

        @functools.wraps(view)
        def required(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return view(request, *args, **kwargs) if self._admits(request) else _refused()

        @functools.wraps(view)
        async def required_async(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            return await view(request, *args, **kwargs) if self._admits(request) else _refused()

        return cast("View", required_async if inspect.iscoroutinefunction(view) else required)

    def _admits(self, request: HttpRequest) -> bool:
        term: Term | None = self.term
        if term is None or not term.valid:
            return False
        cast("Any", request).doyen_term = term
        return True

    def health(self, request: HttpRequest) -> HttpResponse:
        """Responds 200, or 503 once a task has failed: the view of a liveness probe.

            urlpatterns = [path("healthz", leader.health)]

        A process that does not lead is healthy, and so is one whose store cannot be reached.
        """
        if self.failure is None:
            return HttpResponse("ok\n", content_type="text/plain")
        kind = type(self.failure).__name__
        text = f"the candidacy has failed: {kind}; see the log\n"
        return HttpResponse(text, status=503, content_type="text/plain")


def open_for_requests(environ: dict[str, Any] | None = None, **_: Any) -> None:
    """Django is about to serve a request."""
    for each in all_made():
        if isinstance(each, DjangoLeadership):
            each.open_for_request((environ or {}).get("SERVER_SOFTWARE", ""))


def _of_settings() -> BlockingSession:
    from doyen.integrations.django import connect  # which imports this module

    return connect()


def _refused() -> HttpResponse:
    response = HttpResponse(
        "not executed: this process does not lead\n", status=503, content_type="text/plain"
    )
    response["Retry-After"] = "1"
    return response
