"""Clients' writes and renewals of leases.

Writes are proposed under the client's own request id, so a client that repeats one, at this node
or at another, gets the same result. Renewals go to the node that leads, those of one turn of the
event loop in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import MsgspecError

from doyen.errors import ConfigError, DoyenError
from doyen.quorum.keyspace.commands import encode
from doyen.quorum.node.clients import ClientLimits, ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.lease_keeper import (
    CONFIRMED,
    GONE,
    NOT_NOW,
    RETRY_S,
    decode_leases,
)
from doyen.quorum.node.replicated import KEYSPACE
from doyen.quorum.node.validation import flaw
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.requests import (
    ErrorCode,
    IdentifyClient,
    LeaseRenewed,
    RenewLease,
    Write,
)

__all__ = ["Renewals", "Writes"]

Waiting = dict[int, list[tuple[ServedClient, int]]]
"""Client and request id of each renewal, by lease."""


class Writes:
    """The writes of all clients of a node."""

    def __init__(self, driver: Driver, limits: ClientLimits) -> None:
        self._driver = driver
        self._limits = limits

    def hello(self, client: ServedClient, request: IdentifyClient) -> None:
        """Set the name under which a client numbers its writes."""
        if not 8 <= len(request.client) <= self._limits.name:
            text = f"a client's name has 8 to {self._limits.name} characters"
            client.connection.fail(CloseReason.MALFORMED, text)
            return
        client.name = request.client

    def write(self, client: ServedClient, request: Write) -> None:
        name, floor, ids, bodies = client.name, request.floor, request.ids, request.bodies
        if not name or len(ids) != len(bodies) or min(ids) < floor:
            client.connection.fail(CloseReason.OUT_OF_TURN, _malformed(client, request))
            return
        submit, settle, role = self._driver.submit, client.settle, client.role
        for number, body in zip(ids, bodies, strict=True):
            reason = flaw(body, role)
            if reason is not None:
                client.fail(number, ErrorCode.UNUSABLE, reason)
                continue
            try:
                submit(KEYSPACE, body, settle, (name, number, floor))
            except DoyenError as error:
                unusable = isinstance(error, ConfigError)
                code = ErrorCode.UNUSABLE if unusable else ErrorCode.UNAVAILABLE
                client.fail(number, code, str(error))


def _malformed(client: ServedClient, request: Write) -> str:
    ids, bodies = request.ids, request.bodies
    if not client.name:
        return "malformed write: the client has sent no name before it"
    if len(ids) != len(bodies):
        return f"malformed write: {len(ids)} request ids, {len(bodies)} bodies"
    return f"malformed write: request id {min(ids)} is below the floor {request.floor}"


class Renewals:
    """The renewals that this node's clients ask for."""

    def __init__(
        self,
        driver: Driver,
        election_s: float,
        start: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        """`start` runs a task."""
        self._driver = driver
        self._election_s = election_s
        self._start = start
        self._loop = asyncio.get_running_loop()
        self._waiting: Waiting = {}

    def renew(self, client: ServedClient, request: RenewLease) -> None:
        if not self._waiting:
            self._loop.call_soon(self._send)
        self._waiting.setdefault(request.lease, []).append((client, request.id))

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._start(self._renew(waiting))

    async def _renew(self, waiting: Waiting) -> None:
        """Call the leader. While the leader changes, retry for two election timeouts."""
        give_up_at = self._loop.time() + 2 * self._election_s
        while waiting:
            verdicts, why = await self._call_leader([*waiting])
            retried: Waiting = {}
            late = self._loop.time() > give_up_at
            for (lease, askers), verdict in zip(waiting.items(), verdicts, strict=True):
                if verdict == NOT_NOW and not late:
                    if askers := [each for each in askers if not each[0].connection.closed]:
                        retried[lease] = askers
                    continue
                for client, request in askers:
                    if verdict == CONFIRMED:
                        client.send(LeaseRenewed(request))
                    elif verdict == GONE:
                        client.fail(request, ErrorCode.LEASE_GONE, f"the lease {lease} has ended")
                    else:
                        client.fail(request, ErrorCode.UNAVAILABLE, why)
            waiting = retried
            if waiting:
                await asyncio.sleep(RETRY_S)

    async def _call_leader(self, leases: list[int]) -> tuple[list[int], str]:
        """The verdict on each lease, and why if it is `NOT_NOW`."""
        try:
            verdicts = decode_leases(await self._driver.ask_leader(encode(leases)))
        except (DoyenError, MsgspecError) as error:
            return [NOT_NOW] * len(leases), str(error)
        if len(verdicts) != len(leases):
            verdicts = [NOT_NOW] * len(leases)
        return verdicts, "the leader has changed, or is about to end this lease"
