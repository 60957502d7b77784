"""What only Redis does: failover, its clock, lost notifications, the meaning of its errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

import doyen
import servers
from doyen.errors import (
    ConfigError,
    LeadershipLost,
    LeaseGone,
    NotElected,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.lease.clock import SystemClock
from doyen.model import leader_key, order_key
from doyen.stores.port import Context, Store, open_store
from doyen.stores.redis.store import RedisStore
from fixtures import opening
from servers import wire

TTL_S = 0.6
PATIENCE_S = 10.0
KEY = leader_key("e")


opened = opening(RedisStore)


async def test_a_lease_is_ended_only_on_the_server_on_which_it_was_observed(
    redis: servers.Redis,
) -> None:
    """After a failover, counters of lost renewals are used again. An observation on the previous
    server proves nothing about a lease with the same counter on this one."""
    async with opened(redis.url) as store, opened(redis.url) as other:
        lease = await store.grant(60)
        (seen,) = await other.look([lease.id])
        other._observer.judge(seen._replace(incarnation="an earlier server"))
        await other.expire(lease.id, seen.counter)
        await store.renew(lease)
        (seen,) = await other.look([lease.id])
        other._observer.judge(seen)
        await other.expire(lease.id, seen.counter)
        with pytest.raises(LeaseGone):
            await store.renew(lease)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(main())


async def until(what: str, reached: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await reached():  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0.02)
    except TimeoutError:
        pytest.fail(f"not reached: {what}")


async def notified(event: asyncio.Event, within_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(within_s):
        await event.wait()


async def token(store: Store) -> int:
    """Lead once and resign; the token."""
    lease = await store.grant(60)
    won, entry = await store.create(KEY, b"v", lease)
    assert won
    await store.revoke(lease)
    return entry.revision


class Keepalive:
    """Renews a lease, as a session does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.renewals = 0

    async def __aenter__(self) -> Keepalive:
        self.lease = await self._store.grant(TTL_S)
        self._task = asyncio.create_task(self._renew())
        return self

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(TTL_S / 4)
            await self._store.renew(self.lease)
            self.renewals += 1

    async def live(self, ttls: float) -> None:
        """Let some time pass, failing as soon as the lease has ended."""
        await asyncio.wait({self._task}, timeout=ttls * TTL_S)
        if self._task.done():
            self._task.result()

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})


class TestClock:
    """A lease expires only if the server's clock and the observer's own clock agree."""

    @pytest.mark.parametrize("step_s", [3600.0, -3600.0])
    def test_a_stepped_clock_ends_no_lease(self, step_s: float) -> None:
        async def main() -> None:
            async with opened(server.url) as holder, opened(server.url) as other:
                async with Keepalive(holder) as keepalive:
                    await holder.create(KEY, b"alive", keepalive.lease)
                    await other.watch(KEY, lambda: None)
                    rival = await other.grant(60)
                    await keepalive.live(0.5)
                    server.step_clock(step_s)
                    assert not (await other.create(KEY, b"rival", rival)).won
                    await keepalive.live(3)
                    assert not (await other.create(KEY, b"rival", rival)).won
                    entry = await other.get(KEY)
                    assert entry is not None
                    assert entry.value == b"alive"

                async def won() -> bool:
                    return (await other.create(KEY, b"rival", rival)).won

                server.step_clock(-2 * step_s)
                await until("a lease without renewals ends, whatever the clock shows", won)
                with pytest.raises(LeaseGone):
                    await holder.renew(keepalive.lease)

        with servers.Redis(own_clock=True) as server:
            run(main)

    def test_a_new_observer_waits_a_whole_ttl(self) -> None:
        """Although the lease has expired long ago according to the server's clock."""

        async def main() -> None:
            async with opened(server.url) as holder, opened(server.url) as other:
                lease = await holder.grant(TTL_S)
                await holder.create(KEY, b"quiet", lease)
                server.step_clock(3600)
                began = SystemClock().now()
                mine = await other.grant(60)

                async def won() -> bool:
                    return (await other.create(KEY, b"mine", mine)).won

                await until("the lease has ended", won)
                assert SystemClock().now() - began >= TTL_S

        with servers.Redis(own_clock=True) as server:
            run(main)


