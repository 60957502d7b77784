"""The keyspace against the memory store as a model, and its snapshots at every step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from threading import Thread
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from doyen.errors import LeaseGone, TicketGone
from doyen.lease.clock import VirtualClock
from doyen.model import Entry
from doyen.quorum.keyspace import history as histories
from doyen.quorum.keyspace import state
from doyen.quorum.keyspace.commands import (
    AdvanceRevision,
    BeginEra,
    ConditionFailed,
    Create,
    Delete,
    Done,
    Enqueue,
    EntryExists,
    EtcdApply,
    Expire,
    Grant,
    KeyspaceCommand,
    LeaseGranted,
    LeaseNotFound,
    MalformedCommand,
    Put,
    QuotaExceeded,
    RaiseVersion,
    RemoveEndedKeys,
    Result,
    Revoke,
    SetQuota,
    StoredEntry,
    TicketIssued,
    Update,
    Written,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.etcd_requests import PutKey
from doyen.quorum.keyspace.history import Change, ChangeKind, History
from doyen.quorum.keyspace.sorted_map import APART, FULL
from doyen.quorum.keyspace.state import Keyspace, UnknownCommand
from doyen.quorum.keyspace.versions import FIRST, NEWEST, UPDATES
from doyen.stores.memory import MemoryServer

KEYS = ["a", "a/b", "a0", "line/5", "line/5/deep"]
LINES = ["line", "a/line", "a"]
places = st.integers(0, 12)


def do(keyspace: Keyspace, command: KeyspaceCommand) -> Any:
    return decode_result(keyspace.apply(encode(command)))


class Same(RuleBasedStateMachine):
    """The keyspace behaves as the memory store does, except for the numbers; and a keyspace
    restored from a snapshot behaves exactly as the original."""

    version = 1

    slice_keys: int | None = None

    def new(self) -> Keyspace:
        return Keyspace(self.version, slice_keys=self.slice_keys)

    @initialize()
    def begin(self) -> None:
        self.model = MemoryServer(VirtualClock())
        self.real, self.twin = self.new(), self.new()
        self.leases: list[tuple[str, int]] = []
        self.keys: dict[str, str] = {key: key for key in KEYS}
        """Entries by their keys in the model; tickets have other keys in the keyspace."""
        self.pairs: dict[int, int] = {0: 0}
        """Numbers of the model, and the corresponding ones of the keyspace."""
        self.old: list[tuple[Iterator[bytes], list[bytes]]] = []

    def do(self, command: KeyspaceCommand) -> Result:
        result = do(self.real, command)
        assert do(self.twin, command) == result
        return result  # type: ignore[no-any-return]

    def same(self, entry: Entry | None, record: StoredEntry | None) -> None:
        assert (entry is None) == (record is None)
        if entry is None or record is None:
            return
        self.keys.setdefault(entry.key, record.key)
        assert self.keys[entry.key] == record.key
        assert entry.value == record.value
        leases = dict(self.leases)
        assert (leases[entry.lease] if entry.lease else 0) == record.lease
        assert isinstance(entry.version, int)
        for theirs, ours in ((entry.revision, record.revision), (entry.version, record.version)):
            assert self.pairs.setdefault(theirs, ours) == ours

    def lease(self, place: int) -> tuple[str, int]:
        return self.leases[place % len(self.leases)] if self.leases else ("none", 10**9)

    def key(self, place: int) -> tuple[str, str]:
        known = list(self.keys.items())
        return known[place % len(known)]

    @rule(ttl_s=st.floats(0.1, 100))
    def grant(self, ttl_s: float) -> None:
        granted = self.do(Grant(ttl_s))
        assert isinstance(granted, LeaseGranted)
        self.leases.append((self.model.grant(ttl_s).id, granted.lease))

    @rule(place=places, expire=st.booleans())
    def end(self, place: int, expire: bool) -> None:
        theirs, ours = self.lease(place)
        self.model.revoke(theirs)
        command = Expire(self.real.era, (ours, 10**9)) if expire else Revoke(ours)
        assert self.do(command) == Done()

    @rule(era=st.integers(0, 5), place=places)
    def change_leaders(self, era: int, place: int) -> None:
        before = self.real.era
        assert self.do(BeginEra(era)) == (Done() if era > before else ConditionFailed())
        assert self.do(Expire(self.real.era - 1, (self.lease(place)[1],))) == ConditionFailed()

    @rule(place=places, at=places, value=st.binary(max_size=2))
    def create(self, place: int, at: int, value: bytes) -> None:
        (theirs, ours), (key, our_key) = self.lease(place), self.key(at)
        result = self.do(Create(our_key, value, ours))
        try:
            won, entry = self.model.create(key, value, theirs)
        except LeaseGone:
            assert result == LeaseNotFound()
            return
        assert isinstance(result, Written if won else EntryExists)
        self.same(entry, self.real.get(our_key))
        if isinstance(result, EntryExists):
            assert result.entry == self.real.get(our_key)

    @rule(at=places, value=st.binary(max_size=2), stale=st.booleans())
    def put(self, at: int, value: bytes, stale: bool) -> None:
        key, our_key = self.key(at)
        standing = self.model.get(key)
        version = standing.version if standing and not stale else None
        assert version is None or isinstance(version, int)
        entry = self.model.put(key, value, version)
        result = self.do(Put(our_key, value, self.pairs[version or 0]))
        assert isinstance(result, ConditionFailed if entry is None else Written)
        self.same(self.model.get(key), self.real.get(our_key))

    @rule(at=places, value=st.binary(max_size=2), off=st.sampled_from([0, 0, 1]))
    def update(self, at: int, value: bytes, off: int) -> None:
        key, our_key = self.key(at)
        standing = self.model.get(key)
        version = standing.version if standing else 0
        assert isinstance(version, int)
        result = self.do(Update(our_key, value, self.pairs[version] + off))
        if self.version < UPDATES:
            assert isinstance(result, MalformedCommand)
        elif standing is None or off or (entry := self.model.update(standing, value)) is None:
            assert result == ConditionFailed()
        else:
            assert isinstance(result, Written)
            assert isinstance(entry.version, int)
        self.same(self.model.get(key), self.real.get(our_key))

    @rule(at=places, value=st.binary(max_size=2))
    def put_under(self, at: int, value: bytes) -> None:
        key, our_key = self.key(at)
        if key.count("/") < 4:
            entry = self.model.put(f"{key}/s", value, None)
            result = self.do(Put(f"{our_key}/s", value, 0))
            assert isinstance(result, ConditionFailed if entry is None else Written)
            self.same(self.model.get(f"{key}/s"), self.real.get(f"{our_key}/s"))

    @rule(at=places, named=st.booleans(), off=st.sampled_from([0, 0, 1]))
    def delete(self, at: int, named: bool, off: int) -> None:
        key, our_key = self.key(at)
        standing = self.model.get(key)
        version = standing.version if standing and named else None
        assert version is None or isinstance(version, int)
        ours = self.pairs[version] + off if version else 0
        if off and version:
            assert self.do(Delete(our_key, ours)) == ConditionFailed()
            return
        deleted = self.model.delete(key, version)
        assert self.do(Delete(our_key, ours)) == (Done() if deleted else ConditionFailed())

    @rule(
        place=places,
        line=st.sampled_from(LINES),
        value=st.binary(max_size=2),
        rank=st.sampled_from([0, 0, 1, -1, 2**63 - 1, 1 - 2**63]),
    )
    def enqueue(self, place: int, line: str, value: bytes, rank: int) -> None:
        theirs, ours = self.lease(place)
        result = self.do(Enqueue(line, value, ours, rank))
        try:
            entry = self.model.enqueue(line, value, theirs, rank)
        except LeaseGone:
            assert result == LeaseNotFound()
            return
        assert isinstance(result, TicketIssued)
        self.same(entry, self.real.get(result.key))

    @rule(floor=st.integers(0, 300))
    def advance(self, floor: int) -> None:
        assert self.do(AdvanceRevision(floor)) == Done()
        assert self.real.revision >= floor

    @rule(piece=st.binary(max_size=6))
    def garbage(self, piece: bytes) -> None:
        before = list(self.real.snapshot())
        if self.version == 1:
            result = decode_result(self.real.apply(b"\xc1" + piece))
            assert isinstance(result, MalformedCommand)
        else:
            with pytest.raises(UnknownCommand):
                self.real.apply(b"\xc1" + piece)
        assert list(self.real.snapshot()) == before

    @rule()
    def reap(self) -> None:
        assert self.do(RemoveEndedKeys()) == Done()

    @rule()
    def begin_a_snapshot(self) -> None:
        self.old.append((self.real.snapshot(), list(self.real.snapshot())))

    @rule()
    def finish_a_snapshot(self) -> None:
        if self.old:
            lazy, eager = self.old.pop(0)
            assert list(lazy) == eager

    @invariant()
    def reads_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        for prefix in ("a", "a/b", "line", "line/5", "a/line", "b"):
            entries, records = self.model.list(prefix), [*self.real.list(prefix)]
            assert len(entries) == len(records)
            for entry, record in zip(entries, records, strict=True):
                self.same(entry, record)
            self.same(self.model.head(prefix), self.real.head(prefix))
        for key, our_key in self.keys.items():
            found = self.real.get(our_key)
            self.same(self.model.get(key), found)
            try:
                before = self.model.ahead(key)
            except TicketGone:
                assert found is None
                continue
            assert found is not None
            self.same(before, self.real.ahead(found))

    @invariant()
    def numbers_keep_their_order(self) -> None:
        if hasattr(self, "pairs"):
            ours = [self.pairs[theirs] for theirs in sorted(self.pairs)]
            assert ours == sorted(set(ours))

    @invariant()
    def a_restored_twin_is_the_same(self) -> None:
        if hasattr(self, "real"):
            pieces = list(self.real.snapshot())
            assert list(self.twin.snapshot()) == pieces
            self.twin = self.new()
            self.twin.restore(iter(pieces))
            assert list(self.twin.snapshot()) == pieces
            assert list(self.twin.leases()) == list(self.real.leases())

    def teardown(self) -> None:
        for lazy, eager in getattr(self, "old", []):
            assert list(lazy) == eager


class SameInSlices(Same):
    """The same while leases end a key or two at a time."""

    version = UPDATES

    @initialize(size=st.integers(1, 2))
    def begin_with_small_slices(self, size: int) -> None:
        """Called before or after `begin`, and before any command."""
        self.slice_keys = size
        self.real, self.twin = self.new(), self.new()


TestSame = Same.TestCase
TestSameInSlices = SameInSlices.TestCase
TestSame.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestSameInSlices.settings = TestSame.settings


def test_updates_do_not_change_the_order_in_which_keys_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A restored node removes the same keys in a slice as one that has run since the beginning."""
    monkeypatch.setattr(state, "SLICE", 1)
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    versions = {key: do(keyspace, Create(key, b"", lease)).version for key in "abc"}
    updated = do(keyspace, Update("a", b"new", versions["a"]))
    assert (updated.revision, keyspace.get("a")) == (
        versions["a"],
        StoredEntry("a", b"new", versions["a"], updated.version, lease),
    )
    assert do(keyspace, Update("a", b"stale", versions["a"])) == ConditionFailed()
    replica = twin(keyspace)
    for each in (keyspace, replica):
        do(each, Revoke(lease))
        assert do(each, Update("b", b"late", versions["b"])) == ConditionFailed()
        assert do(each, Update("a", b"late", updated.version)) == ConditionFailed()
    for _ in range(4):
        assert [*keyspace.snapshot()] == [*replica.snapshot()]
        do(keyspace, RemoveEndedKeys()), do(replica, RemoveEndedKeys())
    assert len(keyspace) == len(replica) == 0


