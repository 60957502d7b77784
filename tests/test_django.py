"""Django: its commands run in the leader only, on the store that the settings name."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import django
import pytest
from django.core.management import call_command, load_command_class
from django.core.management.base import CommandError
from django.core.signals import request_started
from django.http import HttpResponse
from django.test import RequestFactory

from doyen import Term
from doyen.errors import ConfigError
from doyen.integrations.django import Leadership, connect
from doyen.integrations.django.databases import database_url
from doyen.stores.choice import StoreChoice, choose_store
from framework_crew import PROMPT_S, crew
from support import until_blocking


def test_commands_are_led_by_one_process_and_handed_over(tmp_path: Path) -> None:
    with crew("django", tmp_path) as processes:
        term = processes.next_term()
        took_s, after = processes.hand_over(term)
        assert took_s < PROMPT_S
        assert processes.ended_before(term, after)
        terminated = next(each for each in processes.processes if each.pid == term.pid)
        assert terminated.wait(20) == 128 + signal.SIGTERM
        processes.judge()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project, in this process. Returns the database of its store."""
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "django_site.settings")
    monkeypatch.delenv("DOYEN_STORE", raising=False)
    django.setup()
    database = tmp_path / "db.sqlite3.doyen"
    monkeypatch.setattr("django.conf.settings.DOYEN", {"store": f"sqlite://{database}"})
    return database


def test_a_command_that_returns_ends_the_campaign(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGURG)
    call_command("lead", "--ttl", "10s", "--name", "me", "e", "diffsettings", "--all")
    assert "ROOT_URLCONF = 'django_site.urls'" in capsys.readouterr().out
    with connect() as session:
        assert [term.name for term in session.history("e")] == ["me"]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGURG)) == handlers


def test_mistakes_are_reported_before_the_election(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call_command("lead", "e", "wrk")
    assert "Did you mean work?" in capsys.readouterr().err
    with pytest.raises(CommandError, match="'soon' is not a duration"):
        call_command("lead", "--ttl", "soon", "e", "check")
    with pytest.raises(CommandError, match="priority is a 32-bit integer"):
        call_command("lead", "--priority", str(2**40), "e", "check")
    assert not site.exists()


def test_the_command_line_of_doyen_gets_the_store_of_the_settings(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed: list[Any] = []
    monkeypatch.setattr("os.execve", lambda *given: executed.append(given))
    load_command_class("doyen.integrations.django", "doyen").run_from_argv(
        ["manage.py", "doyen", "leader", "e"]
    )
    ((_, command, environ),) = executed
    assert command[1:] == ["-m", "doyen", "leader", "e"]
    with pytest.MonkeyPatch.context() as child:
        for name in ("DOYEN_STORE", "DJANGO_SETTINGS"):
            child.setenv(name, environ[name])
        assert choose_store(None) == StoreChoice(f"sqlite://{site}", "DJANGO_SETTINGS")


def test_a_leading_command_states_its_store(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stated() -> str:
        call_command("lead", "e", "check")
        return capsys.readouterr().err.splitlines()[0]

    shown, reach = f"doyen: store sqlite://{site}", "on this machine only"
    assert stated() == f"{shown} (from DOYEN in the settings), {reach}"
    monkeypatch.setattr("django.conf.settings.DOYEN", {})
    monkeypatch.setattr("doyen.integrations.django.database_url", lambda *_: f"sqlite://{site}")
    assert stated() == f"{shown} (from DATABASES['default'] in the settings), {reach}"
    monkeypatch.setenv("DOYEN_STORE", "memory://")
    assert stated() == "doyen: store memory:// (from DOYEN_STORE)"


def test_views_are_served_by_the_leader_alone(site: Path) -> None:
    leader = Leadership("e")

    @leader.required
    def token(request: Any) -> HttpResponse:
        return HttpResponse(str(request.doyen_term.token))

    @leader.required
    async def token_async(request: Any) -> HttpResponse:
        return token(request)

    request = RequestFactory().get("/")
    refused = token(request)
    assert (refused.status_code, refused["Retry-After"]) == (503, "1")
    assert asyncio.run(token_async(request)).status_code == 503
    request_started.send(sender=None, environ={"SERVER_SOFTWARE": "WSGIServer"})
    try:
        assert leader.wait(20)
        assert leader.term is not None
        assert token(request).content == str(leader.term.token).encode()
        assert asyncio.run(token_async(request)).status_code == 200
        assert leader.health(request).status_code == 200
    finally:
        leader.close()


def test_a_failed_task_is_not_healthy(site: Path) -> None:
    leader = Leadership("e")

    @leader.task
    def fail(term: Term) -> None:
        raise ValueError("wrong")

    with leader:
        until_blocking(lambda: leader.failure)
        response = leader.health(RequestFactory().get("/"))
        assert (response.status_code, b"ValueError" in response.content) == (503, True)


@pytest.mark.parametrize(
    ("vendor", "database", "url"),
    [
        (
            "postgresql",
            {"NAME": "a b", "USER": "me@x", "PASSWORD": "p:/", "HOST": "h1", "PORT": 5433},
            "postgresql://me%40x:p%3A%2F@h1:5433/a%20b",
        ),
        ("postgresql", {"NAME": "a", "HOST": "/run/pg"}, "postgresql://%2Frun%2Fpg/a"),
        ("postgresql", {"NAME": "a", "HOST": "::1"}, "postgresql://[::1]/a"),
        (
            "postgresql",
            {"NAME": "a", "HOST": "h", "OPTIONS": {"sslmode": "verify-full", "pool": True}},
            "postgresql://h/a?sslmode=verify-full",
        ),
        (
            "mysql",
            {"NAME": "a", "HOST": "h", "USER": "u", "OPTIONS": {"ssl": {"ca": "/etc/ca.pem"}}},
            "mysql://u@h/a?tls=true&ca=/etc/ca.pem",
        ),
        ("mysql", {"NAME": "a", "USER": "u"}, "mysql://u@localhost/a"),
        ("sqlite", {"NAME": Path("/var/db.sqlite3")}, "sqlite:///var/db.sqlite3.doyen"),
    ],
)
def test_the_store_is_in_the_database_of_django(
    vendor: str, database: dict[str, Any], url: str
) -> None:
    assert database_url(vendor, database) == url


@pytest.mark.parametrize(
    ("vendor", "database", "why"),
    [
        ("oracle", {"NAME": "a"}, "no store in a database of oracle"),
        ("sqlite", {"NAME": ":memory:"}, "in memory"),
        ("mysql", {"NAME": "a", "HOST": "/run/mysqld.sock"}, "has a socket"),
        ("postgresql", {"OPTIONS": {"service": "app"}}, "service file"),
    ],
)
def test_a_database_without_a_store_is_refused(
    vendor: str, database: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"{why}.*DOYEN_STORE"):
        database_url(vendor, database)
