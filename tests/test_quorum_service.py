"""Clients served by nodes, in virtual time: real drivers and cores, links that are lists."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from doyen.quorum.consensus.core import Role
from doyen.quorum.keyspace import state
from doyen.quorum.keyspace.commands import (
    AdvanceRevision,
    BeginEra,
    ConditionFailed,
    Create,
    Delete,
    Done,
    Enqueue,
    EntryExists,
    Expire,
    Grant,
    KeyspaceCommand,
    LeaseGranted,
    Put,
    RaiseVersion,
    RemoveEndedKeys,
    Revoke,
    SetQuota,
    Written,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.history import ChangeKind
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import FIRST, NEWEST
from doyen.quorum.node import StateMachine, watches
from doyen.quorum.node import replicated as machines
from doyen.quorum.node import service as services
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.lease_keeper import LOOKS
from doyen.quorum.node.replicated import KEYSPACE, ReplicatedMachines
from doyen.quorum.node.service import SLICE, Service
from doyen.quorum.protocol.frames import MAX_FRAME, CloseReason
from doyen.quorum.protocol.requests import (
    ANSWER,
    MAX_KEY,
    MAX_LEASES,
    MAX_LEVELS,
    MAX_VALUE,
    REQUEST,
    Ahead,
    CancelWatch,
    ErrorCode,
    Failed,
    FoundEntry,
    Get,
    Head,
    IdentifyClient,
    LeaseRenewed,
    LeaseTimes,
    LeaseTimesRequest,
    ListChunk,
    NodeStatus,
    RenewLease,
    Request,
    Scan,
    StatusRequest,
    WatchNotification,
    WatchRequest,
    Write,
    WriteResults,
    decode_answer,
)
from doyen.quorum.protocol.security import Role as Power
from doyen.testing.virtual import run_virtual
from drivers import World
from support import runner

TTL_S = 2.0


class WithKeyspace(ReplicatedMachines):
    def __init__(self, targets: Mapping[int, StateMachine]) -> None:
        self.keyspace = Keyspace(FIRST)
        super().__init__({**targets, KEYSPACE: self.keyspace})


class Client:
    """A client's connection, and what it received on it."""

    def __init__(self, service: Service, name: str = "a-client", role: str = "client") -> None:
        self.role = role
        self.granted: Power = "admin"
        self.closed = False
        self.refused: CloseReason | None = None
        self.faults: list[CloseReason] = []
        self.received: list[Any] = []
        self.results: dict[int, bytes] = {}
        self.deaf = self.paused = self.congested = False
        self._on_frames: Callable[..., None] | None = None
        self._ids = 0
        service.admit(self)  # type: ignore[arg-type]
        if self._on_frames is not None and role == "client":
            self.put(IdentifyClient(name))

    def welcome(self, on_frames: Any, on_end: Any) -> None:
        self._on_frames, self._on_end = on_frames, on_end

    @property
    def ending(self) -> bool:
        return self.closed

    def refuse(self, reason: CloseReason, text: str) -> None:
        self.refused = reason

    def send(self, kind: int, *parts: bytes) -> bool:
        assert kind == ANSWER
        if self.closed:
            return False
        data = b"".join(parts)
        if len(data) >= MAX_FRAME:
            raise ValueError(f"a frame of {len(data)} bytes")  # as links do
        if not self.deaf:
            answer = decode_answer(data)
            self.received.append(answer)
            if isinstance(answer, WriteResults):
                self.results |= zip(answer.ids, answer.results, strict=True)
        return not self.deaf

    async def drain(self) -> None:
        while self.congested and not self.closed:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.001)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._on_end(self, None)

    abort = close

    def fail(self, reason: CloseReason, text: str) -> None:
        self.faults.append(reason)
        self.close()

    def put(self, *requests: Request) -> None:
        assert self._on_frames is not None
        self._on_frames(self, [(REQUEST, encode(each)) for each in requests])

    async def answer(self, request: Any) -> Any:
        self.put(request)
        return await self.answer_to(request.id)

    async def answer_to(self, id: int) -> Any:  # noqa: A002
        async with asyncio.timeout(30):
            while True:
                if id in self.results:
                    return self.results[id]
                for answer in self.received:
                    if not isinstance(answer, WatchNotification | WriteResults) and answer.id == id:
                        return answer
                await asyncio.sleep(0.001)

    async def ask(self, kind: Callable[..., Any], *arguments: Any) -> Any:
        self._ids -= 1
        return await self.answer(kind(self._ids, *arguments))

    async def do(self, id: int, command: KeyspaceCommand, floor: int = 1) -> Any:  # noqa: A002
        self.put(Write(floor, [id], [encode(command)]))
        answer = await self.answer_to(id)
        return decode_result(answer) if isinstance(answer, bytes) else answer


