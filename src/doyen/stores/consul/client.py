"""Connections to Consul's agents: failover, and errors.

A `ConsulClient` sends each request to one agent, and to the next if that one fails. A store has
three: for ordinary calls, for renewals and for blocking queries, so that none of them queues behind
another. Each client has a connection pool per agent, so that requests which hang at one agent take
no connection from the others.

- Every request has a deadline, `ANSWER_S` unless the caller gives another.
- An agent is *silent* if a request to it was cancelled or timed out without an answer. The clients
  of a store share this state. A silent agent is asked only after all others have failed, until it
  answers again. Its idle connections are closed, and blocking queries that wait at it are sent to
  another agent at once.
- A request that failed before its connection was made was not carried out; nor was one that an
  agent refused because there is no leader. The outcome of any other failure is unknown. Reads are
  repeated at every other agent; so is whatever was certainly not carried out.

All agents must be of one datacentre: two datacentres would elect two leaders. This is checked for
agents that report their datacentre, which requires the permission agent:read.

The HTTP library is httpcore2, the transport of httpx2. It sends a request once. aiohttp was not
chosen because it repeats a PUT by itself if a reused connection fails, which would turn an unknown
outcome into a second transaction.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

import httpcore2

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.consul.diagnosis import seconds
from doyen.stores.kit.failover import connect_cause, failover
from doyen.stores.kit.lifecycle import CLOSED

ANSWER_S = 10.0
"""Deadline of a request. Consul itself holds one for up to 7 s while its servers have no leader."""
UNANSWERED_S = 0.1
"""A call that is cancelled earlier than this is no evidence that the agent does not answer."""
TTL_MIN_S = 10.0
"""The shortest session, unless the servers' `session_ttl_min` differs."""
IN_FLIGHT = 16
"""Connections of one client to one agent. An agent allows 200 per client address."""

_NOT_DONE = (
    "No cluster leader",
    "node is not the leader",
    "Raft leader not found",
    "leadership transfer in progress",
    "timed out enqueuing operation",
    "rpc error getting client",
)
_ENTRY = {"Key", "Value", "CreateIndex", "ModifyIndex"}


@dataclass(frozen=True, slots=True)
class ConsulResponse:
    """The answer of an agent."""

    status: int
    index: int
    """The X-Consul-Index of a read, 0 if there is none."""
    text: str

    @property
    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError as error:
            raise OutcomeUnknown(
                f"Consul answered with status {self.status} and no JSON: {self.text[:100]!r};"
                " check that the URL names agents of Consul"
            ) from error

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The entries that a read of keys found."""
        found = self.json if self.status == 200 else []
        if not isinstance(found, list) or not all(
            isinstance(each, dict) and each.keys() >= _ENTRY for each in found
        ):
            raise OutcomeUnknown(
                f"Consul's answer to a read has no entries: {self.text[:100]!r};"
                " check that the URL names agents of Consul"
            )
        return found


class Agent:
    """One agent: its address, and whether it answers. Shared by the clients of a store."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.silent = False
        self.failed_at = -math.inf
        self.blocking: set[asyncio.Timeout] = set()
        """The deadlines of blocking queries that wait at this agent."""

    @property
    def preference(self) -> tuple[bool, float]:
        """Sort key: agents that answer, then those that fail, then those that are silent; among
        equals the one that failed longest ago."""
        return self.silent, self.failed_at

    def answered(self) -> None:
        self.silent, self.failed_at = False, -math.inf

    def failed(self, *, silent: bool) -> None:
        """A request failed. An agent stays silent until it answers."""
        now = asyncio.get_running_loop().time()
        if silent and not self.silent:
            for deadline in self.blocking:
                if not deadline.expired():  # that of the query that has just failed is
                    deadline.reschedule(now)
        self.silent = self.silent or silent
        self.failed_at = now


