"""etcd's API on the nodes of a quorum: gRPC and JSON, elections, watches, faults, refusals."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import grpc
import pytest

from doyen.errors import ConfigError
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.door import check_access
from doyen.quorum.etcd_api.service import LeaseService
from doyen.quorum.keyspace.etcd_state import EtcdKeyspace
from doyen.quorum.protocol.security import TLS, Security
from etcd_door import POLL_S, EtcdClient, doors
from fixtures import run_within
from servers.certificates import LEAF, Certificates

PATIENCE_S = 20.0


async def read(stream: Any) -> Any:
    return await asyncio.wait_for(stream.read(), PATIENCE_S)


async def watch(client: EtcdClient, **create: Any) -> Any:
    """A stream with one watch, which is created."""
    stream = client.stream(rpc.WATCH)
    await stream.write(rpc.WATCH.request(create_request=create))
    created = await read(stream)
    assert created.created
    assert not created.canceled, created
    return stream


async def events(stream: Any, count: int) -> list[tuple[int, bytes]]:
    """Revision and value of the next events."""
    found: list[tuple[int, bytes]] = []
    while len(found) < count:
        response = await read(stream)
        found += [(each.kv.mod_revision, each.kv.value) for each in response.events]
    return found


def test_watches_of_one_stream(tmp_path: Path) -> None:
    async def trial() -> None:
        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            stream = await watch(client, key=b"a", range_end=b"b", prev_kv=True)
            create = {"key": b"a/2", "watch_id": 7, "filters": ["NOPUT"]}
            await stream.write(rpc.WATCH.request(create_request=create))
            assert (await read(stream)).watch_id == 7
            await stream.write(rpc.WATCH.request(create_request=create))
            twice = await read(stream)
            assert (twice.watch_id, twice.canceled) == (-1, True)
            assert "duplicate watch ID" in twice.cancel_reason
            empty = {"key": b"b", "range_end": b"a"}
            await stream.write(rpc.WATCH.request(create_request=empty))
            assert "range is empty" in (await read(stream)).cancel_reason

            await client.call(rpc.PUT, key=b"a/2", value=b"1")
            put = await read(stream)
            assert (put.watch_id, put.events[0].kv.value) == (0, b"1")
            await client.call(rpc.DELETE_RANGE, key=b"a/2")
            gone = {each.watch_id: each.events[0] for each in [await read(stream) for _ in "ab"]}
            assert gone.keys() == {0, 7}
            assert gone[0].prev_kv.value == b"1"
            assert gone[7].type == 1
            assert not gone[7].HasField("prev_kv")

            await stream.write(rpc.WATCH.request(progress_request={}))
            progress = await read(stream)
            assert (progress.watch_id, progress.header.revision) == (-1, 3)
            await stream.write(rpc.WATCH.request(cancel_request={"watch_id": 7}))
            cancelled = await read(stream)
            assert (cancelled.watch_id, cancelled.canceled) == (7, True)

            later = await watch(client, key=b"a", start_revision=6)
            for number in range(3):
                await client.call(rpc.PUT, key=b"a", value=b"%d" % number)
            assert await events(later, 1) == [(6, b"2")]
            await client.call(rpc.COMPACT, revision=5)
            past = await watch(client, key=b"a", start_revision=2)
            compacted = await read(past)
            assert (compacted.canceled, compacted.compact_revision) == (True, 5)

            # Equal watches share what they are told; others of the same key are told otherwise.
            equal = [await watch(client, key=b"s") for _ in range(3)]
            before = await watch(client, key=b"s", prev_kv=True)
            deletions = await watch(client, key=b"s", filters=["NOPUT"])
            for value in (b"1", b"2"):
                await client.call(rpc.PUT, key=b"s", value=value)
            await client.call(rpc.DELETE_RANGE, key=b"s")
            told = [await events(each, 3) for each in equal]
            assert told == [[(7, b"1"), (8, b"2"), (9, b"")]] * 3
            previous: list[bytes] = []
            while len(previous) < 3:
                previous += [each.prev_kv.value for each in (await read(before)).events]
            assert previous == [b"", b"1", b"2"]
            assert await events(deletions, 1) == [(9, b"")]

    run_within(trial())


def test_a_slow_watcher_is_cut_off_and_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has not read is in the history, which is bounded. Then it is told where it has to
    read again."""
    bound = EtcdKeyspace.bound_history
    monkeypatch.setattr(EtcdKeyspace, "bound_history", lambda self, _: bound(self, 1 << 20))

    async def trial() -> None:
        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            slow = await watch(client, key=b"a")
            for _ in range(40):
                await asyncio.gather(
                    *(client.call(rpc.PUT, key=b"a", value=b"x" * 100_000) for _ in range(4))
                )
            told: list[int] = []
            while True:
                response = await read(slow)
                if response.canceled:
                    break
                told += [each.kv.mod_revision for each in response.events]
            assert told == [*range(2, 2 + len(told))], "in order, without gaps"
            assert told[-1] < response.compact_revision <= 161
            latest = await client.call(rpc.RANGE, key=b"a")
            assert latest.kvs[0].mod_revision == 161

    run_within(trial())