class Quorum:
    """Three nodes that serve clients."""

    def __init__(self) -> None:
        self.world = World(machine=WithKeyspace)
        self.services: dict[str, Service] = {}

    async def start(self, *, raised: bool = True) -> None:
        await self.world.boot()
        for node in self.world.nodes.values():
            self.serve(node)
        await self.world.leader()
        if raised:
            await self.world.until(
                lambda: all(self.keyspace(node).version == NEWEST for node in self.world.nodes)
            )

    def serve(self, node: Driver) -> None:
        self.services[node.id] = Service(node, self.keyspace(node.id), self.world.clock)

    async def restart(self, node: str) -> None:
        await self.world.boot_one(node)
        self.serve(self.world.nodes[node])

    def keyspace(self, node: str) -> Keyspace:
        machine = self.world.nodes[node].machine
        assert isinstance(machine, WithKeyspace)
        return machine.keyspace

    async def leader(self) -> str:
        return (await self.world.leader()).id

    async def follower(self) -> str:
        leader = await self.leader()
        return next(node for node in self.world.nodes if node != leader)

    def crash(self, node: str) -> None:
        self.services.pop(node).close()
        self.world.crash(node)


def notices(client: Client) -> list[int]:
    """The watches that were notified."""
    return [
        watch
        for each in client.received
        if isinstance(each, WatchNotification)
        for watch in each.ids
    ]


