"""Which store is used: it is always stated, never silently a local one, and queries create none."""

from __future__ import annotations

import argparse
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

import doyen
from candidates import Capture
from doyen import cli
from doyen.cli import _output
from doyen.errors import ConfigError, StoreError, StoreUnusable
from doyen.stores.choice import absolute, choose_store, without_password
from doyen.stores.port import StoreURL

NAMES = ["DOYEN_STORE", "DOYEN_REQUIRE_STORE", "DATABASE_URL", "ETCDCTL_ENDPOINTS", "ZK_HOSTS"]
NAMES += ["ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY", "ETCDCTL_USER", "ETCDCTL_PASSWORD"]


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An environment that names no store, with a home directory of its own."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def store(*arguments: str) -> str:
    parser = argparse.ArgumentParser()
    _output.add_store_option(parser)
    return _output.store_url(parser.parse_args(arguments))


def test_the_store_is_named_by_option_then_environment_then_default(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = tmp_path / "my home"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_STATE_HOME", "relative/is/ignored")
    folder = home / ".local/state/doyen"
    assert store() == f"sqlite://{tmp_path}/my%20home/.local/state/doyen/doyen.db"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert store() == f"sqlite://{tmp_path}/state/doyen/doyen.db"
    monkeypatch.setenv("DOYEN_STORE", "etcd://h1")
    assert store() == "etcd://h1"
    assert store("--store", "sqlite:x.db") == f"sqlite://{tmp_path}/x.db"


def test_a_default_store_that_cannot_be_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="--store"):
        store()


def test_a_command_states_its_store_once(tmp_path: Path, capsys: Capture) -> None:
    url = f"sqlite://{tmp_path}/d.db"
    doyen.connect_blocking(url).open().close()
    assert cli.main(["leader", "e", "--store", "sqlite:d.db"]) == 1
    assert capsys.readouterr().err == f"doyen: store {url} (from --store)\n"


@pytest.mark.usefixtures("signals")
def test_a_default_store_is_said_to_be_of_this_machine(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["run", "e", "--", "true"]) == 0
    said = capsys.readouterr().err
    assert said.startswith(
        f"doyen: store sqlite://{tmp_path}/state/doyen/doyen.db, on this machine"
    )
    assert "set DOYEN_STORE" in said
    assert said.count("\n") == 1
    assert cli.main(["run", "e", "--json", "--", "true"]) == 0
    first = json.loads(capsys.readouterr().err.splitlines()[0])
    assert first == {
        "event": "store",
        "store": f"sqlite://{tmp_path}/state/doyen/doyen.db",
        "origin": "default",
        "this_machine_only": True,
    }


def logged(caplog: pytest.LogCaptureFixture, event: str) -> list[logging.LogRecord]:
    return [each for each in caplog.records if f"event={event}" in each.getMessage()]


def test_a_session_logs_its_store_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "doyen")
    monkeypatch.setenv("DOYEN_STORE", "sqlite:d.db")
    with doyen.connect_blocking() as session:
        session.leader("e")
    (line,) = logged(caplog, "store_opened")
    assert f"store=sqlite://{tmp_path}/d.db origin=DOYEN_STORE" in line.getMessage()
    assert line.levelno == logging.INFO


