"""The Consul store: its errors, its index rules, its sessions, and failing connections."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

import servers
from doyen.errors import ConfigError, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.model import leader_key, line_key, order_key
from doyen.stores.consul.client import Agents, ConsulResponse
from doyen.stores.consul.diagnosis import AgentState, findings
from doyen.stores.consul.store import ConsulStore
from doyen.stores.consul.watches import MOST_COVERS, ConsulWatches
from doyen.stores.port import Store
from fixtures import opening, refused, shared
from servers import wire

MASTER = "5f0ab5a0-0000-4000-8000-000000000001"
UNKNOWN = "5f0ab5a0-0000-4000-8000-000000000002"


server = shared(lambda: servers.Consul(session_ttl_min="1s"))


opened = opening(ConsulStore)


async def reached(event: asyncio.Event) -> None:
    async with asyncio.timeout(20):
        await event.wait()
    event.clear()


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("consul://h/?lock_delay=3", "no option 'lock_delay'"),
        ("consul://h/?tls=yes", "true or false"),
        ("consul://h/?tls=false&ca=/x", "tls=false"),
        ("consul://h/?ca=/nowhere/ca.pem", "cannot be used"),
        ("consul://h/?cert=/x", "together"),
        ("consul://me:secret@h/", "no users"),
        ("consul://h/?token_file=/nowhere/token", "cannot be read"),
        ("consul://h/?connect_timeout_s=soon", "is a number"),
        ("consul://::1:8500/", "is not a host"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, match: str) -> None:
    refused(url, ConfigError, match)


def test_errors_name_the_cause(server: servers.Consul) -> None:
    unused = servers.free_port()
    refused(f"consul://127.0.0.1:{unused}", StoreUnavailable, f"127.0.0.1:{unused} cannot be reach")
    refused(f"{server.url}?token_floor=1000000", StoreUnusable, "below token_floor=1000000")
    with servers.Proxy(server) as proxy:
        proxy.cut()
        refused(f"{proxy.url}?connect_timeout_s=0.2", StoreUnavailable, "not answer within 0.2 s")


def test_acl_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token comes from the URL or the environment. A missing or unknown one is reported."""
    acl = {"enabled": True, "default_policy": "deny", "tokens": {"master": MASTER}}

    class Guarded(servers.Consul):
        def ping(self) -> None:
            if json.loads(wire.http(self.port, "GET", "/v1/status/leader")[1]) == "":
                raise ValueError("Consul has no leader")

    async def leads(url: str) -> None:
        async with opened(url) as store:
            lease = await store.grant(10)
            assert (await store.create(leader_key("e"), b"v", lease)).won
            await store.renew(lease)
            await store.revoke(lease)
            await store.revoke(lease)
            assert await store.get(leader_key("e")) is None

    async def ready(url: str) -> None:
        """The master token exists a moment after the leader was elected."""
        async with asyncio.timeout(20):
            while True:
                try:
                    return await leads(url)
                except StoreUnusable:
                    await asyncio.sleep(0.05)

    def reader(server: servers.Consul) -> str:
        """A token that may read keys and create sessions, and write no keys."""
        rules = 'key_prefix "" { policy = "read" } session_prefix "" { policy = "write" }'
        policy = {"Name": "reader", "Rules": rules}
        wire.http_json(server.port, "PUT", f"/v1/acl/policy?token={MASTER}", policy)
        token = {"Policies": [{"Name": "reader"}]}
        made = wire.http_json(server.port, "PUT", f"/v1/acl/token?token={MASTER}", token)
        return str(made["SecretID"])

    async def may_not_write(url: str) -> None:
        """A transaction that the ACL refuses is not taken for one whose condition failed."""
        async with opened(url) as store:
            lease = await store.grant(10)
            for call in (
                store.create(leader_key("e"), b"v", lease),
                store.put(order_key("e"), b"v", if_version=None),
                store.delete(leader_key("e")),
                store.enqueue(line_key("e"), b"v", lease),
            ):
                with pytest.raises(StoreUnusable, match="key_prefix write on doyen's prefix"):
                    async with asyncio.timeout(10):
                        await call

    with Guarded(acl=acl, primary_datacenter="dc1") as server:
        at = f"127.0.0.1:{server.port}"
        asyncio.run(ready(f"consul://:{MASTER}@{at}"))
        refused(f"consul://{at}", StoreUnusable, "key_prefix write on doyen's prefix")
        refused(f"consul://:{UNKNOWN}@{at}", StoreUnusable, "does not know the ACL token")
        asyncio.run(may_not_write(f"consul://:{reader(server)}@{at}"))
        monkeypatch.setenv("CONSUL_HTTP_TOKEN", MASTER)
        asyncio.run(leads(f"consul://{at}"))


