"""A simulated Consul datacentre: the part of the HTTP API that doyen uses, and faults.

All agents share one state. Sessions expire between one and two ttls after the last renewal, as
Consul documents; keys bound to them are deleted, and the lock-delay is applied. Blocking queries
follow Consul's rules: the index of a prefix is that of its newest entry or deletion, or of the
whole table if there is neither.

In addition to the faults of connections (see `adversary`), agents have faults that are drawn for
each request while the world is rough:

- status 500 for a request that was not carried out, because there is no leader
- status 500 for a request that was carried out
- tombstones are removed, so that the index of a prefix goes backwards
- a change of the servers' leader: every session's time begins anew
- a silent agent: it accepts requests and neither carries them out nor answers
- an agent that answers everything but blocking queries, which wait at a frozen server
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit
from uuid import UUID

from adversary import Connection
from doyen.stores.consul.diagnosis import seconds

__all__ = ["ConsulModel"]

Raw = dict[str, Any]

SELF = {
    "Config": {"Datacenter": "dc1", "Version": "1.20.1", "Server": True},
    "DebugConfig": {"SessionTTLMin": "1s"},
}


class Refusal(Exception):
    """One operation of a transaction is refused, and with it the transaction."""


class Session:
    """A session, and the timer that ends it."""

    def __init__(self, ttl_s: float, lock_delay_s: float, created: int) -> None:
        self.ttl_s = ttl_s
        self.lock_delay_s = lock_delay_s
        self.created = created
        self.timer: asyncio.TimerHandle | None = None


class ConsulModel:
    """The datacentre and its agents."""

    def __init__(self, seed: int = 0, rough: Callable[[], bool] = lambda: False) -> None:
        self.rng = random.Random(seed)
        self.rough = rough
        self.index = 10
        self.kv: dict[str, Raw] = {}
        self.sessions: dict[str, Session] = {}
        self.silent: dict[str, float] = {}
        """Until when agents are silent, by their address."""
        self.stuck: dict[str, float] = {}
        """Until when blocking queries at an agent stay unanswered, although it answers everything
        else: it has passed them on to a server that is frozen."""
        self.seen: list[tuple[str, str]] = []
        """All requests: the agent's address, then the method and the path."""
        self._tombstones: dict[str, int] = {}
        self._delayed: dict[str, float] = {}
        self._changed = asyncio.Event()

    # The HTTP server.

    async def serve(self, connection: Connection) -> None:
        while True:
            head = (await connection.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in head[1:])
            }
            body = await connection.reader.readexactly(int(headers.get("content-length", 0)))
            method, target, _ = head[0].split()
            url = urlsplit(target)
            path = unquote(url.path.removeprefix("/v1/"))
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            agent = headers["host"]
            self.seen.append((agent, f"{method} {path}"))
            if self._draw_faults(agent):
                while await connection.reader.read(65536):
                    pass
                return
            if "index" in query:
                await self._block(
                    connection.reader, path, int(query["index"]), seconds(query["wait"])
                )
                if asyncio.get_running_loop().time() < self.stuck.get(agent, 0.0):
                    while await connection.reader.read(65536):
                        pass
                    return

            def answer(
                method: str = method,
                path: str = path,
                query: dict[str, str] = query,
                body: bytes = body,
            ) -> bytes:
                return self._answer(method, path, query, json.loads(body or b"null"))

            await connection.answer(path.partition("/")[0], answer, path)

    def _draw_faults(self, agent: str) -> bool:
        """Draw the faults that a request meets on arrival; whether its agent is silent."""
        now = asyncio.get_running_loop().time()
        if self.rough():
            draw = self.rng.random()
            if draw < 0.004:
                self.silent[agent] = now + self.rng.expovariate(1 / 10)
            elif draw < 0.008:
                self._tombstones.clear()
            elif draw < 0.012:
                for name in self.sessions:
                    self._arm(name)
            elif draw < 0.016:
                self.stuck[agent] = now + self.rng.expovariate(1 / 20)
        return now < self.silent.get(agent, 0.0)

    def _answer(self, method: str, path: str, query: dict[str, str], body: Any) -> bytes:
        draw = self.rng.random() if self.rough() else 1.0
        if draw < 0.02:
            return _response(500, "No cluster leader")
        status, answer, index = self._do(method, path, query, body)
        if draw < 0.03:
            return _response(500, "rpc error making call: EOF")
        return _response(status, answer, index)

    def _do(
        self, method: str, path: str, query: dict[str, str], body: Any
    ) -> tuple[int, object, int]:
        kind, _, name = path.partition("/")
        if method == "GET" and path == "agent/self":
            return 200, SELF, 0
        if method == "GET" and kind == "kv":
            found = self._under(name) if "recurse" in query else self._at(name)
            return (200, found, self._index_of(name)) if found else (404, "", self._index_of(name))
        if method == "PUT" and path == "session/create":
            return 200, {"ID": self._create(body)}, 0
        if method == "PUT" and path.startswith("session/renew/"):
            session = path.rpartition("/")[2]
            if session not in self.sessions:
                return 404, "", 0
            self._arm(session)
            return 200, [{"ID": session}], 0
        if method == "PUT" and path.startswith("session/destroy/"):
            self.end(path.rpartition("/")[2])
            return 200, True, 0
        if method == "PUT" and path == "txn":
            return self._transact([each["KV"] for each in body])
        raise NotImplementedError(method, path)

    # Blocking queries.

    async def _block(
        self, reader: asyncio.StreamReader, path: str, index: int, wait_s: float
    ) -> None:
        """Wait until the index of a prefix has passed the given one, the time is over, or the
        client has closed the connection."""
        prefix = path.partition("/")[2]
        disconnected = asyncio.ensure_future(reader.read(1))
        until = asyncio.get_running_loop().time() + wait_s * self.rng.uniform(1, 17 / 16)
        try:
            while self._index_of(prefix) <= index and not disconnected.done():
                changed = asyncio.ensure_future(self._changed.wait())
                left_s = until - asyncio.get_running_loop().time()
                await asyncio.wait(
                    {changed, disconnected}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                if asyncio.get_running_loop().time() >= until:
                    break
        finally:
            disconnected.cancel()
            await asyncio.wait({disconnected})  # two coroutines cannot read one stream

    def _index_of(self, prefix: str) -> int:
        indexes = [each["ModifyIndex"] for each in self._under(prefix)]
        indexes += (at for key, at in self._tombstones.items() if key.startswith(prefix))
        return max(indexes, default=self.index)

    def _next(self) -> int:
        self.index += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return self.index

    # Sessions.

    def _create(self, body: Raw) -> str:
        assert body["Behavior"] == "delete"
        assert body["NodeChecks"] == body["ServiceChecks"] == []
        name = str(UUID(int=self.rng.getrandbits(128)))
        delay_s = seconds(body["LockDelay"])
        self.sessions[name] = Session(seconds(body["TTL"]), delay_s, self._next())
        self._arm(name)
        return name

    def _arm(self, name: str) -> None:
        session = self.sessions[name]
        if session.timer is not None:
            session.timer.cancel()
        delay_s = session.ttl_s * self.rng.uniform(1, 2)
        session.timer = asyncio.get_running_loop().call_later(delay_s, self.end, name)

    def end(self, name: str) -> None:
        """End a session and delete the keys bound to it."""
        session = self.sessions.pop(name, None)
        if session is None:
            return
        if session.timer is not None:
            session.timer.cancel()
        index = self._next()
        until = asyncio.get_running_loop().time() + session.lock_delay_s
        for key in [key for key, raw in self.kv.items() if raw.get("Session") == name]:
            self._delayed[key] = until
            self._remove(self.kv, key, index)

    # Keys.

    def _at(self, key: str) -> list[Raw]:
        return [self.kv[key]] if key in self.kv else []

    def _under(self, prefix: str) -> list[Raw]:
        return [self.kv[key] for key in sorted(self.kv) if key.startswith(prefix)]

    def _remove(self, kv: dict[str, Raw], key: str, index: int) -> None:
        if kv.pop(key, None) is not None:
            self._tombstones[key] = index

    def _transact(self, operations: list[Raw]) -> tuple[int, object, int]:
        kv, errors = dict(self.kv), []
        results: list[Raw] = []
        for number, operation in enumerate(operations):
            if operation["Verb"] == "get-tree":
                below = (kv[key] for key in sorted(kv) if key.startswith(operation["Key"]))
                results += ({"KV": raw} for raw in below)
                continue
            try:
                raw = self._operate(kv, operation, self.index + 1)
            except Refusal as refusal:
                errors.append({"OpIndex": number, "What": str(refusal)})
            else:
                if raw is not None:
                    results.append({"KV": {**raw, "Value": None}})
        if errors:
            return 409, {"Results": None, "Errors": errors}, 0
        if kv != self.kv:
            for key in self.kv.keys() - kv.keys():
                self._tombstones[key] = self.index + 1
            self.kv = kv
            self._next()
        return 200, {"Results": results, "Errors": None}, 0

    def _operate(self, kv: dict[str, Raw], operation: Raw, index: int) -> Raw | None:
        verb, key = operation["Verb"], operation["Key"]
        raw = kv.get(key)
        match verb:
            case "check-not-exists":
                if raw is not None:
                    raise Refusal(f'key "{key}" exists')
                return None
            case "check-index":
                if raw is None or raw["ModifyIndex"] != operation["Index"]:
                    raise Refusal("current modify index doesn't match")
                return raw
            case "check-session":
                if raw is None or raw.get("Session", "") != operation["Session"]:
                    raise Refusal(f'failed session check for key "{key}"')
                return raw
            case "unlock":
                if raw is None or raw.get("Session") != operation["Session"]:
                    raise Refusal(f'failed to unlock key "{key}", lock isn\'t held')
                return self._write(kv, operation, index, raw, None)
            case "get":
                if raw is None:
                    raise Refusal(f'key "{key}" doesn\'t exist')
                return raw
            case "delete":
                kv.pop(key, None)
                return None
            case "cas":
                if operation["Index"] != (raw["ModifyIndex"] if raw else 0):
                    raise Refusal(f'failed to set key "{key}", index is stale')
                return self._write(kv, operation, index, raw, raw.get("Session") if raw else None)
            case "lock":
                session = operation["Session"]
                if session not in self.sessions:
                    raise Refusal(f'failed to lock key "{key}", invalid session "{session}"')
                if raw is not None and raw.get("Session") not in (None, session):
                    raise Refusal(f'failed to lock key "{key}", lock is already held')
                if asyncio.get_running_loop().time() < self._delayed.get(key, 0.0):
                    raise Refusal(f'failed to lock key "{key}" due to lock delay')
                return self._write(kv, operation, index, raw, session)
        raise NotImplementedError(verb)

    def _write(
        self, kv: dict[str, Raw], operation: Raw, index: int, raw: Raw | None, session: str | None
    ) -> Raw:
        locks = raw["LockIndex"] if raw else 0
        if session is not None and (raw is None or raw.get("Session") is None):
            locks += 1
        written = {
            "Key": operation["Key"],
            "Value": operation["Value"],
            "Flags": operation.get("Flags", 0),
            "CreateIndex": raw["CreateIndex"] if raw else index,
            "ModifyIndex": index,
            "LockIndex": locks,
            **({"Session": session} if session is not None else {}),
        }
        kv[operation["Key"]] = written
        return written


def _response(status: int, answer: object, index: int = 0) -> bytes:
    body = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    head = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}"]
    if index:
        head.append(f"X-Consul-Index: {index}")
    return "\r\n".join([*head, "", ""]).encode() + body
