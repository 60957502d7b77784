"""`layout=concurrency`: lines of etcd's Go package `concurrency`, which `etcdctl elect` and
`etcdctl lock` use, and the Election and Lock services of etcd.

    NAME/LEASE                 a candidate: its lease in hexadecimal; the value is its proposal
    /doyen/claims/NAME/LEASE   the claim of a candidate of doyen, written in the same transaction

All keys below `NAME/` are candidates, in the order of their creation, whatever their names: the Go
package counts them all. The proposal of a candidate of doyen is its name, or `proposal` of its
meta. A claim belongs to the candidate that was created at the same revision.
"""

from __future__ import annotations

from builtins import list as list_
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote_to_bytes

from doyen.errors import TicketGone
from doyen.model import Claim, Entry, Finding, Lease, Version
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdCluster
from doyen.stores.etcd.store import EtcdStore, absent, created, unchanged
from doyen.stores.kit.layouts import LineLayout, Place, foreign_claim, plain_claim
from doyen.stores.port import Watch

_CLAIMS = "/doyen/claims"
CLAIMS = f"{_CLAIMS}/".encode()


class ConcurrencyStore(LineLayout, EtcdStore):
    """One client of an etcd cluster, in the layout of the Go package."""

    layout = "concurrency"
    foreign = "candidates of etcdctl and of Go's concurrency package"
    lacks = (
        "their programs have to watch the session themselves, and go on after their lease has"
        " ended if they do not; their resources see no token"
    )
    capabilities = replace(EtcdStore.capabilities, layout="concurrency")

    def __init__(self, cluster: EtcdCluster, *, prefix: str) -> None:
        super().__init__(cluster, prefix=_CLAIMS)
        self._root = f"{prefix}/" if prefix else ""

    async def _join(self, line: str, value: bytes, lease: Lease) -> Entry:
        number = int(lease.id, 16)
        key = f"{line}/{number:x}"
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                compare=[absent(self._at(key))],
                success=self._writes(key, value, number),
                failure=[{"request_range": each} for each in self._ranges(key)],
            ),
        )
        if answer.succeeded:
            revision = answer.header.revision
            return Entry(key, value, revision, revision, lease.id)
        return self._joined(line, answer.responses)[0]

    async def _first(self, line: str) -> Entry | None:
        found = await self._read_one(line, sort_order="ASCEND")
        return found[0] if found else None

    async def _before(self, ticket: Entry) -> Entry | None:
        line = ticket.key.rpartition("/")[0]
        found = await self._read_one(
            line,
            [created(self._at(ticket.key), ticket.revision)],
            sort_order="DESCEND",
            max_create_revision=ticket.revision - 1,
        )
        if found is None:
            raise TicketGone(f"{ticket.key} is no longer in the line")
        return found[0] if found else None

    async def _all(self, line: str) -> list_[Entry]:
        return await self._read_line(line, sort_target="CREATE", sort_order="ASCEND") or []

    async def _ticket(self, key: str) -> Entry | None:
        requests = [{"request_range": each} for each in self._ranges(key)]
        answer = await self._client.call(rpc.TXN, rpc.TxnRequest(success=requests), reads=True)
        found = self._joined(self._place(key).line, answer.responses)
        return found[0] if found else None

    async def _replace(self, ticket: Entry, value: bytes) -> Entry | None:
        if ticket.lease is None:
            return None
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                compare=[unchanged(self._at(ticket.key), ticket.version)],
                success=self._writes(ticket.key, value, int(ticket.lease, 16)),
            ),
        )
        if not answer.succeeded:
            return None
        return ticket._replace(value=value, version=answer.header.revision)

    async def _remove(self, key: str, version: Version | None) -> bool:
        at = self._at(key)
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                compare=[] if version is None else [unchanged(at, version)],
                success=[{"request_delete_range": {"key": each}} for each in (at, CLAIMS + at)],
            ),
        )
        return bool(answer.succeeded and answer.responses[0].response_delete_range.deleted)

    async def _watch(self, place: Place, notify: Callable[[], None]) -> Watch:
        scope = self._root + place.name
        if place.part == "ticket" and "%" not in place.ticket:
            scope = f"{scope}/{place.ticket}"
        return await self._watches.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        return [*await super().diagnose(), self._findings()]

    async def _read_one(
        self, line: str, conditions: Sequence[Any] = (), **options: Any
    ) -> list_[Entry] | None:
        """The first candidate in some order, with its claim; None if a condition does not hold."""
        while True:
            found = await self._read_line(
                line, conditions, limit=1, sort_target="CREATE", **options
            )
            if not found or Claim.decode(found[0].value).attempt:
                return found
            # It is foreign, or the claim that was read belongs to a candidate whose key another
            # process has deleted: such a claim stays until its lease ends.
            ticket = await self._ticket(found[0].key)
            if ticket is not None and ticket.revision == found[0].revision:
                return [ticket]

    async def _read_line(
        self, line: str, conditions: Sequence[Any] = (), **options: Any
    ) -> list_[Entry] | None:
        """Candidates of a line, with their claims; None if a condition does not hold."""
        self._require_usable()
        at = self._at(line)
        ranges = [
            rpc.RangeRequest(key=each + b"/", range_end=each + b"0", **options)
            for each in (at, CLAIMS + at)
        ]
        reads = [{"request_range": each} for each in ranges]
        request = rpc.TxnRequest(compare=conditions, success=reads)
        answer = await self._client.call(rpc.TXN, request, reads=True)
        return self._joined(line, answer.responses) if answer.succeeded else None

    def _ranges(self, key: str) -> list_[Any]:
        at = self._at(key)
        return [rpc.RangeRequest(key=each) for each in (at, CLAIMS + at)]

    def _writes(self, key: str, value: bytes, lease: int) -> list_[Any]:
        claim = plain_claim(value, self.layout)
        proposal = str(claim.meta.get("proposal", claim.name)).encode()
        at = self._at(key)
        return [
            {"request_put": {"key": at, "value": proposal, "lease": lease}},
            {"request_put": {"key": CLAIMS + at, "value": value, "lease": lease}},
        ]

    def _joined(self, line: str, responses: Iterable[Any]) -> list_[Entry]:
        """The candidates of a response, each with its claim."""
        found, claims = (each.response_range.kvs for each in responses)
        own = {each.create_revision: each.value for each in claims}
        begin = len(self._at(line)) + 1
        return [
            Entry(
                f"{line}/{quote(each.key[begin:], safe='')}",
                own.get(each.create_revision) or foreign_claim(each.value or each.key[begin:]),
                each.create_revision,
                each.mod_revision,
                f"{each.lease:016x}" if each.lease else None,
            )
            for each in found
        ]

    def _at(self, key: str) -> bytes:
        """The key in etcd of a line or of a ticket."""
        place = self._place(key)
        line = (self._root + place.name).encode()
        return line + b"/" + unquote_to_bytes(place.ticket) if place.ticket else line