async def test_nothing_but_its_ttl_ends_a_session(server: servers.Consul) -> None:
    """A session has no health check, by which a lock was lost in consul#1290, and no lock-delay."""
    async with opened(server.url) as store:
        lease = await store.grant(1.5)
        (session,) = wire.http_json(server.port, "GET", f"/v1/session/info/{lease.id}")
        assert (session["NodeChecks"], session["ServiceChecks"]) == ([], [])
        limits = session["TTL"], session["Behavior"], session["LockDelay"]
        assert limits == ("1500ms", "delete", 0)
        key = leader_key("delay")
        assert (await store.create(key, b"1", lease)).won
        await store.revoke(lease)
        assert (await store.create(key, b"2", await store.grant(5))).won


def test_a_failing_agent_costs_no_lease_and_no_watch(server: servers.Consul) -> None:
    """consul#1290: with one of several agents down, the lease and the watches go on."""

    async def main() -> None:
        with servers.Proxy(server) as one, servers.Proxy(server) as two:
            url = f"consul://127.0.0.1:{one.port},127.0.0.1:{two.port}"
            async with opened(url) as store, opened(server.url) as other:
                lease = await store.grant(30)
                key, event = leader_key("turn"), asyncio.Event()
                await store.watch(key, event.set)
                one.refuse()
                await renewed(lambda: store.renew(lease))
                assert (await store.create(key, b"v", lease)).won
                await reached(event)
                two.refuse()
                one.heal()
                await renewed(lambda: store.renew(lease))
                assert await other.delete(key)
                await reached(event)
                while await store.get(key) is not None:
                    await reached(event)

    async def renewed(renew: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.timeout(10):
            while True:
                try:
                    return await renew()
                except OutcomeUnknown:  # the reset connection was still in use
                    continue

    asyncio.run(main())


async def test_a_lost_answer_is_an_unknown_outcome(server: servers.Consul) -> None:
    with servers.Proxy(server) as proxy:
        async with opened(proxy.url) as store:
            lease = await store.grant(30)
            key = leader_key("lost answer")
            proxy.break_after(0, "down")
            with pytest.raises(OutcomeUnknown):
                await store.create(key, b"mine", lease)
            found = await store.get(key)
            assert found is not None
            assert found.lease == lease.id
            proxy.refuse()
            with pytest.raises(StoreUnavailable):
                await store.create(key, b"again", lease)
            proxy.heal()
            await store.revoke(lease)


def test_watches_outlive_a_restart_of_the_server() -> None:
    async def main() -> None:
        with servers.Consul(session_ttl_min="1s") as server:
            async with opened(server.url) as store, AsyncExitStack() as later:
                key, event = order_key("restart"), asyncio.Event()
                await store.watch(key, event.set)
                await asyncio.to_thread(server.restart)
                other = await later.enter_async_context(opened(server.url))
                await other.put(key, b"news", if_version=None)
                while await seen(store, key) != b"news":
                    await reached(event)

    async def seen(store: Store, key: str) -> bytes | None:
        try:
            entry = await store.get(key)
        except StoreError:
            return None
        return None if entry is None else entry.value

    asyncio.run(main())


async def test_many_watches_take_few_queries(server: servers.Consul) -> None:
    """Each watch is notified of its own changes, whatever cover it has moved to."""
    with servers.Proxy(server) as proxy:
        async with opened(proxy.url) as store, opened(server.url) as other:
            notified = [asyncio.Event() for _ in range(60)]
            for number, event in enumerate(notified):
                await store.watch(leader_key(f"many{number}"), event.set)
            await store.watch(line_key("many0"), notified[0].set)
            assert proxy.connections <= MOST_COVERS + 2
            lease = await other.grant(30)
            # Watches that moved are notified once. Wait for that before checking for silence.
            await other.create(leader_key("many59"), b"v", lease)
            await reached(notified[59])
            for event in notified:
                event.clear()
            await other.create(leader_key("many7"), b"v", lease)
            await reached(notified[7])
            assert not any(event.is_set() for event in notified)
            await other.enqueue(line_key("many0"), b"t", lease)
            await reached(notified[0])
            await other.revoke(lease)
            for number in (0, 7, 59):
                await reached(notified[number])


class Script:
    """Answers to blocking queries, supplied one by one."""

    def __init__(self) -> None:
        self.sent: list[dict[str, object]] = []
        self._answers: asyncio.Queue[ConsulResponse] = asyncio.Queue()
        self._again = asyncio.Event()

    async def ask(self, method: str, path: str, **options: object) -> ConsulResponse:
        self.sent.append(options)
        self._again.set()
        return await self._answers.get()

    async def answer(self, index: int, **versions: int) -> None:
        raw = [
            {"Key": f"d/e/{key}", "Value": None, "CreateIndex": at, "ModifyIndex": at}
            for key, at in versions.items()
        ]
        await reached(self._again)
        self._answers.put_nowait(ConsulResponse(200 if raw else 404, index, json.dumps(raw)))
        await self._again.wait()

    async def close(self) -> None:
        return


def scripted() -> tuple[Script, ConsulWatches]:
    script = Script()
    watches = ConsulWatches(Agents(["h:1"], token="", tls=None, connect_timeout_s=1), "d")
    watches._client = script  # type: ignore[assignment]
    return script, watches


async def test_an_entry_that_was_returned_and_deleted_is_notified() -> None:
    """An entry that was created, read and deleted between two answers is in neither."""
    script, watches = scripted()
    notified: list[int] = []
    opening = asyncio.ensure_future(watches.watch("d/e/leader", lambda: notified.append(1)))
    await script.answer(5)
    await opening
    watches.returned("d/e/leader", 6)
    await script.answer(7)
    assert notified == [1]
    await script.answer(8, other=8)
    assert notified == [1]
    await script.answer(9, leader=9)
    assert notified == [1, 1]
    watches.returned("d/e/leader", 9)
    await script.answer(10, leader=9)
    assert notified == [1, 1]
    await watches.close()


async def test_index_rules() -> None:
    """A blocking query never has index 0, and begins anew when the index goes backwards."""
    script, watches = scripted()
    opening = asyncio.ensure_future(watches.watch("d/e", lambda: None))
    for index in (0, 40, 12, 12):
        await script.answer(index)
    await opening
    assert [options.get("index") for options in script.sent] == [None, 1, 40, None, 12]
    await watches.close()


def test_diagnosis(server: servers.Consul) -> None:
    async def main() -> None:
        async with opened(server.url) as store:
            assert store.capabilities.ttl_min_s == 1.0
            found = await store.diagnose()
            assert [each.level for each in found] == ["note", "ok", "note"]

    asyncio.run(main())
    config = {"Config": {"Version": "1.6.2", "Datacenter": "a", "Server": True}}
    old = AgentState.of("h1", {**config, "DebugConfig": {"ConsulRaftLeaderLeaseTimeout": "2.5s"}})
    other = AgentState(agent="h2", version="1.20.1", datacentre="b")
    levels = [each.level for each in findings([old, other, AgentState(agent="h3")], 1.0)]
    assert levels == ["problem", "warning", "ok", "note", "warning", "note"]
