"""The port on Consul: keys, sessions and transactions.

Why a leader that observes its own deadline is safe:

- Consul's leader keeps the time of sessions in memory and ends one no sooner than its ttl after a
  renewal reached it; as implemented, after twice the ttl. A new leader gives each session that time
  again.
- A deposed leader still answers renewals until its own lease on leadership ends: half a second
  times `raft_multiplier`, 2.5 s by default and 5 s at most. The new leader began to count at most
  that long before such a renewal, and counts twice the ttl. So the renewal holds if the ttl is not
  shorter than that lease. `doyen doctor` warns if `session_ttl_min` has been lowered below it.
- Lock-delay, Consul's own pause before a key of a lost session can be locked again, is for leaders
  that do not know their deadline. It is set to 0: it would lengthen every failover, and every
  handover that revokes a lease, and add no safety.

Keys: the prefix, then the port's key. A ticket's name is its rank and a unique id; within the rank,
its creation index is its place. Segments `.` and `..` are written `%2E` and `%2E%2E`, because they
have a meaning in the path of a request. No quoted name can have that form.
"""

from __future__ import annotations

import asyncio
import math
import re
from base64 import b64decode, b64encode
from builtins import list as list_
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import getrandbits
from typing import Any
from uuid import uuid4

from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnusable,
    TicketGone,
)
from doyen.lease.timing import DEFAULT_TTL_S
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.consul.client import TTL_MIN_S, Agents, ConsulClient, ConsulResponse
from doyen.stores.consul.diagnosis import AgentState, findings
from doyen.stores.consul.watches import ConsulWatches
from doyen.stores.kit.batches import Batches
from doyen.stores.kit.lifecycle import GuardedStore
from doyen.stores.port import Capabilities, Creation, Looked, Watch

TTL_MAX_S = 86_400.0
_TICKET = re.compile(r"(-?\d+)\.[0-9a-f]{32}")
_DOTS = {".": "%2E", "..": "%2E%2E"}
_UNDOTS = {coded: dots for dots, coded in _DOTS.items()}

Operation = dict[str, object]


