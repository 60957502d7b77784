"""Checks after every event what doyen promises about leaders, members, documents and shards.

The oracle sees the store and all processes at once, which no process can:

- of each election and each shard at most one term is valid, and tokens increase;
- no two processes are the same member of a group at once;
- a document (a published list, a plan, a configuration) is replaced only by a later version, and
  never by one with an earlier token;
- before the next version of a configuration is current, the one before it is in the history; and a
  process applies only versions that the store has, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from doyen.errors import BadDocument
from doyen.lab.scenarios.store_world import StoreWorld
from doyen.manage.config import ConfigDocument
from doyen.manage.documents import Versioned
from doyen.manage.members import MemberView
from doyen.model import Entry
from doyen.term import Term, is_valid

K = TypeVar("K", bound=Hashable)


class ManagementOracle:
    """Watches over a scenario from its beginning. Violations are part of the transcript."""

    def __init__(self, world: StoreWorld) -> None:
        self._world = world
        self.violations: list[str] = []
        self._events = 0
        self._terms: list[Term] = []
        self._tokens: dict[str, int] = {}
        self._members: dict[str, MemberView] = {}
        self._documents: dict[str, Versioned] = {}
        self._written: set[tuple[str, int, str]] = set()
        self._applied: dict[tuple[str, str], int] = {}
        world.loop.after_turn = self._look
        world.server.on_put.append(self._put)

    def begins(self, term: Term) -> None:
        """A process begins a term."""
        if term.token <= self._tokens.get(term.election, 0):
            self._object(f"token {term.token} of {term.election} follows a later one")
        self._tokens[term.election] = term.token
        self._terms.append(term)

    def joins(self, process: str, member: MemberView) -> None:
        """A process has become a member."""
        self._members[process] = member

    def applies(self, process: str, config: str, document: ConfigDocument[Any]) -> None:
        """A process applies a version of a configuration."""
        if (config, document.version, document.id) not in self._written:
            self._object(f"{process} applies version {document.version}, which was never stored")
        if document.version != self._applied.get((process, config), document.version - 1) + 1:
            self._object(f"{process} applies version {document.version} out of order")
        self._applied[process, config] = document.version

    def report(self) -> None:
        """Assert, as a fact of the scenario, that nothing was violated."""
        self._world.transcript.fact(
            "after every event there was one leader at most, one holder of each name, and no"
            " document had gone back",
            self._events > 0 and not self.violations,
        )

    def _look(self) -> None:
        self._events += 1
        self._terms = [term for term in self._terms if is_valid(term)]
        for election in _repeated(term.election for term in self._terms):
            self._object(f"{election} has two valid leaders")
        listed = [each for each in self._members.values() if each.incarnation is not None]
        for group, name in _repeated((each.group, each.name) for each in listed):
            self._object(f"{name} in {group} is two processes")

    def _put(self, key: str, value: bytes, entry: Entry | None) -> None:
        if entry is None or "/history/" in key:
            return
        try:
            now = Versioned.decode(entry)
        except BadDocument:
            return  # it is not a document
        before = self._documents.get(key)
        self._documents[key] = now
        if before is not None and (now.version <= before.version or now.token < before.token):
            self._object(
                f"version {now.version} of token {now.token} has replaced version {before.version}"
                f" of token {before.token}"
            )
        config = key.removeprefix("config/").removesuffix("/current")
        if f"config/{config}/current" == key:
            self._written.add((config, now.version, now.id))
            kept = self._world.server.get(f"config/{config}/history/{now.version - 1}")
            if before is not None and (kept is None or kept.value != before.entry.value):
                self._object(f"version {now.version - 1} of {config} is not in the history")

    def _object(self, text: str) -> None:
        if text not in self.violations:
            self.violations.append(text)
            self._world.transcript.record_event(self._world.now, f"the oracle objects: {text}")


def _repeated(items: Iterable[K]) -> list[K]:
    return [item for item, count in Counter(items).items() if count > 1]
