"""NATS in particular: its errors, its copy of the bucket, and links that fail."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import servers
from doyen.clock import SystemClock
from doyen.errors import ConfigError, DoyenError, LeaseGone, StoreUnavailable, StoreUnusable
from doyen.model import leader_key, line_key, order_key
from doyen.store import Context, Store, open_store
from doyen.stores.nats.link import Address, Link
from doyen.stores.nats.store import NatsStore


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[NatsStore]:
    store = await open_store(url, Context(SystemClock(), lambda event: None))
    assert isinstance(store, NatsStore)
    try:
        yield store
    finally:
        await store.close()


def refused(url: str, kind: type[DoyenError], match: str) -> None:
    async def main() -> None:
        async with opened(url):
            pass

    with pytest.raises(kind, match=match):
        asyncio.run(main())


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
        ("nats://h/?replicas=many", "is a number"),
        ("nats://", "needs a host"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, match: str) -> None:
    refused(url, ConfigError, match)


def test_errors_name_the_cause(nats: servers.Nats) -> None:
    nobody = servers.free_port()
    unreachable = f"nats://127.0.0.1:{nobody}?connect_timeout_s=0.5"
    refused(unreachable, StoreUnavailable, f"127.0.0.1:{nobody} cannot be reached")
    refused(f"{nats.url}/floor?token_floor=1000", StoreUnusable, "below token_floor=1000")
    refused(f"{nats.url}/three?replicas=3", StoreUnusable, "replicas")


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
        refused(server.url, StoreUnavailable, "JetStream does not answer: it is disabled")


def test_a_wrong_password_is_told() -> None:
    class Guarded(Without):
        settings = "authorization { user: app, password: right }\n"

    with Guarded() as server:
        at = f"127.0.0.1:{server.port}?connect_timeout_s=1"
        refused(f"nats://app:wrong@{at}", StoreUnusable, "correct the user, password or token")


def test_a_refusal_is_told_though_later_attempts_are_only_cut_off() -> None:
    """The server hangs up on whoever it refuses, and what it said may be lost by that."""
    info = {"server_id": "x", "version": "2.10.0", "max_payload": 1024, "auth_required": True}

    def serve(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for attempt in itertools.count():
                link, _ = listening.accept()
                with link:
                    link.sendall(f"INFO {json.dumps(info)}\r\n".encode())
                    link.recv(4096)
                    if attempt == 0:
                        link.sendall(b"-ERR 'Authorization Violation'\r\n")
                    else:
                        linger = struct.pack("ii", 1, 0)
                        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=serve, args=(listening,))
        server.start()
        try:
            at = f"127.0.0.1:{listening.getsockname()[1]}?connect_timeout_s=1"
            refused(f"nats://app:wrong@{at}", StoreUnusable, "correct the user, password or token")
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            server.join()


def test_a_bucket_that_forgets_is_refused(nats: servers.Nats, tmp_path: Path) -> None:
    async def make() -> None:
        link = Link(Address((f"127.0.0.1:{nats.port}",), {}, 3.0))
        await link.open()
        name = "KV_forgetful"
        await link.ask(f"STREAM.CREATE.{name}", name=name, subjects=["x"], storage="memory")
        await link.close()

    asyncio.run(make())
    refused(f"{nats.url}/forgetful", StoreUnusable, "needs 'file'")


def test_an_ended_lease_voids_what_is_written_later(nats: servers.Nats) -> None:
    """Though the writer's copy of the bucket is behind, and its write is taken."""

    async def main() -> None:
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

    asyncio.run(main())


def test_a_renewal_that_was_given_up_does_not_end_the_lease(nats: servers.Nats) -> None:
    async def main() -> None:
        async with opened(nats.url) as store:
            lease = await store.grant(30)
            known = dict(store._beats)
            await store.renew(lease)
            store._beats.update(known)  # as if its answer had not come
            await store.renew(lease)
            await store.revoke(lease)
            with pytest.raises(LeaseGone):
                await store.renew(lease)

    asyncio.run(main())


def test_watches_outlive_connections_and_servers() -> None:
    async def main() -> None:
        with servers.Nats() as server, servers.Proxy(server) as link:
            async with opened(link.url) as store:
                key, event = order_key("news"), asyncio.Event()
                await store.watch(key, event.set)
                for number, hurt in enumerate((link.reset, server.restart)):
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


def test_diagnosis_warns_of_one_replica(nats: servers.Nats) -> None:
    async def main() -> None:
        async with opened(nats.url) as store:
            assert [each.level for each in await store.diagnose()] == ["ok", "warning"]

    asyncio.run(main())