def on_quorum(test: Callable[[Quorum], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        quorum = Quorum()
        await quorum.start()
        await test(quorum)

    run_virtual(main)


with_quorum = runner(on_quorum)


async def granted(client: Client, id: int = 1) -> int:  # noqa: A002
    result = await client.do(id, Grant(TTL_S))
    assert isinstance(result, LeaseGranted)
    return result.lease


@with_quorum
async def test_a_write_asked_again_of_another_node_is_carried_out_once(quorum: Quorum) -> None:
    first, second = quorum.services["n1"], quorum.services["n2"]
    a, again = Client(first), Client(second)
    b = Client(second, "another-client")
    lease = await granted(a)
    won = await a.do(2, Create("k", b"a", lease))
    assert isinstance(won, Written)
    assert await again.do(2, Create("k", b"a", lease)) == won
    ticket = await a.do(3, Enqueue("line", b"", lease, 0))
    assert await again.do(3, Enqueue("line", b"", lease, 0)) == ticket
    listed = await again.ask(Scan, "line")
    assert len(listed.entries) == 1
    assert isinstance(await b.do(2, Create("k", b"b", await granted(b))), EntryExists)
    found = await b.ask(Get, "k")
    assert found.entry.value == b"a"


@with_quorum
async def test_a_write_outlives_the_leader_it_was_sent_to(quorum: Quorum) -> None:
    follower = await quorum.follower()
    client = Client(quorum.services[follower])
    leader = await quorum.leader()
    client.put(Write(1, [1], [encode(Put("k", b"v", 0))]))
    quorum.crash(leader)
    answer = await client.answer_to(1)
    assert isinstance(decode_result(answer), Written)
    assert await client.do(1, Put("k", b"v", 0)) == decode_result(answer)


@with_quorum
async def test_every_node_reads_what_was_acknowledged(quorum: Quorum) -> None:
    clients = [Client(service, f"client-{n}") for n, service in quorum.services.items()]
    for number in range(30):
        writer = clients[number % 3]
        result = await writer.do(number + 1, Put(f"k/{number}", b"v", 0))
        assert isinstance(result, Written)
        for reader in clients:
            assert (await reader.ask(Get, f"k/{number}")).entry.value == b"v"
            assert len((await reader.ask(Scan, "k")).entries) == number + 1


@with_quorum
async def test_lines(quorum: Quorum) -> None:
    client = Client(quorum.services[await quorum.follower()])
    lease = await granted(client)
    first = await client.do(2, Enqueue("l", b"1", lease, 0))
    second = await client.do(3, Enqueue("l", b"2", lease, 0))
    assert (await client.ask(Head, "l")).entry.key == first.key
    assert (await client.ask(Ahead, second.key)).entry.key == first.key
    assert (await client.ask(Ahead, first.key)).entry is None
    await client.do(4, Delete(first.key, 0))
    gone = await client.ask(Ahead, first.key)
    assert gone.code is ErrorCode.TICKET_GONE
    assert (await client.ask(Get, "nothing")) == FoundEntry(client._ids, None)


@with_quorum
async def test_much_that_arrives_at_once_is_carried_out_in_order(quorum: Quorum) -> None:
    service = quorum.services[await quorum.leader()]
    client, gone = (Client(service, name) for name in ("a-client", "b-client"))
    count = 3 * SLICE + 7
    client.put(*(Write(1, [n], [encode(Put(f"k/{n}", b"", 0))]) for n in range(1, count + 1)))
    client.put(Write(1, [count + 1], [encode(Put("k/last", b"", 0))]))
    gone.put(*(Write(1, [n], [encode(Put(f"g/{n}", b"", 0))]) for n in range(1, count + 1)))
    gone.close()
    await client.answer_to(count + 1)
    assert [*client.results] == list(range(1, count + 2))
    listed = await client.ask(Scan, "g")
    assert len(listed.entries) < count, "whoever has gone is not served any more"


def test_no_more_is_read_than_a_node_can_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "BACKLOG", 2 * SLICE)

    async def test(quorum: Quorum) -> None:
        client = Client(quorum.services["n1"])
        client.put(*(CancelWatch(-1) for _ in range(2 * SLICE)))
        assert not client.paused
        client.put(*(CancelWatch(-1) for _ in range(2 * SLICE)), StatusRequest(-2))
        assert client.paused
        await client.answer_to(-2)
        assert not client.paused

    on_quorum(test)


@with_quorum
async def test_results_of_one_turn_come_together_and_within_bounds(quorum: Quorum) -> None:
    client = Client(quorum.services[await quorum.leader()])
    lease = await granted(client)
    refused = encode(Create("k", bytes(4000), lease))
    client.put(Write(1, [*range(2, 252)], [refused] * 250))
    client.put(Write(1, [*range(252, 502)], [refused] * 250))
    client.put(Write(1, [*range(502, 510)], [encode(Delete("none", 0))] * 8))
    await client.answer_to(509)
    together = [answer.ids for answer in client.received if isinstance(answer, WriteResults)][1:]
    assert [number for ids in together for number in ids] == [*range(2, 510)]
    assert 2 <= len(together) <= 5, "as many as fit"
    assert all(sum(len(client.results[number]) for number in ids) < 2_000_000 for ids in together)


@with_quorum
async def test_long_lists_come_in_pieces(quorum: Quorum) -> None:
    client = Client(quorum.services["n1"])
    for number in range(6):
        await client.do(number + 1, Put(f"k/{number}", bytes(400_000), 0))
    client.put(Scan(-1, "k"))
    await quorum.world.until(
        lambda: any(isinstance(each, ListChunk) and not each.more for each in client.received)
    )
    pieces = [each for each in client.received if isinstance(each, ListChunk)]
    assert len(pieces) > 1
    assert [each.more for each in pieces] == [True] * (len(pieces) - 1) + [False]
    keys = [record.key for each in pieces for record in each.entries]
    assert keys == [f"k/{number}" for number in range(6)]


@with_quorum
async def test_a_lease_is_renewed_through_any_node_and_ends_without_renewals(
    quorum: Quorum,
) -> None:
    clients = [Client(service) for service in quorum.services.values()]
    lease = await granted(clients[0])
    await clients[0].do(2, Create("k", b"", lease))
    for number in range(12):
        await asyncio.sleep(TTL_S / 2)
        assert isinstance(await clients[number % 3].ask(RenewLease, lease), LeaseRenewed)
    began = quorum.world.loop.time()
    while (await clients[1].ask(Get, "k")).entry is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    took_s = quorum.world.loop.time() - began
    assert TTL_S - 0.1 <= took_s <= TTL_S + 0.1
    assert (await clients[2].ask(RenewLease, lease)).code is ErrorCode.LEASE_GONE


@with_quorum
async def test_any_node_tells_what_is_left_of_leases(quorum: Quorum) -> None:
    clients = [Client(service) for service in quorum.services.values()]
    lease, other = await granted(clients[0]), await granted(clients[0], 2)
    await asyncio.sleep(TTL_S / 2)
    assert isinstance(await clients[0].ask(RenewLease, lease), LeaseRenewed)
    for client in clients:
        told = await client.ask(LeaseTimesRequest, (lease, other, 999))
        assert told.remaining_s == (
            pytest.approx(TTL_S, abs=0.1),
            pytest.approx(TTL_S / 2, abs=0.1),
            None,
        )
    await asyncio.sleep(0.75 * TTL_S)
    told = await clients[1].ask(LeaseTimesRequest, (lease, other))
    assert told.remaining_s == (pytest.approx(TTL_S / 4, abs=0.1), None), "looking renews nothing"


@with_quorum
async def test_requests_for_what_is_left_of_leases_have_a_bound(quorum: Quorum) -> None:
    """One call to the leader is under way at a time, however many clients ask; and a client has a
    few requests under way."""
    node = await quorum.follower()
    driver = quorum.world.nodes[node]
    clients = [Client(quorum.services[node], f"client-{number:02}") for number in range(5)]
    lease = await granted(clients[0])
    under_way = most = calls = 0
    ask_leader = driver.ask_leader

    async def counted(question: bytes) -> bytes:
        nonlocal under_way, most, calls
        under_way, calls = under_way + 1, calls + 1
        most = max(most, under_way)
        try:
            return await ask_leader(question)
        finally:
            under_way -= 1

    driver.ask_leader = counted  # type: ignore[method-assign]
    leases = (lease, *range(10**6, 10**6 + MAX_LEASES - 1))
    ids = [-1000 - number for number in range(100)]
    for client in clients:
        client.put(*(LeaseTimesRequest(one, leases) for one in ids))
    for client in clients:
        answers = [await client.answer_to(one) for one in ids]
        told = [each for each in answers if isinstance(each, LeaseTimes)]
        assert [each.id for each in told] == ids[:LOOKS]
        assert all(each.remaining_s[0] and not any(each.remaining_s[1:]) for each in told)
        assert all(len(each.remaining_s) == MAX_LEASES for each in told)
        refused = [each for each in answers if isinstance(each, Failed)]
        assert len(refused) == 100 - LOOKS
        assert {each.code for each in refused} == {ErrorCode.UNAVAILABLE}
    assert (most, calls) == (1, 5 * LOOKS)
    few = await asyncio.gather(*(client.ask(LeaseTimesRequest, (lease,)) for client in clients))
    assert all(len(each.remaining_s) == 1 for each in few)
    assert calls <= 5 * LOOKS + 2, "what is asked meanwhile is asked together"


@with_quorum
async def test_leases_outlive_a_change_of_leader_and_end_after_it(quorum: Quorum) -> None:
    leader = await quorum.leader()
    client = Client(quorum.services[await quorum.follower()])
    renewed = await granted(client)
    silent = await granted(client, 2)
    await client.do(3, Create("renewed", b"", renewed))
    await client.do(4, Create("silent", b"", silent))
    await asyncio.sleep(TTL_S * 0.9)
    assert isinstance(await client.ask(RenewLease, renewed), LeaseRenewed)
    quorum.crash(leader)
    died_at = quorum.world.loop.time()
    assert isinstance(await client.ask(RenewLease, renewed), LeaseRenewed)
    assert (await client.ask(Get, "silent")).entry is not None, "it has its time anew"
    while (await client.ask(Get, "silent")).entry is not None:
        await asyncio.sleep(TTL_S / 4)
        assert isinstance(await client.ask(RenewLease, renewed), LeaseRenewed)
    assert quorum.world.loop.time() - died_at <= TTL_S * 1.5 + 0.5
    assert (await client.ask(Get, "renewed")).entry is not None


@with_quorum
async def test_a_leader_without_followers_confirms_no_renewal(quorum: Quorum) -> None:
    leader = await quorum.leader()
    client = Client(quorum.services[leader])
    lease = await granted(client)
    quorum.world.cut(leader)
    client.put(RenewLease(-1, lease))
    await asyncio.sleep(15.0)
    assert not any(isinstance(answer, LeaseRenewed) for answer in client.received)
    assert client.closed, "and it sends its clients away"
    quorum.world.heal()


@with_quorum
async def test_a_node_without_a_leader_sends_clients_away_and_takes_them_back(
    quorum: Quorum,
) -> None:
    world = quorum.world
    follower = await quorum.follower()
    service = quorum.services[follower]
    client = Client(service)
    world.cut(follower)
    await world.until(lambda: client.closed)
    assert not service.serving
    assert Client(service).refused is CloseReason.NOT_SERVING
    assert service.clients == 0
    world.heal()
    await world.until(lambda: service.serving)
    again = Client(service)
    assert isinstance(await again.do(1, Put("k", b"", 0)), Written)


@with_quorum
async def test_a_short_election_costs_no_connection(quorum: Quorum) -> None:
    leader = await quorum.leader()
    client = Client(quorum.services[await quorum.follower()])
    quorum.crash(leader)
    assert isinstance(await client.do(1, Put("k", b"", 0)), Written)
    assert not client.closed


def test_invalid_commands_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches, "WATCHES", 3)

    async def test(quorum: Quorum) -> None:
        client = Client(quorum.services["n1"])
        lease = await granted(client)
        commands: Sequence[KeyspaceCommand] = [
            Put("k", bytes(MAX_VALUE + 1), 0),
            Create("x" * (MAX_KEY + 1), b"", lease),
            Enqueue("", b"", lease, 0),
            Grant(0.01),
            Grant(float("inf")),
            Grant(float("nan")),
            AdvanceRevision(2**62),
            Put("a/" * MAX_LEVELS + "a", b"", 0),
            BeginEra(7),
            Expire(1, (lease,)),
            RaiseVersion(NEWEST),
            RemoveEndedKeys(),
            SetQuota(1),
        ]
        for number, command in enumerate(commands, 2):
            answer = await client.do(number, command)
            assert isinstance(answer, Failed), command
            assert answer.code is ErrorCode.UNUSABLE
            assert answer.text
        client.put(Write(1, [50], [b"\x92\x0e" + b"\x94\x04\x90\x91" * 5000]))  # without end
        assert (await client.answer_to(50)).code is ErrorCode.UNUSABLE
        assert quorum.keyspace("n1").lease(lease) is not None
        for _ in range(3):
            await client.ask(WatchRequest, "k", -1)
        assert (await client.ask(WatchRequest, "k", -1)).code is ErrorCode.UNUSABLE
        other = Client(quorum.services["n2"])
        assert (await other.ask(WatchRequest, "x" * (MAX_KEY + 1), -1)).code is ErrorCode.UNUSABLE
        assert await client.do(99, Revoke(lease)) == Done()

    on_quorum(test)