class TestExpiry:
    """One script compares the counter of a lease and ends it."""

    async def test_a_renewal_in_between_prevails(self, redis: servers.Redis) -> None:
        async with opened(redis.url) as holder, opened(redis.url) as other:
            lease = await holder.grant(60)
            key = leader_key("expire")
            await holder.create(key, b"v", lease)
            (seen,) = await other.look([lease.id])
            other._observer.judge(seen)
            await holder.renew(lease)
            await other.expire(lease.id, seen.counter)
            assert await other.get(key) is not None
            (seen,) = await other.look([lease.id])
            await other.expire(lease.id, seen.counter)
            assert await holder.get(key) is None
            with pytest.raises(LeaseGone):
                await holder.renew(lease)

    async def test_an_ended_lease_cannot_be_renewed(self, redis: servers.Redis) -> None:
        """redbeat#127: a client extended a lock that it no longer held."""
        async with opened(redis.url) as old, opened(redis.url) as new:
            key = leader_key("owner")
            lease = await old.grant(60)
            await old.create(key, b"old", lease)
            (seen,) = await new.look([lease.id])
            new._observer.judge(seen)
            await new.expire(lease.id, seen.counter)
            mine = await new.grant(60)
            assert (await new.create(key, b"new", mine)).won
            with pytest.raises(LeaseGone):
                await old.renew(lease)
            assert not await old.delete(key, if_version=-1)
            await old.revoke(lease)
            entry = await old.get(key)
            assert entry is not None
            assert entry.lease == mine.id


class TestSweep:
    """A store that is opened ends expired leases that no candidate waits for."""

    def test_stray_elements_do_not_block_the_sweep(self) -> None:
        async def main() -> None:
            async with opened(server.url) as store:
                lease = await store.grant(TTL_S)
            for number in range(200):
                command("ZADD", "due", "1", f"stray{number}")
                command("HSET", "leases", f"ttl_us:damaged{number}", "x")
                command("ZADD", "due", "1", f"damaged{number}")

            async def due() -> bool:
                (row,) = await store.look([lease.id])
                return row.ttl_us is not None and row.age_us > row.ttl_us

            async def ended() -> bool:
                (row,) = await store.look([lease.id])
                return row.ttl_us is None

            async with opened(server.url) as store:
                await until("the lease has expired by the server's clock", due)
            async with opened(server.url) as store:  # which begins to observe expired leases
                await until("the lease has been ended", ended)
            assert command("ZCARD", "due") == b"1"  # the element that keeps the key

        def command(name: str, key: str, *words: str) -> object:
            return wire.redis_command(server.port, name, f"{{doyen}}:{key}", *words)

        with servers.Redis() as server:
            run(main)