async def standing(client: EtcdClient, name: bytes, count: int) -> None:
    """Wait until so many candidates stand in an election."""
    prefix = {"key": name + b"/", "range_end": name + b"0"}
    while (await client.call(rpc.RANGE, **prefix)).count != count:  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def test_elections_and_locks(tmp_path: Path) -> None:
    async def trial() -> None:
        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            leases = [(await client.call(rpc.GRANT, TTL=60)).ID for _ in range(3)]
            nobody = await client.outcome(rpc.LEADER, name=b"e")
            assert nobody == ("UNKNOWN", "election: no leader")
            first = await client.call(rpc.CAMPAIGN, name=b"e", lease=leases[0], value=b"one")
            assert first.leader.key == b"e/%x" % leases[0]
            campaigns = [
                asyncio.ensure_future(
                    client.call(rpc.CAMPAIGN, name=b"e", lease=lease, value=b"%d" % lease)
                )
                for lease in leases[1:]
            ]
            await standing(client, b"e", 3)
            assert not any(each.done() for each in campaigns)
            await client.call(rpc.PROCLAIM, leader=first.leader, value=b"still")
            assert (await client.call(rpc.LEADER, name=b"e")).kv.value == b"still"
            # The candidate that leaves the line does not hold up the others.
            campaigns[0].cancel()
            await standing(client, b"e", 2)
            await client.call(rpc.RESIGN, leader=first.leader)
            second = await campaigns[1]
            assert second.leader.lease == leases[2]
            late = await client.outcome(rpc.PROCLAIM, leader=first.leader, value=b"late")
            assert late == ("UNKNOWN", "election: not leader")

            lock = await client.call(rpc.LOCK, name=b"l", lease=leases[0])
            waiting = asyncio.ensure_future(client.call(rpc.LOCK, name=b"l", lease=leases[1]))
            await standing(client, b"l", 2)
            assert not waiting.done()
            await client.call(rpc.REVOKE, ID=leases[0])
            assert (await waiting).key != lock.key
            await client.call(rpc.UNLOCK, key=(await waiting).key)
            unknown = await client.outcome(rpc.LOCK, name=b"l", lease=12345)
            assert unknown == ("NOT_FOUND", "etcdserver: requested lease not found")

    run_within(trial())