@with_quorum
async def test_nonsense_ends_the_connection(quorum: Quorum) -> None:
    service = quorum.services["n1"]
    for kind, payload in (
        (REQUEST, b"nonsense"),
        (REQUEST, b""),
        (77, encode(Get(-1, "k"))),
        (REQUEST, encode(Write(0, [0], [b""]))),
        (REQUEST, encode(Write(2, [1], [b""]))),
        (REQUEST, encode(Write(1, [], []))),
        (REQUEST, encode(Write(1, [1, 2], [b""]))),
        (REQUEST, encode(Write(1, [2**64 - 1], [b""]))),
        (REQUEST, encode(Write(1, [*range(1, 999)], [b""] * 998))),
        (REQUEST, encode(IdentifyClient("short"))),
        (REQUEST, b"\x93\x00\xa8a-client" + b"\x91" * 3000),
    ):
        client = Client(service)
        assert client._on_frames is not None
        client._on_frames(client, [(kind, payload)])
        assert client.faults, payload
        assert client.closed
    assert service.clients == 0


@with_quorum
async def test_a_connection_takes_few_names_in_any_minute(quorum: Quorum) -> None:
    """With more than the quorum remembers, it would forget what others repeat."""
    client = Client(quorum.services["n1"])
    pauses = {1: services.NAMES_S - 1, services.NAMES: 2}
    for number in range(services.NAMES + 1):
        await asyncio.sleep(pauses.get(number, 0))
        client.put(IdentifyClient(f"client-{number}" if number else "a-client"))
        assert isinstance(await client.do(1, Put(f"k{number}", b"", 0)), Written)
        client.results.clear()
    assert not client.closed
    client.put(IdentifyClient("one-too-many"))
    assert client.faults == [CloseReason.OUT_OF_TURN]


