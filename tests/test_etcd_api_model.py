"""The same requests to a real etcd and to a quorum that speaks its API: the answers are equal."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from doyen.quorum.etcd_api import rpc
from doyen.quorum.keyspace.etcd_requests import (
    Compare,
    CompareTarget,
    DeleteKeys,
    EtcdRequests,
    EtcdTransaction,
    PutKey,
    RangeKeys,
    SortTarget,
)
from etcd_door import EtcdClient, doors
from etcd_oracle import LEASES, REQUESTS, overlaps
from servers import Etcd

ACTIONS = st.one_of(
    REQUESTS,
    REQUESTS,
    REQUESTS,
    # None of them ends during the test: that would be at different times.
    st.tuples(st.just("grant"), LEASES, st.sampled_from([3600, 7200, 9_000_000_001])),
    st.tuples(st.just("revoke"), LEASES),
    st.tuples(st.just("ttl"), LEASES),
    st.tuples(st.just("keepalive"), LEASES),
    st.tuples(st.just("compact"), st.integers(-2, 10)),
    st.tuples(st.just("watch"), st.integers(-1, 10), st.integers(0, 3), st.booleans()),
    st.just(("leases",)),
    st.just(("flawed",)),
)


def message(request: EtcdRequests, revision: int) -> Any:
    """The message of a request; its revisions are near the current one."""

    def near(given: int) -> int:
        return max(0, revision - 9 + given) if given else 0

    if isinstance(request, RangeKeys):
        return rpc.RANGE.request(
            key=request.key,
            range_end=request.end,
            # etcd does not define which of equal keys it returns.
            limit=request.limit if request.target is SortTarget.KEY else 0,
            revision=near(request.revision),
            sort_order=int(request.order),
            sort_target=int(request.target),
            keys_only=request.keys_only,
            count_only=request.count_only,
            min_mod_revision=near(request.min_mod),
            max_mod_revision=near(request.max_mod),
            min_create_revision=near(request.min_create),
            max_create_revision=near(request.max_create),
        )
    if isinstance(request, PutKey):
        return rpc.PUT.request(
            key=request.key,
            value=request.value,
            lease=request.lease,
            prev_kv=request.previous,
            ignore_value=request.ignore_value,
            ignore_lease=request.ignore_lease,
        )
    if isinstance(request, DeleteKeys):
        return rpc.DELETE_RANGE.request(
            key=request.key, range_end=request.end, prev_kv=request.previous
        )
    assert isinstance(request, EtcdTransaction)
    return rpc.TXN.request(
        compare=[comparison(each, revision) for each in request.compares],
        success=[op(each, revision) for each in request.success],
        failure=[op(each, revision) for each in request.failure],
    )


FIELDS = {
    RangeKeys: "request_range",
    PutKey: "request_put",
    DeleteKeys: "request_delete_range",
    EtcdTransaction: "request_txn",
}
METHODS: dict[type, rpc.EtcdMethod] = {
    RangeKeys: rpc.RANGE,
    PutKey: rpc.PUT,
    DeleteKeys: rpc.DELETE_RANGE,
    EtcdTransaction: rpc.TXN,
}
TARGETS = ["version", "create_revision", "mod_revision", "value", "lease"]


def op(request: EtcdRequests, revision: int) -> Any:
    return rpc.message("RequestOp")(**{FIELDS[type(request)]: message(request, revision)})


def comparison(compare: Compare, revision: int) -> Any:
    number = compare.number
    if compare.target in (CompareTarget.CREATE, CompareTarget.MOD) and number:
        number = max(0, revision - 5 + number)
    value = compare.value if compare.target is CompareTarget.VALUE else number
    return rpc.message("Compare")(
        key=compare.key,
        range_end=compare.end,
        target=int(compare.target),
        result=int(compare.result),
        **{TARGETS[compare.target]: value},
    )


def comparable(answer: Any, request: Any = None) -> Any:
    """An answer without what is particular to a cluster, and without orders that etcd does not
    define."""
    if isinstance(answer, tuple):
        return answer
    if answer.HasField("header"):
        for field in ("cluster_id", "member_id", "raft_term"):
            answer.header.ClearField(field)
    if answer.DESCRIPTOR.name == "RangeResponse" and request is not None and request.sort_target:
        kvs = sorted(answer.kvs, key=lambda kv: bytes(kv.key))
        del answer.kvs[:]
        answer.kvs.extend(kvs)
    if answer.DESCRIPTOR.name == "TxnResponse" and request is not None:
        chosen = request.success if answer.succeeded else request.failure
        for asked, given in zip(chosen, answer.responses, strict=True):
            comparable(
                getattr(given, given.WhichOneof("response")),
                getattr(asked, asked.WhichOneof("request")),
            )
    return answer


FLAWED: list[tuple[rpc.EtcdMethod, Any]] = [
    (rpc.RANGE, rpc.RANGE.request()),
    (rpc.RANGE, rpc.RANGE.request(key=b"a", revision=1 << 40)),
    (rpc.RANGE, rpc.RANGE.request(key=b"a", revision=-3)),
    (rpc.PUT, rpc.PUT.request(value=b"x")),
    (rpc.PUT, rpc.PUT.request(key=b"a", value=b"x", ignore_value=True)),
    (rpc.PUT, rpc.PUT.request(key=b"a", lease=1, ignore_lease=True)),
    (rpc.PUT, rpc.PUT.request(key=b"a", lease=999)),
    (rpc.PUT, rpc.PUT.request(key=b"nothing", ignore_value=True)),
    (rpc.DELETE_RANGE, rpc.DELETE_RANGE.request()),
    (rpc.TXN, rpc.TXN.request(success=[{}])),
    (rpc.TXN, rpc.TXN.request(compare=[{}])),
    (rpc.TXN, rpc.TXN.request(success=[{"request_put": {"key": b"a"}}] * 129)),
    (rpc.TXN, rpc.TXN.request(success=[{"request_put": {"key": b"a"}}] * 2)),
    (
        rpc.TXN,
        rpc.TXN.request(
            success=[
                {"request_put": {"key": b"b"}},
                {"request_delete_range": {"key": b"a", "range_end": b"c"}},
            ]
        ),
    ),
    (
        rpc.TXN,
        rpc.TXN.request(
            success=[
                {"request_txn": {"success": [{"request_put": {"key": b"b"}}]}},
                {"request_put": {"key": b"b"}},
            ]
        ),
    ),
    (
        rpc.TXN,
        rpc.TXN.request(
            success=[
                {
                    "request_txn": {
                        "success": [{"request_put": {"key": b"b"}}],
                        "failure": [{"request_put": {"key": b"b"}}],
                    }
                },
            ]
        ),
    ),
    (rpc.TXN, rpc.TXN.request(compare=[{"key": b"a", "target": "MOD", "version": 3}])),
    (rpc.REVOKE, rpc.REVOKE.request(ID=77)),
    (rpc.TIME_TO_LIVE, rpc.TIME_TO_LIVE.request(ID=77)),
    (rpc.COMPACT, rpc.COMPACT.request(revision=1 << 40)),
    (rpc.COMPACT, rpc.COMPACT.request(revision=-5)),
]


class Pair:
    """A real etcd and ours."""

    def __init__(self, etcd: EtcdClient, ours: EtcdClient) -> None:
        self.servers = etcd, ours
        self.revision = 1
        self.asked = 0

    async def same(self, method: rpc.EtcdMethod, request: Any) -> Any:
        answers = await asyncio.gather(
            *(server.outcome(method, request) for server in self.servers)
        )
        theirs, ours = (comparable(answer, request) for answer in answers)
        assert ours == theirs, f"{method.path} at {self.revision}\n{request}"
        if not isinstance(ours, tuple):
            self.revision = max(self.revision, ours.header.revision)
        self.asked += 1
        return ours

    async def act(self, action: Any) -> None:
        if not isinstance(action, tuple):
            if isinstance(action, EtcdTransaction) and overlaps(action):
                return
            await self.same(METHODS[type(action)], message(action, self.revision))
            return
        kind, *given = action
        if kind == "grant":
            await self.same(rpc.GRANT, rpc.GRANT.request(ID=given[0], TTL=given[1]))
        elif kind == "revoke":
            await self.same(rpc.REVOKE, rpc.REVOKE.request(ID=given[0]))
        elif kind == "ttl":
            await self.time_to_live(given[0])
        elif kind == "keepalive":
            await self.keep_alive(given[0])
        elif kind == "compact":
            revision = self.revision - given[0]
            await self.same(rpc.COMPACT, rpc.COMPACT.request(revision=revision))
        elif kind == "leases":
            both = [await server.call(rpc.LEASES) for server in self.servers]
            theirs, ours = ({each.ID for each in answer.leases} for answer in both)
            assert ours == theirs
        elif kind == "watch":
            await self.watch(*given)
        else:
            for method, request in FLAWED:
                await self.same(method, request)

    async def time_to_live(self, lease: int) -> None:
        request = rpc.TIME_TO_LIVE.request(ID=lease, keys=True)
        answers = [await server.call(rpc.TIME_TO_LIVE, request) for server in self.servers]
        theirs, ours = (
            (each.header.revision, each.grantedTTL, each.TTL < 0, sorted(each.keys))
            for each in answers
        )
        assert ours == theirs

    async def keep_alive(self, lease: int) -> None:
        answers = []
        for server in self.servers:
            stream = server.stream(rpc.KEEP_ALIVE)
            await stream.write(rpc.KEEP_ALIVE.request(ID=lease))
            answers.append(comparable(await stream.read()))
            stream.cancel()
        assert answers[0] == answers[1]

    async def watch(self, back: int, filters: int, prev_kv: bool) -> None:
        """Everything from a revision on, up to a change that is made for it."""
        create = {
            "key": b"\0",
            "range_end": b"\0",
            "start_revision": max(0, self.revision - back),
            "filters": [kind for kind in (0, 1) if filters & 1 << kind],
            "prev_kv": prev_kv,
        }
        streams = [server.stream(rpc.WATCH) for server in self.servers]
        for stream in streams:
            await stream.write(rpc.WATCH.request(create_request=create))
            created = comparable(await stream.read())
            assert (created.created, created.watch_id) == (True, 0)
        await self.same(rpc.PUT, rpc.PUT.request(key=b"z", value=b"end"))
        await self.same(rpc.DELETE_RANGE, rpc.DELETE_RANGE.request(key=b"z"))
        theirs, ours = [await self.told(stream, filters) for stream in streams]
        assert ours == theirs

    async def told(self, stream: Any, filters: int) -> Any:
        events: list[Any] = []
        last = self.revision if not filters & 2 else self.revision - 1
        while filters != 3:
            response = await asyncio.wait_for(stream.read(), 10)
            if response.canceled:
                stream.cancel()
                return response.compact_revision
            events += response.events
            if events and events[-1].kv.mod_revision >= last:
                break
        stream.cancel()
        return events


@pytest.fixture(scope="module")
def fresh_etcd() -> Iterator[Etcd]:
    with Etcd() as etcd:
        yield etcd


def compare(etcd: Etcd, folder: Path, examples: int, *, afresh: bool) -> None:
    """Both begin empty. The state goes on from one example to the next."""
    with asyncio.Runner() as runner:
        manager = doors(folder)
        quorum = runner.run(manager.__aenter__())
        theirs, ours = EtcdClient(etcd.address), EtcdClient(quorum.addresses[0])
        pair = Pair(theirs, ours)

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=not afresh,
            phases=(Phase.generate,),
            suppress_health_check=[*HealthCheck],
        )
        @given(st.lists(ACTIONS, min_size=5, max_size=20))
        def run(actions: list[Any]) -> None:
            for action in actions:
                runner.run(pair.act(action))

        try:
            runner.run(pair.act(("flawed",)))
            run()
            runner.run(pair.act(("flawed",)))
            assert pair.asked > examples
        finally:
            runner.run(theirs.__aexit__())
            runner.run(ours.__aexit__())
            runner.run(manager.__aexit__(None, None, None))


def test_a_quorum_answers_as_etcd_does(fresh_etcd: Etcd, tmp_path: Path) -> None:
    compare(fresh_etcd, tmp_path, 8, afresh=False)


@pytest.mark.chaos
def test_a_quorum_answers_as_etcd_does_for_long(tmp_path: Path) -> None:
    with Etcd() as etcd:
        compare(etcd, tmp_path, 400, afresh=True)