class ConsulStore(GuardedStore):
    """A store on a Consul datacentre."""

    capabilities = Capabilities(
        ttl_default_s=TTL_MIN_S,
        ttl_min_s=TTL_MIN_S,
        ttl_step_s=0.001,
        expiry_factor=2.0,
        notice_s=0.2,
        # Values are sent in base64, and the limit of 512 KiB is for the whole transaction.
        value_bytes=380_000,
        value_limit="Consul's limits.txn_max_req_len",
    )

    def __init__(self, agents: Agents, *, prefix: str) -> None:
        self._agents = agents
        self._prefix = prefix
        self._client = ConsulClient(agents)
        self._renewals = ConsulClient(agents)
        self._watches = ConsulWatches(agents, prefix)
        self._deletions = Batches(self._delete, most=32, in_flight=8)
        self._highest = 0
        """The highest index of an entry that was ever seen."""

    async def open(self, token_floor: int) -> None:
        """Check that reading is permitted and that the index is not below `token_floor`, and find
        out how short sessions may be."""
        await self._read("kv/" + f"{self._prefix}/opening".strip("/"))
        ttl_min_s = self._agents.ttl_min_s
        self.capabilities = replace(
            self.capabilities, ttl_min_s=ttl_min_s, ttl_default_s=max(DEFAULT_TTL_S, ttl_min_s)
        )
        if token_floor:
            await self._refuse_below(token_floor)

    async def _refuse_below(self, floor: int) -> None:
        lease = await self.grant(self.capabilities.ttl_min_s)
        try:
            answer = await self._client.ask(
                "GET", f"session/info/{lease.id}", reads=True, consistent=None
            )
            index = max((each["CreateIndex"] for each in answer.json), default=0)
        finally:
            await self.revoke(lease)
        if index < floor:
            raise StoreUnusable(
                f"Consul is at index {index}, below token_floor={floor}: it was restored or"
                " replaced, and its tokens would be lower than those already given out. Restore a"
                " snapshot whose index is higher"
            )

    async def grant(self, ttl_s: float) -> Lease:
        if ttl_s > TTL_MAX_S:
            raise ConfigError(f"a session of Consul lasts {TTL_MAX_S:g} s at most, not {ttl_s:g} s")
        granted_s = math.ceil(max(ttl_s, self.capabilities.ttl_min_s) * 1000) / 1000
        answer = await self._client.ask("PUT", "session/create", _session(granted_s))
        return Lease(answer.json["ID"], granted_s)

    async def renew(self, lease: Lease) -> None:
        answer = await self._renewals.ask("PUT", f"session/renew/{lease.id}", accept=(200, 404))
        if answer.status == 404:
            raise LeaseGone("Consul has ended the session")

    async def revoke(self, lease: Lease) -> None:
        try:
            await self._client.ask("PUT", f"session/destroy/{lease.id}")
        except OutcomeUnknown as error:
            if "Unknown session" not in str(error):  # with ACLs, the answer for an ended session
                raise

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        path, before = self._path(key), self._highest
        while True:
            answer = await self._transact(
                {"Verb": "check-not-exists", "Key": path}, lock_operation(path, value, lease)
            )
            if answer.status == 200:
                return Creation(True, await self._newer(self._written(answer, value), before))
            refuse_ended(answer)
            existing = await self.get(key)
            if existing is not None:
                return Creation(False, existing)

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """One transaction. If it is refused, each of the three is requested by itself."""
        if ticket is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        path, before = self._path(key), self._highest
        line, place = self._path(ticket.key.rpartition("/")[0]) + "/", self._path(other)
        answer = await self._transact(
            {"Verb": "check-not-exists", "Key": path},
            lock_operation(path, value, lease),
            {"Verb": "get-tree", "Key": line},
            {"Verb": "get-tree", "Key": place},
        )
        if answer.status != 200:
            refuse_ended(answer)
            return await super().create_and_look(key, value, lease, ticket, other)
        found = {each["KV"]["Key"]: each["KV"] for each in answer.json["Results"]}
        written = self._entry({**found[path], "Value": _text(value)})
        creation = Creation(True, await self._newer(written, before))
        try:
            below = [self._entry(raw) for at, raw in found.items() if at.startswith(line)]
            ahead = _ahead_of(ticket, below)
        except TicketGone as error:
            return Looked(creation, failure=error)
        return Looked(creation, ahead, self._entry(found[place]) if place in found else None)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        if if_version is None:
            return await self._replace(key, value, 0)
        path = self._path(key)
        free: Operation = {"Verb": "check-session", "Key": path, "Session": ""}
        written = await self._replace(key, value, if_version, free)
        while written is None:
            # It has another version, or it is bound to a session, which a write would keep.
            found = await self.get(key)
            if found is None or found.version != if_version or found.lease is None:
                return None
            answer = await self._transact(
                {"Verb": "check-index", "Key": path, "Index": if_version},
                {"Verb": "unlock", **_content(path, value), "Session": found.lease},
            )
            if answer.status == 200:
                written = self._written(answer, value)
        return written

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        if entry.lease is None:
            return None
        # A write keeps the session of the entry, which is deleted when the session ends.
        return await self._replace(entry.key, value, entry.version)

    async def _replace(
        self, key: str, value: bytes, version: Version, *conditions: Operation
    ) -> Entry | None:
        """Write an entry, if the index of its last write is `version`; 0 if it must not exist."""
        write = {"Verb": "cas", **_content(self._path(key), value), "Index": version}
        answer = await self._transact(*conditions, write)
        return self._written(answer, value) if answer.status == 200 else None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        path = self._path(key)
        condition: Operation = {"Verb": "get", "Key": path}
        if if_version is not None:
            condition = {"Verb": "check-index", "Key": path, "Index": if_version}
        self._require_usable()
        return await self._deletions.ask((condition, {"Verb": "delete", "Key": path}))

    async def _delete(
        self, deletions: Sequence[tuple[Operation, Operation]]
    ) -> list_[bool | BaseException]:
        """Deletions as one transaction, of 64 operations at most: a candidate that resigns deletes
        a record and a ticket, and Consul's writes are slow. If one of the deletions is refused, so
        is the transaction, and each is then tried by itself."""
        answer = await self._transact(*(each for pair in deletions for each in pair))
        if answer.status == 200 or len(deletions) == 1:
            return [answer.status == 200] * len(deletions)
        alone = await asyncio.gather(
            *(self._delete([each]) for each in deletions), return_exceptions=True
        )
        return [each if isinstance(each, BaseException) else each[0] for each in alone]

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        path, before = self._path(f"{line}/{rank}.{uuid4().hex}"), self._highest
        answer = await self._transact(lock_operation(path, value, lease))
        if answer.status == 200:
            return await self._newer(self._written(answer, value), before)
        refuse_ended(answer)
        raise StoreUnusable(f"Consul refuses a ticket: {answer.text}")

    async def ahead(self, ticket: Entry) -> Entry | None:
        return _ahead_of(ticket, await self.list(ticket.key.rpartition("/")[0]))

    async def get(self, key: str) -> Entry | None:
        path = f"kv/{self._path(key)}"
        return next(map(self._entry, await self._read(path)), None)

    async def list(self, prefix: str) -> list_[Entry]:
        path = f"kv/{self._path(prefix)}/"
        return sorted(map(self._entry, await self._read(path, recurse=None)), key=_place)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._watches.watch(self._path(scope), notify)

    async def diagnose(self) -> Sequence[Finding]:
        states = []
        for pool in self._client.pools:
            host = pool.agent.host
            try:
                found = await self._agents.inspect(pool)
            except StoreError as error:
                states.append(AgentState(agent=host, error=str(error)))
            else:
                states.append(AgentState.of(host, found))
        return findings(states, self.capabilities.ttl_min_s)

    async def _release(self) -> None:
        await self._deletions.close()
        await self._watches.close()
        await self._renewals.close()
        await self._client.close()

    async def _transact(self, *operations: Operation) -> ConsulResponse:
        """Carry out all operations, or none, in which case the status is 409."""
        self._require_usable()
        body = [{"KV": each} for each in operations]
        return await self._client.ask("PUT", "txn", body, accept=(200, 409))

    async def _read(self, path: str, **options: Any) -> list_[dict[str, Any]]:
        """A consistent read of entries."""
        self._require_usable()
        answer = await self._client.ask(
            "GET", path, accept=(200, 404), reads=True, consistent=None, **options
        )
        return answer.entries

    def _path(self, key: str) -> str:
        segments = (_DOTS.get(segment, segment) for segment in key.split("/"))
        return f"{self._prefix}/{'/'.join(segments)}"

    def _written(self, answer: ConsulResponse, value: bytes) -> Entry:
        """The entry that a transaction wrote. Consul's answer does not have its value."""
        return self._entry({**answer.json["Results"][-1]["KV"], "Value": _text(value)})

    async def _newer(self, created: Entry, before: int) -> Entry:
        """Check the index of a new entry, which may be a token: it must exceed all earlier ones."""
        if created.revision > before:
            return created
        await self.delete(created.key, if_version=created.version)
        raise StoreUnusable(
            f"Consul is at index {created.revision} and was at {before} before: it was restored or"
            " replaced, and its tokens would be lower than those already given out. Restore a"
            f" snapshot whose index is higher, then connect again, with token_floor={before}"
        )

    def _entry(self, raw: dict[str, Any]) -> Entry:
        self._watches.returned(raw["Key"], raw["ModifyIndex"])
        self._highest = max(self._highest, raw["ModifyIndex"])
        segments = raw["Key"].removeprefix(f"{self._prefix}/").split("/")
        return Entry(
            key="/".join(_UNDOTS.get(segment, segment) for segment in segments),
            value=b64decode(raw["Value"] or ""),
            revision=raw["CreateIndex"],
            version=raw["ModifyIndex"],
            lease=raw.get("Session"),
        )


