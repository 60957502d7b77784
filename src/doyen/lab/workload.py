"""Clients, what they ask for, and the machine that carries it out.

A client has one request under way at a time. It asks a server, follows its word to whoever leads,
tries the next when none answers, under the same number for as long as it takes: the machine carries
a numbered request out once. What it saw is kept for the checker of linearizability.

Imports msgspec, the words of consensus and the plan.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from doyen.lab.linearizability import Operation
from doyen.lab.plan import stream
from doyen.quorum.consensus.core import Membership

if TYPE_CHECKING:
    from doyen.lab.world import World

__all__ = ["Client", "RegisterMachine", "WorkloadRequest", "membership_of"]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(tuple[int, int, int, int]).decode
_decode_membership = msgspec.msgpack.Decoder(Membership).decode

LOYALTY = 0.6
"""How often a client begins with whoever answered it last: that is how one meets a leader that is
none any more."""


def membership_of(data: bytes) -> Membership:
    """What an entry of that kind holds."""
    return _decode_membership(data)


class RegisterMachine:
    """Registers, and what each client's last request gave."""

    __slots__ = ("_first", "digest", "done", "values")

    def __init__(self, first: dict[tuple[int, int], int] | None = None) -> None:
        self._first = first
        """Told of every request when it is first carried out, with its number among those."""
        self.values: dict[int, int] = {}
        self.done: dict[int, tuple[int, int | None]] = {}
        self.digest = 0

    def apply(self, data: bytes) -> int | None:
        """Swap: gives the value that stood there."""
        client, seq, key, value = _decode(data)
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
        twin = RegisterMachine()
        twin.values = self.values.copy()
        twin.done = self.done.copy()
        twin.digest = self.digest
        return twin


class WorkloadRequest:
    """One sending of an operation."""

    __slots__ = ("client", "data", "operation")

    def __init__(self, client: Client, operation: Operation) -> None:
        self.client = client
        self.operation = operation
        value = operation.value
        self.data = (
            b""
            if value is None
            else _encode((operation.client, operation.seq, operation.key, value))
        )


class Client:
    """Somebody who writes and reads, and never gives up."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self.number = number
        self._rng = stream(world.noise, f"client {number}")
        self._write_share = self._rng.choice([0.1, 0.5, 0.9])
        self._seq = 0
        self._request: WorkloadRequest | None = None
        self._tries = 0
        self._whom = ""
        self._last: str | None = None
        self.history: list[Operation] = []

    def begin(self, _: object = None) -> None:
        """Ask for the next thing."""
        world = self._world
        self._seq += 1
        key = self._rng.randrange(world.plan.keys)
        writes = self._rng.random() < self._write_share or world.now > world.healed_at
        value = self._seq * 64 + self.number if writes else None
        operation = Operation(self.number, self._seq, key, value, world.stamp())
        self.history.append(operation)
        self._request = WorkloadRequest(self, operation)
        self._ask(self._last if self._rng.random() < LOYALTY else None)

    def _ask(self, leader: str | None) -> None:
        """Send it to whoever is said to lead, or to anybody."""
        world = self._world
        self._tries += 1
        host = world.hosts.get(leader) if leader else None
        if host is None or self._rng.random() < 0.1:
            host = self._rng.choice(list(world.hosts.values()))
        assert self._request is not None
        self._whom = host.id
        world.push(world.now + world.network.latency(), host.asked, self._request)
        patience_s = world.plan.patience_s
        if world.now > world.healed_at:
            patience_s = min(patience_s, 1.0)
        world.push(world.now + patience_s, self._impatient, (self._seq, self._tries))

    def _impatient(self, sent: tuple[int, int]) -> None:
        if sent == (self._seq, self._tries) and self._request is not None:
            names = list(self._world.hosts)
            self._ask(names[(names.index(self._whom) + 1) % len(names)])

    def refused(self, what: tuple[WorkloadRequest, str | None]) -> None:
        """The server asked cannot do it, and perhaps says who can."""
        request, leader = what
        if request is self._request:
            self._tries += 1
            pause = 0.01 if leader else 0.1 * self._rng.random() + 0.02
            self._world.push(self._world.now + pause, self._again, (self._seq, self._tries, leader))

    def _again(self, what: tuple[int, int, str | None]) -> None:
        seq, tries, leader = what
        if (seq, tries) == (self._seq, self._tries) and self._request is not None:
            self._ask(leader)

    def answered(self, what: tuple[WorkloadRequest, int | None, int, str]) -> None:
        request, result, index, server = what
        if request is not self._request:
            return
        operation = request.operation
        if operation.ended == inf:
            operation.ended = self._world.stamp()
            operation.result = result
            if operation.value is None:
                operation.position = index
            self._world.served(operation)
        self._request = None
        self._last = server
        pause = self._rng.expovariate(1 / self._world.plan.pause_s)
        if self._world.now > self._world.healed_at:
            pause = min(pause, 0.5)
        self._world.push(self._world.now + pause, self.begin, None)
