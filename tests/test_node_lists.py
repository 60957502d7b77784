"""Reads at a node: nothing is read before the node is current."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest

from doyen.quorum.keyspace.commands import EntryExists, Put, decode_result, encode
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.clients import RefusedCreate
from doyen.quorum.node.lists import Lists
from doyen.quorum.protocol.requests import Response, WriteResults
from mutants_nodes import refused_while_behind


class BehindDriver:
    """The driver of a node that has not applied everything yet."""

    def __init__(self) -> None:
        self.current: list[Callable[[], None]] = []

    def when_current(self, call: Callable[[], None]) -> None:
        self.current.append(call)


class Client:
    ending = congested = draining = False

    def __init__(self) -> None:
        self.reads: deque[Any] = deque()
        self.held: deque[bytes] = deque()
        self.received: list[Response] = []
        self.connection, self.send = self, self.received.append


def refusal() -> Any:
    """The answer to a create that was refused because of an entry that this node has an older value
    of."""
    keyspace, driver, client = Keyspace(), BehindDriver(), Client()
    keyspace.apply(encode(Put("k", b"old", 0)))
    lists: Any = Lists(driver, keyspace, lambda task: None, lambda connection: None)  # type: ignore[arg-type]
    lists.read(client, [RefusedCreate(7, "k")])
    keyspace.apply(encode(Put("k", b"new", 1)))
    for call in driver.current:
        call()
    (answer,) = client.received
    assert isinstance(answer, WriteResults)
    return decode_result(answer.results[0])


def test_the_entry_of_a_refused_create_is_read_when_the_node_is_current() -> None:
    refused = refusal()
    assert isinstance(refused, EntryExists)
    assert refused.entry.value == b"new"


def test_the_mutant_that_does_not_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    refused_while_behind(monkeypatch)
    assert refusal().entry.value == b"old"
