"""The requests that doyen makes of JetStream, on a connection that is replaced when it ends.

A request that has no responder, or that JetStream refuses, was not carried out. One that is not
answered may have been carried out (`OutcomeUnknown`). Without a connection nothing is sent
(`StoreUnavailable`).
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import random
import re
from base64 import b64decode
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.stores.kit.failover import connect_cause
from doyen.stores.kit.streams import write_joined

T = TypeVar("T")

log = logging.getLogger("doyen.nats")

OLDEST = (2, 11)
CLOSE_S = 2.0
RESPONSE_S = 10.0
MARKER_TTL = "1h"
"""How long the server keeps a delete marker."""
PIPELINED = 64
"""How many reads are in flight at a time."""

_CANCEL_AGAIN_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S, _LASTING_S = 0.1, 1.0, 5.0
_REFUSED = os.strerror(errno.ECONNREFUSED)
"""If all servers do, none is running: there is nothing to wait for."""
_WRONG_LAST = (10071, 10164)
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_STREAM_EXISTS = 10058
_NO_JETSTREAM = (10039, 10076)


class ConnectionEnded(Exception):
    """The connection ended before the response arrived."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """The servers, and nats-py's options for the login and for TLS."""

    hosts: tuple[str, ...]
    options: Mapping[str, Any] = field(repr=False)
    connect_timeout_s: float


class NatsConnection(Client):
    """A client of nats-py that connects once. `ended` is done when the connection has ended.

    nats-py's own reconnection is not used: it stops for good when the server sends an error, and it
    buffers requests and sends them late. Two more faults of nats-py are worked around:

    - It stops reading at the first message whose subject or headers it cannot decode. Such a
      message in the bucket would end every connection on which the bucket is followed.
    - If the connection breaks while it is being closed, its subscriptions and its socket are
      left open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        address: NatsAddress,
        urls: Iterable[str],
        on_error: Callable[[Exception], Awaitable[None]],
    ) -> NatsConnection:
        """Connect to one of the servers."""
        connection = cls()
        try:
            connecting = connection.connect(
                list(urls),
                error_cb=on_error,
                connect_timeout=address.connect_timeout_s,  # type: ignore[arg-type]
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                ping_interval=2,
                max_outstanding_pings=2,
                **address.options,
            )
            await run_in_task(connecting, address.connect_timeout_s)
            if not connection.is_connected:
                raise ConnectionAbortedError("the server closed the connection at once")
            write_joined(connection._transport)
        except BaseException:
            await connection.close_within(CLOSE_S)
            raise
        return connection

    def end(self) -> None:
        """Abandon the requests in flight: none of them will be answered."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def close_within(self, timeout_s: float) -> None:
        self.end()
        try:
            await run_in_task(self.close(), timeout_s)
        except (OSError, nats.errors.Error, AssertionError) as error:
            log.debug("%s", log_line(event="nats_closing_failed", reason=error))

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (ValueError, IndexError):
            return {}

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        readable = bytes(subject).decode(errors="backslashreplace").encode()
        return super()._build_message(sid, readable, reply, data, headers)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self.end()
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            log.debug("%s", log_line(event="nats_closing_failed", reason=error))
        finally:
            for subscription in self._subs.values():
                if subscription._wait_for_msgs_task is not None:
                    subscription._wait_for_msgs_task.cancel()
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]


class WrongSequence(Exception):
    """The last message of the subject is not the one that the request expects."""


class StreamMissing(StoreUnavailable):
    """The stream does not exist."""


class StreamExists(StoreUnusable):
    """There is a stream of this name, with another configuration."""


class StoredMessage(NamedTuple):
    """The last message of a subject."""

    sequence: int
    headers: Mapping[str, str]
    value: bytes

    @property
    def deleted(self) -> bool:
        """A delete marker, written by a client, or by the server when a message has expired."""
        return "KV-Operation" in self.headers or "Nats-Marker-Reason" in self.headers