def twin(keyspace: Keyspace) -> Keyspace:
    restored = Keyspace()
    restored.restore(keyspace.snapshot())
    return restored


def test_a_lease_ends_at_once_and_its_keys_go_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE", 3)
    keyspace = Keyspace()
    lease, other = do(keyspace, Grant(1.0)).lease, do(keyspace, Grant(1.0)).lease
    keys = [do(keyspace, Enqueue("line", b"", lease, 0)).key for _ in range(7)]
    mine = do(keyspace, Enqueue("line", b"", other, 0)).key
    do(keyspace, Create("leader", b"", lease))
    before = keyspace.revision

    assert do(keyspace, Revoke(lease)) == Done()
    assert (len(keyspace), keyspace.ended) == (6, 1)
    assert keyspace.lease(lease) is None
    standing = keyspace.get(mine)
    assert standing is not None
    assert [*keyspace.list("line")] == [standing]
    assert keyspace.head("line") == standing
    assert keyspace.ahead(standing) is None
    for key in (*keys, "leader"):
        assert keyspace.get(key) is None
        assert do(keyspace, Delete(key, 0)) == ConditionFailed()
    again = do(keyspace, Create("leader", b"new", other))
    assert isinstance(again, Written), "what is ended stands in nobody's way"

    replica = twin(keyspace)
    for left in (3, 2, 2):
        assert do(keyspace, RemoveEndedKeys()) == do(replica, RemoveEndedKeys()) == Done()
        assert [*keyspace.snapshot()] == [*replica.snapshot()]
        assert len(keyspace) == left
    assert keyspace.ended == 0
    leader = keyspace.get("leader")
    assert leader is not None
    assert leader.value == b"new", "a slice removes by key and lease"
    last = keyspace.revision
    do(keyspace, RemoveEndedKeys())
    assert keyspace.revision == last

    changes = keyspace.history.after(before)
    assert changes is not None
    ends = [change for change in changes if change.kind is ChangeKind.END]
    assert [change.key for change in ends] == keys, "in the order in which they were bound"
    assert {change.lease for change in ends} == {lease}
    revisions = [change.revision for change in ends]
    assert [revisions.count(each) for each in sorted({*revisions})] == [3, 3, 1]


