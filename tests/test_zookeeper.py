"""The ZooKeeper store: its tree, its options, authentication, and its errors."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

import doyen
import servers
from doyen.errors import ConfigError, LeaseGone, StoreError, StoreUnavailable, StoreUnusable
from doyen.model import leader_key, line_key, notice_key, order_key
from doyen.stores.zookeeper import store as module
from doyen.stores.zookeeper.diagnosis import ZooKeeperServerState, findings
from doyen.stores.zookeeper.store import ZooKeeperStore
from fixtures import opening
from servers import wire
from servers.fetch import obtain
from servers.zookeeper import JAVA
from support import until

TTL_S = 2.0
PATIENCE_S = 30.0


opened = opening(ZooKeeperStore)


@contextmanager
def inspector(server: servers.ZooKeeper) -> Iterator[Any]:
    """An independent client of kazoo, to inspect znodes."""
    client = KazooClient(server.address)
    client.start()
    try:
        yield client
    finally:
        client.stop()
        client.close()


@pytest.fixture
def chroot() -> str:
    return f"/test-{uuid.uuid4().hex[:8]}"


def test_an_operator_finds_the_recipe(zookeeper: servers.ZooKeeper, chroot: str) -> None:
    """Tickets are ephemeral sequential znodes under the election's path, the record is an ephemeral
    znode beside them, and the token is the number of the transaction that created it."""

    async def main(client: Any) -> None:
        async with (
            doyen.connect(zookeeper.url + chroot, ttl_s=TTL_S) as session,
            session.campaign("/app/leader_election", name="server1") as term,
        ):
            place = f"{chroot}/app/leader_election"
            assert sorted(client.get_children(place)) == ["guid_0000000000", "leader"]
            record, ticket = client.get(f"{place}/leader"), client.get(f"{place}/guid_0000000000")
            assert b"server1" in record[0]
            assert record[1].czxid == term.token
            assert record[1].ephemeralOwner == ticket[1].ephemeralOwner != 0
            async with session.campaign("race", recipe="race"):
                assert client.get_children(f"{chroot}/elections/race") == ["leader"]
        assert client.get_children(place) == []

    with inspector(zookeeper) as client:
        asyncio.run(main(client))


async def test_tokens_begin_above_the_floor(zookeeper: servers.ZooKeeper, chroot: str) -> None:
    url = zookeeper.url + chroot
    async with opened(url) as plain, opened(f"{url}?token_floor=1000000000000") as raised:
        lease = await plain.grant(TTL_S)
        entry = (await plain.create(leader_key("e"), b"", lease)).entry
        seen = await raised.get(leader_key("e"))
        assert seen is not None
        assert seen.revision == entry.revision + 10**12
        assert await raised.delete(seen.key, if_version=seen.version)


def test_an_emptied_ensemble_is_refused(chroot: str) -> None:
    """An ensemble that was emptied would give out lower tokens than before."""

    async def main(server: servers.ZooKeeper) -> None:
        async with opened(server.url + chroot) as store:
            for number in range(20):
                await store.put(order_key(str(number)), b"", if_version=None)
            server.kill()
            shutil.rmtree(server.folder / "data" / "version-2")
            await asyncio.to_thread(server.start)
            lease = await store.grant(TTL_S)
            with pytest.raises(StoreUnusable, match="Set token_floor"):
                await store.create(leader_key("e"), b"", lease)
        async with opened(server.url + chroot) as other:
            assert await other.get(leader_key("e")) is None

    with servers.ZooKeeper() as server:
        asyncio.run(main(server))


@pytest.mark.parametrize("operation", ["delete", "put"])
async def test_a_late_change_does_not_affect_the_next_record(
    zookeeper: servers.ZooKeeper, chroot: str, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is replaced between the read and the change. Both have ZooKeeper's version 0, so
    the version alone would permit the change."""
    url = zookeeper.url + chroot
    async with opened(url) as ours, opened(url) as theirs:
        key = leader_key("e")
        lease = await theirs.grant(TTL_S)
        old = (await theirs.create(key, b"old", lease)).entry
        read = ours._unchanged

        async def read_late(*args: Any) -> Any:
            seen = await read(*args)
            monkeypatch.setattr(ours, "_unchanged", read)
            assert await theirs.delete(key)
            assert (await theirs.create(key, b"new", lease)).won
            return seen

        monkeypatch.setattr(ours, "_unchanged", read_late)
        if operation == "delete":
            assert not await ours.delete(key, if_version=old.version)
        else:
            assert await ours.put(key, b"ours", if_version=old.version) is None
        found = await ours.get(key)
        assert found is not None
        assert found.value == b"new"


