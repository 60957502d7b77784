"""Every engine over TLS with certificates on both sides, and the errors of refused clients.

ZooKeeper keeps its certificates in Java's format: see test_zookeeper.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPSConnection
from pathlib import Path
from typing import Any

import pytest

import servers
from doyen.errors import StoreError
from doyen.lease.clock import SystemClock
from doyen.model import leader_key
from doyen.stores.port import Context, Store, StoreURL, open_store, tls_remedy
from servers.certificates import AUTHORITY, Certificates
from servers.mariadb import DATABASE, PASSWORD
from servers.process import HOST

KEY = leader_key("e")


def ping_https(certificates: Certificates, port: int, page: str) -> None:
    context = ssl.create_default_context(cafile=str(certificates.certificate("ca")))
    context.load_cert_chain(certificates.certificate("client"), certificates.key("client"))
    link = HTTPSConnection(HOST, port, timeout=10, context=context)
    try:
        link.request("GET", page)
        if (status := link.getresponse().status) != 200:
            raise ValueError(f"it is not well: {status}")
    finally:
        link.close()


class SecuredEtcd(servers.Etcd):
    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        super().__init__(
            cert_file=str(certificates.certificate("server")),
            key_file=str(certificates.key("server")),
            trusted_ca_file=str(certificates.certificate("ca")),
            client_cert_auth="true",
        )

    @property
    def tls(self) -> str:
        return self.url

    def command(self) -> list[str]:
        here = self.address
        return [part.replace(f"http://{here}", f"https://{here}") for part in super().command()]

    def ping(self) -> None:
        ping_https(self._certificates, self.port, "/health")


class SecuredConsul(servers.Consul):
    port_count = 4

    def __init__(self, certificates: Certificates) -> None:
        super().__init__(
            cert_file=str(certificates.certificate("server")),
            key_file=str(certificates.key("server")),
            ca_file=str(certificates.certificate("ca")),
            verify_incoming_https=True,
        )

    def prepare(self) -> None:
        super().prepare()
        file = self.folder / "consul.json"
        settings = json.loads(file.read_text())
        settings["ports"]["https"] = self.ports[3]
        file.write_text(json.dumps(settings))

    @property
    def tls(self) -> str:
        return f"consul://{HOST}:{self.ports[3]}"


class SecuredMariaDB(servers.MariaDB):
    def __init__(self, certificates: Certificates) -> None:
        super().__init__(
            ssl_cert=str(certificates.certificate("server")),
            ssl_key=str(certificates.key("server")),
            ssl_ca=str(certificates.certificate("ca")),
        )

    def prepare(self) -> None:
        super().prepare()
        with (self.folder / "init.sql").open("a") as script:
            script.write(
                f"CREATE USER IF NOT EXISTS strict@'%' IDENTIFIED BY '{PASSWORD}' REQUIRE X509;\n"
                "GRANT ALL ON *.* TO strict@'%';\n"
            )

    @property
    def tls(self) -> str:
        return f"mysql://strict:{PASSWORD}@{HOST}:{self.port}/{DATABASE}"


class SecuredNats(servers.Nats):
    def __init__(self, certificates: Certificates) -> None:
        super().__init__()
        self._certificates = certificates

    def prepare(self) -> None:
        super().prepare()
        file = self.folder / "nats.conf"
        tls = {
            "cert_file": str(self._certificates.certificate("server")),
            "key_file": str(self._certificates.key("server")),
            "ca_file": str(self._certificates.certificate("ca")),
            "verify": True,
        }
        file.write_text(json.dumps({**json.loads(file.read_text()), "tls": tls}))

    def ping(self) -> None:
        if "Server is ready" not in self.log_tail(100):
            raise ValueError("not ready")

    @property
    def tls(self) -> str:
        return self.url


class SecuredPostgres(servers.Postgres):
    def __init__(self, certificates: Certificates) -> None:
        super().__init__()
        self._certificates = certificates

    def prepare(self) -> None:
        super().prepare()
        data = self.folder / "data"
        owner = data.stat()
        for source in (
            *(self._certificates.certificate(name) for name in ("server", "ca")),
            self._certificates.key("server"),
        ):
            copy = Path(shutil.copy(source, data))
            os.chown(copy, owner.st_uid, owner.st_gid)
            copy.chmod(0o600)
        self.options |= {
            "ssl": "on",
            "ssl_cert_file": "server.pem",
            "ssl_key_file": "server.key",
            "ssl_ca_file": "ca.pem",
        }
        (data / "pg_hba.conf").write_text(
            "hostssl all all 127.0.0.1/32 trust clientcert=verify-ca\n"
            "hostnossl all all 127.0.0.1/32 trust\n"
        )

    @property
    def tls(self) -> str:
        return self.url


class SecuredQuorum(servers.Quorum):
    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates
        files = {
            "certificate": str(certificates.certificate("server")),
            "key": str(certificates.key("server")),
            "authority": str(certificates.certificate("ca")),
        }
        super().__init__(tls=files)

    @property
    def tls(self) -> str:
        return self.url

    def ping(self) -> None:
        ping_https(self._certificates, self.port, "/readyz")


class SecuredRedis(servers.Redis):
    port_count = 2

    def __init__(self, certificates: Certificates) -> None:
        super().__init__(
            tls_cert_file=str(certificates.certificate("server")),
            tls_key_file=str(certificates.key("server")),
            tls_ca_cert_file=str(certificates.certificate("ca")),
        )

    def prepare(self) -> None:
        self.options["tls_port"] = str(self.ports[1])

    @property
    def tls(self) -> str:
        return f"redis://{HOST}:{self.ports[1]}"


Secured = (
    SecuredConsul
    | SecuredEtcd
    | SecuredMariaDB
    | SecuredNats
    | SecuredPostgres
    | SecuredQuorum
    | SecuredRedis
)
ENGINES: dict[str, Callable[[Certificates], Secured]] = {
    "consul": SecuredConsul,
    "etcd": SecuredEtcd,
    "mysql": SecuredMariaDB,
    "nats": SecuredNats,
    "postgresql": SecuredPostgres,
    "quorum": SecuredQuorum,
    "redis": SecuredRedis,
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module", params=ENGINES)
def server(request: pytest.FixtureRequest, certificates: Certificates) -> Iterator[Secured]:
    with ENGINES[request.param](certificates) as server:
        yield server


async def opened(url: str) -> Store:
    return await open_store(url, Context(SystemClock(), lambda event: None))


async def test_with_certificates_on_both_sides(server: Secured, certificates: Certificates) -> None:
    store = await opened(f"{server.tls}?{certificates.options()}")
    try:
        lease = await store.grant(60)
        await store.renew(lease)
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)
        assert (await store.create(KEY, b"v", lease)).won
        async with asyncio.timeout(20):
            await notified.wait()
        await store.revoke(lease)
    finally:
        await store.close()


REFUSALS = {
    "an authority that did not sign the server's": (
        {"ca": "stranger"},
        "(?i)certificate.*; set ca= to",
    ),
    "no certificate of our own": ({"own": ""}, "certificate.*cert= and key="),
    "a certificate of an authority unknown to it": (
        {"own": "guest"},
        "certificate.*cert= and key=",
    ),
}


@pytest.mark.parametrize("mistake", REFUSALS)
def test_a_refused_connection_gets_the_reason(
    server: Secured, certificates: Certificates, mistake: str
) -> None:
    options, says = REFUSALS[mistake]
    url = f"{server.tls}?connect_timeout_s=2&{certificates.options(**options)}"
    with pytest.raises(StoreError, match=says) as caught:
        asyncio.run(opened(url))
    assert server.tls.rpartition("@")[2].rpartition("//")[2].partition("/")[0] in str(caught.value)


@pytest.mark.parametrize("engine", ["consul", "mysql", "nats", "redis"])
def test_a_certificate_that_python_refuses_is_explained(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engines whose clients use Python's default settings for TLS, which are strict from 3.13
    on. Here they are strict in every version."""
    strict(monkeypatch)
    without = [each for each in AUTHORITY if not each.startswith("keyUsage")]
    certificates = Certificates(tmp_path, authority=tuple(without))
    with ENGINES[engine](certificates) as server:
        url = f"{server.tls}?connect_timeout_s=2&{certificates.options()}"
        with pytest.raises(StoreError, match=r"(?s)key usage.*; the certificate lacks") as caught:
            asyncio.run(opened(url))
    assert "keyUsage=critical,keyCertSign" in str(caught.value)
    assert "set ca= to" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        ("unable to get local issuer certificate", "set ca= to"),
        ("CA cert does not include key usage extension", "keyUsage=critical,keyCertSign"),
        ("Missing Authority Key Identifier", "authorityKeyIdentifier"),
        ("Missing Subject Key Identifier", "subjectKeyIdentifier"),
        ("Basic Constraints of CA cert not marked critical", "basicConstraints=critical,CA:true"),
        ("certificate has expired", "renew"),
        ("IP address mismatch, certificate is not valid for '10.0.0.1'", "subjectAltName"),
        ("Hostname mismatch, certificate is not valid for 'h'", "subjectAltName"),
    ],
)
def test_the_remedy_suits_the_reason_of_a_failed_verification(cause: str, remedy: str) -> None:
    url = StoreURL.parse("redis://h?tls=true")
    text = f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {cause} (_ssl.c:1018)"
    assert remedy in tls_remedy(url, text.lower())


