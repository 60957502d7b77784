"""The port on Consul: keys, sessions and transactions.

Why a leader that keeps its own deadline is safe here:

- Consul's leader counts sessions in memory and ends one no sooner than its ttl after a renewal
  reached it; as built, after twice the ttl. A new leader gives each session that time again.
- A leader that has been deposed and does not know it yet still answers renewals, for as long as its
  own lease on leadership lasts: half a second times `raft_multiplier`, 2.5 s by default and 5 s at
  most. The new leader's count began before such a renewal by no more than that, and lasts twice the
  ttl: so the renewal holds, provided that the ttl is not shorter than that lease. Where
  `session_ttl_min` has been lowered below it, `doyen doctor` says so.
- Lock-delay, Consul's own pause before a key of a lost session can be locked again, is for leaders
  that do not know their deadline. It is set to 0: it would lengthen every failover, and every
  handover by revoking too, and add nothing.

Keys: the prefix, then the port's key. A ticket is called by its rank and something unique; within
the rank its creation index is its place. Segments `.` and `..` are written `%2E` and `%2E%2E`,
since they would be directions in the path of a request; no quoted name can look like that.
"""

from __future__ import annotations

import asyncio
import math
import re
from base64 import b64decode, b64encode
from builtins import list as list_
from collections.abc import Awaitable, Callable, Sequence
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
from doyen.stores.port import Capabilities, Creation, Store, Watch

__all__ = ["ConsulStore"]

TTL_MAX_S = 86_400.0
_TICKET = re.compile(r"(-?\d+)\.[0-9a-f]{32}")
_DOTS = {".": "%2E", "..": "%2E%2E"}
_UNDOTS = {coded: dots for dots, coded in _DOTS.items()}

Operation = dict[str, object]
Asked = list_[tuple[tuple[Operation, Operation], "asyncio.Future[bool]"]]