def test_a_session_on_the_default_store_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with doyen.connect_blocking():
        pass
    (line,) = logged(caplog, "default_store")
    assert line.levelno == logging.WARNING
    assert f"sqlite://{tmp_path}/state/doyen/doyen.db" in line.getMessage()
    assert "this machine only" in line.getMessage()


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_the_default_can_be_refused(
    value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setenv("DOYEN_REQUIRE_STORE", value)
    with pytest.raises(ConfigError, match="set DOYEN_STORE"):
        doyen.connect()
    with pytest.raises(ConfigError, match="DOYEN_REQUIRE_STORE"):
        doyen.connect_blocking(None)
    assert cli.main(["run", "e", "--", "true"]) == 2
    assert "DOYEN_REQUIRE_STORE" in capsys.readouterr().err
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("DOYEN_STORE", "sqlite:d.db")
    assert cli.main(["run", "e", "--", "true"]) == 0
    monkeypatch.setenv("DOYEN_REQUIRE_STORE", "perhaps")
    monkeypatch.delenv("DOYEN_STORE")
    with pytest.raises(ConfigError, match="1 or 0"):
        doyen.connect()


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_name_is_not_the_default(empty: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="empty"):
        doyen.connect(empty)
    monkeypatch.setenv("DOYEN_STORE", empty)
    with pytest.raises(ConfigError, match="empty \\(DOYEN_STORE\\)"):
        doyen.connect_blocking()


def test_a_store_within_one_process_is_no_store_of_a_command(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (["run", "e", "--", "true"], ["leader", "e"], ["doctor"], ["watch", "e"]):
        assert cli.main([command[0], "--store", "memory://", *command[1:]]) == 2
        assert "exists within one process only" in capsys.readouterr().err
    monkeypatch.setenv("DOYEN_STORE", "memory:")
    assert cli.main(["line", "e"]) == 2


QUERIES = [
    ["leader", "e"],
    ["line", "e"],
    ["line", "e", "--watch"],
    ["watch", "e"],
    ["list"],
    ["history", "e"],
    ["members", "g"],
    ["dash", "--listen", "127.0.0.1:0"],
    ["doctor"],
    ["resign", "e"],
    ["transfer", "e", "--to", "x"],
    ["config", "get", "c"],
    ["config", "watch", "c"],
    ["shards", "s"],
]


@pytest.mark.parametrize("query", QUERIES, ids=" ".join)
def test_a_query_creates_nothing(query: list[str], tmp_path: Path, capsys: Capture) -> None:
    """Neither at a misspelt path nor at the default."""
    before = sorted(os.listdir(tmp_path))
    assert cli.main([*query, "--store", "sqlite:some/where.db"]) == 69
    said = capsys.readouterr().err
    assert f"there is no store at {tmp_path}/some/where.db" in said
    assert cli.main(query) == 69
    assert f"there is no store at {tmp_path}/state/doyen/doyen.db" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == before


def test_a_home_directory_that_no_shell_has_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a crontab or a unit, and as `--store`, no shell replaces it."""
    monkeypatch.setenv("HOME", "/home/ann")
    assert choose_store("sqlite:~/d.db").url == "sqlite:///home/ann/d.db"


def test_a_path_that_cannot_be_looked_at_is_not_called_empty(tmp_path: Path) -> None:
    """As one in a directory that this user may not search."""
    with (
        pytest.raises(StoreError, match="File name too long"),
        doyen.connect_blocking(f"sqlite:{tmp_path}/{'x' * 300}", create=False),
    ):
        pass


def test_a_file_without_a_store_is_not_made_one(tmp_path: Path) -> None:
    empty = tmp_path / "empty.db"
    empty.touch()
    with (
        pytest.raises(StoreUnusable, match=r"there is no store at .*empty\.db"),
        doyen.connect_blocking("sqlite:empty.db", create=False),
    ):
        pass
    assert empty.stat().st_size == 0


def test_doctor_creates_a_store_if_it_is_told_to(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["doctor", "--create", "--store", "sqlite:new.db", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["store"] == f"sqlite://{tmp_path}/new.db"


@pytest.mark.parametrize(
    ("environment", "url", "origin"),
    [
        ({"DATABASE_URL": "postgres://u:p@db/x"}, "postgres://u:p@db/x", "DATABASE_URL"),
        ({"DATABASE_URL": "mysql+pymysql://db/x"}, "mysql+pymysql://db/x", "DATABASE_URL"),
        ({"ETCDCTL_ENDPOINTS": "h1:2379, h2:2379"}, "etcd://h1:2379,h2:2379", "ETCDCTL_ENDPOINTS"),
        (
            {
                "ETCDCTL_ENDPOINTS": "https://h1:2379,https://h2:2379/",
                "ETCDCTL_CACERT": "/a b/ca.pem",
                "ETCDCTL_USER": "me:p@ss",
            },
            "etcd://me:p%40ss@h1:2379,h2:2379?tls=true&ca=/a+b/ca.pem",
            "ETCDCTL_ENDPOINTS",
        ),
        (
            {"ETCDCTL_ENDPOINTS": "http://h1", "ETCDCTL_USER": "me", "ETCDCTL_PASSWORD": "x"},
            "etcd://me:x@h1",
            "ETCDCTL_ENDPOINTS",
        ),
        ({"ZK_HOSTS": "h1:2181,h2/app"}, "zookeeper://h1:2181,h2/app", "ZK_HOSTS"),
        ({"DOYEN_STORE": "env:ZK_HOSTS", "ZK_HOSTS": "h1"}, "zookeeper://h1", "ZK_HOSTS"),
        (
            {"DOYEN_STORE": "env:REDIS_URL", "REDIS_URL": "redis://h1"},
            "redis://h1",
            "REDIS_URL",
        ),
        (
            {"DOYEN_STORE": "env:ZK_HOSTS", "ZK_HOSTS": "h1", "DATABASE_URL": "postgres://db/x"},
            "zookeeper://h1",
            "ZK_HOSTS",
        ),
    ],
)
def test_variables_of_other_programs_name_a_store(
    environment: dict[str, str], url: str, origin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = choose_store(None)
    assert (chosen.url, chosen.origin) == (url, origin)


def test_variables_that_disagree_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgres://db/x")
    monkeypatch.setenv("ZK_HOSTS", "h1")
    with pytest.raises(ConfigError, match="DOYEN_STORE=env:DATABASE_URL"):
        choose_store(None)
    monkeypatch.setenv("DOYEN_STORE", "env:NOWHERE")
    with pytest.raises(ConfigError, match="NOWHERE, which is not set"):
        choose_store(None)


def test_a_database_of_another_kind_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django's own file, for example, is no place for elections."""
    monkeypatch.setenv("DATABASE_URL", "sqlite:///db.sqlite3")
    choice = choose_store(None)
    assert choice.defaulted
    assert "(DATABASE_URL is for neither PostgreSQL nor MySQL)" in str(choice)
    monkeypatch.setenv("DOYEN_REQUIRE_STORE", "1")
    with pytest.raises(ConfigError, match="DATABASE_URL is for neither"):
        choose_store(None)


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("postgres://u@h/x", "postgresql"),
        ("postgresql+psycopg://u@h/x", "postgresql"),
        ("postgres+asyncpg://u@h/x", "postgresql"),
        ("mysql+pymysql://u@h/x", "mysql"),
        ("mariadb+mariadbconnector://u@h/x", "mysql"),
        ("valkey://h", "redis"),
        ("zk://h", "zookeeper"),
        ("redis+sentinel://h/m", "redis+sentinel"),
    ],
)
def test_schemes_of_other_programs_are_known(text: str, scheme: str) -> None:
    assert StoreURL.parse(text).parts.scheme == scheme


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("ectd://h1", "did you mean etcd?"),
        ("postgre://h1/x", "did you mean postgres"),
        ("zookeper://h1", "did you mean zookeeper?"),
        ("https://h1:2379", "write etcd://, or consul://"),
        ("sqlite:d.db?token_flor=1", "did you mean token_floor?"),
        ("doyen.db", "it must start with a scheme"),
        ("redis:h1", "write redis://h1"),
        ("etcd://http://h1:2379", "is followed by http://: leave that out"),
        ("redis://:se/cret@h1", "write %2F"),
        ("sqlite:$HOME/d.db", "begins with '$HOME', which a shell would have replaced"),
        ("sqlite:~nosuchuser/d.db", "begins with '~nosuchuser'"),
    ],
)
def test_a_misspelt_url_gets_a_suggestion(url: str, advice: str) -> None:
    with pytest.raises(ConfigError) as refused, doyen.connect_blocking(url):
        pass
    assert advice in str(refused.value)