def test_ends_of_many_leases_share_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE", 5)
    keyspace = Keyspace()
    do(keyspace, BeginEra(1))
    leases = tuple(do(keyspace, Grant(1.0)).lease for _ in range(4))
    for lease in leases:
        for number in range(2):
            do(keyspace, Create(f"{lease}/{number}", b"", lease))
    do(keyspace, Expire(1, leases))
    assert (len(keyspace), keyspace.ended, keyspace.lease_count) == (3, 2, 0)
    replica = twin(keyspace)
    do(keyspace, RemoveEndedKeys())
    do(replica, RemoveEndedKeys())
    assert (len(keyspace), keyspace.ended) == (0, 0)
    assert [*keyspace.snapshot()] == [*replica.snapshot()]


def test_in_the_first_version_a_lease_ends_whole_and_snapshots_are_as_they_were() -> None:
    """Members of the first release compute the same from the same log, and can read these
    snapshots."""
    keyspace = Keyspace(FIRST)
    lease = do(keyspace, Grant(1.5)).lease
    for number in range(state.SLICE + 1):
        do(keyspace, Create(f"k{number}", b"", lease))
    do(keyspace, Put("p", b"v", 0))
    do(keyspace, Revoke(lease))
    assert (len(keyspace), keyspace.revision, keyspace.ended) == (1, state.SLICE + 4, 0)
    pieces = [msgspec.msgpack.decode(piece) for piece in keyspace.snapshot()]
    revision = state.SLICE + 3
    assert pieces == [[0, 1, revision + 1, 0], [2, [["p", b"v", revision, revision, 0, False]]]]


