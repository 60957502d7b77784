"""A connection to NATS, the few requests that doyen makes of JetStream, and what its errors mean.

A request that nobody responds to was not carried out, nor one that JetStream refuses. One whose
answer does not come may have been: the caller gives it up. While there is no connection nothing is
sent; nats-py would keep it and send it late.

Imports nats-py and the error tree.
"""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable

__all__ = ["Address", "Link", "Message", "Refused"]

OLDEST = (2, 11)
ANSWER_S = 10.0
GRAVE_TTL = "1h"
"""How long the mark of a deletion is kept."""

_WRONG_LAST = (10071, 10164)
_NOT_FOUND = (10014, 10037, 10059)
_NO_JETSTREAM = (10039, 10076)


class Refused(Exception):
    """Something else was last written to the subject than the request expects."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the servers are, and who we are to them."""

    hosts: tuple[str, ...]
    options: Mapping[str, Any] = field(repr=False)
    connect_timeout_s: float


class Message(NamedTuple):
    """What was last written to a subject."""

    sequence: int
    headers: Mapping[str, str]
    value: bytes

    @property
    def deleted(self) -> bool:
        return "KV-Operation" in self.headers


class Link:
    """One connection, to one server at a time."""

    def __init__(self, address: Address, on_reconnect: Callable[[], None] | None = None) -> None:
        self._address = address
        self._on_reconnect = on_reconnect
        self._under_way: set[asyncio.Future[Msg]] = set()
        self._opened = False
        self.client = Client()

    async def open(self) -> None:
        """Connect to any of the servers, within the time for that."""
        where = ", ".join(self._address.hosts)
        trouble: Exception | None = None
        refusal: Exception | None = None

        async def failed(error: Exception) -> None:
            nonlocal trouble, refusal
            trouble = error
            if "authorization" in str(error).lower():
                refusal = error

        async def lost() -> None:
            for request in list(self._under_way):
                request.cancel()

        async def again() -> None:
            if self._on_reconnect is not None:
                self._on_reconnect()

        timeout_s = self._address.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self.client.connect(
                    [f"nats://{host}" for host in self._address.hosts],
                    error_cb=failed,
                    disconnected_cb=lost,
                    reconnected_cb=again,
                    connect_timeout=max(1, round(timeout_s)),
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=0.2,  # type: ignore[arg-type]
                    ping_interval=2,
                    max_outstanding_pings=2,
                    **self._address.options,
                )
        except TimeoutError as error:
            # A server that refuses us hangs up at once: of some attempts only that is seen.
            if refusal is not None:
                raise StoreUnusable(
                    f"NATS at {where} refuses us ({refusal}): correct the user, password or token"
                ) from refusal
            reason = str(trouble or "") or f"no answer within {timeout_s:g} s"
            raise StoreUnavailable(f"NATS at {where} cannot be reached: {reason}") from error
        except (OSError, nats.errors.Error) as error:
            raise StoreUnavailable(f"NATS at {where} cannot be reached: {error}") from error
        self._opened = True
        version = str(self.client.connected_server_version)
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if release < OLDEST:
            raise StoreUnusable(
                f"NATS at {where} is {version}; doyen needs {'.'.join(map(str, OLDEST))} or later"
            )

    @property
    def incarnation(self) -> str:
        """Differs when a server has been started again: it may lack what it had confirmed."""
        return str(self.client._server_info.get("server_id", ""))

    async def ask(self, subject: str, **request: object) -> dict[str, Any]:
        """A request to JetStream's API."""
        body = json.dumps(request).encode() if request else b""
        return self._checked(await self._send(f"$JS.API.{subject}", body))

    async def write(
        self, subject: str, value: bytes, last: int | None, headers: Mapping[str, str] | None = None
    ) -> int:
        """Write to a subject, if `last` is what was last written there (0: nothing)."""
        given = dict(headers or {})
        if last is not None:
            given["Nats-Expected-Last-Subject-Sequence"] = str(last)
        answer = self._checked(await self._send(subject, value, given))
        return int(answer["seq"])

    async def bury(self, subject: str, last: int | None) -> int:
        """Mark a subject as deleted."""
        return await self.write(subject, b"", last, {"KV-Operation": "DEL", "Nats-TTL": GRAVE_TTL})

    async def last(self, stream: str, subject: str) -> Message | None:
        """What was last written to a subject."""
        try:
            answer = await self.ask(f"STREAM.MSG.GET.{stream}", last_by_subj=subject)
        except KeyError:
            return None
        found = answer["message"]
        lines = b64decode(found.get("hdrs", "")).decode().split("\r\n")[1:]
        headers = dict(line.split(": ", 1) for line in lines if ": " in line)
        return Message(int(found["seq"]), headers, b64decode(found.get("data", "")))

    async def close(self) -> None:
        if self._opened and not self.client.is_closed:
            await self.client.close()

    async def _send(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> Msg:
        if not self.client.is_connected:
            raise StoreUnavailable("there is no connection to NATS at the moment")
        request: asyncio.Future[Msg] = asyncio.ensure_future(
            self.client.request(subject, body, timeout=ANSWER_S, headers=headers)
        )
        self._under_way.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise OutcomeUnknown("the connection to NATS was lost") from None
        except nats.errors.NoRespondersError as error:
            raise StoreUnavailable(
                "JetStream does not answer: it is disabled, or has no leader at the moment"
            ) from error
        except (nats.errors.Error, OSError) as error:
            raise OutcomeUnknown(f"NATS did not answer: {error}") from error
        finally:
            self._under_way.discard(request)

    def _checked(self, message: Msg) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(message.data)
        error = answer.get("error")
        if error is None:
            return answer
        code, text = error.get("err_code"), error.get("description", "")
        if code in _WRONG_LAST:
            raise Refused(text)
        if code in _NOT_FOUND:
            raise KeyError(text)
        if code in _NO_JETSTREAM:
            raise StoreUnusable(f"JetStream cannot be used here: {text}; enable it for the account")
        if error.get("code") == 503:
            raise StoreUnavailable(f"JetStream cannot serve now: {text}")
        raise StoreUnusable(f"JetStream refuses: {text} ({code})")
