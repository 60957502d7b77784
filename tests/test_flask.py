"""Flask: the workers of gunicorn campaign, and the leader's views are served by it alone."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask

import doyen
from doyen import Term
from doyen.integrations import background, gunicorn
from doyen.integrations.flask import Leadership
from doyen.integrations.wsgi import LeaderMiddleware
from framework_crew import PROMPT_S, crew
from support import until_blocking


def test_workers_hand_over(tmp_path: Path) -> None:
    with crew("flask", tmp_path) as workers:
        term = workers.next_term()
        took_s, after = workers.hand_over(term)
        assert took_s < PROMPT_S
        assert workers.ended_before(term, after)
        (master,) = workers.processes
        assert master.pid not in {line.pid for line in workers.lines}
        opened = [os.readlink(each) for each in Path(f"/proc/{master.pid}/fd").iterdir()]
        assert not [each for each in opened if str(workers.database) in each]
        workers.judge()
        master.terminate()
        assert master.wait(60) == 0
        assert workers.lines[-1][:3] == ("end", *after[1:3])


@pytest.fixture
def leader(store: str) -> Iterator[Leadership]:
    made = Leadership("e", store)
    yield made
    made.close()


@pytest.fixture
def app(leader: Leadership) -> Flask:
    app = Flask(__name__)
    leader.init_app(app)

    @app.get("/token")
    @leader.required
    def token() -> str:
        return str(leader().token)

    app.add_url_rule("/healthz", view_func=leader.health)
    return app


def test_the_first_request_opens_and_the_leader_answers(app: Flask, leader: Leadership) -> None:
    client = app.test_client()
    assert client.get("/healthz").status_code == 200
    assert leader.wait(20)
    assert leader.term is not None
    assert client.get("/token").text == str(leader.term.token)


def test_others_answer_503(app: Flask, leader: Leadership, store: str) -> None:
    with doyen.connect_blocking(store) as session, session.campaign("e"):
        response = app.test_client().get("/token")
        assert (response.status_code, response.headers["Retry-After"]) == (503, "1")
        assert "not executed" in response.text


def test_a_failed_task_is_not_healthy(app: Flask, leader: Leadership) -> None:
    @leader.task
    def fail(term: Term) -> None:
        raise ValueError("wrong")

    client = app.test_client()
    client.get("/healthz")
    until_blocking(lambda: leader.failure)
    response = client.get("/healthz")
    assert (response.status_code, "ValueError" in response.text) == (503, True)


def test_requests_are_forwarded(app: Flask, leader: Leadership, store: str) -> None:
    """While another leads they are sent to its address, at which nobody listens here."""
    middleware = LeaderMiddleware(
        app.wsgi_app,
        view=leader.view,
        secret="the same in all processes",
        trust=["http://127.0.0.1:9"],
        wait_s=0,
    )
    app.wsgi_app = middleware  # type: ignore[method-assign]
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("e", meta={"address": "http://127.0.0.1:9"}),
    ):
        leader.open()
        until_blocking(lambda: leader.view.leader)
        refused = app.test_client().get("/token")
        assert (refused.status_code, "the leader cannot be reached" in refused.text) == (503, True)
    until_blocking(lambda: leader.view.leads)
    assert app.test_client().get("/token").status_code == 200
    leader.close()
    assert (leader.view.leader, leader.view.term) == (None, None)


def test_a_view_that_is_asked_for_too_late_is_refused(leader: Leadership) -> None:
    leader.open()
    with pytest.raises(doyen.ConfigError, match="before `open`"):
        _ = leader.view


def test_sigterm_ends_the_wait_for_a_store(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker notes the signal, and looks at that only when it has started."""
    monkeypatch.setattr(background, "_made", weakref.WeakSet())
    leader = Leadership("e", lambda: doyen.connect_blocking("redis://127.0.0.1:9", wait_s=60))
    noted: list[int] = []

    def stop() -> None:
        until_blocking(lambda: "store_waited_for" in caplog.text)
        os.kill(os.getpid(), signal.SIGTERM)

    def note(number: int, frame: object) -> None:
        noted.append(number)

    handler = signal.signal(signal.SIGTERM, note)
    stopper = threading.Thread(target=stop)
    try:
        stopper.start()
        with pytest.raises(SystemExit):
            gunicorn.post_worker_init(None)
        assert signal.getsignal(signal.SIGTERM) is note
    finally:
        signal.signal(signal.SIGTERM, handler)
        stopper.join()
    assert (noted, leader.leads) == ([signal.SIGTERM], False)


def test_workers_whose_threads_are_greenlets_are_reported(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "_made", weakref.WeakSet())
    patched = types.SimpleNamespace(is_module_patched=lambda name: name == "threading")
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    gunicorn.post_worker_init(None)
    assert "threads_are_greenlets" in caplog.text


def test_gunicorn_without_the_hooks_is_told(
    app: Flask, leader: Leadership, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="doyen"):
        for _ in range(2):
            app.test_client().get("/healthz", environ_base={"SERVER_SOFTWARE": "gunicorn/27.0.0"})
    until_blocking(lambda: caplog.text.count("campaign_begins_late") == 1)
