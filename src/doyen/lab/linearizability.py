"""Checks whether what clients saw could come from one register per key, one request at a time.

There are two ways. The log is a *witness*: it gives an order in which every answer must be right,
and in which no request may precede one that had ended when it began. This check is cheap, and a
positive result is final. After a negative one there may still be another order: then a search per
key (Wing and Gong's, with Lowe's memory of visited states) decides.

Every request swaps or reads: the answer to a write is the value that it replaced, so writes
constrain one another too. All values written in a history are different.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

import msgspec


@dataclass(slots=True, eq=False, repr=False)
class Operation:
    """One request of a client, from its first sending to its answer."""

    client: int
    seq: int
    key: int
    value: int | None
    """What it writes; None if it reads."""
    began: int
    ended: float = inf
    """Infinite if it was never answered: it may have been executed, or may be later."""
    result: int | None = None
    """The value before."""
    position: float = inf
    """Its position in the log, if known. A read comes right after what had been applied."""

    def __repr__(self) -> str:
        what = f"reads k{self.key}" if self.value is None else f"sets k{self.key} to {self.value}"
        answer = f", answered {self.result}" if self.ended < inf else ", unanswered"
        return f"client {self.client} {what}{answer}"


_encode = msgspec.msgpack.Encoder().encode
decode_swap = msgspec.msgpack.Decoder(tuple[int, int, int, int]).decode
"""The client, the request's number, the key and the value of a write."""


def encode_swap(operation: Operation) -> bytes:
    return _encode((operation.client, operation.seq, operation.key, operation.value))


def witnessed(history: Iterable[Operation]) -> Operation | None:
    """The first request that the order of the log does not explain, or None."""
    values: dict[int, int | None] = {}
    known = [op for op in history if op.position < inf]
    known.sort(key=lambda op: (op.position, op.value is None, op.began))
    latest_began = -1
    for op in known:
        if op.ended < latest_began:
            return op
        latest_began = max(latest_began, op.began)
        if op.ended < inf and op.result != values.get(op.key):
            return op
        if op.value is not None:
            values[op.key] = op.value
    return None


def linearizable(history: Iterable[Operation]) -> list[Operation] | None:
    """None if some order explains the history, else the requests of a key that has no order."""
    by_key: defaultdict[int, list[Operation]] = defaultdict(list)
    for op in history:
        if op.ended < inf or op.value is not None:
            by_key[op.key].append(op)
    for key in sorted(by_key):
        if not _explained(by_key[key]):
            return by_key[key]
    return None


def _explained(ops: Sequence[Operation]) -> bool:
    """Search depth first: take any request that began before every remaining one had ended, if the
    register gives its answer; skip sets of requests that were tried with the same value."""
    order = sorted(ops, key=lambda op: op.began)
    done = 0
    needed = sum(1 << at for at, op in enumerate(order) if op.ended < inf)
    value: int | None = None
    tried = {(done, value)}
    trail: list[tuple[int, int | None, int]] = []
    at = _next(order, done, -1, value)
    while done & needed != needed:
        if at is None:
            if not trail:
                return False
            done, value, at = trail.pop()
            at = _next(order, done, at, value)
            continue
        op = order[at]
        after = done | 1 << at
        left = value if op.value is None else op.value
        if (after, left) in tried:
            at = _next(order, done, at, value)
            continue
        tried.add((after, left))
        trail.append((done, value, at))
        done, value = after, left
        at = _next(order, done, -1, value)
    return True


def _next(order: Sequence[Operation], done: int, after: int, value: int | None) -> int | None:
    """The next request after `after` that may come first of those that remain."""
    bound = inf
    for at, op in enumerate(order):
        if done >> at & 1:
            continue
        if op.began > bound:
            return None
        bound = min(bound, op.ended)
        if at > after and (op.ended == inf or op.result == value):
            return at
    return None