def test_a_client_whose_answer_fails_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, callback_failures: list[str]
) -> None:
    """Otherwise it would wait for ever. Here the answer is held until it has taken earlier ones."""

    async def test(quorum: Quorum) -> None:
        client = Client(quorum.services["n1"])
        await client.do(1, Put("k", b"", 0))
        client.congested = True
        client.put(Get(-1, "k"))
        await asyncio.sleep(1.0)
        monkeypatch.setattr(Keyspace, "get", lambda self, key: 1 / 0)
        client.congested = False
        await quorum.world.until(lambda: client.closed)
        assert callback_failures.pop() == "ZeroDivisionError('division by zero')"

    on_quorum(test)


@with_quorum
async def test_a_client_that_does_not_read_is_disconnected(quorum: Quorum) -> None:
    client = Client(quorum.services["n1"])
    client.deaf = True
    client.put(Get(-1, "k"))
    await quorum.world.until(lambda: client.closed)


def test_a_client_whose_session_was_dropped_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "FORGOTTEN_AFTER", 5)

    async def test(quorum: Quorum) -> None:
        idle, busy = Client(quorum.services["n1"]), Client(quorum.services["n2"], "busy-client")
        await idle.do(1, Put("k", b"", 0))
        for number in range(1, 20):
            await busy.do(number, Put(f"b/{number}", b"", 0))
        answer = await idle.do(2, Put("l", b"", 0), floor=2)
        assert isinstance(answer, Failed)
        assert answer.code is ErrorCode.FORGOTTEN
        assert (await idle.ask(Get, "l")).entry is None

    on_quorum(test)


