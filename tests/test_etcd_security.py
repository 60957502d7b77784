"""etcd with users and with TLS: who is let in, and what the rest are told."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.model import leader_key
from doyen.stores.etcd.store import EtcdStore
from servers import Etcd
from servers.wire import http_json
from test_etcd import on

KEY = leader_key("e")


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """An etcd with authentication. `user` may do with /doyen/ as it likes."""
    with Etcd() as server:
        prefix = {"permType": "READWRITE", "key": b64("/doyen/"), "range_end": b64("/doyen0")}
        for path, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "user", "password": "p@ss/word"}),
            ("role/add", {"name": "candidate"}),
            ("role/grant", {"name": "candidate", "perm": prefix}),
            ("user/grant", {"user": "user", "role": "candidate"}),
            ("enable", {}),
        ):
            http_json(server.port, "POST", f"/v3/auth/{path}", body)
        yield server


async def nothing(store: EtcdStore) -> None:
    pass


@pytest.mark.parametrize(
    ("user", "prefix", "message"),
    [
        ("", "", "wants a user and a password"),
        ("user:wrong@", "", "knows no user 'user' with this password"),
        ("nobody:x@", "", "knows no user 'nobody'"),
        ("user:p%40ss%2Fword@", "/elsewhere", "does not permit this"),
    ],
)
def test_who_is_not_let_in_is_told_why(guarded: Etcd, user: str, prefix: str, message: str) -> None:
    with pytest.raises(StoreUnusable, match=message) as caught:
        on(f"etcd://{user}{guarded.address}{prefix}", nothing)
    assert guarded.address in str(caught.value)
    assert "p@ss" not in str(caught.value)


def test_a_token_that_etcd_no_longer_knows_is_replaced(guarded: Etcd) -> None:
    """In calls, renewals and the watch stream alike."""

    async def body(store: EtcdStore) -> None:
        def lose_the_token() -> None:
            assert store._cluster.token not in ("", "expired")
            store._cluster._token = "expired"

        lose_the_token()
        lease = await store.grant(60)
        lose_the_token()
        told = asyncio.Event()
        await store.watch(KEY, told.set)
        lose_the_token()
        assert (await store.create(KEY, b"v", lease)).won
        await told.wait()
        lose_the_token()
        await store.renew(lease)
        assert store._cluster.token != "expired"

    on(f"etcd://user:p%40ss%2Fword@{guarded.address}", body)


def test_a_password_is_no_hindrance_where_there_are_no_users(etcd: Etcd) -> None:
    """So that clients can be given theirs before authentication is turned on."""
    on(f"etcd://user:password@{etcd.address}", nothing)


class EtcdWithTLS(Etcd):
    """An etcd that speaks TLS, and lets in who has a certificate of its authority."""

    @property
    def trusted(self) -> str:
        return str(self.folder / "ca.pem")

    def prepare(self) -> None:
        new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        at = self.folder
        (at / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        openssl(*new, "-x509", "-subj", "/CN=ca", "-keyout", at / "ca.key", "-out", at / "ca.pem")
        for name in ("server", "client"):
            own, request, signed = (at / f"{name}.{kind}" for kind in ("key", "csr", "pem"))
            openssl(*new, "-new", "-subj", f"/CN={name}", "-keyout", own, "-out", request)
            by = ("-CA", at / "ca.pem", "-CAkey", at / "ca.key", "-CAcreateserial")
            what = ("-req", "-in", request, "-out", signed, "-extfile", at / "names")
            openssl("x509", *what, *by)

    def command(self) -> list[str]:
        here = self.address
        plain = [part.replace(f"http://{here}", f"https://{here}") for part in super().command()]
        files = {"cert-file": "server.pem", "key-file": "server.key", "trusted-ca-file": "ca.pem"}
        tls = [f"--{option}={self.folder / name}" for option, name in files.items()]
        return [*plain, *tls, "--client-cert-auth"]

    def ping(self) -> None:
        context = ssl.create_default_context(cafile=self.trusted)
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # our authority is a plain one
        context.load_cert_chain(self.folder / "client.pem", self.folder / "client.key")
        link = HTTPSConnection("127.0.0.1", self.port, timeout=2, context=context)
        try:
            link.request("GET", "/health")
            if link.getresponse().status != 200:
                raise ValueError("etcd is not healthy")
        finally:
            link.close()


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def secured() -> Iterator[EtcdWithTLS]:
    with EtcdWithTLS() as server:
        yield server


def test_tls_with_certificates_on_both_sides(secured: EtcdWithTLS) -> None:
    async def body(store: EtcdStore) -> None:
        lease = await store.grant(60)
        await store.renew(lease)
        told = asyncio.Event()
        await store.watch(KEY, told.set)
        assert (await store.create(KEY, b"v", lease)).won
        await told.wait()

    folder = secured.folder
    files = f"ca={secured.trusted}&cert={folder}/client.pem&key={folder}/client.key"
    on(f"{secured.url}?tls=true&{files}", body)


@pytest.mark.parametrize("options", ["", "tls=true", "ca={ca}"])
def test_what_tls_refuses_is_unavailable(secured: EtcdWithTLS, options: str) -> None:
    """In plain text; trusting other authorities; without a certificate of one's own."""
    options = options.format(ca=secured.trusted)
    with pytest.raises(StoreUnavailable, match=re.escape(secured.address)):
        on(f"{secured.url}?connect_timeout_s=2&{options}", nothing)