async def test_a_leader_whose_record_was_removed_does_not_remove_the_next(
    zookeeper: servers.ZooKeeper, chroot: str
) -> None:
    """What the store remembers of the record that it created must not permit that."""
    url = zookeeper.url + chroot
    async with opened(url) as a, opened(url) as b:
        key = leader_key("e")
        mine = (await a.create(key, b"a", await a.grant(TTL_S))).entry
        assert await b.delete(key)
        assert (await b.create(key, b"b", await b.grant(TTL_S))).won
        assert not await a.delete(key, if_version=mine.version)
        found = await a.get(key)
        assert found is not None
        assert found.value == b"b"


async def test_an_entry_of_a_lease_can_be_made_persistent(
    zookeeper: servers.ZooKeeper, chroot: str
) -> None:
    async with opened(zookeeper.url + chroot) as store:
        lease = await store.grant(TTL_S)
        bound = (await store.create(order_key("e"), b"1", lease)).entry
        kept = await store.put(bound.key, b"2", if_version=bound.version)
        assert kept is not None
        assert kept.lease is None
        assert kept.revision > bound.revision
        await store.revoke(lease)
        found = await store.get(bound.key)
        assert found == kept


def test_unused_watches_are_removed_from_the_server(chroot: str) -> None:
    """Each candidate watches a key that is never written. The server must not keep that watch for
    as long as the connection lasts."""

    async def main(server: servers.ZooKeeper) -> None:
        async with opened(server.url + chroot) as store:
            before = watches(server)
            for number in range(20):
                (await store.watch(notice_key("e", str(number)), lambda: None)).close()
            kept = await store.watch(leader_key("e"), lambda: None)
            assert watches(server) > before
            kept.close()
            await store.get(leader_key("e"))  # follows the removals in order
            assert watches(server) == before

    def watches(server: servers.ZooKeeper) -> int:
        answer = wire.zookeeper_command(server.port, b"mntr")
        return int(answer.partition("zk_watch_count\t")[2].split()[0])

    with servers.ZooKeeper() as server:
        asyncio.run(main(server))


async def test_exhausted_ticket_numbers_are_reported(
    zookeeper: servers.ZooKeeper, chroot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZooKeeper's counter has 31 bits, after which numbers repeat."""
    monkeypatch.setattr(module, "_LAST_TICKET", 2)
    async with opened(zookeeper.url + chroot) as store:
        lease = await store.grant(TTL_S)
        for _ in range(2):
            await store.enqueue(line_key("e"), b"", lease)
        with pytest.raises(StoreUnusable, match="delete that znode"):
            await store.enqueue(line_key("e"), b"", lease)
        assert len(await store.list(line_key("e"))) == 2


def test_znodes_of_other_programs_are_ignored(zookeeper: servers.ZooKeeper, chroot: str) -> None:
    """Their names are not encoded as doyen's are."""

    async def main(client: Any) -> None:
        async with opened(zookeeper.url + chroot) as store:
            lease = await store.grant(TTL_S)
            await store.create(leader_key("e"), b"v", lease)
            notified = asyncio.Event()
            await store.watch("elections/e", notified.set)
            for name in (":=FF", "=FF:", "line:/foreign", "guid_abc"):
                client.create(f"{chroot}/elections/e/{name}", b"?", makepath=True)
            await asyncio.wait_for(notified.wait(), 10.0)
            assert b"v" in [entry.value for entry in await store.list("elections/e")]
            client.create(f"{chroot}/elections/=FF", b"?")
            assert b"v" in [entry.value for entry in await store.list("elections")]
            notified.clear()
            await store.delete(leader_key("e"))
            await asyncio.wait_for(notified.wait(), 10.0)

    with inspector(zookeeper) as client:
        asyncio.run(main(client))


def test_an_operator_ends_a_lease_by_deleting_its_znode(
    zookeeper: servers.ZooKeeper, chroot: str
) -> None:
    async def main(client: Any) -> None:
        async with opened(zookeeper.url + chroot) as store:
            lease = await store.grant(TTL_S)
            await store.create(leader_key("e"), b"", lease)
            client.delete(f"{chroot}/doyen/leases/{lease.id}")
            with pytest.raises(LeaseGone, match="removed"):
                await store.renew(lease)
            with pytest.raises(LeaseGone):
                await store.renew(lease)
            # Its entries remain until the holder revokes it, or until its time is over.
            assert await store.get(leader_key("e")) is not None
            await store.revoke(lease)
            assert await store.get(leader_key("e")) is None

    with inspector(zookeeper) as client:
        asyncio.run(main(client))


async def test_a_request_beyond_zookeepers_limits_is_refused(
    zookeeper: servers.ZooKeeper, chroot: str
) -> None:
    async with opened(zookeeper.url + chroot) as store:
        with pytest.raises(ConfigError, match=r"grants, 40 s.*maxSessionTimeout"):
            await store.grant(41.0)
        lease = await store.grant(TTL_S)
        with pytest.raises(ConfigError, match="1000001 bytes"):
            await store.create(leader_key("e"), bytes(1_000_001), lease)


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ("?session=5", "has no option 'session'"),
        ("?tls=yes", "tls is true or false"),
        ("?tls=false&ca=x.pem", "tls=false goes with none of ca"),
        ("?cert=x.pem", "cert and key go together"),
        ("?ca=nowhere.pem", "No such file"),
        ("?acl=creator", "acl=creator needs a user"),
        ("?acl=mine", "acl is creator or open"),
        ("?sasl=PLAIN", "sasl is DIGEST-MD5 or GSSAPI"),
        ("?sasl=DIGEST-MD5", "needs a user"),
        ("?service=zk", "service can only be used with sasl"),
        ("?connect_timeout_s=soon", "is a number"),
        ("?token_floor=-1", "is a whole number of 0 or more"),
        ("/a//b", "is not a path of a znode"),
        ("/a/../b", "is not a path of a znode"),
        ("/zookeeper/x", "ZooKeeper's own use"),
    ],
)
def test_a_url_that_cannot_work_is_refused(rest: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asyncio.run(_open(f"zookeeper://127.0.0.1:1{rest}"))


@pytest.mark.parametrize("hosts", ["", "h1,,h2", "::1"])
def test_a_malformed_host_is_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        asyncio.run(_open(f"zookeeper://{hosts}/x"))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kazoo.client", None)
    for name in ("store", "connection", "session", "watches", "diagnosis"):
        monkeypatch.delitem(sys.modules, f"doyen.stores.zookeeper.{name}")
    with pytest.raises(ConfigError, match=r'pip install "doyen\[zookeeper\]"'):
        asyncio.run(_open("zookeeper://127.0.0.1:1"))


def test_missing_sasl_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "puresasl", None)
    with pytest.raises(ConfigError, match=r'pip install "kazoo\[sasl\]"'):
        asyncio.run(_open("zookeeper://127.0.0.1:1?sasl=GSSAPI"))