class ConsulStore(Store):
    """A store on a Consul datacentre."""

    capabilities = Capabilities(
        ttl_default_s=TTL_MIN_S,
        ttl_min_s=TTL_MIN_S,
        ttl_step_s=0.001,
        expiry_factor=2.0,
        notice_s=0.2,
    )

    def __init__(self, agents: Agents, *, prefix: str) -> None:
        self._agents = agents
        self._prefix = prefix
        self._wire = ConsulClient(agents)
        self._renewals = ConsulClient(agents)
        self._watches = ConsulWatches(agents, prefix)
        self._deletions = _Deletions(self._transact)
        self._highest = 0
        """The highest index of an entry that was ever seen."""

    async def open(self, token_floor: int) -> None:
        """See that we may read, and learn how short sessions may be."""
        await self.get("opening")
        ttl_min_s = self._agents.ttl_min_s
        self.capabilities = replace(
            self.capabilities, ttl_min_s=ttl_min_s, ttl_default_s=max(DEFAULT_TTL_S, ttl_min_s)
        )
        if token_floor:
            await self._refuse_below(token_floor)

    async def _refuse_below(self, floor: int) -> None:
        lease = await self.grant(self.capabilities.ttl_min_s)
        try:
            told = await self._wire.ask(
                "GET", f"session/info/{lease.id}", reads=True, consistent=None
            )
            index = max((each["CreateIndex"] for each in told.json), default=0)
        finally:
            await self.revoke(lease)
        if index < floor:
            raise StoreUnusable(
                f"Consul is at index {index}, below token_floor={floor}: it seems to have been"
                " restored or replaced, and would give out tokens a second time"
            )

    async def grant(self, ttl_s: float) -> Lease:
        if ttl_s > TTL_MAX_S:
            raise ConfigError(f"a session of Consul lasts {TTL_MAX_S:g} s at most, not {ttl_s:g} s")
        granted_s = math.ceil(max(ttl_s, self.capabilities.ttl_min_s) * 1000) / 1000
        answer = await self._wire.ask("PUT", "session/create", _session(granted_s))
        return Lease(answer.json["ID"], granted_s)

    async def renew(self, lease: Lease) -> None:
        answer = await self._renewals.ask("PUT", f"session/renew/{lease.id}", accept=(200, 404))
        if answer.status == 404:
            raise LeaseGone("Consul has ended the session")

    async def revoke(self, lease: Lease) -> None:
        try:
            await self._wire.ask("PUT", f"session/destroy/{lease.id}")
        except OutcomeUnknown as error:
            if "Unknown session" not in str(error):  # with ACLs, Consul's word for one that ended
                raise

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        path, before = self._path(key), self._highest
        while True:
            answer = await self._transact(
                {"Verb": "check-not-exists", "Key": path}, _lock(path, value, lease)
            )
            if answer.status == 200:
                return Creation(True, await self._newer(self._written(answer, value), before))
            _refuse_ended(answer)
            standing = await self.get(key)
            if standing is not None:
                return Creation(False, standing)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        answer = await self._transact(
            {
                "Verb": "cas",
                "Key": self._path(key),
                "Value": _text(value),
                "Index": if_version or 0,
                # To write what stands there already is nothing to Consul: no index, no wake-up.
                "Flags": getrandbits(63),
            }
        )
        return self._written(answer, value) if answer.status == 200 else None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        path = self._path(key)
        condition: Operation = {"Verb": "get", "Key": path}
        if if_version is not None:
            condition = {"Verb": "check-index", "Key": path, "Index": if_version}
        return await self._deletions.delete(condition, {"Verb": "delete", "Key": path})

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        path, before = self._path(f"{line}/{rank}.{uuid4().hex}"), self._highest
        answer = await self._transact(_lock(path, value, lease))
        if answer.status == 200:
            return await self._newer(self._written(answer, value), before)
        _refuse_ended(answer)
        raise StoreUnusable(f"Consul refuses a ticket: {answer.text}")

    async def ahead(self, ticket: Entry) -> Entry | None:
        line = [each for each in await self.list(ticket.key.rpartition("/")[0]) if _is_ticket(each)]
        place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
        if place is None:
            raise TicketGone(f"the ticket {ticket.key} is no longer in its line")
        return line[place - 1] if place else None

    async def get(self, key: str) -> Entry | None:
        path = f"kv/{self._path(key)}"
        return next(map(self._entry, await self._read(path)), None)

    async def list(self, prefix: str) -> list_[Entry]:
        path = f"kv/{self._path(prefix)}/"
        entries = map(self._entry, await self._read(path, recurse=None))
        return sorted(entries, key=lambda entry: (-_rank(entry.key), entry.revision))

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._watches.watch(self._path(scope), notify)

    async def diagnose(self) -> Sequence[Finding]:
        states = []
        for link in self._wire.links:
            host = link.agent.host
            try:
                told = await self._agents.inspect(link)
            except StoreError as error:
                states.append(AgentState(agent=host, silent_because=str(error)))
            else:
                states.append(AgentState.of(host, told))
        return findings(states, self.capabilities.ttl_min_s)

    async def close(self) -> None:
        await self._deletions.close()
        await self._watches.close()
        await self._renewals.close()
        await self._wire.close()

    async def _transact(self, *operations: Operation) -> ConsulResponse:
        """All of it, or nothing, which status 409 says."""
        body = [{"KV": each} for each in operations]
        return await self._wire.ask("PUT", "txn", body, accept=(200, 409))

    async def _read(self, path: str, **options: Any) -> list_[dict[str, Any]]:
        """A consistent read of entries."""
        answer = await self._wire.ask(
            "GET", path, accept=(200, 404), reads=True, consistent=None, **options
        )
        return answer.entries

    def _path(self, key: str) -> str:
        segments = (_DOTS.get(segment, segment) for segment in key.split("/"))
        return f"{self._prefix}/{'/'.join(segments)}"

    def _written(self, answer: ConsulResponse, value: bytes) -> Entry:
        """The entry that a transaction wrote; Consul does not repeat its value."""
        return self._entry({**answer.json["Results"][-1]["KV"], "Value": _text(value)})

    async def _newer(self, created: Entry, before: int) -> Entry:
        """An entry that was just created, whose index may be a token: refuse one of the past."""
        if created.revision > before:
            return created
        await self.delete(created.key, if_version=created.version)
        raise StoreUnusable(
            f"Consul is at index {created.revision} and was at {before} before: it was restored or"
            " replaced, and its tokens would be lower than those already given out. Restore a"
            f" snapshot whose index is higher, then connect again, with token_floor={before}"
        )

    def _entry(self, raw: dict[str, Any]) -> Entry:
        self._watches.show(raw["Key"], raw["ModifyIndex"])
        self._highest = max(self._highest, raw["ModifyIndex"])
        segments = raw["Key"].removeprefix(f"{self._prefix}/").split("/")
        return Entry(
            key="/".join(_UNDOTS.get(segment, segment) for segment in segments),
            value=b64decode(raw["Value"] or ""),
            revision=raw["CreateIndex"],
            version=raw["ModifyIndex"],
            lease=raw.get("Session"),
        )


