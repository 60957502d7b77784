"""The transport between nodes, over real sockets: restarts, doubles, bounds, snapshots."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
import uvloop

from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.quorum.consensus.core import Membership, Recovered
from doyen.quorum.consensus.raft import Raft, RaftSettings
from doyen.quorum.keyspace.versions import IDENTIFIED, NEWEST
from doyen.quorum.node.membership import Members, NodeMember
from doyen.quorum.node.peer_connections import FOUNDED
from doyen.quorum.node.snapshot_transfer import CHUNK_SIZE, MAX_PIECE, WINDOW
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.frames import MAX_FRAME, ConnectionRefused
from doyen.quorum.protocol.security import TLS, Security
from neighbours import HOST, OPEN, SECRET, SNAPSHOT, Anyone, Beat, Node, Nodes, Text, call, run
from servers import Proxy
from servers.certificates import Certificates
from support import until


async def two(nodes: Nodes, security: Security = OPEN) -> tuple[Node, Node]:
    """Two nodes, linked both ways."""
    one, other = [await nodes.add(name, security=security) for name in ("n1", "n2")]
    one.know(one, other)
    other.know(one, other)
    await until(lambda: one.links() and other.links())
    return one, other


async def test_messages_arrive_in_order_and_as_they_were() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        assert one.links() == [("connected", "n2")]
        sent = [Beat(number, number, b"\x00\xff") for number in range(1000)]
        for message in sent:
            one.peers.send("n2", message)
        other.peers.send("n1", Text(1, "hello"))
        await until(lambda: len(other.heard()) == len(sent) and one.heard())
        assert other.heard() == sent
        assert one.events[-1] == ("received", "n2", Text(1, "hello"))
        assert not one.peers.dropped


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("secured", ["secret", "tls"])
def test_nodes_that_know_one_another(
    secured: str,
    new_loop: Callable[[], asyncio.AbstractEventLoop],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    if secured == "tls":
        files = Certificates(tmp_path_factory.mktemp("tls"))
        certificate, key = files.certificate("server"), files.key("server")
        tls = TLS(certificate=certificate, key=key, authority=files.certificate("ca"))
        security = Security(tls=tls)
    else:
        security = Security(peer_secret=SECRET)

    async def body() -> None:
        async with Nodes() as nodes:
            one, other = await two(nodes, security)
            assert await one.peers.ask("n2", b"?") == b"re: ?"
            done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            one.peers.send_snapshot("n2", 5, SNAPSHOT, pieces_of(bytes(MAX_PIECE)), done.set_result)
            assert await done
            with socket.create_connection((HOST, one.port)):
                await until(lambda: one.listener.pending == 1)
                other.die()
                await until(lambda: ("disconnected", "n2") in one.events)
            await until(lambda: not one.listener.pending)

    run(body(), new_loop=new_loop)


async def test_a_peer_that_ends_every_link_is_not_dialled_without_pause() -> None:
    async with Nodes() as nodes:
        pauses: list[float] = []

        def jitter() -> float:
            pauses.append(asyncio.get_running_loop().time())
            return 1.0

        one = await nodes.add("n1", jitter=jitter)
        other = await nodes.add("n2")
        other.listener._peers = _show_out
        one.know(other)
        await until(lambda: len(pauses) == 4)
        assert pauses[3] - pauses[0] > 0.01 + 0.02 + 0.04
        assert one.events[:2] == [("connected", "n2"), ("disconnected", "n2")]


def _show_out(link: FrameConnection) -> None:
    link.welcome(lambda *_: None, lambda *_: None)
    link.close()


@pytest.mark.parametrize("known", ["no address", "an old address"])
async def test_a_peer_that_cannot_be_dialled_is_answered_on_its_own_connection(known: str) -> None:
    """A node that was down does not know where those are who joined or moved meanwhile."""
    async with Nodes() as nodes:
        one, other = await nodes.add("n1"), await nodes.add("n2")
        if known == "an old address":
            other.peers.reach({"n1": f"{HOST}:{await free()}"})
        one.know(other)
        await until(partial(_resent, other, one, Text(1, "to a peer that was not dialled")))
        assert other.links() == []
        other.know(one)
        await until(other.links)
        dropped = other.peers.dropped.copy()
        other.peers.send("n1", Text(1, "to a peer that was"))
        await until(lambda: one.heard()[-1] == Text(1, "to a peer that was"))
        assert one.links() == [("connected", "n2")]
        assert other.peers.dropped == dropped
        assert not one.counts
        assert not other.counts


def _resent(sender: Node, receiver: Node, message: Text) -> bool:
    """Send it, as heartbeats are sent again and again, and say whether any has arrived."""
    sender.peers.send(receiver.me.node, message)
    return message in receiver.heard()


async def test_a_peer_is_sent_nothing_on_its_own_connection_while_it_is_dialled() -> None:
    """The handshake states the position in the log. The peer must not hear of a later one from this
    node before it has judged that, or it takes this node's folder for an older copy."""
    async with Nodes() as nodes:
        one, other = await nodes.add("n1"), await nodes.add("n2")
        one.know(other)
        await until(lambda: other.peers.incoming)
        with socket.create_server((HOST, 0)) as silent:
            other.peers.reach({"n1": f"{HOST}:{silent.getsockname()[1]}"})
            await until(lambda: other.peers.outgoing["n1"].dialling)
            other.peers.send("n1", Text(1, "too early"))
            assert other.peers.dropped["n1"] == 1
            other.peers.reach({})