def test_renewals_of_one_stream_do_not_wait_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are in the order of the requests."""
    renew = LeaseService.renew

    async def trial() -> None:
        last = asyncio.Event()

        async def delayed(self: LeaseService, lease: int) -> int:
            if lease == leases[-1]:
                last.set()
            await last.wait()
            return await renew(self, lease)

        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            leases = [(await client.call(rpc.GRANT, TTL=60)).ID for _ in range(5)]
            monkeypatch.setattr(LeaseService, "renew", delayed)
            stream = client.stream(rpc.KEEP_ALIVE)
            for lease in leases:
                await stream.write(rpc.KEEP_ALIVE.request(ID=lease))
            answers = [await read(stream) for _ in leases]
            assert [(each.ID, each.TTL) for each in answers] == [(each, 60) for each in leases]
            await stream.write(rpc.KEEP_ALIVE.request(ID=7))
            await stream.done_writing()
            assert (await read(stream)).TTL == 0
            assert await read(stream) is grpc.aio.EOF

    run_within(trial())


async def post(address: str, path: str, body: Any) -> tuple[int, Any]:
    status, lines = await _post(address, path, json.dumps(body).encode())
    return status, json.loads(lines)


async def _post(address: str, path: str, body: bytes) -> tuple[int, bytes]:
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    head_, _, body_ = answer.partition(b"\r\n\r\n")
    return int(head_.split()[1]), body_


def encoded(text: bytes) -> str:
    return b64encode(text).decode()


def test_the_json_gateway(tmp_path: Path) -> None:
    async def trial() -> None:
        async with doors(tmp_path) as quorum:
            (address,) = quorum.addresses
            put = {"key": encoded(b"k"), "value": encoded(b"v")}
            status, answer = await post(address, "/v3/kv/put", put)
            assert (status, answer["header"]["revision"]) == (200, "2")
            _, read = await post(address, "/v3/kv/range", {"key": encoded(b"k")})
            assert (b64decode(read["kvs"][0]["value"]), read["count"]) == (b"v", "1")
            txn = {
                "compare": [{"key": encoded(b"k"), "target": "CREATE", "create_revision": "2"}],
                "success": [{"requestPut": put}],
            }
            _, done = await post(address, "/v3/kv/txn", txn)
            assert done["succeeded"]
            _, granted = await post(address, "/v3/lease/grant", {"TTL": "700", "ID": "5"})
            assert (granted["ID"], granted["TTL"]) == ("5", "700")
            _, kept = await _post(address, "/v3/lease/keepalive", b'{"ID": 5}')
            assert json.loads(kept.splitlines()[1])["result"]["TTL"] == "700"
            status, refused = await post(address, "/v3/kv/range", {})
            text = "etcdserver: key is not provided"
            assert (status, refused) == (400, {"error": text, "message": text, "code": 3})
            assert (await post(address, "/v3/lease/revoke", {"ID": 6}))[0] == 404
            assert (await post(address, "/v3/auth/enable", {}))[0] == 501
            assert (await post(address, "/v3/kv/rage", {}))[0] == 404
            assert (await _post(address, "/v3/kv/put", b"{not json"))[0] == 400
            assert (await _post(address, "/health", b""))[0] == 200
            assert json.loads((await _post(address, "/version", b""))[1])["etcdserver"]

            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            for _ in range(3):  # one connection for several requests
                body = json.dumps({"ID": 5}).encode()
                head = f"POST /v3/kv/lease/timetolive HTTP/1.1\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Host: x\r\n\r\n" + body)
                await asyncio.wait_for(reader.readuntil(b'"grantedTTL":"700"}'), PATIENCE_S)
            create = json.dumps({"create_request": {"key": encoded(b"k")}}).encode()
            head = f"POST /v3/watch HTTP/1.1\r\nHost: x\r\nContent-Length: {len(create)}\r\n\r\n"
            writer.write(head.encode() + create)
            await reader.readuntil(b'"created":true')
            await post(address, "/v3/kv/put", put)
            await asyncio.wait_for(reader.readuntil(b'"events":'), PATIENCE_S)
            writer.close()
            door = quorum.doors["n1"]
            while door.api.watches.streams:  # noqa: ASYNC110 - the watch ends with its connection
                await asyncio.sleep(POLL_S)

    run_within(trial())


def test_a_node_without_a_leader_sends_its_clients_elsewhere(tmp_path: Path) -> None:
    """Those too that came after it had lost its leader. Clients do not resume a watch that ends
    with etcd's error `no leader`, so it is not this one."""

    async def trial() -> None:
        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            watches = quorum.doors["n1"].api.watches
            watches._election_s = POLL_S
            first = (await client.call(rpc.GRANT, TTL=600)).ID
            second = (await client.call(rpc.GRANT, TTL=600)).ID
            await client.call(rpc.CAMPAIGN, name=b"e", lease=first)
            told = await watch(client, key=b"k")
            waiting = asyncio.create_task(client.outcome(rpc.CAMPAIGN, name=b"e", lease=second))
            line = {"key": b"e/", "range_end": b"e0", "count_only": True}
            while (await client.call(rpc.RANGE, **line)).count < 2:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            watches.leader_is(None)
            code, text = await waiting
            assert (code, "no leader" in text) == ("UNAVAILABLE", True)
            assert text != "etcdserver: no leader"
            for stream in (told, client.stream(rpc.WATCH)):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await read(stream)
                assert (caught.value.code().name, caught.value.details()) == (code, text)
            watches.leader_is("n1")
            told = await watch(client, key=b"k")
            # The candidate has its place in the line, and goes on at any node.
            waiting = asyncio.create_task(client.outcome(rpc.CAMPAIGN, name=b"e", lease=second))
            await client.call(rpc.REVOKE, ID=first)
            assert (await waiting).leader.lease == second
            await client.call(rpc.PUT, key=b"k", value=b"v")
            assert [value for _, value in await events(told, 1)] == [b"v"]

    run_within(trial())