class Agents:
    """What the clients of one store share."""

    def __init__(
        self,
        hosts: Sequence[str],
        *,
        token: str,
        tls: ssl.SSLContext | None,
        connect_timeout_s: float,
    ) -> None:
        self.each = [Agent(host) for host in hosts]
        self.tls = tls
        self.connect_timeout_s = connect_timeout_s
        self.headers = [("X-Consul-Token", token)] if token else []
        self.ttl_min_s = TTL_MIN_S
        """The shortest session, as the last server that was inspected has reported it."""
        self._datacentre = ""
        self._checked: set[str] = set()

    def url(self, host: str, path: str, **options: object) -> str:
        """The URL of a path, which is quoted. An option of None has no value.

        >>> Agents(["h:1"], token="", tls=None, connect_timeout_s=3).url("h:1", "kv/%2F", index=7)
        'http://h:1/v1/kv/%252F?index=7'
        """
        flags = [name for name, value in options.items() if value is None]
        valued = {name: value for name, value in options.items() if value is not None}
        query = "&".join(filter(None, (*flags, urlencode(valued))))
        scheme = "http" if self.tls is None else "https"
        return f"{scheme}://{host}/v1/{quote(path, safe='/')}" + (f"?{query}" if query else "")

    async def inspect(self, pool: AgentPool) -> dict[str, Any] | None:
        """The configuration of an agent; None if the ACL does not permit reading it."""
        host = pool.agent.host
        try:
            answer = await pool.request("GET", "agent/self", answer_s=self.connect_timeout_s)
            if answer.status == 403:
                return None
            if answer.status != 200:
                raise translate(answer, host)
            found = answer.json
        except OutcomeUnknown as error:  # the request changes nothing
            raise StoreUnavailable(str(error)) from error
        if not isinstance(found, dict) or not isinstance(found.get("Config"), dict):
            raise StoreUnusable(f"the server at {host} is not an agent of Consul: correct the URL")
        return found

    async def check(self, pool: AgentPool) -> None:
        """Before the first request to an agent: refuse one of another datacentre than the rest."""
        host = pool.agent.host
        if host in self._checked:
            return
        found = await self.inspect(pool)
        if found is not None:
            datacentre = str(found["Config"]["Datacenter"])
            if self._datacentre not in ("", datacentre):
                raise StoreUnusable(
                    f"Consul at {host} is of the datacentre {datacentre!r}, the rest of"
                    f" {self._datacentre!r}: all agents in the URL must be of one datacentre"
                )
            self._datacentre = datacentre
            shortest = found.get("DebugConfig", {}).get("SessionTTLMin")
            # 0 means the default. The setting of a client agent does not apply to servers.
            if found["Config"].get("Server") and shortest:
                self.ttl_min_s = seconds(shortest) or TTL_MIN_S
        self._checked.add(host)


class AgentPool:
    """The connections of one client to one agent."""

    def __init__(self, agents: Agents, agent: Agent) -> None:
        self.agent = agent
        self._agents = agents
        self._pool = httpcore2.AsyncConnectionPool(
            ssl_context=agents.tls, max_connections=IN_FLIGHT, keepalive_expiry=60.0
        )

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        answer_s: float = ANSWER_S,
        blocking: bool = False,
        **options: object,
    ) -> ConsulResponse:
        """One request to one agent, its errors translated."""
        agents, agent, host = self._agents, self.agent, self.agent.host
        wait_s = min(agents.connect_timeout_s, answer_s)
        began = asyncio.get_running_loop().time()
        deadline = asyncio.timeout(answer_s)
        try:
            async with deadline:
                if blocking and len(agents.each) > 1:
                    agent.blocking.add(deadline)
                response = await self._pool.request(
                    method,
                    agents.url(host, path, **options),
                    headers=agents.headers,
                    content=None if body is None else json.dumps(body).encode(),
                    extensions={"timeout": {"pool": wait_s, "connect": wait_s}},
                )
        except asyncio.CancelledError:
            # A blocking query is cancelled when it is no longer needed, not because it hangs.
            if not blocking and asyncio.get_running_loop().time() - began > UNANSWERED_S:
                await self._mark_silent()
            raise
        except TimeoutError as error:
            await self._mark_silent()
            raise OutcomeUnknown(
                f"Consul at {host} does not answer within {answer_s:g} s"
            ) from error
        except (httpcore2.ConnectError, httpcore2.ConnectTimeout, httpcore2.PoolTimeout) as error:
            if not isinstance(error, httpcore2.ConnectError):
                agent.failed(silent=True)
            raise StoreUnavailable(
                f"Consul at {host} cannot be reached: {_cause(error)}"
            ) from error
        except (
            httpcore2.NetworkError,
            httpcore2.ProtocolError,
            httpcore2.TimeoutException,
            ssl.SSLError,
        ) as error:
            raise OutcomeUnknown(
                f"the connection to Consul at {host} failed: {_cause(error)}"
            ) from error
        finally:
            agent.blocking.discard(deadline)
        agent.answered()
        headers = {name.lower(): value for name, value in response.headers}
        index = headers.get(b"x-consul-index", b"")
        text = response.content.decode("utf-8", "replace")
        return ConsulResponse(response.status, int(index) if index.isdigit() else 0, text)

    async def _mark_silent(self) -> None:
        """Close idle connections too: they may be dead, and each would cost a failed call."""
        self.agent.failed(silent=True)
        for connection in self._pool.connections:
            if connection.is_idle():
                await connection.aclose()

    async def close(self) -> None:
        await self._pool.aclose()