class TestFailover:
    """A replica that lacks the last writes becomes the master."""

    def promoted(self, behind_s: float) -> tuple[list[int], int]:
        """Tokens of a master, the last of which its replica lacks, and one of the replica."""
        tokens: list[int] = []

        async def before() -> None:
            async with opened(master.url) as store:
                tokens.append(await token(store))
                await until("the replica has it", self.in_step(master.port, replica.port))
                nowhere = str(servers.free_port())
                wire.redis_command(replica.port, "REPLICAOF", "127.0.0.1", nowhere)
                tokens.extend([await token(store) for _ in range(5)])

        async def after() -> None:
            async with opened(replica.url) as store:
                tokens.append(await token(store))

        with Master() as master, servers.RedisReplica(master, own_clock=True) as replica:
            replica.step_clock(-behind_s)
            run(before)
            master.kill()
            wire.redis_command(replica.port, "REPLICAOF", "NO", "ONE")
            run(after)
        return tokens[:-1], tokens[-1]

    def in_step(self, master: int, replica: int) -> Callable[[], Awaitable[bool]]:
        async def reached() -> bool:
            here, there = (
                wire.redis_command(port, "HGET", "{doyen}:meta", "revision")
                for port in (master, replica)
            )
            return here == there

        return reached

    @pytest.mark.parametrize("behind_s", [0.0, 600.0])
    def test_tokens_grow_although_the_last_are_lost(self, behind_s: float) -> None:
        """Even if the new master's clock is behind the old one's."""
        given, new = self.promoted(behind_s)
        assert given == sorted(set(given))
        assert new > given[-1]

    def test_a_sentinel_names_the_new_master(self) -> None:
        """The old one is frozen, so its connections do not end."""

        async def main() -> None:
            async with opened(f"{sentinel.url}?connect_timeout_s=1") as store:
                first = await token(store)
                changed = asyncio.Event()
                await store.watch(KEY, changed.set)
                lease = await store.grant(60)
                await store.renew(lease)
                await until("the replica has it", self.in_step(master.port, replica.port))
                await asyncio.to_thread(master.freeze)
                changed.clear()

                async def renewed() -> bool:
                    try:
                        async with asyncio.timeout(0.5):
                            await store.renew(lease)
                    except (StoreUnavailable, OutcomeUnknown, TimeoutError):
                        return False
                    return True

                await until("the lease is renewed at the new master", renewed)
                async with asyncio.timeout(PATIENCE_S):
                    second = await token(store)
                assert second > first
                await notified(changed)

        with (
            Master() as master,
            servers.RedisReplica(master) as replica,
            servers.RedisSentinel(master) as sentinel,
        ):
            run(main)

    def test_a_write_waits_for_replicas_if_asked(self) -> None:
        async def main() -> None:
            async with opened(f"{master.url}?replicas=1") as store:
                await token(store)
                replica.freeze()
                with pytest.raises(OutcomeUnknown, match="0 of 1 replicas"):
                    await store.grant(60)
                replica.thaw()

        with Master() as master, servers.RedisReplica(master) as replica:
            run(main)

    def test_a_replica_is_passed_over(self) -> None:
        async def main() -> None:
            with pytest.raises(StoreUnavailable, match="is a replica of"):
                async with opened(replica.url):
                    pass
            both = f"redis://127.0.0.1:{replica.port},127.0.0.1:{master.port}"
            async with opened(both) as store:
                assert await token(store)
                levels = {each.subject: each.level for each in await store.diagnose()}
                assert levels["replication"] == "warning"

        with Master() as master, servers.RedisReplica(master) as replica:
            run(main)