def test_a_raised_version_is_never_lowered_and_begins_a_history_that_all_nodes_have() -> None:
    keyspace = Keyspace(FIRST)
    do(keyspace, Put("a", b"", 0))
    replica = twin(keyspace)
    for each in (keyspace, replica):
        assert do(each, RaiseVersion(2)) == Done()
        assert do(each, RaiseVersion(2)) == do(each, RaiseVersion(1)) == ConditionFailed()
        do(each, Put("b", b"", 0))
    assert [*keyspace.snapshot()] == [*replica.snapshot()]
    assert keyspace.history.after(0) is None
    restored = twin(keyspace)
    assert restored.version == 2
    assert restored.history.after(1) == [Change(2, "b", ChangeKind.PUT)]
    assert restored.history.after(0) is None


def test_what_a_later_release_may_put_into_the_log_ends_the_node() -> None:
    keyspace = Keyspace()
    before = [*keyspace.snapshot()]
    for unknown in (
        encode([99, "new"]),
        encode(RaiseVersion(NEWEST + 1)),
        encode([10, 2, "a new field"]),
    ):
        with pytest.raises(UnknownCommand, match="install the release"):
            keyspace.apply(unknown)
    assert [*keyspace.snapshot()] == before
    later = msgspec.msgpack.decode(before[0])
    for place, value in ((1, 3), (4, NEWEST + 1)):
        head = [*later]
        head[place] = value
        with pytest.raises(UnknownCommand, match="install the release"):
            keyspace.restore([encode(head)])


