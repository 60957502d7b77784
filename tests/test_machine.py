"""Commands carried out exactly once, and the same on every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from doyen.errors import StoreUnusable
from doyen.quorum.keyspace import commands
from doyen.quorum.keyspace.state import Keyspace, UnknownCommand
from doyen.quorum.node import replicated as module
from doyen.quorum.node.replicated import (
    KEYSPACE,
    USER,
    Command,
    Failure,
    ReplicatedMachines,
    decode_batch,
    encode_batch,
)
from drivers import Tally


def machine() -> tuple[ReplicatedMachines, Tally]:
    tally = Tally()
    return ReplicatedMachines({USER: tally}), tally


def one(machine: ReplicatedMachines, index: int, *command: Any) -> Any:
    (result,) = machine.apply(index, [Command(*command)])
    return result


def test_a_batch_survives_its_encoding() -> None:
    batch = [Command("a", 1, 1, USER, b"x"), Command("b", 7, 3, KEYSPACE, b"")]
    assert decode_batch(encode_batch(batch)) == batch


def test_a_command_is_carried_out_once() -> None:
    replica, tally = machine()
    assert one(replica, 1, "a", 1, 1, USER, b"x") == 1
    assert one(replica, 2, "a", 1, 1, USER, b"x") == 1
    assert one(replica, 3, "b", 1, 1, USER, b"x") == 2
    assert replica.apply(4, [Command("a", 2, 1, USER, b"y")] * 3) == [3, 3, 3]
    assert tally.done == [b"x", b"x", b"y"]


def test_results_are_kept_until_they_are_received() -> None:
    replica, tally = machine()
    for seq in range(1, 6):
        one(replica, seq, "a", seq, 1, USER, b"x")
    assert one(replica, 6, "a", 6, 4, USER, b"x") == 6
    assert one(replica, 7, "a", 4, 4, USER, b"x") == 4
    assert one(replica, 8, "a", 3, 1, USER, b"x").forgotten
    assert one(replica, 9, "a", 7, 1 << 60, USER, b"x").forgotten
    assert len(tally.done) == 6


def keyspace_machine(version: int) -> tuple[ReplicatedMachines, Keyspace]:
    keyspace = Keyspace(version)
    return ReplicatedMachines({KEYSPACE: keyspace}), keyspace


def write(
    machine: ReplicatedMachines, client: str, seq: int, command: commands.KeyspaceCommand
) -> Any:
    body = commands.encode(command)
    (result,) = machine.apply(1, [Command(client, seq, 1, KEYSPACE, body)])
    return result if isinstance(result, Failure) else commands.decode_result(result)


@pytest.mark.parametrize("length", [1, 900, 1000, 4096])
def test_a_ticket_is_taken_once_however_long_its_key_is(length: int) -> None:
    machine, keyspace = keyspace_machine(2)
    lease = write(machine, "a", 1, commands.Grant(5.0)).lease
    enqueue = commands.Enqueue("x" * length, b"me", lease, 0)
    ticket = write(machine, "a", 2, enqueue)
    assert isinstance(ticket, commands.TicketIssued)
    assert write(machine, "a", 2, enqueue) == ticket
    assert len(keyspace) == 1


def test_what_was_refused_is_not_carried_out_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt met with a large record, and its client knows that it has lost. A second
    attempt, which was on its way all the while, comes when the record is gone."""
    monkeypatch.setattr(module, "RESULT_BYTES", 2_000)
    machine, keyspace = keyspace_machine(2)
    lease = write(machine, "a", 1, commands.Grant(5.0)).lease
    write(machine, "a", 2, commands.Create("k", b"x" * 4_000, lease))
    assert isinstance(
        write(machine, "b", 1, commands.Create("k", b"", lease)), commands.EntryExists
    )
    write(machine, "a", 3, commands.Delete("k", 0))
    assert write(machine, "b", 1, commands.Create("k", b"", lease)).forgotten
    assert keyspace.get("k") is None