class _Deletions:
    """Deletions asked for in one turn of the loop go as one transaction: who resigns deletes a
    record and a ticket, and Consul's writes are slow. If one of them is refused, so is the whole,
    and each is tried by itself. A transaction that all its callers have given up is cancelled."""

    MOST = 32  # a transaction has 64 operations at most

    def __init__(self, transact: Callable[..., Awaitable[ConsulResponse]]) -> None:
        self._transact = transact
        self._asked: Asked = []
        self._tasks: dict[asyncio.Task[None], Asked] = {}

    async def delete(self, condition: Operation, deletion: Operation) -> bool:
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._send)
        self._asked.append(((condition, deletion), done))
        try:
            return await done
        except asyncio.CancelledError:
            _retrieve(done)
            for task, asked in self._tasks.items():
                if all(each.done() for _, each in asked):
                    task.cancel()
            raise

    def _send(self) -> None:
        asked, self._asked = [each for each in self._asked if not each[1].done()], []
        for at in range(0, len(asked), self.MOST):
            together = asked[at : at + self.MOST]
            task = asyncio.get_running_loop().create_task(self._carry_out(together))
            self._tasks[task] = together
            task.add_done_callback(self._tasks.pop)

    async def _carry_out(self, asked: Asked) -> None:
        try:
            answer = await self._transact(*(each for pair, _ in asked for each in pair))
            if answer.status != 200 and len(asked) > 1:
                await asyncio.gather(*(self._carry_out([each]) for each in asked))
                return
        except asyncio.CancelledError:
            _resolve(asked, OutcomeUnknown("the store was closed during a deletion"))
            raise
        except Exception as error:  # noqa: BLE001 - it is the callers' to handle
            _resolve(asked, error)
        else:
            _resolve(asked, answer.status == 200)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _resolve(asked: Asked, result: bool | Exception) -> None:
    for _, done in asked:
        if not done.done():
            if isinstance(result, Exception):
                done.set_exception(result)
            else:
                done.set_result(result)


def _retrieve(done: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting an exception whose only reader was cancelled."""
    if done.done() and not done.cancelled():
        done.exception()


def _session(ttl_s: float) -> dict[str, object]:
    return {
        "Name": "doyen",
        "TTL": f"{round(ttl_s * 1000)}ms",
        "Behavior": "delete",
        "LockDelay": "0s",
        # Left out, each of these would mean the health of the agent's node. `Checks` is what the
        # other two were before Consul 1.7.
        "NodeChecks": [],
        "ServiceChecks": [],
        "Checks": [],
    }


def _lock(path: str, value: bytes, lease: Lease) -> Operation:
    return {"Verb": "lock", "Key": path, "Value": _text(value), "Session": lease.id}


def _refuse_ended(answer: ConsulResponse) -> None:
    if any("invalid session" in error["What"] for error in answer.json["Errors"]):
        raise LeaseGone("Consul has ended the session")


def _is_ticket(entry: Entry) -> bool:
    """Whether an entry in a line is a ticket, and not something that others have put there."""
    return entry.lease is not None and _TICKET.fullmatch(entry.key.rpartition("/")[2]) is not None


def _rank(key: str) -> int:
    ticket = _TICKET.fullmatch(key.rpartition("/")[2])
    return int(ticket[1]) if ticket else 0


def _text(value: bytes) -> str:
    return b64encode(value).decode()