def test_a_relative_path_in_a_directory_that_was_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ConfigError, match="name an absolute path"):
        choose_store("sqlite:doyen.db")


def test_a_misspelt_option_of_connect_gets_a_suggestion() -> None:
    options: Any = {"tls_s": 5}
    with pytest.raises(TypeError, match=r"no option 'tls_s' \(did you mean ttl_s\?\)"):
        doyen.connect("memory://", **options)
    number: Any = 7
    with pytest.raises(ConfigError, match="is a string"):
        doyen.connect(number)
    text: Any = "5"  # of an environment variable, for example
    with (
        pytest.raises(ConfigError, match="ttl_s is a number, not '5'"),
        doyen.connect_blocking("memory://", ttl_s=text),
    ):
        pass


def test_a_misspelt_option_of_a_campaign_gets_a_suggestion() -> None:
    options: Any = {"nmae": "server1"}
    wrong = pytest.raises(TypeError, match=r"no option 'nmae' \(did you mean name\?\)")
    with doyen.connect_blocking("memory://") as session:
        for start in (session.campaign, session.lock, session.candidate):
            with wrong:
                start("e", **options)
        with wrong:
            next(iter(session.campaigns("e", **options)))
        other: Any = {"kind": "locks"}
        with pytest.raises(TypeError, match="no option 'kind'"):
            session.campaign("e", **other)