@with_quorum
async def test_a_node_reports_its_status(quorum: Quorum) -> None:
    leader = await quorum.leader()
    client = Client(quorum.services[leader])
    await granted(client)
    await client.do(2, Put("k", b"", 0))
    condition = await client.ask(StatusRequest)
    assert isinstance(condition, NodeStatus)
    assert (condition.node, condition.leader, condition.role) == (leader, leader, "leading")
    assert (condition.keys, condition.leases, condition.clients) == (1, 1, 1)
    assert sorted(condition.voters) == ["n1", "n2", "n3"]
    assert not condition.full


@with_quorum
async def test_an_onlooker_may_only_ask_for_the_status_of_a_node_without_a_leader(
    quorum: Quorum,
) -> None:
    follower = await quorum.follower()
    service = quorum.services[follower]
    quorum.world.cut(follower)
    await quorum.world.until(lambda: not service.serving)
    onlooker = Client(service, role="onlooker")
    condition = await onlooker.ask(StatusRequest)
    assert isinstance(condition, NodeStatus)
    assert (condition.node, condition.leader, condition.clients) == (follower, None, 0)
    onlooker.put(Get(-9, "k"))
    assert onlooker.faults == [CloseReason.OUT_OF_TURN]
    garbage = Client(service, role="onlooker")
    assert garbage._on_frames is not None
    garbage._on_frames(garbage, [(REQUEST, b"\xc1")])
    assert garbage.faults == [CloseReason.MALFORMED]
    flood = Client(service, role="onlooker")
    flood.put(StatusRequest(1), StatusRequest(2))
    assert flood.faults == [CloseReason.OUT_OF_TURN]
    assert not flood.received
    service.close()
    assert Client(service, role="onlooker").refused is CloseReason.NOT_SERVING