def test_results_of_the_keyspace_are_kept_within_bounds() -> None:
    machine, _ = keyspace_machine(2)
    lease = write(machine, "a", 1, commands.Grant(5.0)).lease
    write(machine, "a", 2, commands.Create("k", b"x" * 4_000, lease))
    for number in range(1, 100):
        assert isinstance(
            write(machine, "b", number, commands.Create("k", b"", lease)), commands.EntryExists
        )
    assert isinstance(
        write(machine, "b", 2, commands.Create("k", b"", lease)), commands.EntryExists
    )
    assert write(machine, "b", 99, commands.Create("k", b"", lease)).forgotten
    size = sum(map(len, machine.snapshot()))
    assert size < 4_000 + module.RESULT_BYTES + 10_000


def test_a_refused_create_has_a_short_result_however_large_the_entry_is() -> None:
    machine, keyspace = keyspace_machine(2)
    lease = write(machine, "a", 1, commands.Grant(5.0)).lease
    write(machine, "a", 2, commands.Create("k", b"x" * 100_000, lease))
    refused = commands.LargeEntryExists("k")
    for number in range(1, 1000):
        assert write(machine, "b", number, commands.Create("k", b"", lease)) == refused
    write(machine, "a", 3, commands.Delete("k", 0))
    assert write(machine, "b", 1, commands.Create("k", b"", lease)) == refused
    assert keyspace.get("k") is None


def test_results_of_all_clients_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_BYTES", 10_000)
    replica = ReplicatedMachines({USER: Odd(b"x" * 1000)})
    for number in range(50):
        one(replica, 1 + number, f"c{number}", 1, 1, USER, b"")
    assert sum(map(len, replica.snapshot())) < 12_000
    assert one(replica, 60, "c49", 1, 1, USER, b"") == b"x" * 1000
    assert one(replica, 61, "c0", 1, 1, USER, b"").forgotten
    again = ReplicatedMachines({USER: Odd(b"x" * 1000)})
    again.restore(replica.snapshot())
    for each in (replica, again):
        one(each, 62, "new", 1, 1, USER, b"")
    assert [*again.snapshot()] == [*replica.snapshot()]