def test_a_session_shows_its_store_and_its_health() -> None:
    session = doyen.connect_blocking("memory://u:secret@x")
    assert repr(session) == "<BlockingSession on memory://u:…@x, not open>"
    assert repr(doyen.connect("memory://x")) == "<Session on memory://x, not open>"
    with doyen.connect_blocking("memory://x") as session:
        assert repr(session) == "<BlockingSession on memory://x, ok>"
    assert repr(session) == "<BlockingSession on memory://x, closed>"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mysql://app:secret@h1,[::1]:3306/x?tls=true", "mysql://app:…@h1,[::1]:3306/x?tls=true"),
        ("etcd://h1:2379,[::1]:2379", "etcd://h1:2379,[::1]:2379"),
        ("sqlite:////var/lib/doyen.db", "sqlite:////var/lib/doyen.db"),
        ("no url", "no url"),
        ("consul://:token@h1", "consul://:…@h1"),
        ("nats://token@h1", "nats://…@h1"),
        (
            "redis+sentinel://h1/m?sentinel_password=x&replicas=1",
            "redis+sentinel://h1/m?sentinel_password=…&replicas=1",
        ),
        ("postgresql://h/x?listen=postgresql://u:p@h", "postgresql://h/x?listen=…"),
        ("doyen://h1:7400?secret_file=/etc/s", "doyen://h1:7400?secret_file=/etc/s"),
        ("postgresql://app:se/cr@et@db:5432/x", "postgresql://app:…@db:5432/x"),
        ("postgresql://app:se#cret@db/x", "postgresql://app:…@db/x"),
        ("mysql://app:?secret@h1,h2/x", "mysql://app:…@h1,h2/x"),
        ("doyen://se/cret@h1:7400,h2:7400/app", "doyen://…@h1:7400,h2:7400/app"),
        ("doyen://se?cr#et@h1:7400", "doyen://…@h1:7400"),
        ("doyen://se%2Fcret@h1:7400", "doyen://…@h1:7400"),
        ("doyen://h1:7400,h2/app@home", "doyen://h1:7400,h2/app@home"),
        ("nats://se/cret@h1:4222", "nats://…@h1:4222"),
        ("consul://:to/ken@h1", "consul://:…@h1"),
        ("etcd://h1:2379,h2/app@home", "etcd://h1:2379,h2/app@home"),
        ("etcd://[::1]:2379/app@home", "etcd://[::1]:2379/app@home"),
    ],
)
def test_secrets_are_not_shown(url: str, shown: str) -> None:
    assert without_password(url) == shown


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("sqlite:a%20b.db?token_floor=7", "{cwd}/a%20b.db?token_floor=7"),
        ("sqlite://./d.db", "{cwd}/d.db"),
        ("sqlite:sub/../d.db", "{cwd}/d.db"),
        ("sqlite:///d.db", "/d.db"),
    ],
)
def test_relative_paths_become_absolute(url: str, path: str) -> None:
    assert absolute(url) == f"sqlite://{path.format(cwd=os.getcwd())}"


def test_spaces_around_a_named_variable_do_not_name_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OURS", " sqlite:///var/lib/doyen.db \n")
    assert choose_store("env:OURS").url == choose_store(" sqlite:///var/lib/doyen.db \n").url


@pytest.mark.parametrize("value", ["https://h1,http://h2", "h1:2379, https://h2:2379"])
def test_endpoints_with_and_without_tls_are_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """What the scheme of the first one means for the others would be a guess."""
    monkeypatch.setenv("ETCDCTL_ENDPOINTS", value)
    for given in (None, "env:ETCDCTL_ENDPOINTS"):
        with pytest.raises(ConfigError, match="TLS for all members or for none: give all"):
            choose_store(given)