class JetStream:
    """Requests to JetStream. After `open`, a connection that ends is replaced in the background,
    with a pause that grows while connections do not last."""

    def __init__(self, address: NatsAddress) -> None:
        self._address = address
        self._urls = [f"nats://{host}" for host in address.hosts]
        self._connection: NatsConnection | None = None
        """The latest connection, even if it has ended."""
        self._error = ""
        """The last reason for which there was no connection."""
        self._causes: set[str] = set()
        """All reasons since they were last cleared."""
        self._reconnecting: asyncio.Task[None] | None = None

    @property
    def server_id(self) -> str:
        """Of the latest connection. A server has another id after a restart."""
        return "" if self._connection is None else str(self._connection._server_info["server_id"])

    @property
    def version(self) -> str:
        return "" if self._connection is None else str(self._connection.connected_server_version)

    async def open(self) -> None:
        """Connect to one of the servers within the time allowed, and stay connected."""
        where = ", ".join(self._address.hosts)
        connection = await self._first_connection(where)
        release = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if release < OLDEST:
            raise StoreUnusable(
                f"NATS at {where} is {self.version}; doyen needs"
                f" {'.'.join(map(str, OLDEST))} or later"
            )
        self._reconnecting = asyncio.get_running_loop().create_task(self._reconnect(connection))

    async def _first_connection(self, where: str) -> NatsConnection:
        timeout_s = self._address.connect_timeout_s
        refusal = ""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    self._causes.clear()
                    try:
                        return await self._connect()
                    except (OSError, nats.errors.Error) as error:
                        self._failed(error)
                    if self._causes == {_REFUSED}:
                        raise StoreUnavailable(f"NATS at {where} cannot be reached: {_REFUSED}")
                    # A server that refuses a client closes the connection at once, so its reason
                    # arrives in some of the attempts only.
                    if "authorization" in self._error.lower():
                        refusal = self._error
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            if refusal:
                raise StoreUnusable(
                    f"NATS at {where} refuses the login ({refusal}): correct the user, password or"
                    " token"
                ) from error
            reason = self._error or f"no response within {timeout_s:g} s"
            raise StoreUnavailable(f"NATS at {where} cannot be reached: {reason}") from error

    async def _connect(self) -> NatsConnection:
        async def on_error(error: Exception) -> None:
            self._failed(error)

        connection = await NatsConnection.open(self._address, self._urls, on_error)
        if not self._address.options.get("tls"):  # certificates name the servers of the URL
            known = [url.geturl() for url in connection.discovered_servers]
            self._urls += [url for url in known if url not in self._urls]
        self._connection = connection
        return connection

    def _failed(self, error: Exception) -> None:
        """Keep the reason. `NoServersError` says only that all attempts failed."""
        if not isinstance(error, nats.errors.NoServersError):
            self._error = connect_cause(error) or self._error or "no response"
            self._causes.add(self._error)

    async def _reconnect(self, connection: NatsConnection) -> None:
        """Replace the connection whenever it has ended."""
        loop = asyncio.get_running_loop()
        pause_s, since = 0.0, loop.time()
        while True:
            await asyncio.wait({connection.ended})
            log.info("%s", log_line(event="nats_disconnected", reason=self._error or "closed"))
            if loop.time() - since > _LASTING_S:
                pause_s = 0.0
            while connection.ended.done():
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
                try:
                    async with asyncio.timeout(self._address.connect_timeout_s):
                        connection = await self._connect()
                except (OSError, nats.errors.Error) as error:
                    self._failed(error)
                    log.debug("%s", log_line(event="nats_unreachable", reason=self._error))
                except Exception:
                    log.exception("%s", log_line(event="nats_connecting_failed"))
            since = loop.time()

    def connected(self) -> NatsConnection:
        """The present connection. Raises `StoreUnavailable` if there is none."""
        connection = self._connection
        if connection is not None and not connection.is_connected:
            connection.end()  # nats-py is still closing it, which may take a while
        if connection is None or connection.ended.done():
            raise StoreUnavailable(
                f"no connection to NATS at the moment: {self._error or 'not connected yet'}"
            )
        return connection

    async def call(self, subject: str, **request: object) -> dict[str, Any]:
        """A request to JetStream's API."""
        body = json.dumps(request).encode() if request else b""
        return _checked(await self._send(f"$JS.API.{subject}", body))

    async def write(
        self, subject: str, value: bytes, last: int | None, headers: Mapping[str, str] | None = None
    ) -> int:
        """Write to a subject if `last` is the sequence of its last message (0: it has none), and
        return the sequence of the new one."""
        given = dict(headers or {})
        if last is not None:
            given["Nats-Expected-Last-Subject-Sequence"] = str(last)
        response = _checked(await self._send(subject, value, given))
        if "seq" not in response:
            raise OutcomeUnknown(f"the response to a write has no sequence: {response}")
        return int(response["seq"])

    async def delete(self, subject: str, last: int | None) -> int:
        """Write a delete marker."""
        return await self.write(subject, b"", last, {"KV-Operation": "DEL", "Nats-TTL": MARKER_TTL})

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message of a subject."""
        found = await self._get(stream, last_by_subj=subject)
        return None if found is None else found[1]

    async def next(
        self, stream: str, subjects: str, start: int
    ) -> tuple[str, StoredMessage] | None:
        """The first message from position `start` on, and its subject."""
        return await self._get(stream, seq=start, next_by_subj=subjects)

    async def _get(self, stream: str, **which: object) -> tuple[str, StoredMessage] | None:
        response = await self.call(f"STREAM.MSG.GET.{stream}", **which)
        if "message" not in response:
            return None
        found = response["message"]
        lines = b64decode(found.get("hdrs", "")).decode(errors="replace").split("\r\n")[1:]
        parts = (line.partition(":") for line in lines)
        headers = {name.strip(): value.strip() for name, colon, value in parts if colon}
        message = StoredMessage(int(found["seq"]), headers, b64decode(found.get("data", "")))
        return found["subject"], message

    async def last_of_each(
        self, stream: str, subjects: Iterable[str]
    ) -> list[StoredMessage | None]:
        """The last messages of several subjects, in pipelined requests."""
        limit = asyncio.Semaphore(PIPELINED)

        async def one(subject: str) -> StoredMessage | None:
            async with limit:
                return await self.last(stream, subject)

        found = await asyncio.gather(*map(one, subjects), return_exceptions=True)
        for each in found:
            if isinstance(each, BaseException):
                raise each
        return [each for each in found if not isinstance(each, BaseException)]

    async def close(self) -> None:
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        self._error = "closed"
        if self._connection is not None and not self._connection.is_closed:
            await self._connection.close_within(CLOSE_S)

    async def _send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> Msg:
        connection = self.connected()
        request = connection.request(subject, body, timeout=RESPONSE_S, headers=headers)
        try:
            return await run_in_task(request, 2 * RESPONSE_S, connection.ended)
        except ConnectionEnded:
            raise OutcomeUnknown(f"the connection to NATS was lost: {self._error}") from None
        except nats.errors.NoRespondersError as error:
            raise StoreUnavailable(
                "JetStream does not respond: it is disabled, has no leader at the moment, or has"
                " lost the bucket"
            ) from error
        except (nats.errors.Error, OSError) as error:
            raise OutcomeUnknown(f"NATS did not respond: {error}") from error


def _checked(message: Msg) -> dict[str, Any]:
    """The response as a table. Map an error response to an exception."""
    try:
        response: dict[str, Any] = json.loads(message.data)
        error = response.get("error")
    except (ValueError, AttributeError):
        raise OutcomeUnknown(
            f"the response is not JetStream's: {message.data[:40]!r}; does another service"
            " respond to this subject?"
        ) from None
    if error is None:
        return response
    code, text = error.get("err_code"), error.get("description", "")
    if code in _WRONG_LAST:
        raise WrongSequence(text)
    if code == _NO_MESSAGE:
        return {}
    if code == _NO_STREAM:
        raise StreamMissing(f"the bucket does not exist: {text}")
    if code == _STREAM_EXISTS:
        raise StreamExists(f"JetStream refuses the request: {text} ({code})")
    if code in _NO_JETSTREAM:
        raise StoreUnusable(f"JetStream is not available: {text}; enable it for the account")
    if error.get("code") == 503:
        raise StoreUnavailable(f"JetStream is temporarily unavailable: {text}")
    raise StoreUnusable(f"JetStream refuses the request: {text} ({code})")


async def run_in_task(
    work: Coroutine[Any, Any, T], timeout_s: float, ended: asyncio.Future[None] | None = None
) -> T:
    """Run a coroutine of nats-py in a task of its own, until `ended` is done at the longest.

    nats-py swallows a cancellation that arrives while it flushes, and `asyncio.wait_for` before
    Python 3.12 one that arrives together with an exception. The caller's cancellation must not get
    lost.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark as retrieved
    try:
        until: set[asyncio.Future[Any]] = {task} if ended is None else {task, ended}
        await asyncio.wait(until, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gave_up = not task.done()
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if ended is not None and ended.done() and (gave_up or task.cancelled()):
        raise ConnectionEnded
    if gave_up or task.cancelled():
        raise TimeoutError
    return task.result()
