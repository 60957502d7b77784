"""Clients of bare cores, their requests, and the state machine that executes them.

A client has one request under way at a time. It sends it to a server, follows a hint to the leader,
and tries the next server if there is no answer, under the same request number for as long as it
takes: the state machine executes a numbered request once. The client keeps what it saw for the
linearizability checker.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from doyen.lab.linearizability import Operation, decode_swap, encode_swap
from doyen.lab.plan import stream
from doyen.quorum.consensus.core import Membership

if TYPE_CHECKING:
    from doyen.lab.world import World

membership_of = msgspec.msgpack.Decoder(Membership).decode
"""Decodes the data of a membership entry."""

SAME_SERVER = 0.6
"""The probability that a client sends a request first to the server that answered it last. That is
how requests reach a leader that has been deposed."""


class RegisterMachine:
    """Registers, and the result of each client's last request."""

    __slots__ = ("_first", "digest", "done", "values")

    def __init__(self, first: dict[tuple[int, int], int] | None = None) -> None:
        self._first = first
        """Where the order of the requests is recorded when they are first executed."""
        self.values: dict[int, int] = {}
        self.done: dict[int, tuple[int, int | None]] = {}
        self.digest = 0

    def apply(self, data: bytes) -> int | None:
        """Swap a register's value. Returns the one before."""
        client, seq, key, value = decode_swap(data)
        last = self.done.get(client)
        if last is not None and last[0] >= seq:
            return last[1]
        result = self.values.get(key)
        self.values[key] = value
        self.done[client] = (seq, result)
        self.digest = hash((self.digest, client, seq, value))
        if self._first is not None:
            self._first[client, seq] = len(self._first)
        return result

    def copy(self) -> RegisterMachine:
        copied = RegisterMachine()
        copied.values = self.values.copy()
        copied.done = self.done.copy()
        copied.digest = self.digest
        return copied


class WorkloadRequest:
    """An operation as it is sent to a server."""

    __slots__ = ("client", "data", "operation")

    def __init__(self, client: Client, operation: Operation) -> None:
        self.client = client
        self.operation = operation
        self.data = b"" if operation.value is None else encode_swap(operation)


class Client:
    """Writes and reads, one request after the other, and repeats each until it is answered."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._queue = world.queue
        self.number = number
        self._rng = stream(world.noise, f"client {number}")
        self._write_share = self._rng.choice([0.1, 0.5, 0.9])
        self._seq = 0
        self._request: WorkloadRequest | None = None
        self._tries = 0
        self._server = ""
        self._last_server: str | None = None
        self.history: list[Operation] = []

    def begin(self, _: object = None) -> None:
        """Send the next request."""
        world = self._world
        self._seq += 1
        key = self._rng.randrange(world.plan.keys)
        writes = self._rng.random() < self._write_share or self._healed()
        value = self._seq * 64 + self.number if writes else None
        operation = Operation(self.number, self._seq, key, value, world.stamp())
        self.history.append(operation)
        self._request = WorkloadRequest(self, operation)
        self._send(self._last_server if self._rng.random() < SAME_SERVER else None)

    def _healed(self) -> bool:
        return self._queue.now > self._world.measurements.healed_at

    def _send(self, leader: str | None) -> None:
        """Send the request to this server, or to a random one."""
        world = self._world
        self._tries += 1
        server = world.servers.get(leader) if leader else None
        if server is None or self._rng.random() < 0.1:
            server = self._rng.choice(list(world.servers.values()))
        assert self._request is not None
        self._server = server.id
        self._queue.push_after(world.network.latency(), server.receive_request, self._request)
        patience_s = world.plan.patience_s
        if self._healed():
            patience_s = min(patience_s, 1.0)
        self._queue.push_after(patience_s, self._timed_out, (self._seq, self._tries))

    def _timed_out(self, sent: tuple[int, int]) -> None:
        if sent == (self._seq, self._tries) and self._request is not None:
            names = list(self._world.servers)
            self._send(names[(names.index(self._server) + 1) % len(names)])

    def refused(self, refusal: tuple[WorkloadRequest, str | None]) -> None:
        """A server refuses the request, and may name the leader."""
        request, leader = refusal
        if request is self._request:
            self._tries += 1
            pause = 0.01 if leader else 0.1 * self._rng.random() + 0.02
            self._queue.push_after(pause, self._retry, (self._seq, self._tries, leader))

    def _retry(self, attempt: tuple[int, int, str | None]) -> None:
        seq, tries, leader = attempt
        if (seq, tries) == (self._seq, self._tries) and self._request is not None:
            self._send(leader)

    def answered(self, answer: tuple[WorkloadRequest, int | None, int, str]) -> None:
        request, result, index, server = answer
        if request is not self._request:
            return
        operation = request.operation
        if operation.ended == inf:
            operation.ended = self._world.stamp()
            operation.result = result
            if operation.value is None:
                operation.position = index
            self._world.answered(operation)
        self._request = None
        self._last_server = server
        pause = self._rng.expovariate(1 / self._world.plan.pause_s)
        if self._healed():
            pause = min(pause, 0.5)
        self._queue.push_after(pause, self.begin, None)