def test_beyond_the_quota_only_what_makes_room_is_carried_out() -> None:
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    do(keyspace, Create("mine", b"x" * 100, lease))
    kept = do(keyspace, Put("kept", b"x" * 100, 0)).version
    assert do(keyspace, SetQuota(keyspace.bytes + 200)) == Done()
    assert isinstance(do(keyspace, Put("fits", b"x" * 60, 0)), Written)
    assert not keyspace.alarm
    size, revision = keyspace.bytes, keyspace.revision
    full = QuotaExceeded(size, keyspace.quota)
    assert do(keyspace, Create("more", b"", lease)) == full
    assert do(keyspace, Put("more", b"", 0)) == full
    assert do(keyspace, Put("kept", b"x" * 200, kept)) == full
    assert do(keyspace, Enqueue("line", b"", lease, 0)) == full
    assert do(keyspace, Grant(1.0)) == full
    assert (keyspace.bytes, keyspace.revision, keyspace.alarm) == (size, revision, True)
    assert twin(keyspace).alarm
    assert isinstance(do(keyspace, Put("kept", b"", kept)), Written), "what shrinks is carried out"
    assert do(keyspace, Revoke(lease)) == Done()
    assert not keyspace.alarm
    assert isinstance(do(keyspace, Put("more", b"", 0)), Written)
    assert do(keyspace, Delete("more", 0)) == Done()
    assert twin(keyspace).bytes == keyspace.bytes


def test_a_put_of_a_smaller_value_ends_the_alarm_when_a_tenth_of_the_quota_is_free() -> None:
    keyspace = Keyspace()
    version = do(keyspace, Put("k", b"x" * 900, 0)).version
    do(keyspace, SetQuota(keyspace.bytes))
    tenth = keyspace.quota // 10
    assert isinstance(do(keyspace, Put("more", b"", 0)), QuotaExceeded)
    version = do(keyspace, Put("k", b"x" * (901 - tenth), version)).version
    assert (keyspace.alarm, twin(keyspace).alarm) == (True, True), "less than a tenth is free"
    other = twin(keyspace)
    for each in (keyspace, other):
        assert isinstance(do(each, Put("k", b"x" * (900 - tenth), version)), Written)
        assert not each.alarm
    assert [*keyspace.snapshot()] == [*other.snapshot()]


def test_the_size_is_that_of_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "SLICE", 1)
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    do(keyspace, Create("a", b"1", lease))
    do(keyspace, Create("b", b"22", lease))
    do(keyspace, Revoke(lease))
    do(keyspace, Put("b", b"new", 0))
    assert twin(keyspace).bytes == keyspace.bytes
    do(keyspace, RemoveEndedKeys())
    do(keyspace, Delete("b", 0))
    assert (len(keyspace), keyspace.bytes) == (0, 0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([Put, Put, Put, Update, Create, Delete, Revoke]),
            st.sampled_from("abc"),
            st.integers(0, 60),
            st.sampled_from([0, 0, 0, 1]),
        ),
        max_size=40,
    )
)
@example([(Put, "a", 0, 0)] * 2 + [(Put, "b", 60, 0), (Put, "c", 36, 0), (Put, "a", 60, 0)])
@example([(Put, "a", 60, 0)] * 3 + [(Put, "b", 60, 0), (Put, "c", 60, 0), (Put, "a", 0, 0)])
@example(
    [
        *((Create, "a", 1, 0), (Create, "b", 1, 0), (Update, "a", 2, 0), (Update, "b", 2, 0)),
        *((Revoke, "a", 0, 0), (Put, "b", 3, 0), (Put, "a", 3, 0)),
    ]
)
def test_a_write_means_the_same_wherever_the_value_is_kept_that_it_replaces(
    writes: list[tuple[type[KeyspaceCommand], str, int, int]],
) -> None:
    """One of the keyspaces has all values in their blocks before each command."""
    spaces = Keyspace(slice_keys=1), Keyspace(slice_keys=1)
    lease = 0
    for keyspace in spaces:
        do(keyspace, SetQuota(3 * 128 + 128 + 100))
        lease = do(keyspace, Grant(5.0)).lease
    for kind, key, size, off in writes:
        present = spaces[0]._entries.get(key)  # perhaps of a lease that has ended
        version = (present.version if present else 0) + off
        command: KeyspaceCommand
        if kind is Create:
            command = Create(key, b"." * size, lease)
        elif kind is Delete:
            command = Delete(key, version)
        elif kind is Revoke:
            command = Revoke(lease)
        else:
            assert kind is Put or kind is Update
            command = kind(key, b"." * size, version)
        spaces[0]._entries._settle()
        results = [(keyspace.apply(encode(command)), keyspace.alarm) for keyspace in spaces]
        assert results[0] == results[1]
    first, second = ([*keyspace.snapshot()] for keyspace in spaces)
    assert first == second
    assert spaces[0].bytes == spaces[1].bytes