async def test_questions_are_answered_each_by_its_own_answer() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        held: list[tuple[bytes, object]] = []
        other.answer = lambda question, answer: held.append((question, answer))
        asked = [asyncio.create_task(one.peers.ask("n2", b"%d" % n)) for n in range(100)]
        await until(lambda: len(held) == 100)
        asked[7].cancel()
        for question, answer in reversed(held):
            assert callable(answer)
            answer(question * 2)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(answers.pop(7), asyncio.CancelledError)
        assert answers == [b"%d%d" % (n, n) for n in range(100) if n != 7]


async def test_a_request_that_was_not_delivered_and_one_that_may_have_been() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        with pytest.raises(StoreUnavailable, match="'n3' is not connected"):
            await one.peers.ask("n3", b"?")
        with pytest.raises(StoreUnusable, match="too large"):
            await one.peers.ask("n2", bytes(MAX_FRAME))
        heard: list[bytes] = []
        other.answer = lambda question, answer: heard.append(question)
        sent = asyncio.create_task(one.peers.ask("n2", b"heard"))
        await until(lambda: heard)
        unsent = asyncio.create_task(one.peers.ask("n2", b"not heard"))
        await asyncio.sleep(0)  # queued, and what is queued goes out in the next turn
        one.peers.connections["n2"].abort()
        assert [type(await failure(task)) for task in (sent, unsent)] == [
            OutcomeUnknown,
            StoreUnavailable,
        ]
        assert heard == [b"heard"]
        with pytest.raises(StoreUnavailable, match="not connected"):
            await one.peers.ask("n2", b"?")


async def test_a_request_to_a_dropped_peer_has_an_unknown_outcome() -> None:
    """What is queued goes out with the link's end."""
    async with Nodes() as nodes:
        one, other = await two(nodes)
        heard: list[bytes] = []
        other.answer = lambda question, answer: heard.append(question)
        asked = asyncio.create_task(one.peers.ask("n2", b"?"))
        await asyncio.sleep(0)
        one.peers.reach({})
        assert type(await failure(asked)) is OutcomeUnknown
        await until(lambda: heard)


async def failure(task: asyncio.Task[bytes]) -> BaseException | None:
    await asyncio.wait([task])
    return task.exception()


async def test_a_peer_that_dies_is_noticed_and_found_again_when_it_is_back() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        other.die()
        await until(lambda: "n2" not in one.peers.connections)
        assert one.links()[1:] == [("disconnected", "n2")], "it is told with the connection's end"
        await until(lambda: "refused" in one.peers.connection_errors.get("n2", ""))
        again = await nodes.add("n2", port=other.port, incarnation=99)
        again.know(one)
        await until(lambda: one.links()[-1] == ("connected", "n2"))
        one.peers.send("n2", Text(2, "welcome back"))
        await until(again.heard)
        assert [event[0] for event in one.links()] == ["connected", "disconnected", "connected"]
        assert one.counts == {}, "no silence was waited for"