def _session(ttl_s: float) -> dict[str, object]:
    return {
        "Name": "doyen",
        "TTL": f"{round(ttl_s * 1000)}ms",
        "Behavior": "delete",
        "LockDelay": "0s",
        # The default of each is the health check of the agent's node. `Checks` is the name of the
        # other two before Consul 1.7.
        "NodeChecks": [],
        "ServiceChecks": [],
        "Checks": [],
    }


def _content(path: str, value: bytes) -> Operation:
    # Consul ignores a write that changes nothing: no new index, no notification.
    return {"Key": path, "Value": _text(value), "Flags": getrandbits(63)}


def lock_operation(path: str, value: bytes, lease: Lease) -> Operation:
    return {"Verb": "lock", "Key": path, "Value": _text(value), "Session": lease.id}


def refuse_ended(answer: ConsulResponse) -> None:
    if any("invalid session" in error["What"] for error in answer.json["Errors"]):
        raise LeaseGone("Consul has ended the session")


def _is_ticket(entry: Entry) -> bool:
    """Whether an entry in a line is a ticket, and not a key of another program."""
    return entry.lease is not None and _TICKET.fullmatch(entry.key.rpartition("/")[2]) is not None


def _ahead_of(ticket: Entry, below: Iterable[Entry]) -> Entry | None:
    """The ticket directly before this one, given all that is below the key of its line."""
    line = sorted(filter(_is_ticket, below), key=_place)
    place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
    if place is None:
        raise TicketGone(f"the ticket {ticket.key} is no longer in its line")
    return line[place - 1] if place else None


def _place(entry: Entry) -> tuple[int, int]:
    """Sort key of an entry in a list: tickets by their rank, and within a rank by arrival."""
    return -_rank(entry.key), entry.revision


def _rank(key: str) -> int:
    ticket = _TICKET.fullmatch(key.rpartition("/")[2])
    return int(ticket[1]) if ticket else 0


def _text(value: bytes) -> str:
    return b64encode(value).decode()
