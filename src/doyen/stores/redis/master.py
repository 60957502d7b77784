"""The Redis server that is the master now, and the scripts that it runs for doyen.

`RedisMaster` finds the master for all connections of one store, which therefore agree on it: when
one of them finds that another server is the master, the others leave the old one. A leader thus
never renews its lease on one server while its record is taken over on another.

`ScriptRunner` has one connection at a time, made when it is needed. Connecting goes on if the
caller that needed it first gives up. Nothing is sent twice, except a script that the server has not
cached.

Imports redis-py, its own package, the kit of the stores and the error tree.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    AskError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
    TryAgainError,
)

from doyen._waiting import shared
from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.stores.kit.failover import ConnectionLost, answer_within, failover
from doyen.stores.kit.lifecycle import CLOSED
from doyen.stores.kit.url import Host
from doyen.stores.redis.connection import Command, RedisAddress, RedisConnection, ask_sentinel
from doyen.stores.redis.scripts import KEYS, SCRIPTS

__all__ = ["RedisMaster", "ScriptRunner"]

_REDIRECTIONS = 3
_DIGESTS = {name: hashlib.sha1(text.encode()).hexdigest() for name, text in SCRIPTS.items()}

_TEMPORARY = (OutOfMemoryError, ClusterDownError, TryAgainError, AskError)
_TEMPORARY_WORDS = ("BUSY", "MISCONF", "NOREPLICAS", "OOM", "LOADING", "MASTERDOWN")


class RedisMaster:
    """Finds the master among the servers of an address."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self.run = ""
        """The run id of the server that was last found to be the master. Connections to another
        server are out of date."""
        self.moved: Host | None = None
        """The server that has doyen's slot, according to the cluster."""

    async def connect(self) -> RedisConnection:
        """A connection to the master."""
        hosts = self.address.hosts if self.moved is None else (self.moved, *self.address.hosts)
        summary = "no connection to a Redis master: "
        try:
            connection = await failover(hosts, self._ask, summary=summary)
        except StoreUnavailable:
            self.moved = None
            raise
        self.run = connection.run
        return connection

    async def _ask(self, host: Host) -> RedisConnection:
        async with answer_within(self.address.connect_timeout_s, host):
            if self.address.service is not None:
                host = await ask_sentinel(self.address, host, self.address.service)
            return await RedisConnection.to_master(self.address, host)

    async def connect_to(self, host: Host) -> RedisConnection:
        """A connection to the server that a cluster names for one request."""
        async with answer_within(self.address.connect_timeout_s, host):
            return await RedisConnection.to_master(self.address, host)


class ScriptRunner:
    """Runs scripts at the master, on one connection."""

    def __init__(self, master: RedisMaster, prefix: str) -> None:
        self.where = str(master.address)
        self._master = master
        self._prefix = prefix
        self._keys: Command = (len(KEYS), *(prefix + key for key in KEYS), prefix)
        self._connection: RedisConnection | None = None
        self._connecting: asyncio.Task[RedisConnection] | None = None
        self._closed = False

    async def connected(self) -> RedisConnection:
        """The connection to the master, made anew if there is none."""
        if self._closed:
            raise StoreUnusable(CLOSED)
        if self._connection is not None and self._connection.open:
            if self._connection.run == self._master.run:
                return self._connection
            self._connection.drop()
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._master.connect())
            self._connecting.add_done_callback(self._on_connected)
        return await shared(self._connecting)

    def _on_connected(self, connecting: asyncio.Task[RedisConnection]) -> None:
        self._connecting = None
        if connecting.cancelled() or connecting.exception() is not None:
            return
        if self._closed:
            connecting.result().drop()
        else:
            self._connection = connecting.result()

    async def command(self, *command: str) -> Any:
        """A command that is not a script. Raises `ResponseError` if it is refused."""
        try:
            return (await (await self.connected()).send(command))[0]
        except ConnectionLost as error:
            raise StoreUnavailable(f"{self.where}: {error}") from error

    async def run(
        self, script: str, *given: str | bytes, wait: Sequence[Command] = (), reads: bool = False
    ) -> tuple[list[Any], RedisConnection]:
        """Run a script, and the command `wait` after it, which waits for replicas. Returns their
        responses, and the connection that gave them. A script that `reads` changes nothing."""
        how: Command = ("EVALSHA", _DIGESTS[script])
        try:
            for _ in range(_REDIRECTIONS):
                connection = self._connection
                if connection is None or not connection.open or connection.run != self._master.run:
                    connection = await self.connected()
                command: Command = (*how, *self._keys, connection.run, *given)
                try:
                    return await connection.send(command, *wait), connection
                except NoScriptError:
                    how = ("EVAL", SCRIPTS[script])
                except MovedError as error:  # a subclass of AskError, so it comes first
                    self._master.moved = _redirected(error, connection)
                    connection.drop()
                except AskError as error:
                    host = _redirected(error, connection)
                    return await self._run_at(host, SCRIPTS[script], given, wait)
                except ResponseError as error:
                    raise self._translate(error, connection) from error
        except ConnectionLost as error:
            if reads:
                raise StoreUnavailable(f"{self.where}: {error}") from error
            raise OutcomeUnknown(
                f"{self.where}: the connection ended before the response ({error})"
            ) from error
        raise StoreUnavailable(f"{self.where}: no server has accepted the script")

    async def _run_at(
        self, host: Host, script: str, given: Sequence[str | bytes], wait: Sequence[Command]
    ) -> tuple[list[Any], RedisConnection]:
        """Run a script at the server to which doyen's slot is being moved. It has the keys already
        but does not own the slot, so only this one request is for it."""
        connection = await self._master.connect_to(host)
        command: Command = ("EVAL", script, *self._keys, connection.run, *given)
        try:
            return (await connection.send(("ASKING",), command, *wait))[1:], connection
        except ResponseError as error:
            raise self._translate(error, connection) from error
        finally:
            connection.drop()

    def _translate(self, error: ResponseError, connection: RedisConnection) -> Exception:
        """Map an error response to an exception of the port."""
        host, text = connection.host, str(error)
        if isinstance(error, ReadOnlyError) or "READONLY" in text:
            connection.drop()
            return StoreUnavailable(f"{host} has become a replica: another is master now")
        if isinstance(error, _TEMPORARY) or any(word in text for word in _TEMPORARY_WORDS):
            return StoreUnavailable(f"{host}: {text}")
        if isinstance(error, NoPermissionError) or "NOPERM" in text or "can't" in text:
            return StoreUnusable(
                f"{host}: {text}; doyen's user needs"
                f" ~{self._prefix}* &{self._prefix}* +@all -@dangerous +info"
            )
        return StoreUnusable(f"{host}: {text}")

    async def close(self) -> None:
        """End the connection, and the attempt to make one. Idempotent."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait({self._connecting})
        if self._connection is not None:
            await self._connection.close()


def _redirected(error: AskError, connection: RedisConnection) -> Host:
    """The server that a redirection names; without a host it is the one that redirects."""
    return Host(error.host or connection.host.name, error.port)
