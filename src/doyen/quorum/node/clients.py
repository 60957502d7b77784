"""One client's connection, as a node that serves it sees it.

`ServedClient` holds what has arrived and is not handled yet, what the client may do, and the
results of its writes, which are sent together once per turn of the event loop, and no faster than
the client takes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct

from doyen.errors import (
    CommandFailed,
    OutcomeUnknown,
    StoreError,
)
from doyen.quorum.keyspace.commands import (
    LargeEntryExists,
    QuotaExceeded,
    decode_result,
    encode,
)
from doyen.quorum.node import roles
from doyen.quorum.node.proposals import Forgotten
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.requests import (
    ANSWER,
    MAX_KEY,
    ErrorCode,
    Failed,
    Response,
    WriteResults,
)

PIECE: Final = 1 << 20
"""About how many bytes of results or of a list go into one frame."""
TEXT: Final = 4 * MAX_KEY
"""The longest explanation of an error that is sent, in characters."""


class RefusedCreate(Struct, frozen=True, gc=False):
    """A create that was refused because of a large entry, which is read when it can be sent."""

    id: int
    key: str


class ServedClient:
    """One connection of a client."""

    __slots__ = (
        *("_drain", "_loop", "_read", "_results", "_results_bytes", "_results_ids", "allowed"),
        *("backlog", "backlog_bytes", "connection", "draining", "held", "lists", "looks", "name"),
        *("named", "paused", "reads", "role", "watches"),
    )

    def __init__(
        self,
        connection: FrameConnection,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[ServedClient, list[Any]], None],
        drain: Callable[[ServedClient], None],
    ) -> None:
        """`read` answers reads when this node is current, `drain` goes on with the client when it
        has taken earlier answers."""
        self._read = read
        self._drain = drain
        self.connection = connection
        self.role = connection.granted
        self.allowed = roles.allowed(self.role)
        self.name = ""
        """The name under which it numbers its writes."""
        self.named: deque[float] = deque()
        """When it has taken its latest names, on the loop's clock."""
        self.backlog: deque[tuple[int, bytes]] = deque()
        """Frames that have arrived and are not handled yet."""
        self.backlog_bytes = 0
        self.paused = False
        """Whether nothing is read from the connection, because the backlog is long."""
        self.reads: deque[Any] = deque()
        """Reads that can be answered as soon as the client has taken earlier answers."""
        self.held: deque[bytes] = deque()
        """Encoded results that are sent when the client has taken earlier answers."""
        self.draining = False
        """Whether the client has to take earlier answers first."""
        self.lists = 0
        """Long lists that are being sent."""
        self.looks = 0
        """Requests for what is left of leases that are under way."""
        self.watches: dict[int, str] = {}
        """Scopes of its watches, by id."""
        self._loop = loop
        self._results_ids: list[int] = []
        self._results: list[bytes] = []
        self._results_bytes = 0

    def send(self, answer: Response) -> None:
        """Send an answer, after the results that wait."""
        if self._results_ids:
            self._send_results()
        self._send(encode(answer))

    def settle(self, request: int, result: Any, error: BaseException | None) -> None:
        """Send the outcome of a write, together with others of this turn of the loop."""
        if error is not None:
            self.fail(request, error_code(error), str(error))
            return
        if result.startswith(_SPECIAL):
            special = decode_result(result)
            if isinstance(special, LargeEntryExists):
                self._read(self, [RefusedCreate(request, special.key)])
            else:
                assert isinstance(special, QuotaExceeded)
                self.fail(request, ErrorCode.UNAVAILABLE, _beyond_quota(special))
            return
        ids = self._results_ids
        if not ids:
            self._loop.call_soon(self._send_results)
        ids.append(request)
        self._results.append(result)
        self._results_bytes += len(result)
        if self._results_bytes > PIECE:
            self._send_results()

    def settle_all(self, requests: Sequence[int], results: Sequence[bytes]) -> None:
        """`settle`, for writes that were all carried out."""
        size = self._results_bytes + sum(map(len, results))
        if size > PIECE or not _SPECIAL_TAGS.isdisjoint(map(_tag, results)):
            for request, result in zip(requests, results, strict=True):
                self.settle(request, result, None)
            return
        if not self._results_ids:
            self._loop.call_soon(self._send_results)
        self._results_ids += requests
        self._results += results
        self._results_bytes = size

    def _send_results(self) -> None:
        if self._results_ids:
            data = encode(WriteResults(self._results_ids, self._results))
            self._results_ids, self._results, self._results_bytes = [], [], 0
            if self.draining or self.connection.congested:
                self.held.append(data)
                self._drain(self)
            else:
                self._send(data)

    def send_held(self) -> None:
        """Send the first of the results that were held."""
        self._send(self.held.popleft())

    def _send(self, data: bytes) -> None:
        connection = self.connection
        if not connection.send(ANSWER, data) and not connection.closed:
            self._overflow()

    def _overflow(self) -> None:
        self.connection.fail(CloseReason.OVERFLOW, "does not read its answers")

    def fail(self, request: int, code: ErrorCode, text: str) -> None:
        """The text is cut, since it may quote what the client sent."""
        self.send(Failed(request, code, text[:TEXT]))


def error_code(error: BaseException) -> ErrorCode:
    """How an error of a proposal or of the node is reported to a client."""
    if isinstance(error, Forgotten):
        return ErrorCode.FORGOTTEN
    if isinstance(error, OutcomeUnknown):
        return ErrorCode.UNKNOWN
    if isinstance(error, StoreError):
        return ErrorCode.UNAVAILABLE
    return ErrorCode.UNUSABLE if isinstance(error, CommandFailed) else ErrorCode.UNKNOWN


_SPECIAL = encode(QuotaExceeded(0, 0))[:2], encode(LargeEntryExists(""))[:2]
"""How the encoded results begin that are not sent as they are."""
_tag = itemgetter(1)
_SPECIAL_TAGS = frozenset(map(_tag, _SPECIAL))


def _beyond_quota(full: QuotaExceeded) -> str:
    return (
        f"the keyspace is full: {full.bytes} of {full.quota} bytes are in use, and this needs more"
        " than is left of that quota. Delete entries or end leases, or restart every node with a"
        " larger --quota-bytes"
    )