async def test_servers_that_refuse_connections_are_named_at_once() -> None:
    one, other = servers.free_port(), servers.free_port()
    url = f"zookeeper://127.0.0.1:{one},127.0.0.1:{other}?connect_timeout_s=600"
    with pytest.raises(StoreUnavailable) as failure:
        async with asyncio.timeout(PATIENCE_S):
            await _open(url)
    assert f"127.0.0.1:{one}: " in str(failure.value)
    assert f"127.0.0.1:{other}: " in str(failure.value)
    assert "refused" in str(failure.value)


async def test_servers_that_refuse_connections_are_waited_for_if_asked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with servers.ZooKeeper() as server:
        server.kill()
        session = doyen.connect(server.url, wait_s=60)
        opening = asyncio.create_task(session.__aenter__())
        await until(lambda: "store_waited_for" in caplog.text)
        await asyncio.to_thread(server.start)
        await opening
        assert await session.leader("e") is None
        await session.__aexit__(None, None, None)


async def test_a_server_that_is_not_zookeeper_is_reported() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}: "):
            await _open(f"zookeeper://127.0.0.1:{port}?connect_timeout_s=0.5")


async def test_entries_are_private_to_their_user(zookeeper: servers.ZooKeeper, chroot: str) -> None:
    """With digest authentication, clients with another password or none have no access."""
    ours = zookeeper.url.replace("//", "//doyen:p%40ss%3Aword@") + chroot
    async with opened(ours) as store, opened(ours) as same:
        lease = await store.grant(8.0)
        assert (await store.create(leader_key("e"), b"", lease)).won
        assert await same.get(leader_key("e")) is not None
    for url in (ours.replace("word@", "wrong@"), zookeeper.url + chroot):
        with pytest.raises(StoreUnusable, match="Check user and password"):
            await _open(url)
    async with opened(zookeeper.url.replace("//", "//a:b@") + chroot + "2?acl=open") as store:
        await store.put(order_key("e"), b"", if_version=None)
    async with opened(zookeeper.url + chroot + "2") as anonymous:
        assert await anonymous.get(order_key("e")) is not None


class SaslZooKeeper(servers.ZooKeeper):
    """A server that requires SASL authentication."""

    def __init__(self) -> None:
        super().__init__(
            authProvider_1="org.apache.zookeeper.server.auth.SASLAuthenticationProvider",
            sessionRequireClientSASLAuth="true",
        )

    def prepare(self) -> None:
        super().prepare()
        (self.folder / "jaas.conf").write_text(
            "Server { org.apache.zookeeper.server.auth.DigestLoginModule required"
            ' user_doyen="secret"; };'
        )

    def environment(self) -> dict[str, str]:
        option = f"-Djava.security.auth.login.config={self.folder}/jaas.conf"
        return {**super().environment(), "JAVA_TOOL_OPTIONS": option}


