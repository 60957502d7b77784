"""A connection to NATS, the few requests that doyen makes of JetStream, and what its errors mean.

A request that nobody responds to was not carried out, nor one that JetStream refuses. One whose
answer does not come may have been carried out: the caller gives it up. While there is no connection
nothing is sent; nats-py would keep it and send it late.

A connection that ends, for whatever reason, is replaced by a new client of nats-py, with a pause
that grows while connections do not last. nats-py's own reconnection is not used: it gives up for
good when the server sends an error.

Imports nats-py and the error tree.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
from base64 import b64decode
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable

__all__ = [
    "NatsAddress",
    "NatsConnection",
    "StoredMessage",
    "StreamMissing",
    "WrongSequence",
    "apart",
]

T = TypeVar("T")

log = logging.getLogger("doyen.nats")

OLDEST = (2, 11)
ANSWER_S = 10.0
CLOSE_S = 2.0
GRAVE_TTL = "1h"
"""How long a delete marker is kept."""
AT_ONCE = 64
"""How many reads are sent before the answer to the first has come."""

_AGAIN_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S, _LASTING_S = 0.1, 1.0, 5.0
_WRONG_LAST = (10071, 10164)
_NO_MESSAGE = 10037
_NO_STREAM = 10059
_NO_JETSTREAM = (10039, 10076)


class WrongSequence(Exception):
    """The last message of the subject is not the one that the request expects."""


class Abandoned(Exception):
    """The connection ended while an answer was awaited."""


class StreamMissing(StoreUnavailable):
    """The stream does not exist."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """Where the servers are, and who we are to them."""

    hosts: tuple[str, ...]
    options: Mapping[str, Any] = field(repr=False)
    connect_timeout_s: float


class StoredMessage(NamedTuple):
    """The last message of a subject."""

    sequence: int
    headers: Mapping[str, str]
    value: bytes

    @property
    def deleted(self) -> bool:
        """A delete marker, written by a client, or by the server when a message has expired."""
        return "KV-Operation" in self.headers or "Nats-Marker-Reason" in self.headers


class _Client(Client):
    """nats-py, where it would stop working or leave something behind.

    - It stops reading at the first message whose subject or headers it cannot decode. Such a
      message in the bucket would stop every connection on which the bucket is followed.
    - If the connection breaks while it is being closed, subscriptions and callbacks are forgotten.
    """

    def __init__(self, ended: Callable[[Client], None]) -> None:
        super().__init__()
        self._ended = ended

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
        self._ended(self)
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            log.debug("a connection to NATS broke while it was closed: %s", error)
        finally:
            for subscription in self._subs.values():
                if subscription._wait_for_msgs_task is not None:
                    subscription._wait_for_msgs_task.cancel()
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]


class NatsConnection:
    """A connection to one of the servers; another one when it ends."""

    def __init__(self, address: NatsAddress, on_connect: Callable[[], None] | None = None) -> None:
        self._address = address
        self._urls = [f"nats://{host}" for host in address.hosts]
        self._on_connect = on_connect
        self._under_way: set[asyncio.Task[Any]] = set()
        self._client: Client | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()
        self._trouble = "not connected yet"
        self.incarnation = ""
        """Differs when a server has been started again: it may lack what it had confirmed."""
        self.version = ""

    async def open(self) -> None:
        """Connect to any of the servers within the time allowed, and stay connected."""
        where = ", ".join(self._address.hosts)
        timeout_s = self._address.connect_timeout_s
        refusal = ""
        self._trouble = ""
        try:
            async with asyncio.timeout(timeout_s):
                while self._client is None:
                    try:
                        await self._connect()
                    except (OSError, nats.errors.Error) as error:
                        self._failed(error)
                    # A server that refuses a client closes the connection at once, and what it
                    # said is seen in some of the attempts only.
                    if self._client is None:
                        if "authorization" in self._trouble.lower():
                            refusal = self._trouble
                        await asyncio.sleep(_PAUSE_S)
        except TimeoutError as error:
            if refusal:
                raise StoreUnusable(
                    f"NATS at {where} refuses us ({refusal}): correct the user, password or token"
                ) from error
            reason = self._trouble or f"no answer within {timeout_s:g} s"
            raise StoreUnavailable(f"NATS at {where} cannot be reached: {reason}") from error
        release = tuple(int(part) for part in re.findall(r"\d+", self.version)[:2])
        if release < OLDEST:
            raise StoreUnusable(
                f"NATS at {where} is {self.version}; doyen needs"
                f" {'.'.join(map(str, OLDEST))} or later"
            )
        self._keeper = asyncio.get_running_loop().create_task(self._keep())

    async def _connect(self) -> None:
        client = _Client(self._drop)

        async def failed(error: Exception) -> None:
            self._failed(error)

        try:
            connecting = client.connect(
                self._urls,
                error_cb=failed,
                connect_timeout=self._address.connect_timeout_s,  # type: ignore[arg-type]
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                ping_interval=2,
                max_outstanding_pings=2,
                **self._address.options,
            )
            await apart(connecting, self._address.connect_timeout_s)
            if not client.is_connected:
                raise ConnectionAbortedError("the connection ended at once")
        except BaseException:
            await _close(client)
            raise
        self.incarnation = str(client._server_info.get("server_id", ""))
        self.version = str(client.connected_server_version)
        if not self._address.options.get("tls"):  # certificates name the servers of the URL
            known = [url.geturl() for url in client.discovered_servers]
            self._urls += [url for url in known if url not in self._urls]
        self._client = client

    def _failed(self, error: Exception) -> None:
        """Remember why there is no connection: the last error that says so."""
        if not isinstance(error, nats.errors.NoServersError):
            self._trouble = str(error) or self._trouble or "no answer"

    def _drop(self, client: Client) -> None:
        """The connection has ended: nothing that is under way will be answered."""
        if client is self._client:
            self._client = None
            self._lost.set()
            for request in list(self._under_way):
                request.cancel()

    async def _keep(self) -> None:
        """Connect again whenever the connection has ended."""
        loop = asyncio.get_running_loop()
        pause_s, since = 0.0, loop.time()
        while True:
            await self._lost.wait()
            self._lost.clear()
            log.info("the connection to NATS has ended (%s); reconnecting", self._trouble)
            if loop.time() - since > _LASTING_S:
                pause_s = 0.0
            while self._client is None:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
                try:
                    async with asyncio.timeout(self._address.connect_timeout_s):
                        await self._connect()
                except (OSError, nats.errors.Error) as error:
                    self._failed(error)
                    log.debug("NATS cannot be reached: %s", self._trouble)
                except Exception:
                    log.exception("connecting to NATS failed; it will be tried again")
            since = loop.time()
            if self._on_connect is not None:
                self._on_connect()

    def connected(self) -> Client:
        """The client of the present connection; `StoreUnavailable` if there is none."""
        client = self._client
        if client is not None and not client.is_connected:
            self._drop(client)  # it is still being closed, which may take a while
            client = None
        if client is None:
            raise StoreUnavailable(f"there is no connection to NATS at the moment: {self._trouble}")
        return client

    async def ask(self, subject: str, **request: object) -> dict[str, Any]:
        """A request to JetStream's API."""
        body = json.dumps(request).encode() if request else b""
        return self._checked(await self._send(f"$JS.API.{subject}", body))

    async def write(
        self, subject: str, value: bytes, last: int | None, headers: Mapping[str, str] | None = None
    ) -> int:
        """Write to a subject if `last` is the sequence of its last message (0: there is none)."""
        given = dict(headers or {})
        if last is not None:
            given["Nats-Expected-Last-Subject-Sequence"] = str(last)
        answer = self._checked(await self._send(subject, value, given))
        if "seq" not in answer:
            raise OutcomeUnknown(f"the answer to a write has no sequence: {answer}")
        return int(answer["seq"])

    async def bury(self, subject: str, last: int | None) -> int:
        """Write a delete marker."""
        return await self.write(subject, b"", last, {"KV-Operation": "DEL", "Nats-TTL": GRAVE_TTL})

    async def last(self, stream: str, subject: str) -> StoredMessage | None:
        """The last message of a subject."""
        answer = await self.ask(f"STREAM.MSG.GET.{stream}", last_by_subj=subject)
        if "message" not in answer:
            return None
        found = answer["message"]
        lines = b64decode(found.get("hdrs", "")).decode(errors="replace").split("\r\n")[1:]
        parts = (line.partition(":") for line in lines)
        headers = {name.strip(): value.strip() for name, colon, value in parts if colon}
        return StoredMessage(int(found["seq"]), headers, b64decode(found.get("data", "")))

    async def last_of_all(self, stream: str, subjects: Iterable[str]) -> list[StoredMessage | None]:
        """The last messages of subjects, asked for together."""
        turns = asyncio.Semaphore(AT_ONCE)

        async def one(subject: str) -> StoredMessage | None:
            async with turns:
                return await self.last(stream, subject)

        answers = await asyncio.gather(*map(one, subjects), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        client, self._client = self._client, None
        for request in list(self._under_way):
            request.cancel()
        if client is not None:
            await _close(client)
        self._trouble = "closed"

    async def _send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> Msg:
        client = self.connected()
        work = client.request(subject, body, timeout=ANSWER_S, headers=headers)
        try:
            return await apart(work, 2 * ANSWER_S, self._under_way)
        except Abandoned:
            raise OutcomeUnknown(f"the connection to NATS was lost: {self._trouble}") from None
        except nats.errors.NoRespondersError as error:
            raise StoreUnavailable(
                "JetStream does not answer: it is disabled, or has no leader at the moment"
            ) from error
        except (nats.errors.Error, OSError) as error:
            raise OutcomeUnknown(f"NATS did not answer: {error}") from error

    def _checked(self, message: Msg) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(message.data)
            error = answer.get("error")
        except (ValueError, AttributeError):
            raise OutcomeUnknown(
                f"the answer is not JetStream's: {message.data[:40]!r}; does another service"
                " respond to this subject?"
            ) from None
        if error is None:
            return answer
        code, text = error.get("err_code"), error.get("description", "")
        if code in _WRONG_LAST:
            raise WrongSequence(text)
        if code == _NO_MESSAGE:
            return {}
        if code == _NO_STREAM:
            raise StreamMissing(f"the bucket is gone: {text}")
        if code in _NO_JETSTREAM:
            raise StoreUnusable(f"JetStream cannot be used here: {text}; enable it for the account")
        if error.get("code") == 503:
            raise StoreUnavailable(f"JetStream cannot serve now: {text}")
        raise StoreUnusable(f"JetStream refuses: {text} ({code})")


async def apart(
    work: Coroutine[Any, Any, T], timeout_s: float, under_way: set[asyncio.Task[Any]] | None = None
) -> T:
    """Run something of nats-py in a task of its own, which is listed in `under_way`.

    nats-py swallows a cancellation that arrives while it flushes, and `asyncio.wait_for` before
    Python 3.12 one that arrives together with an exception. The caller's must not be lost.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # count as retrieved
    listed = set() if under_way is None else under_way
    listed.add(task)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        listed.discard(task)
        gave_up = not task.done()
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_AGAIN_S)
    if gave_up:
        raise TimeoutError
    if task.cancelled():
        raise Abandoned
    return task.result()


async def _close(client: Client) -> None:
    try:
        await apart(client.close(), CLOSE_S)
    except (OSError, nats.errors.Error, AssertionError) as error:
        log.debug("a connection to NATS was not closed in order: %s", error)