async def test_a_peer_that_is_back_is_dialled_at_once_when_it_calls() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1", jitter=lambda: 1e6)  # waits for ever between attempts
        other = Node("n2")
        other.port = await free()
        one.know(other)
        await until(lambda: "refused" in one.peers.connection_errors["n2"])
        assert not one.peers.refusals, "nothing listens there"
        other = await nodes.add("n2", port=other.port)
        other.know(one)
        await until(lambda: one.links() == [("connected", "n2")])


async def free() -> int:
    server = await asyncio.start_server(lambda *_: None, HOST, 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def test_silence_is_not_reported_as_an_end() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1", keepalive_s=0.02)
        other = await nodes.add("n2")
        with Proxy(other) as proxy:
            one.peers.reach({"n2": f"{HOST}:{proxy.port}"})
            await until(one.links)
            asked = asyncio.create_task(one.peers.ask("n2", b"?"))
            other.answer = lambda question, answer: None
            proxy.half_open()
            assert isinstance(await failure(asked), OutcomeUnknown)
            assert one.links() == [("connected", "n2")]
            assert "nothing was received" in one.peers.connection_errors["n2"]
            proxy.heal()
            await until(lambda: len(one.links()) == 2)
            assert one.links() == [("connected", "n2")] * 2
            assert one.counts["silent"] == 1


async def test_a_second_process_with_the_id_of_a_peer_is_refused() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        double = await nodes.add("n2", incarnation=99)
        double.know(one)
        await until(lambda: "another process" in double.peers.connection_errors["n1"])
        assert double.counts["duplicate"] >= 1
        assert await one.peers.ask("n2", b"?") == b"re: ?"
        assert one.links() == [("connected", "n2")]
        assert one.counts["duplicate"] >= 1
        other.die()
        await until(lambda: ("connected", "n1") in double.events)


async def test_a_second_process_at_the_address_of_a_peer_is_not_taken_for_it() -> None:
    """The peer itself is connected, and speaks: whoever answers at its address is another."""
    async with Nodes() as nodes:
        one, other = await two(nodes)
        double = await nodes.add("n2", incarnation=99)
        one.know(double)
        await until(lambda: "every node needs an id" in one.peers.connection_errors["n2"])
        assert [event[0] for event in one.links()] == ["connected"]
        assert other.peers.connections["n1"].open


async def test_a_second_process_with_the_id_of_a_dead_peer_replaces_it() -> None:
    """A machine that lost its power says no farewell."""
    async with Nodes() as nodes:
        one = await nodes.add("n1", probe_s=0.05)
        other = await nodes.add("n2")
        with Proxy(one) as proxy:
            other.peers.reach({"n1": f"{HOST}:{proxy.port}"})
            await until(other.links)
            proxy.cut()
            again = await nodes.add("n2", incarnation=99)
            again.know(one)
            await until(again.links)
            again.peers.send("n1", Text(1, "here I am"))
            await until(one.heard)
            assert one.counts == {}


async def test_a_node_is_not_its_own_peer() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1")
        one.peers.reach({"n2": one.address})
        await until(lambda: "this is node 'n1', not 'n2'" in one.peers.connection_errors["n2"])
        double = await nodes.add("n1", incarnation=99)
        double.peers.reach({"n2": one.address})
        await until(lambda: "this is node 'n1'" in double.peers.connection_errors["n2"])
        assert not one.links()


async def test_a_node_of_another_cluster_is_refused() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1")
        stray = await nodes.add("n2", cluster="d")
        stray.know(one)
        await until(lambda: "belongs to cluster 'c'" in stray.peers.connection_errors["n1"])
        assert one.counts["cluster"] >= 1
        assert not one.peers.incoming


async def test_a_peer_below_the_clusters_version_is_refused_with_the_remedy() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        assert one.peers.supports("n2") == NEWEST
        assert one.peers.supports("n3") == 0
        one.peers.require(NEWEST + 1)
        remedy, here, there = "install the release", one.peers, other.peers
        await until(lambda: remedy in there.connection_errors.get("n1", ""))
        await until(lambda: remedy in here.connection_errors.get("n2", ""))
        assert here.refusals == here.connection_errors
        assert one.peers.supports("n2") == 0
        assert one.counts["version"] >= 1
        assert not one.peers.incoming


async def test_a_recorded_member_that_is_not_connected_supports_what_all_with_ids_do() -> None:
    async with Nodes() as nodes:
        members = Anyone("n1")
        members.own = NodeMember("id1", "c", {"n1": "id1", "n2": "id2"})
        one = await nodes.add("n1", members=members)
        assert one.peers.supports("n2") == IDENTIFIED
        assert one.peers.supports("n3") == 0


async def test_a_node_that_is_not_a_member_is_asked_for_its_version() -> None:
    async with Nodes() as nodes:
        one, other = await nodes.add("n1"), await nodes.add("n2")
        assert await one.peers.newest("n2", other.address) == NEWEST
        with pytest.raises(ConnectionRefused, match="this is node 'n2', not 'n3'"):
            await one.peers.newest("n3", other.address)
        await other.close()
        assert await one.peers.newest("n2", other.address) is None
        assert not one.links()
        assert not other.peers.incoming


async def test_a_founding_record_that_comes_late_is_no_fault() -> None:
    """Whoever has dialled a node that waited to be founded tells it the record, and that node may
    have heard it from another by then. They connect anew, as members."""
    async with Nodes() as nodes:
        one, other = await two(nodes)
        link = one.peers.connections["n2"]
        link.send(FOUNDED, b"the record")
        await until(lambda: link.closed and one.peers.connections.get("n2") not in (None, link))
        assert await one.peers.ask("n2", b"?") == b"re: ?"
        assert not other.counts


async def test_a_peer_that_moves_and_one_that_leaves() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        asked = asyncio.create_task(one.peers.ask("n2", b"?"))
        other.answer = lambda question, answer: None
        await asyncio.sleep(0)
        one.peers.reach({})
        assert isinstance(await failure(asked), OutcomeUnknown | StoreUnavailable)
        other.die()
        await until(lambda: not one.peers.incoming)
        one.peers.send("n2", Text(1, "anyone?"))
        assert one.peers.dropped == {"n2": 1}
        moved = await nodes.add("n2", incarnation=99)
        one.know(moved)
        await until(lambda: len(one.links()) == 2)
        one.know(moved)  # nothing changes
        one.peers.send("n2", Text(1, "at your new place"))
        await until(moved.heard)
        assert one.links() == [("connected", "n2")] * 2  # those let go are not told of


async def test_a_peer_that_does_not_read_costs_its_messages_and_no_memory() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1", bound=1 << 20)
        other = await nodes.add("n2")
        third = await nodes.add("n3")
        one.know(other, third)
        await until(lambda: len(one.links()) == 2)
        await until(lambda: other.peers.incoming)
        other.peers.incoming["n1"].connection.pause()
        data = bytes(10_000)
        for count in range(2000):
            one.peers.send("n2", Beat(1, count, data))
            if count % 50 == 0:
                await asyncio.sleep(0)
        link = one.peers.connections["n2"]
        assert one.peers.dropped["n2"] > 500
        assert link.queued < (1 << 20) + 20_000
        with pytest.raises(StoreUnavailable, match="is full"):
            await one.peers.ask("n2", b"?")
        assert await one.peers.ask("n3", b"?") == b"re: ?"
        other.peers.incoming["n1"].connection.resume()
        arrived = 2000 - one.peers.dropped["n2"]
        await until(lambda: len(other.heard()) == arrived)
        counts = [message.count for message in other.heard() if isinstance(message, Beat)]
        assert counts == sorted(counts)


async def test_a_message_too_large_is_dropped_and_reported() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        one.peers.send("n2", Beat(1, 1, bytes(MAX_FRAME)))
        one.peers.send("n2", Beat(1, 2))
        await until(other.heard)
        assert other.heard() == [Beat(1, 2)]
        assert one.counts == {"too-large": 1}


async def pieces_of(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def test_a_snapshot_arrives_piece_by_piece_as_it_was() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        pieces = [b"", b"a", bytes(CHUNK_SIZE), bytes(CHUNK_SIZE + 1), b"", bytes(WINDOW * 3)]
        pieces += [bytes(MAX_PIECE), b"z" * 100] + [b"%d" % n for n in range(3000)]
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        one.peers.send_snapshot("n2", 5, SNAPSHOT, pieces_of(*pieces), done.set_result)
        assert await done
        assert other.streams == [("n1", 5, SNAPSHOT, pieces)]


async def test_heartbeats_pass_a_snapshot_on_its_way() -> None:
    """Whoever stores it is slow: what is under way stays within the window, and nothing that is
    sent meanwhile waits for the rest."""
    async with Nodes() as nodes:
        one, other = await two(nodes)
        gate = asyncio.Event()
        other.slowly = gate.wait
        taken = 0

        async def pieces() -> AsyncIterator[bytes]:
            nonlocal taken
            for _ in range(200):
                taken += 1
                yield bytes(50_000)

        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        one.peers.send_snapshot("n2", 5, SNAPSHOT, pieces(), done.set_result)
        await until(lambda: other.streams)
        for count in range(50):
            one.peers.send("n2", Beat(1, count))
            assert await one.peers.ask("n2", b"?") == b"re: ?"
            assert len(other.heard()) == count + 1
        assert taken * 50_000 <= 2 * WINDOW + 100_000
        assert not done.done()
        gate.set()
        assert await done
        assert sum(map(len, other.streams[0][3])) == 200 * 50_000


@pytest.mark.parametrize("how", ["link ends", "cannot be stored", "cannot be read", "too large"])
async def test_a_failed_snapshot_is_reported_once(how: str) -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        closed = asyncio.Event()

        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield bytes(100_000)
                if how == "cannot be read":
                    raise OSError("the disk is broken")
                yield bytes(MAX_PIECE + 1 if how == "too large" else 1_000_000)
                yield bytes(1_000_000)
            finally:
                closed.set()

        async def slowly() -> None:
            if how == "cannot be stored":
                raise OSError("no space")
            await asyncio.Event().wait()

        other.slowly = slowly
        done: list[bool] = []
        one.peers.send_snapshot("n2", 5, SNAPSHOT, pieces(), done.append)
        await until(lambda: other.streams)
        if how == "link ends":
            one.peers.connections["n2"].abort()
        await until(lambda: done)
        await closed.wait()
        assert done == [False]


async def test_a_snapshot_for_an_unknown_peer_fails() -> None:
    async with Nodes() as nodes:
        one = await nodes.add("n1")
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        one.peers.send_snapshot("n9", 5, SNAPSHOT, pieces_of(b"x"), done.set_result)
        assert not await done


async def test_the_receiver_of_a_snapshot_learns_of_the_end_of_its_connection() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)

        async def pieces() -> AsyncIterator[bytes]:
            yield b"x"
            await asyncio.Event().wait()

        one.peers.send_snapshot("n2", 5, SNAPSHOT, pieces(), lambda ok: None)
        await until(lambda: other.streams and other.streams[0][3])
        one.die()
        await until(lambda: not other.peers.incoming)
        await until(lambda: len(other.peers._tasks._tasks) == 1)  # the one that dials


async def test_a_connection_is_not_used_once_the_data_directory_is_known_to_be_older() -> None:
    """A peer reports it after the handshake of this connection was checked, and before the
    connection is used."""

    async def save(member: NodeMember) -> None: ...

    async with Nodes() as nodes:
        members = Members("n1", {}, NodeMember("m1"), save)
        members.core = Raft(
            "n1",
            Membership(("n1", "n2")),
            Recovered(),
            settings=RaftSettings(),
            jitter=lambda: 0.5,
            now=0.0,
        )
        one, other = await nodes.add("n1", members=members), await nodes.add("n2")

        async def report(them: object) -> bool:
            members.lost = "its data directory is an older copy"
            return True

        vars(one.peers)["is_unique"] = report
        one.peers.reach({"n2": other.address})
        await until(lambda: "older copy" in one.peers.connection_errors.get("n2", ""))
        assert not one.peers.connections
        assert not one.links()


async def test_closing_ends_every_connection() -> None:
    async with Nodes() as nodes:
        one, other = await two(nodes)
        caller = await call(one.address)
        await one.close()
        await until(lambda: ("disconnected", "n1") in other.events and caller.ends)
        assert ("disconnected", "n2") not in one.events