def test_sasl_authentication(chroot: str) -> None:
    async def main(server: servers.ZooKeeper) -> None:
        url = server.url.replace("//", "//doyen:secret@") + chroot
        async with opened(f"{url}?sasl=DIGEST-MD5") as store:
            lease = await store.grant(TTL_S)
            assert (await store.create(leader_key("e"), b"", lease)).won
        with pytest.raises(StoreError) as failure:
            await _open(f"{url.replace('secret', 'wrong')}?sasl=DIGEST-MD5&connect_timeout_s=1")
        assert "does not accept the credentials" in str(failure.value)
        with pytest.raises(StoreUnusable, match="does not accept the credentials"):
            await _open(server.url)

    with SaslZooKeeper() as server:
        asyncio.run(main(server))


class TlsZooKeeper(servers.ZooKeeper):
    """A server with TLS and a self-signed certificate, which requires no client certificate."""

    port_count = 4

    def __init__(self) -> None:
        super().__init__(
            serverCnxnFactory="org.apache.zookeeper.server.NettyServerCnxnFactory",
            ssl_clientAuth="none",
        )

    def prepare(self) -> None:
        store = str(self.folder / "key.p12")
        keytool = str(obtain(JAVA).home / "keytool")
        key = ("-storepass", "secret", "-alias", "zk", "-keystore", store)
        make = ("-genkeypair", "-keyalg", "EC", "-dname", "CN=zk", "-ext", "san=ip:127.0.0.1")
        for arguments in (make, ("-exportcert", "-rfc", "-file", str(self.ca))):
            command = [keytool, *arguments, *key]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        self.options |= {
            "secureClientPort": str(self.ports[3]),
            "ssl_keyStore_location": store,
            "ssl_keyStore_password": "secret",
            "ssl_trustStore_location": str(self.ca),
        }
        super().prepare()

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def tls(self) -> str:
        return f"zookeeper://127.0.0.1:{self.ports[3]}"


def test_tls_with_a_self_signed_certificate(chroot: str) -> None:
    async def main(server: TlsZooKeeper) -> None:
        async with opened(f"{server.tls}{chroot}?ca={server.ca}") as store:
            lease = await store.grant(TTL_S)
            notified = asyncio.Event()
            await store.watch(leader_key("e"), notified.set)
            await asyncio.gather(*(store.get(leader_key(str(each))) for each in range(200)))
            assert (await store.create(leader_key("e"), bytes(50_000), lease)).won
            await asyncio.wait_for(notified.wait(), 10)
            assert (await store.diagnose())[0].level == "ok"
        with pytest.raises(StoreUnavailable, match="certificate verify failed"):
            await _open(f"{server.tls}?tls=true&connect_timeout_s=0.4")
        with pytest.raises(StoreUnavailable):
            await _open(f"{server.url}?ca={server.ca}&connect_timeout_s=0.4")

    with TlsZooKeeper() as server:
        asyncio.run(main(server))


async def test_diagnosis_of_a_server(zookeeper: servers.ZooKeeper, chroot: str) -> None:
    async with opened(zookeeper.url + chroot) as store:
        found = {(each.level, each.subject) for each in await store.diagnose()}
    assert found == {("ok", "version"), ("note", "servers"), ("ok", "sessions")}


def test_findings_for_states_of_servers() -> None:
    def levels(*states: ZooKeeperServerState) -> set[tuple[str, str]]:
        return {(each.level, each.subject) for each in findings(states)}

    good = [
        ZooKeeperServerState(server=f"h{each}", version="3.9.5", mode="follower")
        for each in range(3)
    ]
    assert levels(*good) == {("ok", "version")}
    assert ("warning", "version") in levels(
        ZooKeeperServerState(server="h", version="3.8.0", mode="leader")
    )
    assert ("problem", "version") in levels(
        ZooKeeperServerState(server="h", version="3.9.3", mode="leader")
    )
    alone = ZooKeeperServerState(server="h", version="3.8.0", mode="standalone")
    assert levels(alone) == {("ok", "version"), ("note", "servers")}
    assert ("problem", "servers") in levels(*good, alone)
    assert ("warning", "servers") in levels(
        *good, ZooKeeperServerState(server="h", error="refused")
    )
    assert ("note", "servers") in levels(*good, ZooKeeperServerState(server="h"))
    short = (("tickTime", "2000"), ("minSessionTimeout", "1000"))
    assert ("warning", "sessions") in levels(
        *good, ZooKeeperServerState(server="h", settings=short)
    )


async def _open(url: str) -> None:
    async with opened(url):
        pass
