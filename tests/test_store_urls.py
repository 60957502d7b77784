"""URLs that people already have, on real servers; and queries there create nothing."""

from __future__ import annotations

import re
import uuid
from urllib.parse import urlsplit

import pytest

import doyen
import servers
from doyen.cli import main
from doyen.errors import ConfigError, StoreUnusable


def with_scheme(url: str, scheme: str, options: str) -> str:
    parts = urlsplit(url)
    query = "&".join(filter(None, [parts.query, options]))
    return parts._replace(scheme=scheme, query=query).geturl()


def elects(url: str) -> bool:
    with doyen.connect_blocking(url) as session, session.campaign(f"urls-{uuid.uuid4()}") as term:
        return term.valid


LIBPQ = "sslmode=disable&connect_timeout=5&application_name=app&target_session_attrs=read-write"


@pytest.mark.parametrize("scheme", ["postgres", "postgresql+psycopg"])
def test_urls_of_postgresql(scheme: str, postgresql: servers.Postgres) -> None:
    assert elects(with_scheme(postgresql.url, scheme, f"{LIBPQ}&channel_binding=prefer"))


@pytest.mark.parametrize("scheme", ["mysql+pymysql", "mariadb"])
def test_urls_of_mysql(scheme: str, mysql: servers.MariaDB) -> None:
    assert elects(with_scheme(mysql.url, scheme, "charset=utf8mb4&connect_timeout=5"))


@pytest.mark.usefixtures("signals")
def test_variables_of_other_programs(
    postgresql: servers.Postgres,
    etcd: servers.Etcd,
    zookeeper: servers.ZooKeeper,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hosts = {
        "DATABASE_URL": with_scheme(postgresql.url, "postgres", LIBPQ),
        "ETCDCTL_ENDPOINTS": f"http://{urlsplit(etcd.url).netloc}",
        "ZK_HOSTS": f"{urlsplit(zookeeper.url).netloc}/urls",
    }
    for name in ("DOYEN_STORE", *hosts):
        monkeypatch.delenv(name, raising=False)
    for name, value in hosts.items():
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert main(["run", f"urls-{uuid.uuid4()}", "--", "true"]) == 0
            assert f"(from {name})" in capsys.readouterr().err


def test_the_same_option_twice_is_refused(postgresql: servers.Postgres) -> None:
    url = with_scheme(postgresql.url, "postgres", "connect_timeout=5&connect_timeout_s=6")
    with pytest.raises(ConfigError, match="say the same thing"):
        elects(url)


@pytest.mark.parametrize(
    ("server", "elsewhere", "missing"),
    [
        ("postgresql", "?schema=nowhere", "no tables of doyen in the schema nowhere"),
        ("mysql", "?prefix=nowhere_", "no tables nowhere_"),
        ("nats", "/nowhere", "no bucket nowhere"),
        ("zookeeper", "/nowhere", "no znode /nowhere"),
    ],
)
def test_a_query_creates_nothing(
    server: str, elsewhere: str, missing: str, request: pytest.FixtureRequest
) -> None:
    url = re.sub("[?].*", "", request.getfixturevalue(server).url).rstrip("/") + elsewhere
    for _ in range(2):  # the first try has created nothing
        with (
            pytest.raises(StoreUnusable, match=missing),
            doyen.connect_blocking(url, create=False),
        ):
            pass
    with doyen.connect_blocking(url) as session:
        session.leader("e")
    with doyen.connect_blocking(url, create=False) as session:
        assert session.leader("e") is None