@pytest.mark.parametrize("size", [100, 10_000])
def test_replaced_values_that_stay_in_memory_are_few_bytes(size: int) -> None:
    """The quota does not count them. Small ones are kept for a while, as many as are kept apart."""
    keyspace, count = Keyspace(), 300

    def put(key: str, value: bytes) -> None:
        found = keyspace.get(key)
        do(keyspace, Put(key, value, found.version if found else 0))
        do(keyspace, EtcdApply(PutKey(key.encode(), value)))

    for number in range(count):
        put(f"k/{number}", bytes(size))
    for number in range(count):
        put(f"k/{number}", b"v")
    for entries in (keyspace._entries, keyspace.etcd._live):
        kept = sum(len(each.value) for _, values in entries._blocks for each in values)
        assert kept == count * (size if size <= APART else 1)
        assert kept <= 2048 * APART
    assert [entry.value for entry in keyspace.list("k")] == [b"v"] * count


def test_a_late_expiry_of_an_earlier_leader_ends_nothing() -> None:
    keyspace = Keyspace()
    do(keyspace, BeginEra(3))
    lease = do(keyspace, Grant(1.0)).lease
    do(keyspace, Create("k", b"v", lease))
    do(keyspace, BeginEra(4))
    assert do(keyspace, Expire(3, (lease,))) == ConditionFailed()
    assert keyspace.get("k") is not None
    assert do(keyspace, Expire(4, (lease,))) == Done()
    assert keyspace.get("k") is None


def test_a_floor_raises_tokens_and_never_lowers_them() -> None:
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    do(keyspace, AdvanceRevision(1000))
    do(keyspace, AdvanceRevision(10))
    assert do(keyspace, Create("k", b"", lease)).revision == 1001


def test_a_rank_of_more_than_64_bits_is_refused() -> None:
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    assert isinstance(do(keyspace, Enqueue("l", b"", lease, 2**63)), MalformedCommand)
    assert keyspace.revision == lease


def test_deeply_nested_lists_in_a_command_are_refused() -> None:
    """Whether a node that skips it exhausts the stack depends on the depth of its own calls."""
    keyspace = Keyspace(FIRST)
    put = b"\x95" + encode(Put("k", b"", 0))[1:]
    for depth in (0, 10, 960, 10_000):
        result = decode_result(keyspace.apply(put + b"\x91" * depth + b"\xc0"))
        assert isinstance(result, MalformedCommand)
    assert keyspace.revision == 0


def test_history_returns_the_changes_since_a_revision() -> None:
    keyspace = Keyspace()
    do(keyspace, Put("a/b/c", b"", 0))
    one = keyspace.revision
    do(keyspace, Put("a/d", b"", 0))
    assert keyspace.history.changed("a", one)
    assert keyspace.history.changed("a/d", one)
    assert not keyspace.history.changed("a/b", one)
    assert not keyspace.history.changed("a/bb", 0)
    assert keyspace.history.changed("a/b/c", 0)
    assert keyspace.history.after(one) == [Change(2, "a/d", ChangeKind.PUT)]
    assert keyspace.history.after(0, "a/b") == [Change(1, "a/b/c", ChangeKind.PUT)]
    two = keyspace.revision
    do(keyspace, Delete("a/b/c", 0))
    assert keyspace.history.changed("a/b", two)
    assert not keyspace.history.changed("a/d", two)


