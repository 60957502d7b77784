"""Forwarding between real processes: uvicorn with Starlette, and gunicorn, on a local store and on
a quorum. The leader is killed, frozen and resigns while clients send requests to all processes.

The ledger tells what was executed: no request twice, none that was answered "not executed", and
tokens only grow. No client waits longer than the bounds allow.
"""

from __future__ import annotations

import http.client
import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect

import doyen
from fixtures import shared
from forward_peers import ANSWER_S, ELECTION, PATIENCE_S, TTL_S, WAIT_S, Answer, Peer, Peers, poll
from servers import QuorumCluster

LATE_S = 5.0
"""The load of the machine."""
LONGEST_S = WAIT_S + 1.0 + ANSWER_S + 2 * TTL_S + LATE_S
"""Waiting at the first process and at the leader, and an answer that does not come."""

quorum = shared(QuorumCluster)


class Clients:
    """Threads that send requests to random processes."""

    def __init__(self, peers: Peers, threads: int = 8) -> None:
        self._peers = peers
        self.answers: dict[str, Answer] = {}
        self.longest_s = 0.0
        """That a process took which was never frozen."""
        self._ids = itertools.count()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(threads)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * LONGEST_S)

    def _run(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            request = f"r{next(self._ids)}"
            peer = draw.choice([e for e in self._peers.all if e.alive and not e.is_frozen])
            answer = peer.post(f"/do?id={request}", b"x" * draw.randrange(100))
            self.answers[request] = answer
            if not peer.was_frozen:
                self.longest_s = max(self.longest_s, answer.took_s)

    def served(self, more: int = 20) -> None:
        """Wait until so many more requests have been carried out."""
        before = self._carried_out()
        poll(lambda: self._carried_out() >= before + more)

    def _carried_out(self) -> int:
        return sum(answer.status == 200 for answer in [*self.answers.values()])


def judge(clients: Clients, peers: Peers) -> Counter[int]:
    """Compare what clients were told with what was executed. Returns how often each status was."""
    executions = peers.executions()
    times = Counter(each.request for each in executions)
    assert not [request for request, count in times.items() if count > 1], "executed twice"
    tokens = [each.token for each in executions]
    assert tokens == sorted(tokens), "executed under an earlier term than one before"
    assert clients.longest_s < LONGEST_S
    for request, answer in clients.answers.items():
        if answer.status == 200:
            assert times[request] == 1, answer
        elif answer.text.startswith("not executed"):
            assert times[request] == 0, answer
        else:
            assert answer.status in (0, 502, 503, 504), answer
            assert answer.status == 0 or "may have been carried out" in answer.text, answer
    return Counter(answer.status for answer in clients.answers.values())


ON_A_QUORUM = pytest.param("asgi on quorum", marks=pytest.mark.chaos)


@pytest.fixture(params=["asgi on sqlite", "wsgi on sqlite", ON_A_QUORUM])
def peers(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Peers]:
    kind, _, engine = request.param.split()
    url = f"sqlite://{tmp_path}/doyen.db"
    if engine == "quorum":
        url = str(request.getfixturevalue("quorum").url)
    with Peers(url, kind, tmp_path) as peers:
        yield peers


def resign(peers: Peers) -> None:
    with doyen.connect_blocking(peers.store) as session:
        session.resign(ELECTION)


def test_a_leader_resigns_is_frozen_and_is_killed_under_load(peers: Peers) -> None:
    with Clients(peers) as clients:
        clients.served()
        resign(peers)
        clients.served()
        former = peers.leader()
        with former.frozen():
            peers.leader(but=former)
            clients.served()
        clients.served()
        peers.leader().kill()
        clients.served()
    statuses = judge(clients, peers)
    assert statuses[200] >= 100
    assert [peer.get("/leader") for peer in peers.all if peer.alive].count(200) == 1


def test_bodies_are_streamed_and_a_frozen_leader_is_not_waited_for(peers: Peers) -> None:
    leader, follower = peers.leader(), peers.follower()

    upload = http.client.HTTPConnection("127.0.0.1", follower.port, timeout=PATIENCE_S)
    for method in ("HEAD", "GET"):
        upload.request(method, "/nowhere")
        response = upload.getresponse()
        assert (response.status, bool(response.read())) == (404, method == "GET")
        for name in ("date", "server", "content-length"):
            assert len(response.headers.get_all(name)) == 1  # type: ignore[arg-type]
    upload.putrequest("POST", "/upload?id=upload")
    upload.putheader("transfer-encoding", "chunked")
    upload.endheaders()
    part = 100_000  # a WSGI server reads so many bytes at a time as the application asks for
    upload.send(b"%x\r\n%b\r\n" % (part, b"x" * part))
    poll(lambda: executed(peers, "upload"))  # the leader has the first part
    upload.send(b"6\r\n world\r\n0\r\n\r\n")
    answered = upload.getresponse().read().decode()
    assert answered == f"{part + 6} from 127.0.0.1:{follower.port}"
    upload.close()

    download = http.client.HTTPConnection("127.0.0.1", follower.port, timeout=PATIENCE_S)
    download.request("GET", "/download")
    response = download.getresponse()
    assert response.read1(5) == b"first"

    answers: list[Answer] = []
    hanging = threading.Thread(target=lambda: answers.append(follower.post("/hang?id=hang")))
    hanging.start()
    poll(lambda: executed(peers, "hang"))
    with leader.frozen():
        hanging.join(ANSWER_S + LATE_S)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        download.close()
        (answer,) = answers
        assert answer.status == 502  # given up because it was replaced, before the time was up
        assert "may have been carried out" in answer.text
        assert follower.post("/do?id=after").status == 200
    assert Counter(each.request for each in peers.executions()) == {
        "upload": 1,
        "hang": 1,
        "after": 1,
    }


def executed(peers: Peers, request: str) -> bool:
    return request in {each.request for each in peers.executions()}


async def test_websockets_are_forwarded_and_end_with_the_leader(tmp_path: Path) -> None:
    with Peers(f"sqlite://{tmp_path}/doyen.db", "asgi", tmp_path) as peers:
        leader, follower = peers.leader(), peers.follower()
        url = follower.socket
        options: Any = {"max_size": None, "subprotocols": ["chat"]}
        async with connect(f"{url}/ws?id=first", **options) as socket:
            assert socket.subprotocol == "chat"
            for message in ("text", b"bytes", "", b"x" * 3_000_000):
                await socket.send(message)
                assert await socket.recv() == message
            await socket.send("bye")
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert (socket.close_code, socket.close_reason) == (4001, "as asked")
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(f"{url}/nowhere")
        assert refused.value.response.status_code == 403
        await ends(follower, "second", leader.frozen)
        leader, follower = peers.leader(), peers.follower()
        await ends(follower, "third", leader.killed)
        async with connect(f"{follower.socket}/ws?id=fourth") as socket:
            await socket.send("up")  # has waited for the next leader
            assert await socket.recv() == "up"
        executions = peers.executions()
        assert [each.request for each in executions] == ["first", "second", "third", "fourth"]
        assert executions[1].token < executions[2].token < executions[3].token


async def ends(
    follower: Peer, request: str, fate: Callable[[], AbstractContextManager[None]]
) -> None:
    """A websocket ends with code 1012 when this happens to the leader."""
    async with connect(f"{follower.socket}/ws?id={request}") as socket:
        await socket.send("up")
        assert await socket.recv() == "up"
        with fate(), pytest.raises(websockets.ConnectionClosed):
            await socket.recv()
        assert socket.close_code == 1012
