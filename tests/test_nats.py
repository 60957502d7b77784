"""What only NATS does: its errors, the copy of the bucket, connections that fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import socket
import struct
import threading
import time
from pathlib import Path

import pytest

import doyen
import servers
from doyen.errors import ConfigError, LeaseGone, StoreUnavailable, StoreUnusable
from doyen.model import leader_key, line_key, order_key
from doyen.stores.nats.jetstream import JetStream, NatsAddress
from doyen.stores.nats.store import NatsStore
from doyen.stores.port import Creation, Store
from fixtures import opening, refused

opened = opening(NatsStore)


async def reached(event: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await event.wait()
    event.clear()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("nats://h/?ttl=3", "no option 'ttl'"),
        ("nats://h/a.b", "name of a bucket"),
        ("nats://h/?tls=yes", "true or false"),
        ("nats://h/?cert=/x", "together"),
        ("nats://h/?creds=/nowhere", "no such file"),
        ("nats://h/?replicas=many", "is a whole number"),
        ("nats://", "is not a host"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, match: str) -> None:
    refused(url, ConfigError, match)


def test_errors_name_the_cause(nats: servers.Nats) -> None:
    refused(f"{nats.url}/three?replicas=3", StoreUnusable, "replicas")


async def test_servers_that_all_refuse_are_not_waited_for() -> None:
    hosts = [f"{name}:{servers.free_port()}" for name in ("127.0.0.1", "localhost")]
    with pytest.raises(StoreUnavailable, match=f"{hosts[0]}, {hosts[1]} cannot be reached"):
        async with asyncio.timeout(30), opened(f"nats://{','.join(hosts)}?connect_timeout_s=60"):
            pass


class Without(servers.Nats):
    """A server without JetStream, or with a password."""

    settings = ""

    def prepare(self) -> None:
        where = f'listen: "127.0.0.1:{self.port}"\n'
        (self.folder / "nats.conf").write_text(where + self.settings)

    def ping(self) -> None:
        if "Server is ready" not in self.log_tail(100):
            raise ValueError("not ready")


def test_a_server_without_jetstream_is_refused() -> None:
    with Without() as server:
        refused(server.url, StoreUnavailable, "JetStream does not respond: it is disabled")


def test_a_wrong_password_is_reported() -> None:
    class Guarded(Without):
        settings = "authorization { user: app, password: right }\n"

    with Guarded() as server:
        at = f"127.0.0.1:{server.port}?connect_timeout_s=1"
        refused(f"nats://app:wrong@{at}", StoreUnusable, "correct the user, password or token")


def test_a_refused_login_is_reported_though_later_attempts_are_only_cut_off() -> None:
    """The server closes the connection of a client that it refuses, and the reason may be lost."""
    info = {"server_id": "x", "version": "2.10.0", "max_payload": 1024, "auth_required": True}

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for attempt in itertools.count():
                connection, _ = listening.accept()
                with connection:
                    connection.sendall(f"INFO {json.dumps(info)}\r\n".encode())
                    connection.recv(4096)
                    if attempt == 0:
                        connection.sendall(b"-ERR 'Authorization Violation'\r\n")
                    else:
                        linger = struct.pack("ii", 1, 0)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        try:
            at = f"127.0.0.1:{listening.getsockname()[1]}?connect_timeout_s=1"
            refused(f"nats://app:wrong@{at}", StoreUnusable, "correct the user, password or token")
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            server.join()


def test_a_bucket_in_memory_is_refused(nats: servers.Nats, tmp_path: Path) -> None:
    async def make() -> None:
        jetstream = JetStream(NatsAddress((f"127.0.0.1:{nats.port}",), {}, 3.0))
        await jetstream.open()
        name = "KV_forgetful"
        await jetstream.call(f"STREAM.CREATE.{name}", name=name, subjects=["x"], storage="memory")
        await jetstream.close()

    asyncio.run(make())
    refused(f"{nats.url}/forgetful", StoreUnusable, "needs 'file'")


def test_operators_may_purge_and_delete_a_bucket(nats: servers.Nats) -> None:
    async def main() -> None:
        url, key = f"{nats.url}/operated", leader_key("e")
        async with opened(url) as store:
            lease = await store.grant(30)
            made = await store.create(key, b"", lease)
            await store._jetstream.call("STREAM.PURGE.KV_operated")
            async with asyncio.timeout(20):
                assert await store.delete(key, if_version=made.entry.version)
                again = await store.create(key, b"", lease)
            assert again.won
            assert again.entry.revision > made.entry.revision
            await store._jetstream.call("STREAM.DELETE.KV_operated")
            async with opened(url):
                with pytest.raises(StoreUnusable, match="token_floor"):
                    await store.grant(30)

    asyncio.run(main())
    refused(f"{nats.url}/operated?token_floor=1000", StoreUnusable, "below token_floor=1000")


async def test_a_bucket_is_made_above_the_tokens_of_another(nats: servers.Nats) -> None:
    async with opened(f"{nats.url}/above?token_floor=1000") as store:
        made = await store.create(leader_key("e"), b"", await store.grant(30))
        assert made.entry.revision > 1000


async def test_an_ended_lease_voids_what_is_written_later(nats: servers.Nats) -> None:
    """Even if the copy of the writer is behind and the server accepts its write."""
    async with opened(f"{nats.url}/late") as store, opened(f"{nats.url}/late") as other:
        lease = await store.grant(30)
        key = leader_key("late")
        await other.revoke(lease)
        with pytest.raises(LeaseGone):
            await store.create(key, b"late", lease)
        with pytest.raises(LeaseGone):
            await store.enqueue(line_key("late"), b"late", lease)
        assert await other.get(key) is None
        mine = await other.grant(30)
        assert (await other.create(key, b"mine", mine)).won


async def test_a_renewal_without_a_response_does_not_end_the_lease(nats: servers.Nats) -> None:
    async with opened(nats.url) as store:
        lease = await store.grant(30)
        known = dict(store._leases._held)
        await store.renew(lease)
        store._leases._held.update(known)  # as if the response had been lost
        await store.renew(lease)
        await store.revoke(lease)
        with pytest.raises(LeaseGone):
            await store.renew(lease)


def test_watches_outlive_connections_and_servers() -> None:
    async def main() -> None:
        with servers.Nats() as server, servers.Proxy(server) as proxy:
            async with opened(proxy.url) as store:
                key, event = order_key("news"), asyncio.Event()
                await store.watch(key, event.set)
                for number, hurt in enumerate((proxy.reset, server.restart)):
                    await asyncio.to_thread(hurt)
                    async with opened(server.url) as other:
                        found = await other.get(key)
                        value = str(number).encode()
                        assert await other.put(key, value, if_version=found and found.version)
                    while await seen(store, key) != value:
                        await reached(event)

    async def seen(store: Store, key: str) -> bytes | None:
        try:
            entry = await store.get(key)
        except StoreUnavailable:
            return None
        return None if entry is None else entry.value

    asyncio.run(main())


async def test_bytes_that_are_no_text_do_not_stop_the_copy(nats: servers.Nats) -> None:
    """In a subject or in headers, they make nats-py stop reading the connection."""
    async with opened(f"{nats.url}/bytes") as store:
        reader, writer = await asyncio.open_connection("127.0.0.1", nats.port)
        await reader.readline()
        writer.write(b'CONNECT {"headers":true,"verbose":false}\r\n')
        writer.write(b"PUB $KV.bytes.entries.\xff\xfe 1\r\nx\r\n")
        writer.write(b"HPUB $KV.bytes.entries.a 16 16\r\nNATS/1.0 \xff\xff\xff\r\n\r\n\r\n")
        writer.write(b"PUB $KV.bytes.leases.stray 3\r\nabc\r\nPING\r\n")
        await writer.drain()
        assert await reader.readline() == b"PONG\r\n"
        writer.close()
        async with opened(f"{nats.url}/bytes") as other:
            for each in (store, other):
                lease = await each.grant(30)
                assert (await each.create(leader_key(lease.id), b"", lease)).won


async def test_creations_over_markers_that_the_server_has_forgotten(
    nats: servers.Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doyen.stores.nats.jetstream.MARKER_TTL", "1s")
    keys = [leader_key(f"forgotten{number}") for number in range(30)]
    at = f"{nats.url}/forgotten"
    async with opened(at) as a, opened(at) as b:
        leases = await a.grant(30), await b.grant(30)
        for key in keys:
            made = await a.create(key, b"", leases[0])
            await a.delete(key, if_version=made.entry.version)
        await b.get(keys[-1])
        async with asyncio.timeout(20):
            while await a._jetstream.last(  # noqa: ASYNC110
                "KV_forgotten", a._subject(keys[-1])
            ):
                await asyncio.sleep(0.1)  # the server does not announce it
        for number, key in enumerate(keys):

            async def late(key: str = key, late_s: float = number * 1e-4) -> Creation:
                await asyncio.sleep(late_s)
                return await b.create(key, b"b", leases[1])

            one, two = await asyncio.gather(a.create(key, b"a", leases[0]), late())
            assert one.won is not two.won
            assert one.entry == two.entry == await a.get(key)


@pytest.mark.parametrize(("number", "wiped"), [(8, False), (3, True)])
def test_many_candidates_have_a_leader_soon_after_an_outage(number: int, wiped: bool) -> None:
    """It takes a ttl and a handover, however many leases expired in the outage, and also if the
    server comes back without its data."""
    ttl_s = 1.0

    async def candidate(url: str, leads: asyncio.Event) -> None:
        async with doyen.connect(url, ttl_s=ttl_s) as session:
            async for campaign in session.campaigns("outage"):
                async with campaign:
                    leads.set()
                    await asyncio.Event().wait()

    async def main() -> float:
        with servers.Nats() as server:
            leads = asyncio.Event()
            tasks = [asyncio.create_task(candidate(server.url, leads)) for _ in range(number)]
            await reached(leads)
            async with opened(server.url) as store:
                changed = asyncio.Event()
                await store.watch(line_key("outage"), changed.set)
                while len(await store.list(line_key("outage"))) < number:
                    await reached(changed)
            server.kill()
            await asyncio.sleep(3.5 * ttl_s)  # until all clients have stopped trying to revoke
            leads.clear()
            if wiped:
                shutil.rmtree(server.folder / "data")
            server.launch()
            await asyncio.to_thread(server.await_ready)
            began = time.monotonic()
            await reached(leads)
            took_s = time.monotonic() - began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return took_s

    assert asyncio.run(main()) < 3 * ttl_s, f"ending leases one by one takes {number} ttls"


async def test_diagnosis_warns_of_one_replica(nats: servers.Nats) -> None:
    async with opened(nats.url) as store:
        assert [each.level for each in await store.diagnose()] == ["ok", "warning"]