@with_quorum
async def test_an_era_begun_by_one_who_led_before_is_followed_by_another(quorum: Quorum) -> None:
    """A leader's first word may be carried out late, in the next one's time."""
    leader = await quorum.world.leader()
    await asyncio.sleep(0.1)
    era = quorum.keyspace(leader.id).era
    await leader.propose(KEYSPACE, encode(BeginEra(era + 1)))
    await quorum.world.until(lambda: quorum.keyspace(leader.id).era == era + 2)
    client = Client(quorum.services[await quorum.follower()])
    lease = await granted(client)
    assert isinstance(await client.ask(RenewLease, lease), LeaseRenewed)
    assert (
        decode_result(await leader.propose(KEYSPACE, encode(Expire(era, (lease,)))))
        == ConditionFailed()
    )
    await quorum.world.until(lambda: quorum.keyspace(leader.id).lease(lease) is None)


@with_quorum
async def test_nodes_that_restart_serve_again(quorum: Quorum) -> None:
    client = Client(quorum.services["n1"])
    lease = (await client.do(1, Grant(60.0))).lease
    await client.do(2, Create("k", b"v", lease))
    for node in ("n1", "n2", "n3"):
        quorum.crash(node)
    for node in ("n1", "n2", "n3"):
        await quorum.restart(node)
    await quorum.world.leader()
    service = quorum.services["n2"]
    await quorum.world.until(lambda: service.serving)
    again = Client(service)
    assert (await again.ask(Get, "k")).entry.value == b"v"
    assert isinstance(await again.ask(RenewLease, lease), LeaseRenewed)
    assert [node.role for node in quorum.world.nodes.values()].count(Role.LEADING) == 1


def test_a_lease_with_many_keys_ends_a_slice_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Absent at once for whoever reads; watches are notified slice by slice, by every node."""
    monkeypatch.setattr(state, "SLICE", 10)

    async def test(quorum: Quorum) -> None:
        client, watcher = Client(quorum.services["n1"]), Client(quorum.services["n2"])
        lease = await granted(client)
        for number in range(95):
            await client.do(2 + number, Create(f"k/{number:02}", b"", lease))
            await watcher.answer(WatchRequest(-1 - number, f"k/{number:02}", -1))
        await watcher.ask(Get, "k")
        watcher.received.clear()
        before = quorum.keyspace("n1").revision
        assert await client.do(200, Revoke(lease)) == Done()
        assert (await client.ask(Scan, "k")).entries == []
        await quorum.world.until(lambda: len(notices(watcher)) == 95)
        assert sorted(notices(watcher)) == list(range(-95, 0)), "each once"
        assert (
            max(len(each.ids) for each in watcher.received if isinstance(each, WatchNotification))
            <= 10
        )
        await quorum.world.until(
            lambda: all(len(quorum.keyspace(node)) == 0 for node in quorum.world.nodes)
        )
        changes = quorum.keyspace("n3").history.after(before)
        assert changes is not None
        ends = {change.revision for change in changes if change.kind is ChangeKind.END}
        assert len(ends) == 10

    on_quorum(test)


def test_an_end_outlives_the_leader_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE", 1)

    async def test(quorum: Quorum) -> None:
        leader, follower = await quorum.leader(), await quorum.follower()
        client = Client(quorum.services[follower])
        lease = await granted(client)
        for number in range(20):
            await client.do(2 + number, Create(f"k/{number}", b"", lease))
        assert await client.do(100, Revoke(lease)) == Done()
        quorum.crash(leader)
        await quorum.world.until(
            lambda: all(len(quorum.keyspace(node)) == 0 for node in quorum.world.nodes)
        )

    on_quorum(test)


@with_quorum
async def test_writes_beyond_the_quota_are_refused_with_the_remedy(quorum: Quorum) -> None:
    for service in quorum.services.values():
        service._keeper._quota_bytes = 1000
    client = Client(quorum.services["n1"])
    lease = await granted(client)
    quorum.services[await quorum.leader()]._keeper._start_upkeep()
    await quorum.world.until(lambda: quorum.keyspace("n1").quota == 1000)
    refused = await client.do(2, Create("k", b"x" * 1000, lease))
    assert isinstance(refused, Failed)
    assert refused.code is ErrorCode.UNAVAILABLE
    assert "of 1000 bytes" in refused.text
    assert "--quota-bytes" in refused.text
    condition = await client.ask(StatusRequest)
    assert (condition.alarm, condition.quota) == (True, 1000)
    assert condition.bytes == quorum.keyspace("n1").bytes > 0
    assert await client.do(3, Revoke(lease)) == Done()
    assert not (await client.ask(StatusRequest)).alarm