def test_a_write_is_not_repeated_because_results_of_others_took_the_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that has had no answer yet says so (`floor` 1), like one that is new. Its write was
    carried out, the answer was lost, and others have filled the table since."""
    monkeypatch.setattr(module, "TABLE_BYTES", 10_000)
    replica = ReplicatedMachines({USER: (odd := Odd(b"x" * 1000))})
    one(replica, 1, "first", 1, 1, USER, b"")
    one(replica, 1, "first", 3, 1, USER, b"")
    for number in range(20):
        one(replica, 2 + number, f"c{number}", 1, 1, USER, b"")
    copied = ReplicatedMachines({USER: Odd(b"x" * 1000)})
    copied.restore(replica.snapshot())
    done = len(odd.done)
    for number in (1, 2, 3):
        assert one(replica, 30, "first", number, 1, USER, b"").forgotten
        assert one(copied, 30, "first", number, 1, USER, b"").forgotten
    assert len(odd.done) == done
    for number in range(20, 40):
        for each in (replica, copied):
            one(each, 11 + number, f"c{number}", 1, 1, USER, b"")
    assert [*copied.snapshot()] == [*replica.snapshot()]
    assert sum(map(len, replica.snapshot())) < 12_000


def test_in_the_first_version_large_results_are_not_kept() -> None:
    """As members of the first release do it."""
    machine, _ = keyspace_machine(1)
    lease = write(machine, "a", 1, commands.Grant(5.0)).lease
    write(machine, "b", 1, commands.Create("k", b"x" * 100_000, lease))
    for number in range(50):
        refused = write(machine, f"c{number}", 1, commands.Create("k", b"mine", lease))
        assert isinstance(refused, commands.EntryExists)
    assert sum(map(len, machine.snapshot())) < 200_000
    write(machine, "d", 1, commands.Delete("k", 0))
    again = write(machine, "c7", 1, commands.Create("k", b"mine", lease))
    assert isinstance(again, commands.Written)
    assert write(machine, "c7", 1, commands.Create("k", b"mine", lease)) == again


def test_a_client_with_a_history_that_is_not_known_is_refused() -> None:
    replica, tally = machine()
    assert one(replica, 1, "a", 9, 2, USER, b"x").forgotten
    assert one(replica, 2, "a", 9, 1, USER, b"x") == 1
    assert tally.done == [b"x"]


def test_idle_clients_are_dropped_by_log_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORGOTTEN_AFTER", 10)
    replica, _ = machine()
    one(replica, 1, "idle", 1, 1, USER, b"x")
    one(replica, 5, "busy", 1, 1, USER, b"x")
    one(replica, 10, "busy", 2, 2, USER, b"x")
    assert one(replica, 10, "idle", 1, 1, USER, b"x") == 1
    one(replica, 19, "busy", 3, 3, USER, b"x")
    one(replica, 20, "busy", 4, 4, USER, b"x")
    assert one(replica, 20, "idle", 2, 2, USER, b"x").forgotten


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLIENTS", 3)
    monkeypatch.setattr(module, "RESULTS", 4)
    replica, _ = machine()
    for number in range(5):
        one(replica, 1 + number, f"c{number}", 1, 1, USER, b"x")
    assert one(replica, 6, "c0", 2, 2, USER, b"x").forgotten
    for seq in range(2, 8):
        one(replica, 6 + seq, "c4", seq, 1, USER, b"x")
    assert one(replica, 20, "c4", 1, 1, USER, b"x").forgotten
    assert one(replica, 21, "c4", 7, 1, USER, b"x") == 11


def test_an_error_is_a_result() -> None:
    replica, tally = machine()
    failed = one(replica, 1, "a", 1, 1, USER, b"fail")
    assert failed == Failure("ValueError: as asked")
    assert one(replica, 2, "a", 1, 1, USER, b"fail") == failed
    assert one(replica, 3, "a", 2, 1, USER, b"x") == 1
    assert tally.done == [b"x"]


@pytest.mark.parametrize(
    ("target", "remedy"), [(USER, "the same machine="), (7, "install the release")]
)
def test_a_node_without_the_state_machine_that_its_log_needs_stops(
    target: int, remedy: str
) -> None:
    """If it passed over the command it would differ from the nodes that have the machine."""
    replica = ReplicatedMachines({KEYSPACE: Keyspace()})
    batch = [Command("a", 1, 1, target, b"x")]
    with pytest.raises(StoreUnusable, match=remedy):
        replica.apply(1, batch)
    with pytest.raises(StoreUnusable, match=remedy):
        replica.require([encode_batch([]), b"nonsense", encode_batch(batch)])


def test_an_unknown_command_stops_the_node_instead_of_being_passed_over() -> None:
    replica = ReplicatedMachines({KEYSPACE: Keyspace()})
    with pytest.raises(UnknownCommand):
        one(replica, 2, "a", 2, 1, KEYSPACE, commands.encode([99, "what?"]))


class Odd(Tally):
    """Gives back whatever it was made with."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self.result = result

    def apply(self, command: bytes) -> Any:
        self.done.append(command)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [object(), 1 << 70, {1: object()}, lambda: None])
def test_a_result_that_cannot_be_encoded_is_an_error(result: Any) -> None:
    replica = ReplicatedMachines({USER: Odd(result)})
    assert "msgpack cannot encode" in one(replica, 1, "a", 1, 1, USER, b"x").reason


