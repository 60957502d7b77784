"""Requests that carry a fencing token: what a service does with them.

A request that changes something must carry the token of the leader that sends it, in the header
`fencing-token`. The service keeps the highest token seen (`SeenTokens`) and refuses lower ones.

Comparing when a request arrives is not enough: a handler that was admitted with token 6 may still
be about to write when a request with token 7 comes. So requests of different tokens take turns
within the process. Once one with a later token has come, those with earlier ones are refused, and
it begins when the last of them has ended. Requests that only read are not waited for.

`FencedRequests` decides; `doyen.fencing.asgi` and `doyen.fencing.wsgi` are the middleware. May
import errors only.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from doyen.errors import ConfigError
from doyen.fencing.seen import SeenTokens
from doyen.fencing.tokens import HasToken, stale, token_of

__all__ = ["HEADER", "FencedRequests", "NotExecuted", "Turns", "token_headers"]

HEADER = "fencing-token"
SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
"""Methods that change nothing."""
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


def token_headers(token: int | HasToken) -> dict[str, str]:
    """The headers of a request that is sent under a token.

    >>> token_headers(42)
    {'fencing-token': '42'}
    """
    return {HEADER: str(token_of(token))}


class NotExecuted(NamedTuple):
    """The answer to a request that is not executed."""

    status: int
    why: str
    highest: int | None = None
    """The highest token seen, if the one of the request is lower."""

    @property
    def headers(self) -> list[tuple[str, str]]:
        if self.highest is not None:
            return [(HEADER, str(self.highest))]
        return [("retry-after", "1")] if self.status == 503 else []

    @property
    def body(self) -> bytes:
        return f"not executed: {self.why}\n".encode()


class Fenced(NamedTuple):
    """A request with a token, and the resource that it concerns."""

    resource: str
    token: int
    writes: bool

    def stale(self, highest: int) -> NotExecuted:
        """The answer if `highest` has been seen."""
        return NotExecuted(412, str(stale(self.resource, self.token, highest)), highest)


@dataclass(frozen=True, slots=True, kw_only=True)
class FencedRequests:
    """The settings of the middleware, and the decisions that follow from them."""

    tokens: SeenTokens
    """Where the highest token of each resource is kept."""
    resource: str | Callable[[str, str], str | None]
    """The name of what the service protects, or a function of method and path that returns it; None
    for requests that need no token. Each resource belongs to one election."""
    drain_s: float = 10.0
    """How long a request waits for those with earlier tokens that are being executed."""

    def __post_init__(self) -> None:
        if not self.drain_s >= 0:
            raise ConfigError(f"drain_s must be 0 or more; got {self.drain_s!r}")
        if not callable(getattr(self.tokens, "see", None)):
            raise ConfigError(
                "tokens must have a method `see`, as MemoryTokens, FileTokens and SQLTokens do"
            )

    def concerns(self, method: str, path: str) -> str | None:
        """The resource of a request, or None if it needs no token."""
        return self.resource if isinstance(self.resource, str) else self.resource(method, path)

    def read(self, method: str, path: str, values: list[str]) -> Fenced | NotExecuted | None:
        """What a request with these values of the header is. None: it needs no token."""
        resource = self.concerns(method, path)
        if resource is None or (not values and method in SAFE):
            return None
        if not values:
            return NotExecuted(
                428,
                f"{method} requests to {resource!r} need the token of the leader's term in the"
                f" header {HEADER}",
            )
        if len(values) > 1 or not _NUMBER.fullmatch(values[0]) or int(values[0]) >= 2**63:
            return NotExecuted(
                400, f"the header {HEADER} must be one integer from 0 to 2**63 - 1, in digits"
            )
        return Fenced(resource, int(values[0]), method not in SAFE)

    def too_long(self, request: Fenced) -> NotExecuted:
        """The answer if the requests with earlier tokens do not end."""
        return NotExecuted(
            503,
            f"requests to {request.resource!r} with earlier tokens have not ended within"
            f" {self.drain_s:g} s",
        )


@dataclass(slots=True)
class _Turn:
    """The requests to one resource, and how many with each token are writing."""

    highest: int
    under_way: Counter[int] = field(default_factory=Counter)
    asking: int = 0
    """Requests that have arrived and not left."""


class Turns:
    """The requests that are being executed: those that write to one resource all have the same
    token. Any thread.

    A request arrives before its token is compared with the highest that was seen, and leaves when
    it has ended or was refused. While there are requests, the highest token of those that entered
    is known here. So one whose token was compared before a later one came is refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns: dict[str, _Turn] = {}
        self._waiters: set[Callable[[], None]] = set()

    def arrive(self, request: Fenced) -> None:
        """The token of the request is about to be compared. Pair with `leave`."""
        with self._lock:
            self._turns.setdefault(request.resource, _Turn(request.token)).asking += 1

    def enter(self, request: Fenced) -> bool | NotExecuted:
        """Begin the request; False if it has to wait for requests with earlier tokens. From then on
        requests with earlier tokens are refused."""
        with self._lock:
            turn = self._turns[request.resource]
            if turn.highest > request.token:
                return request.stale(turn.highest)
            turn.highest = request.token
            if any(token < request.token for token in turn.under_way):
                return False
            if request.writes:
                turn.under_way[request.token] += 1
            return True

    def leave(self, request: Fenced, *, entered: bool = True) -> None:
        """The request has ended, or it was refused before it had `entered`."""
        with self._lock:
            turn = self._turns[request.resource]
            turn.asking -= 1
            if not turn.asking:
                del self._turns[request.resource]
            if not (entered and request.writes):
                return
            turn.under_way[request.token] -= 1
            if turn.under_way[request.token]:
                return
            del turn.under_way[request.token]
            waiters, self._waiters = self._waiters, set()
        for wake in waiters:
            wake()

    @contextlib.contextmanager
    def waiting(self, request: Fenced, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called when requests have ended that `request` may have to wait for."""
        with self._lock:
            self._waiters.add(wake)
            turn = self._turns.get(request.resource)
            ended = turn is None or all(token >= request.token for token in turn.under_way)
        if ended:
            wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiters.discard(wake)
