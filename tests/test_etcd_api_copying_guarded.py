"""Keyspaces are copied from an etcd with TLS and users, and to it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from doyen.errors import StoreError
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.copying import Copied, KeyspaceSide, copy
from doyen.stores.port import StoreURL
from etcd_door import DoorNode, EtcdClient, doors
from servers.certificates import Certificates
from servers.cluster import Cluster
from servers.etcd import ETCDCTL
from servers.fetch import obtain
from test_etcd_api_copying import records
from test_tls import SecuredEtcd, ping_https

ROOT, APP = "root:r%40ot@", "app:app@"
"""Users in a URL. `app` may read and write the keys that begin with /app/ only."""
LEASE = 77


class GuardedEtcd(SecuredEtcd):
    """An etcd with TLS and users. With `by_certificate`, the name of a client's certificate is its
    user."""

    def __init__(self, certificates: Certificates, *, by_certificate: bool = False) -> None:
        super().__init__(certificates)
        self.options["bcrypt_cost"] = "4"  # the least, to log in fast
        if not by_certificate:
            del self.options["client_cert_auth"], self.options["trusted_ca_file"]

    def ctl(self, *arguments: str, user: str = "") -> None:
        names = ("cacert", "ca"), ("cert", "client")
        files = [f"--{option}={self._certificates.certificate(name)}" for option, name in names]
        files.append(f"--key={self._certificates.key('client')}")
        login = [f"--user={user}"] if user else []
        program = str(obtain(ETCDCTL).path)
        endpoint = f"--endpoints=https://{self.address}"
        subprocess.run([program, endpoint, *files, *login, *arguments], check=True)

    def add_users(self, *commands: str) -> None:
        for command in ("user add root:r@ot", "user grant-role root root", *commands):
            self.ctl(*command.split())
        self.ctl("auth", "enable")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def guarded(certificates: Certificates) -> Iterator[GuardedEtcd]:
    with GuardedEtcd(certificates) as server:
        server.add_users(
            "role add app",
            "role grant-permission app readwrite --prefix=true /app/",
            "user add app:app",
            "user grant-role app app",
        )
        yield server


def url_of(server: GuardedEtcd, user: str, options: str) -> StoreURL:
    return StoreURL.parse(f"etcd://{user}{server.address}?{options}")


class Copies:
    """A guarded etcd beside a quorum, and how to copy between them."""

    def __init__(self, server: GuardedEtcd, certificates: Certificates, door: str) -> None:
        self._server, self._door = server, door
        self.tls = certificates.options(own="")

    async def run(
        self,
        user: str,
        *,
        tls: str | None = None,
        prefix: bytes = b"",
        export: bool = False,
        **settings: Any,
    ) -> Copied:
        """Import from the etcd, or export to it."""
        outer = url_of(self._server, user, self.tls if tls is None else tls)
        urls = [outer, StoreURL.parse(f"etcd://{self._door}")]
        sides = [KeyspaceSide(each, prefix) for each in (urls[::-1] if export else urls)]
        self.etcd = sides[-1] if export else sides[0]
        try:
            return await copy(*sides, **settings)
        finally:
            for side in sides:
                await side.close()


def run(
    folder: Path,
    server: GuardedEtcd,
    certificates: Certificates,
    trial: Callable[[Copies, EtcdClient], Any],
) -> None:
    async def whole() -> None:
        async with (
            asyncio.timeout(60),
            doors(folder) as quorum,
            EtcdClient(quorum.addresses[0]) as client,
        ):
            await trial(Copies(server, certificates, quorum.addresses[0]), client)

    asyncio.run(whole())


def test_an_etcd_with_users_and_tls_is_copied_in_and_out(
    tmp_path: Path, guarded: GuardedEtcd, certificates: Certificates
) -> None:
    async def trial(copies: Copies, quorum: EtcdClient) -> None:
        for number in range(150):
            put = {"key": b"/app/%03d" % number, "value": b"v"}
            await quorum.call(rpc.PUT, **put)
        await quorum.call(rpc.GRANT, ID=LEASE, TTL=600)
        await quorum.call(rpc.PUT, key=b"/app/leased", value=b"v", lease=LEASE)
        await quorum.call(rpc.PUT, key=b"/other", value=b"v")
        all_keys = await records(quorum)

        # A user writes what it may, is interrupted, and goes on; its token expires meanwhile.
        def interrupt(what: str, done: int, total: int) -> None:
            copies.etcd._client._cluster.login.token = "expired"
            if done == 120:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await copies.run(APP, prefix=b"/app/", export=True, progress=interrupt)
        done = await copies.run(APP, prefix=b"/app/", export=True)
        assert (done.keys, done.leases) == (151, 1)
        assert 0 < done.written < 151, "only what was missing"
        with pytest.raises(StoreError, match=r"does not let the user 'app' read all keys: grant"):
            await copies.run(APP, export=True)

        # Root reads and writes all.
        done = await copies.run(ROOT, export=True)
        assert (done.keys, done.written) == (152, 1)
        await quorum.call(rpc.DELETE_RANGE, key=b"\0", range_end=b"\0")
        await quorum.call(rpc.REVOKE, ID=LEASE)
        with pytest.raises(StoreError, match="'app' read the keys that begin with '/o'"):
            await copies.run(APP, prefix=b"/o")
        done = await copies.run(ROOT)
        assert (done.keys, done.leases, done.written) == (152, 1, 152)
        assert await records(quorum) == all_keys
        assert 500 < (await quorum.call(rpc.TIME_TO_LIVE, ID=LEASE)).TTL <= 600

        # What a role was granted as the error says.
        guarded.ctl(*["role", "add", "all"], user="root:r@ot")
        grant = ("role", "grant-permission", "all", "readwrite", "--prefix=true", "")
        guarded.ctl(*grant, user="root:r@ot")
        guarded.ctl(*["user", "grant-role", "app", "all"], user="root:r@ot")
        assert (await copies.run(APP)).written == 0

    run(tmp_path, guarded, certificates, trial)


def test_mistakes_in_the_url_are_explained(
    tmp_path: Path, guarded: GuardedEtcd, certificates: Certificates
) -> None:
    stranger = certificates.options(ca="stranger", own="")

    async def trial(copies: Copies, quorum: EtcdClient) -> None:
        for user, tls, remedy in (
            ("", None, "requires a user and a password, as in etcd://user:password@host"),
            ("app:wrong@", None, "no user 'app' with this password: correct the URL"),
            (ROOT, "", "may expect TLS: set tls=true, and ca="),
            (ROOT, "tls=true", "set ca= to the file of the authority"),
            (ROOT, stranger, "set ca= to the file of the authority"),
        ):
            for export in (False, True):
                with pytest.raises(StoreError, match=remedy) as caught:
                    await copies.run(user, tls=tls, export=export)
                assert guarded.address in str(caught.value)
                assert "r@ot" not in str(caught.value)
        # The other way round: the quorum has no TLS.
        door = StoreURL.parse(f"etcd://{copies._door}?{copies.tls}")
        side = KeyspaceSide(door)
        with pytest.raises(StoreError, match="may not use TLS: leave out tls="):
            await side.size()
        await side.close()

    run(tmp_path, guarded, certificates, trial)


class SecuredNode(DoorNode):
    certificates: Certificates

    def ping(self) -> None:
        ping_https(self.certificates, self.port, "/readyz")


class SecuredQuorum(Cluster[SecuredNode]):
    member = SecuredNode


@pytest.mark.chaos
def test_certificates_instead_of_passwords(certificates: Certificates) -> None:
    """The command, between an etcd whose users are the names of certificates and a quorum with
    mutual TLS."""
    quorum = SecuredQuorum(
        3,
        tls_certificate=str(certificates.certificate("server")),
        tls_key=str(certificates.key("server")),
        tls_authority=str(certificates.certificate("ca")),
    )
    for node in quorum.members:
        node.certificates = certificates
    certificates.sign("reader")
    with GuardedEtcd(certificates, by_certificate=True) as etcd, quorum:
        for key in ("/a", "/b"):
            etcd.ctl("put", key, "v")
        etcd.add_users("user add client:x", "user grant-role client root", "user add reader:x")
        nodes = ",".join(each.address for each in quorum.members)

        def doyen(action: str, own: str) -> subprocess.CompletedProcess[str]:
            outer = f"etcd://{etcd.address}?{certificates.options(own=own)}"
            inner = f"doyen://{nodes}?{certificates.options()}"
            command = [sys.executable, "-m", "doyen", "cluster", action, outer, "--store", inner]
            return subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60)

        for action, written in (("import", 2), ("export", 0)):
            done = doyen(action, "client")
            assert done.returncode == 0, done.stderr
            copied = json.loads(done.stdout)
            assert (copied["keys"], copied["written"]) == (2, written)
        refused = doyen("import", "reader")
        assert "does not let the user of this certificate read all keys: grant" in refused.stderr
        refused = doyen("import", "")
        assert "set cert= and key=" in refused.stderr