def test_a_result_is_not_changed_afterwards() -> None:
    mine = Odd([1])
    replica = ReplicatedMachines({USER: mine})
    first = one(replica, 1, "a", 1, 1, USER, b"x")
    mine.result.append(2)
    assert first == one(replica, 2, "a", 1, 1, USER, b"x") == [1]


def test_a_node_without_memory_ends_instead_of_differing() -> None:
    replica = ReplicatedMachines({USER: Odd(MemoryError())})
    with pytest.raises(MemoryError):
        one(replica, 1, "a", 1, 1, USER, b"x")


class Pieces(Tally):
    """Sees the very pieces that it gave."""

    given = (b"one", b"", b"three" * 1000)

    def snapshot(self) -> Iterator[bytes]:
        return iter(self.given)

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.restored = tuple(pieces)


def cut_anew(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 20])
def test_pieces_come_back_as_they_were_however_they_were_cut(size: int) -> None:
    first, second = Pieces(), Tally()
    data = b"".join(ReplicatedMachines({KEYSPACE: first, USER: second}).snapshot())
    first, second = Pieces(), Tally()
    ReplicatedMachines({KEYSPACE: first, USER: second}).restore(cut_anew(data, size))
    assert first.restored == Pieces.given


def test_a_piece_of_any_size_goes_out_in_moderate_ones() -> None:
    """A frame of the disk's or of a link's has a bound, which a user's piece has not."""
    big = Pieces()
    big.given = (b"small", bytes(20 << 20))  # type: ignore[assignment]
    pieces = list(ReplicatedMachines({USER: big}).snapshot())
    assert max(map(len, pieces)) <= 1 << 20
    restored = Pieces()
    ReplicatedMachines({USER: restored}).restore(pieces)
    assert restored.restored == big.given


def test_a_snapshot_does_not_show_what_comes_after() -> None:
    replica, _ = machine()
    one(replica, 1, "a", 1, 1, USER, b"x")
    pieces = replica.snapshot()
    one(replica, 2, "a", 2, 1, USER, b"y")
    again, tally = machine()
    again.restore(pieces)
    assert one(again, 2, "a", 1, 1, USER, b"x") == 1
    assert one(again, 3, "a", 2, 1, USER, b"z") == 2
    assert tally.done == [b"x", b"z"]


def test_a_snapshot_that_is_cut_short_is_refused() -> None:
    replica, _ = machine()
    data = b"".join(replica.snapshot())
    for end in range(1, len(data)):
        again, _ = machine()
        with pytest.raises((StoreUnusable, ValueError)):
            again.restore([data[:end]])


def test_a_snapshot_with_more_than_we_have_is_refused() -> None:
    replica, _ = machine()
    with pytest.raises(StoreUnusable, match="same machine="):
        ReplicatedMachines({}).restore(replica.snapshot())


proposed = st.builds(
    Command,
    client=st.sampled_from("abc"),
    seq=st.integers(1, 6),
    floor=st.integers(1, 6),
    target=st.just(USER),
    body=st.sampled_from([b"x", b"y", b"fail"]),
)


@given(st.lists(st.lists(proposed, max_size=4), max_size=12), st.integers(0, 12))
@example([[Command("a", 2, 1, USER, b"x"), Command("a", 1, 1, USER, b"x")]], 1)
def test_a_restored_machine_goes_on_as_the_other(log: list[list[Command]], at: int) -> None:
    """Whatever the log, and wherever a snapshot was taken in it."""
    whole, done = machine()
    results = [whole.apply(index, batch) for index, batch in enumerate(log, 1)]
    before, _ = machine()
    for index, batch in enumerate(log[:at], 1):
        before.apply(index, batch)
    after, restored = machine()
    after.restore(cut_anew(b"".join(before.snapshot()), 13))
    assert results[at:] == [after.apply(n, batch) for n, batch in enumerate(log[at:], at + 1)]
    assert restored.done == done.done
    assert b"".join(after.snapshot()) == b"".join(whole.snapshot())