def test_what_is_not_offered_or_too_large(tmp_path: Path) -> None:
    async def trial() -> None:
        async with doors(tmp_path) as quorum, EtcdClient(quorum.addresses[0]) as client:
            snapshot = rpc.STATUS._replace(path="/etcdserverpb.Maintenance/Snapshot")
            user_list = rpc.STATUS._replace(path="/etcdserverpb.Auth/UserList")
            for method in (snapshot, user_list):
                assert (await client.outcome(method))[0] == "UNIMPLEMENTED"
            assert (await client.outcome(rpc.ALARM, action=1))[0] == "UNIMPLEMENTED"
            assert not (await client.call(rpc.ALARM)).alarms
            # Clients that have a password go on without it.
            users = "FAILED_PRECONDITION", "etcdserver: authentication is not enabled"
            assert await client.outcome(rpc.AUTHENTICATE, name="a", password="b") == users
            assert not (await client.call(rpc.AUTH_STATUS)).enabled
            await client.call(rpc.PUT, key=b"k", value=b"x" * 1_000_000)
            too_large = await client.outcome(rpc.PUT, key=b"k", value=b"x" * 1_100_000)
            assert too_large == ("INVALID_ARGUMENT", "etcdserver: request is too large")
            deep: dict[str, Any] = {}
            for _ in range(12):
                deep = {"success": [{"request_txn": deep}]}
            assert (await client.outcome(rpc.TXN, rpc.TXN.request(**deep)))[0] == "INVALID_ARGUMENT"
            # Bytes that are neither HTTP/1.1 nor a request end the connection, and nothing else.
            host, port = quorum.addresses[0].split(":")
            for garbage in (b"\x00\x01\x02", b"PRX", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff" * 9):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(garbage + b"\r\n\r\n")
                writer.write_eof()
                await asyncio.wait_for(reader.read(), PATIENCE_S)
                writer.close()
            assert (await client.call(rpc.RANGE, key=b"k", count_only=True)).count == 1
            header = (await client.call(rpc.STATUS)).header
            members = (await client.call(rpc.MEMBER_LIST)).members
            assert [(each.ID, each.name) for each in members] == [(header.member_id, "n1")]
            assert members[0].clientURLs == [f"http://{quorum.addresses[0]}"]

    run_within(trial())


def test_leases_and_watches_go_on_at_another_node(tmp_path: Path) -> None:
    """The leader is stopped. A lease that is kept at another node lives on, and a watch that is
    resumed there misses nothing."""

    async def trial() -> None:
        async with doors(tmp_path, 3) as quorum:
            leader = quorum.leader
            assert leader is not None
            gone = f"127.0.0.1:{quorum.doors[leader].port}"
            other = next(each for each in quorum.addresses if each != gone)
            async with EtcdClient(gone) as lost, EtcdClient(other) as client:
                lease = (await client.call(rpc.GRANT, TTL=60)).ID
                await client.call(rpc.PUT, key=b"mine", lease=lease)
                keeping = client.stream(rpc.KEEP_ALIVE)
                watching = await watch(lost, key=b"w")
                await client.call(rpc.PUT, key=b"w", value=b"0")
                seen = await events(watching, 1)
                await quorum.stop(leader)
                with pytest.raises(grpc.aio.AioRpcError) as ended:
                    while await read(watching) is not grpc.aio.EOF:
                        pass
                assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
                # Results above the usual 4 MiB, on a node that follows.
                follower = next(each for each in quorum.nodes if each != quorum.leader)
                async with EtcdClient(f"127.0.0.1:{quorum.doors[follower].port}") as another:
                    for number in range(9):
                        put = {"key": b"large/%d" % number, "value": bytes(1_000_000)}
                        await another.call(rpc.PUT, **put)
                    every = {"key": b"large/", "range_end": b"large0"}
                    assert len((await another.call(rpc.RANGE, **every)).kvs) == 9
                    deleted = await another.call(rpc.DELETE_RANGE, **every, prev_kv=True)
                    assert sum(len(each.value) for each in deleted.prev_kvs) == 9_000_000
                for number in range(1, 4):
                    await client.call(rpc.PUT, key=b"w", value=b"%d" % number)
                    await keeping.write(rpc.KEEP_ALIVE.request(ID=lease))
                    assert (await read(keeping)).TTL == 60
                resumed = await watch(client, key=b"w", start_revision=seen[-1][0] + 1)
                assert [value for _, value in await events(resumed, 3)] == [b"1", b"2", b"3"]
                assert (await client.call(rpc.RANGE, key=b"mine")).count == 1
                # A lease that is not renewed ends, and its key with it.
                short = await client.call(rpc.GRANT, TTL=0)
                assert short.TTL == 1
                ends = await watch(client, key=b"short", filters=["NOPUT"])
                put = await client.outcome(rpc.PUT, key=b"short", lease=short.ID)
                if isinstance(put, tuple):
                    assert put[0] == "NOT_FOUND", "it has ended already"
                else:
                    assert await events(ends, 1)
                await keeping.write(rpc.KEEP_ALIVE.request(ID=short.ID))
                assert (await read(keeping)).TTL == 0

    run_within(trial())


def test_certificates(tmp_path: Path) -> None:
    """The door admits clients with a certificate of the node's authority, but no onlookers. It uses
    new certificates without a restart."""
    made = Certificates(tmp_path)
    made._signed("onlooker", "ca", *LEAF, "extendedKeyUsage=clientAuth", unit="doyen-onlooker")
    tls = TLS(
        certificate=made.certificate("server"),
        key=made.key("server"),
        authority=made.certificate("ca"),
    )

    def credentials(name: str, authority: str = "ca") -> Any:
        return grpc.ssl_channel_credentials(
            made.certificate(authority).read_bytes(),
            made.key(name).read_bytes(),
            made.certificate(name).read_bytes(),
        )

    async def trial() -> None:
        client = credentials("client")
        async with doors(tmp_path / "nodes", tls=tls, credentials=client) as quorum:
            (address,) = quorum.addresses
            async with EtcdClient(address, client) as admitted:
                await admitted.call(rpc.PUT, key=b"a")
                members = (await admitted.call(rpc.MEMBER_LIST)).members
                assert members[0].clientURLs == [f"https://{address}"]
            for name in ("guest", "onlooker"):
                async with EtcdClient(address, credentials(name)) as refused:
                    assert (await refused.outcome(rpc.RANGE, key=b"a"))[0] == "UNAVAILABLE"
            # Certificates of another authority replace the files: new connections use them.
            made._signed("next", "stranger", *LEAF, "extendedKeyUsage=serverAuth")
            guest = credentials("guest", "stranger")
            for new, old in ("stranger.pem", "ca.pem"), ("next.pem", "server.pem"):
                (tmp_path / new).replace(tmp_path / old)
            (tmp_path / "next.key").replace(tmp_path / "server.key")
            async with EtcdClient(address, guest) as admitted:
                assert (await admitted.call(rpc.RANGE, key=b"a")).count == 1
            async with EtcdClient(address, client) as refused:
                assert (await refused.outcome(rpc.RANGE, key=b"a"))[0] == "UNAVAILABLE"

    run_within(trial())


def test_where_clients_need_a_secret_the_door_needs_certificates() -> None:
    secret, other = b"x" * 16, b"y" * 16
    check_access("127.0.0.1", Security(), insecure=False)
    check_access("0.0.0.0", Security(), insecure=True)
    mutual = TLS(certificate="c", key="k", authority="a")
    check_access("0.0.0.0", Security(tls=mutual, secret=secret), insecure=False)
    with pytest.raises(ConfigError, match="neither a shared secret nor mutual TLS"):
        check_access("0.0.0.0", Security(), insecure=False)
    with pytest.raises(ConfigError, match="clients of etcd cannot prove the secret"):
        check_access("127.0.0.1", Security(secret=secret, peer_secret=other), insecure=False)
