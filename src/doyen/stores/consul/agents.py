"""The agents as one client sees them: connections, failover, and what their errors mean.

A `Wire` is a pool of connections to one agent at a time, and moves on to the next when that one
fails or does not answer. A store has three: for ordinary calls, for renewals and for blocking
queries, so that none of them queues behind another.

A request that failed before its connection was made was not carried out; nor was one that an agent
refused for want of a leader. Of any other failure the outcome is unknown. Reads may be repeated,
and are, at every other agent; so is whatever was certainly not carried out.

All agents must be of one datacentre: two of them would elect two leaders. An agent that tells its
datacentre (that takes the permission agent:read) is held to it.

Imports httpcore, the error tree and the diagnosis.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpcore

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.consul.diagnosis import seconds

__all__ = ["TTL_MIN_S", "Agents", "Answer", "Wire"]

UNANSWERED_S = 0.1
"""A call that is cancelled after less was not given up for want of an answer."""
TTL_MIN_S = 10.0
"""The shortest session, unless servers have been told otherwise (`session_ttl_min`)."""
IN_FLIGHT = 16
"""Connections of one wire. An agent allows 200 to all clients of one address."""

_ANSWERS = (200, 404, 409)
"""Done; nothing there; a transaction that was refused."""
_NOT_DONE = (
    "No cluster leader",
    "node is not the leader",
    "Raft leader not found",
    "leadership transfer in progress",
    "timed out enqueuing operation",
    "rpc error getting client",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent said."""

    status: int
    index: int
    """The X-Consul-Index of a read, 0 if there is none."""
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)