class TestHints:
    """A notification may be lost: the watch is notified all the same."""

    async def test_changes_without_a_connection_are_notified(self, redis: servers.Redis) -> None:
        async with opened(redis.url) as store:
            changed = asyncio.Event()
            await store.watch(order_key("hints"), changed.set)
            await asyncio.sleep(0.05)
            changed.clear()
            wire.redis_command(redis.port, "CLIENT", "KILL", "TYPE", "pubsub")
            await notified(changed)

    async def test_a_lost_notification_is_made_up_for(
        self, redis: servers.Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = f"{redis.url}?poll_s=0.1"
        async with opened(url) as store, opened(redis.url) as other:
            changed = asyncio.Event()
            await store.watch(order_key("deaf"), changed.set)
            monkeypatch.setattr(store._subscriber, "_changed", lambda scope: None)
            await other.put(order_key("deaf"), b"v", if_version=None)
            await notified(changed)
            assert await other.delete(order_key("deaf"))

    def test_leases_and_watches_survive_a_restart(self) -> None:
        async def main() -> None:
            async with opened(server.url) as store, opened(server.url) as other:
                lease = await store.grant(60)
                await store.create(KEY, b"v", lease)
                changed = asyncio.Event()
                await other.watch(KEY, changed.set)
                await asyncio.to_thread(server.restart)
                await notified(changed)
                await store.renew(lease)
                await asyncio.sleep(0.05)
                changed.clear()
                assert await store.delete(KEY)
                await notified(changed)
                wire.redis_command(server.port, "SCRIPT", "FLUSH")
                assert (await store.create(KEY, b"v", lease)).won

        with servers.Redis() as server:
            run(main)

    def test_watches_share_a_connection(self, redis: servers.Redis) -> None:
        async def main() -> None:
            before = connections()
            async with opened(redis.url) as store:
                watches = [await store.watch(order_key(str(n)), print) for n in range(50)]
                await store.renew(await store.grant(60))
                assert connections() - before == 3
                for watch in watches:
                    watch.close()

                async def left() -> bool:
                    said = wire.redis_command(redis.port, "INFO", "stats") or b""
                    return b"pubsub_channels:0" in said

                await until("nothing is subscribed to any more", left)

        def connections() -> int:
            said = wire.redis_command(redis.port, "INFO", "clients") or b""
            (line,) = [each for each in said.splitlines() if each.startswith(b"connected_clients")]
            return int(line.split(b":")[1])

        run(main)


class TestDamage:
    """Data that another program has written to doyen's keys."""

    async def test_a_damaged_entry_does_not_hide_others(self, redis: servers.Redis) -> None:
        bad, good = leader_key("damaged"), leader_key("sound")
        async with opened(redis.url) as store:
            lease = await store.grant(60)
            for key in (bad, good):
                await store.create(key, b"v", lease)
            damage = ("HSET", "{doyen}:entries", f"version:{bad}", "x")
            wire.redis_command(redis.port, *damage)
            surveys = await store.survey([bad, good])
            assert all(each.owners == {lease.id} for each in surveys.values())
            assert await store.get(good) is not None
            with pytest.raises(StoreUnusable, match=f"{bad} is damaged"):
                await store.get(bad)
            await store.revoke(lease)
            assert await store.get(bad) is None


class TestElections:
    """Defects of other libraries, tested through the public API."""

    async def test_a_candidate_that_was_not_elected_does_not_enter(
        self, redis: servers.Redis
    ) -> None:
        """redis-py#621: `with lock:` was entered without the lock."""
        async with (
            doyen.connect(redis.url, ttl_s=2) as one,
            doyen.connect(redis.url, ttl_s=2) as two,
            one.campaign("621", name="one"),
        ):
            with pytest.raises(NotElected):
                async with two.campaign("621", name="two", wait_s=0.1):
                    pytest.fail("entered without being elected")

    async def test_a_failure_to_acquire_is_not_success(self, redis: servers.Redis) -> None:
        """redbeat#208: an exception in acquire was taken for success."""
        with servers.Proxy(redis) as proxy:
            async with opened(proxy.url) as store, opened(redis.url) as other:
                lease = await store.grant(60)
                proxy.break_after(0, "down")
                with pytest.raises(OutcomeUnknown):
                    await store.create(leader_key("208"), b"mine", lease)
                found = await other.get(leader_key("208"))
                assert found is not None
                assert found.lease == lease.id
                proxy.refuse()
                with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                    await store.create(leader_key("208b"), b"mine", lease)
                with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{proxy.port}"):
                    await store.create(leader_key("208b"), b"mine", lease)
                assert await other.get(leader_key("208b")) is None
                proxy.heal()
                await store.revoke(lease)

    async def test_a_failed_renewal_is_retried(self, redis: servers.Redis) -> None:
        """redisson#775: after one failed renewal no other was scheduled."""
        with servers.Proxy(redis) as proxy:
            async with (
                doyen.connect(proxy.url, ttl_s=1.5) as session,
                session.campaign("775", name="one") as term,
            ):
                for _ in range(3):
                    await asyncio.to_thread(proxy.reset)
                    left_s = [term.remaining_s]

                    async def renewed(left_s: list[float] = left_s) -> bool:
                        term.check()
                        left_s.append(term.remaining_s)
                        return left_s[-1] > left_s[-2]

                    await until("the lease is renewed", renewed)

    async def test_a_leader_is_ended_when_renewals_fail(self, redis: servers.Redis) -> None:
        """redisson#4698: the work went on without the lock."""
        with servers.Proxy(redis) as proxy:
            async with doyen.connect(proxy.url, ttl_s=1) as session:
                with pytest.raises(LeadershipLost):
                    async with session.campaign("4698", name="one"):
                        await asyncio.to_thread(proxy.cut)
                        await notified(asyncio.Event())
                await asyncio.to_thread(proxy.heal)


class TestOpening:
    """A configuration that cannot work is refused with the reason."""

    @pytest.mark.parametrize(
        ("rest", "words"),
        [
            ("?colour=red", "no option 'colour'"),
            ("/zero", "a number, not 'zero'"),
            ("?prefix={a}", "without braces"),
            ("?poll_s=never", "poll_s is a number"),
            ("?token_floor=-1", "token_floor is a whole number"),
            ("?tls=perhaps", "tls is true or false"),
            (f"?ca={__file__}", "go with tls=true"),
            ("?tls=true&ca=/nowhere", "/nowhere cannot be read"),
            ("?sentinel_user=me", "go with redis.sentinel://"),
            (f"?tls=true&cert={__file__}", "cert and key go together"),
        ],
    )
    async def test_a_wrong_url(self, rest: str, words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            await open_store(f"redis://localhost{rest}", Context(SystemClock(), print))
        with pytest.raises(ConfigError, match="needs the master's name"):
            await open_store("redis+sentinel://localhost", Context(SystemClock(), print))

    async def test_a_server_that_does_not_exist(self) -> None:
        port = servers.free_port()
        with pytest.raises(StoreUnavailable, match=f"127.0.0.1:{port}: Connection refused"):
            async with opened(f"redis://127.0.0.1:{port}"):
                pass

    async def test_a_server_that_does_not_respond(self, redis: servers.Redis) -> None:
        with servers.Proxy(redis) as proxy:
            proxy.cut()
            with pytest.raises(StoreUnavailable, match=r"does not answer within 0\.3 s"):
                async with opened(f"{proxy.url}?connect_timeout_s=0.3"):
                    pass

    async def test_a_database_that_does_not_exist(self, redis: servers.Redis) -> None:
        with pytest.raises(StoreUnusable, match="database 999"):
            async with opened(f"{redis.url}/999"):
                pass

    def test_a_user_without_permission(self) -> None:
        async def main() -> None:
            where = f"127.0.0.1:{server.port}"
            for who in ("", ":wrong@", "nobody:secret@"):
                with pytest.raises(StoreUnusable, match="refuses the login"):
                    async with opened(f"redis://{who}{where}"):
                        pass
            async with opened(f"redis://:secret@{where}") as store:
                await store._scripts.command(
                    "ACL",
                    "SETUSER",
                    "reader",
                    "on",
                    ">r",
                    "~*",
                    "+@read",
                    "+info",
                    "+eval",
                    "+evalsha",
                )
                enough = "~{doyen}:* &{doyen}:* +@all -@dangerous +info"
                await store._scripts.command("ACL", "SETUSER", "doyen", "on", ">d", *enough.split())
            with pytest.raises(StoreUnusable, match="doyen's user needs"):
                async with opened(f"redis://reader:r@{where}"):
                    pass
            async with opened(f"redis://doyen:d@{where}") as store:
                await store.watch(KEY, lambda: None)
                assert await token(store)
                assert await store.diagnose()

        with Guarded(requirepass="secret") as server:
            run(main)

    async def test_data_of_a_newer_doyen(self, redis: servers.Redis) -> None:
        wire.redis_command(redis.port, "HSET", "{newer}:meta", "layout", "3")
        with pytest.raises(StoreUnusable, match="newer doyen"):
            async with opened(f"{redis.url}?prefix=newer"):
                pass

    async def test_data_of_an_older_doyen(self, redis: servers.Redis) -> None:
        """This version would not see the records of an older one, so there would be two leaders."""
        wire.redis_command(redis.port, "HSET", "{older}:meta", "layout", "1")
        wire.redis_command(redis.port, "ZADD", "{older}:leases", "0", "a")
        with pytest.raises(StoreUnusable, match="older doyen"):
            async with opened(f"{redis.url}?prefix=older"):
                pass

    async def test_prefixes_and_floors(self, redis: servers.Redis) -> None:
        floor = 1 << 52
        async with opened(f"{redis.url}?prefix=high&token_floor={floor}") as high:
            assert await token(high) > floor
            lease = await high.grant(60)
            assert (await high.create(KEY, b"v", lease)).won
            async with opened(redis.url) as usual:
                assert await usual.get(KEY) is None
            await high.revoke(lease)


class Master(servers.Redis):
    """A server that begins replication at once."""

    def __init__(self) -> None:
        super().__init__(repl_diskless_sync_delay="0")


class Guarded(servers.Redis):
    """A server with a password."""

    def ping(self) -> None:
        try:
            wire.redis_command(self.port, "PING")
        except ValueError as refusal:
            if "NOAUTH" not in str(refusal):
                raise


def test_the_doctor_reports_what_is_unsafe() -> None:
    async def main() -> None:
        async with opened(server.url) as store:
            found = {each.subject: each for each in await store.diagnose()}
            assert found["redis"].level == "ok"
            assert found["memory"].level == "problem"
            assert "allkeys-lru" in found["memory"].text
            assert found["durability"].level == "warning"

    with servers.Redis(appendonly="no", maxmemory_policy="allkeys-lru") as server:
        run(main)
