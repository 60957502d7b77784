"""The state of a bucket: what its messages mean. Pure.

    $KV.<bucket>.leases.<id>      a lease; its ttl. Written once, deleted when the lease has ended
    $KV.<bucket>.entries.<key>    an entry; headers name its lease and the sequence of its creation

An entry is void if its lease is absent. A lease is written before anything is bound to it, and its
id is never used again. Hence an entry without its lease stays void in whatever order the messages
arrive.

Any program may write to a bucket. A message that doyen cannot have written raises `DamagedMessage`
and changes nothing, with one exception: a lease whose value is damaged still exists. If it counted
as absent, a new client would consider the record of a live leader void.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

from doyen.model import Entry
from doyen.stores.nats.jetstream import StoredMessage

LEASE = "Doyen-Lease"
CREATED = "Doyen-Created"
_MARKERS = 10_000
_TICKET = re.compile(r"(-?\d+)-[0-9a-f]{32}")


def subject_of(bucket: str, kind: str, key: str) -> str:
    """
    >>> subject_of("doyen", "entries", "elections/a.b/leader")
    '$KV.doyen.entries.elections.a%2Eb.leader'
    """
    segments = (quote(segment, safe="").replace(".", "%2E") for segment in key.split("/"))
    return f"$KV.{bucket}.{kind}.{'.'.join(segments)}"


def key_of(bucket: str, subject: str) -> tuple[str, str]:
    """The kind and the key of a subject. Only one of all the spellings of a key is accepted."""
    kind, _, rest = subject.removeprefix(f"$KV.{bucket}.").partition(".")
    key = "/".join(unquote(token) for token in rest.split("."))
    if kind not in ("leases", "entries") or subject != subject_of(bucket, kind, key):
        raise DamagedMessage("the subject is not one of doyen's")
    return kind, key


class DamagedMessage(ValueError):
    """A message that doyen cannot have written."""


@dataclass(slots=True)
class BucketView:
    """Entries, leases and delete markers after some message of the stream."""

    entries: dict[str, Entry] = field(default_factory=dict)
    leases: dict[str, float | None] = field(default_factory=dict)
    """The ttl of each lease; None if the value of the lease is damaged."""
    bound: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The keys that are bound to each lease."""
    markers: dict[str, int] = field(default_factory=dict)
    """For keys without an entry: the sequence of the delete marker or void record there."""
    ended: dict[str, int] = field(default_factory=dict)
    """The sequence at which a lease ended, of the leases that ended last."""

    def apply(self, kind: str, key: str, message: StoredMessage) -> set[str]:
        """Apply the next message, and return the keys of the entries that it changes."""
        if kind == "leases":
            return self._apply_lease(key, message)
        before = self.entries.pop(key, None)
        if before is not None and before.lease is not None:
            self.bound[before.lease].discard(key)
        lease = message.headers.get(LEASE)
        if message.deleted or (lease is not None and lease not in self.leases):
            self._mark_deleted(key, message.sequence)
        else:
            self.markers.pop(key, None)
            created = _created(message)
            self.entries[key] = Entry(key, message.value, created, message.sequence, lease)
            if lease is not None:
                self.bound[lease].add(key)
        return {key}

    def _apply_lease(self, lease: str, message: StoredMessage) -> set[str]:
        if not message.deleted:
            self.leases[lease] = None
            try:
                ttl_s = float(message.value)
            except ValueError:
                ttl_s = math.nan
            if not 0 < ttl_s < math.inf:
                raise DamagedMessage(f"{message.value[:40]!r} is not the ttl of a lease")
            self.leases[lease] = ttl_s
            return set()
        self.leases.pop(lease, None)
        _put_bounded(self.ended, lease, message.sequence)
        void = self.bound.pop(lease, set())
        for key in void:
            self._mark_deleted(key, int(str(self.entries.pop(key).version)))
        return void

    def under(self, prefix: str) -> list[Entry]:
        """The entries whose keys begin with `prefix` and a `/`; tickets in order."""
        entries = [entry for key, entry in self.entries.items() if key.startswith(f"{prefix}/")]
        return sorted(entries, key=lambda entry: (-_rank(entry.key), entry.revision))

    def correct_marker(self, key: str, expected: int, found: StoredMessage | None) -> None:
        """Correct the marker of a key after a write that expected the sequence `expected` was
        refused. `found` is the last message of the key's subject, and this view has applied it.

        Markers become wrong because the server drops them after a while and this view keeps a
        limited number. A live record is never taken for a marker: it is among the entries.
        """
        if key in self.entries:
            return
        if found is None:
            if self.markers.get(key) == expected:
                del self.markers[key]
        elif found.deleted or (LEASE in found.headers and found.headers[LEASE] not in self.leases):
            self._mark_deleted(key, found.sequence)

    def _mark_deleted(self, key: str, sequence: int) -> None:
        _put_bounded(self.markers, key, sequence)


def _created(message: StoredMessage) -> int:
    """The revision of an entry: the sequence of its creation."""
    text = message.headers.get(CREATED, "")
    return int(text) if text.isdecimal() else message.sequence


def _rank(key: str) -> int:
    ticket = _TICKET.fullmatch(key.rpartition("/")[2])
    return int(ticket[1]) if ticket else 0


def _put_bounded(sequences: dict[str, int], key: str, sequence: int) -> None:
    sequences[key] = sequence
    if len(sequences) > _MARKERS:
        del sequences[next(iter(sequences))]