@pytest.mark.parametrize("words", ["Connection reset by peer", "Connection lost"])
def test_a_server_that_hangs_up_may_want_a_certificate(words: str) -> None:
    """Python before 3.14 reports the first, 3.14 the second."""
    assert "cert= and key=" in tls_remedy(StoreURL.parse("redis://h?tls=true"), words.lower())


def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    lenient = ssl.create_default_context

    def insisting(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = lenient(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", insisting)


def test_a_redis_that_disappears_without_tls_shutdown_is_left_at_once(
    certificates: Certificates,
) -> None:
    """The server completes the TLS handshake, refuses, and disappears. What was opened is closed
    when the loop ends; otherwise the garbage collector would warn."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.certificate("server"), certificates.key("server"))

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            while True:
                link = stack.enter_context(listening.accept()[0])
                secured = stack.enter_context(context.wrap_socket(link, server_side=True))
                secured.recv(1024)
                secured.sendall(b"-ERR not today\r\n" * 4)

    with socket.create_server((HOST, 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        port = listening.getsockname()[1]
        url = f"redis://{HOST}:{port}?connect_timeout_s=2&{certificates.options(own='')}"
        try:
            with pytest.raises(StoreError, match="not today"):
                asyncio.run(opened(url))
            gc.collect()
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            server.join()