class ConsulClient:
    """Requests of one kind, each sent to an agent that answers."""

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self.pools = [AgentPool(agents, agent) for agent in agents.each]
        self._closed = False

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        accept: Collection[int] = (200,),
        reads: bool = False,
        **request: Any,
    ) -> ConsulResponse:
        """One request, sent to one agent after another as long as nothing can be carried out twice.

        Answers whose status is not in `accept` are failures. `request` is for `AgentPool.request`.
        """

        async def attempt(pool: AgentPool) -> ConsulResponse:
            if self._closed:
                raise StoreUnusable(CLOSED)
            try:
                await self._agents.check(pool)
                answer = await pool.request(method, path, body, **request)
                if answer.status in accept and not _denied(answer):
                    return answer
                raise translate(answer, pool.agent.host)
            except (StoreUnavailable, OutcomeUnknown):
                pool.agent.failed(silent=False)
                raise

        pools = sorted(self.pools, key=lambda pool: pool.agent.preference)
        return await failover(pools, attempt, repeatable=reads)

    async def close(self) -> None:
        self._closed = True
        for pool in self.pools:
            await pool.close()


def _denied(answer: ConsulResponse) -> bool:
    """Whether a transaction was refused by the ACL, and not by its own conditions."""
    return answer.status == 409 and any(
        words in answer.text for words in ("Permission denied", "ACL not found")
    )


def translate(answer: ConsulResponse, host: str) -> StoreError:
    """Map an error response to an exception."""
    reason = answer.text.strip()[:300] or f"status {answer.status}"
    if "ACL not found" in reason:
        return StoreUnusable(f"Consul at {host} does not know the ACL token: correct it")
    if answer.status == 403 or "Permission denied" in reason:
        return StoreUnusable(
            f"Consul at {host} refuses: {reason}. The ACL token needs key_prefix write on doyen's"
            " prefix and session_prefix write; it is given as consul://:TOKEN@host, token_file= or"
            " CONSUL_HTTP_TOKEN"
        )
    if "HTTP request to an HTTPS server" in reason:
        return StoreUnusable(f"Consul at {host} requires TLS: add tls=true to the URL")
    if "Invalid Session TTL" in reason:
        return StoreUnusable(
            f"Consul at {host} refuses: {reason}; ask for a ttl within these bounds"
        )
    if answer.status == 429 or any(text in reason for text in _NOT_DONE):
        return StoreUnavailable(f"Consul at {host} cannot serve now: {reason}")
    if answer.status < 500:
        return StoreUnusable(f"Consul at {host} refuses ({answer.status}): {reason}")
    return OutcomeUnknown(f"Consul at {host} failed: {reason}")


def _cause(error: BaseException) -> str:
    """The innermost cause of an error. Libraries wrap it in more general ones."""
    reason = str(error)
    while (below := error.__cause__ or error.__context__) is not None:
        error = below.exceptions[0] if isinstance(below, BaseExceptionGroup) else below
        reason = str(error) or reason
    return connect_cause(reason) or type(error).__name__