class Agents:
    """What the wires of one store share."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        token: str,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
    ) -> None:
        self.hosts = hosts
        self.tls = tls
        self.connect_timeout_s = connect_timeout_s
        self.headers = [("X-Consul-Token", token)] if token else []
        self.ttl_min_s = TTL_MIN_S
        """The shortest session, as far as an agent has told."""
        self._datacentre = ""
        self._greeted: set[str] = set()

    def url(self, host: str, path: str, **options: object) -> str:
        """The address of a path, whose odd characters are quoted; an option of None has no value.

        >>> Agents(["h:1"], token="", tls=None, connect_timeout_s=3).url("h:1", "kv/%2F", index=7)
        'http://h:1/v1/kv/%252F?index=7'
        """
        flags = [name for name, value in options.items() if value is None]
        valued = {name: value for name, value in options.items() if value is not None}
        query = "&".join(filter(None, (*flags, urlencode(valued))))
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{host}/v1/{quote(path, safe='/')}" + (f"?{query}" if query else "")

    async def inspect(self, pool: httpcore.AsyncConnectionPool, host: str) -> dict[str, Any] | None:
        """What an agent says of itself; None if it will not tell us."""
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                answer = await self.request(pool, host, "GET", "agent/self")
        except TimeoutError as error:
            raise StoreUnavailable(
                f"Consul at {host} does not answer within {self.connect_timeout_s:g} s"
            ) from error
        except OutcomeUnknown as error:  # of a question nothing remains
            raise StoreUnavailable(str(error)) from error
        if answer.status == 403:
            return None
        if answer.status != 200:
            raise translate(answer, host)
        told: dict[str, Any] = answer.json
        return told

    async def greet(self, pool: httpcore.AsyncConnectionPool, host: str) -> None:
        """Meet an agent for the first time: refuse one of another datacentre than the rest."""
        if host in self._greeted:
            return
        told = await self.inspect(pool, host)
        if told is not None:
            datacentre = str(told["Config"]["Datacenter"])
            if self._datacentre not in ("", datacentre):
                raise StoreUnusable(
                    f"Consul at {host} is of the datacentre {datacentre!r}, the rest of"
                    f" {self._datacentre!r}: all agents in the URL must be of one datacentre"
                )
            self._datacentre = datacentre
            shortest = told.get("DebugConfig", {}).get("SessionTTLMin")
            # 0 stands for the default. A client's own setting says nothing about the servers'.
            if told["Config"].get("Server") and shortest:
                self.ttl_min_s = seconds(shortest) or TTL_MIN_S
        self._greeted.add(host)

    async def request(
        self,
        pool: httpcore.AsyncConnectionPool,
        host: str,
        method: str,
        path: str,
        body: object = None,
        answer_s: float | None = None,
        **options: object,
    ) -> Answer:
        """One request to one agent, the failures of its connection translated."""
        timeout = {"connect": self.connect_timeout_s, "read": answer_s}
        try:
            response = await pool.request(
                method,
                self.url(host, path, **options),
                headers=self.headers,
                content=None if body is None else json.dumps(body).encode(),
                extensions={"timeout": timeout},
            )
        except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            raise StoreUnavailable(
                f"Consul at {host} cannot be reached: {_cause(error)}"
            ) from error
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
            ssl.SSLError,
        ) as error:
            raise OutcomeUnknown(
                f"the connection to Consul at {host} failed: {_cause(error)}"
            ) from error
        index = dict(response.headers).get(b"X-Consul-Index", b"0")
        text = response.content.decode("utf-8", "replace")
        return Answer(response.status, int(index), text)


class Wire:
    """Connections to one agent at a time."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._turn = 0
        self.pool = httpcore.AsyncConnectionPool(
            ssl_context=agents.tls, max_connections=IN_FLIGHT, keepalive_expiry=60.0
        )
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        reads: bool = False,
        answer_s: float | None = None,
        **options: object,
    ) -> Answer:
        """One request, at the agents in turn for as long as that can do no harm."""
        failure: StoreError = StoreUnavailable("the store is closed")
        for _ in self._agents.hosts:
            if self._closed:
                break
            turn, began = self._turn, asyncio.get_running_loop().time()
            host = self._agents.hosts[turn % len(self._agents.hosts)]
            try:
                await self._agents.greet(self.pool, host)
                answer = await self._agents.request(
                    self.pool, host, method, path, body, answer_s, **options
                )
                if answer.status in _ANSWERS:
                    return answer
                raise translate(answer, host)
            except StoreUnavailable as error:
                failure = error
            except OutcomeUnknown as error:
                failure = error
                if not reads:
                    self._move_on(turn)
                    break
            except asyncio.CancelledError:
                if asyncio.get_running_loop().time() - began > UNANSWERED_S:
                    self._move_on(turn)
                raise
            self._move_on(turn)
        raise failure

    def _move_on(self, turn: int) -> None:
        """Go to the next agent, unless somebody else has gone there already."""
        if self._turn == turn:
            self._turn += 1

    async def close(self) -> None:
        self._closed = True
        await self.pool.aclose()


def translate(answer: Answer, host: str) -> StoreError:
    """What an answer means that is none."""
    said = answer.text.strip()[:300] or f"status {answer.status}"
    if "ACL not found" in said:
        return StoreUnusable(f"Consul at {host} does not know the ACL token: correct it")
    if answer.status == 403 or "Permission denied" in said:
        return StoreUnusable(
            f"Consul at {host} refuses: {said}. The ACL token needs key_prefix write on doyen's"
            " prefix and session_prefix write; it is given as consul://:TOKEN@host, token_file= or"
            " CONSUL_HTTP_TOKEN"
        )
    if "HTTP request to an HTTPS server" in said:
        return StoreUnusable(f"Consul at {host} speaks TLS: add tls=true to the URL")
    if "Invalid Session TTL" in said:
        return StoreUnusable(f"Consul at {host} refuses: {said}; ask for a ttl within these bounds")
    if answer.status == 429 or any(text in said for text in _NOT_DONE):
        return StoreUnavailable(f"Consul at {host} cannot serve now: {said}")
    if answer.status < 500:
        return StoreUnusable(f"Consul at {host} refuses ({answer.status}): {said}")
    return OutcomeUnknown(f"Consul at {host} failed: {said}")


def _cause(error: BaseException) -> str:
    """The reason that lies at the bottom of an error; libraries wrap them without words."""
    while not str(error) and (below := error.__cause__ or error.__context__) is not None:
        error = below
    return str(error) or type(error).__name__