def test_changes_older_than_the_history_count_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MAX_CHANGES", 4)
    keyspace = Keyspace()
    do(keyspace, Put("old", b"", 0))
    since = keyspace.revision
    for number in range(3):
        assert not keyspace.history.changed("quiet", since)
        do(keyspace, Put(f"k/{number}", b"", 0))
    assert not keyspace.history.changed("quiet", since)
    do(keyspace, Put("k/3", b"", 0))
    assert not keyspace.history.changed("quiet", since)
    do(keyspace, Put("k/4", b"", 0))
    assert keyspace.history.changed("quiet", since)
    assert keyspace.history.after(since) is None
    assert not keyspace.history.changed("quiet", keyspace.revision - 3)
    assert keyspace.history.changed("k", keyspace.revision - 1)


def test_what_is_kept_of_the_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by size. Changes that do not fit count as changed; the others are distinguished."""
    monkeypatch.setattr(histories, "MAX_BYTES", 50_000)
    monkeypatch.setattr(histories, "INDEX_BYTES", 20_000)
    history, seen = History(), 0
    for revision in range(1, 1000):
        history.add(Change(revision, f"{revision}/" + "x/" * 50, ChangeKind.PUT))
        if revision % 7 == 0:
            seen += history.changed("quiet", revision - 2)
            assert history.changed(f"{revision}/x", revision - 1)
            assert not history.changed(f"{revision - 1}/x", revision - 1)
            assert history.changed("quiet", 0)
        assert len(history) * 164 <= 50_100
        assert sum(map(len, history._index)) <= 30_000
    assert seen == 0


def test_a_list_shows_one_instant_even_if_read_late() -> None:
    keyspace = Keyspace()
    for number in range(500):
        do(keyspace, Put(f"k/{number:03}", b"then", 0))
    do(keyspace, Put("k", b"beside", 0))
    do(keyspace, Put("k0", b"beside", 0))
    listed = keyspace.list("k")
    first = next(listed)
    for number in range(500):
        do(keyspace, Delete(f"k/{number:03}", 0))
        do(keyspace, Put(f"k/{number:03}x", b"now", 0))
    records = [first, *listed]
    assert [record.key for record in records] == [f"k/{number:03}" for number in range(500)]
    assert {record.value for record in records} == {b"then"}
    assert {record.value for record in keyspace.list("k")} == {b"now"}


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_restored_node_remembers_of_the_history(version: int) -> None:
    """Snapshots of the first version hold no history: everything before them counts as changed."""
    keyspace, other = Keyspace(version), Keyspace()
    do(keyspace, Put("a", b"", 0))
    do(keyspace, Put("b", b"", 0))
    other.restore(keyspace.snapshot())
    assert other.history.changed("a", 1) == (version == 1)
    assert not other.history.changed("a", 2)


def test_malformed_snapshots_are_refused_and_change_nothing() -> None:
    keyspace = Keyspace()
    do(keyspace, Put("a", b"", 0))
    for pieces in ([], [b"\x93\x00\x63\x00\x00"], [b"nonsense"]):
        with pytest.raises(ValueError):  # noqa: PT011
            keyspace.restore(pieces)
    assert keyspace.get("a") is not None


def test_pieces_may_be_taken_on_another_thread_while_commands_go_on() -> None:
    keyspace = Keyspace()
    lease = do(keyspace, Grant(1.0)).lease
    for number in range(20_000):
        keyspace.apply(encode(Create(f"k/{number:06d}", b"old", lease)))
    expected = [record.key for record in keyspace.list("k")]
    pieces: list[bytes] = []
    snapshot = keyspace.snapshot()
    thread = Thread(target=lambda: pieces.extend(snapshot))
    thread.start()
    for number in range(0, 20_000, 3):
        keyspace.apply(encode(Delete(f"k/{number:06d}", 0)))
        keyspace.apply(encode(Put(f"n/{number:06d}", b"new", 0)))
    thread.join()
    other = Keyspace()
    other.restore(pieces)
    assert [record.key for record in other.list("k")] == expected
    assert [*other.list("n")] == []
    assert len(pieces) > 2


def test_the_collector_has_nothing_to_follow_in_what_is_kept() -> None:
    keyspace = Keyspace()
    for number in range(3 * FULL):
        keyspace.apply(encode(Put(f"key/{number}", b"value", 0)))
    for _ in range(2):  # the inner tuples are untracked first
        gc.collect()
    assert not any(gc.is_tracked(block) for block in keyspace._entries._blocks)
