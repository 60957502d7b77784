"""Carries out committed commands, each once, on the state machines of a node.

A log entry is a batch of `Command`s. Each names its client and request number (`client`, `seq`), so
a command that is proposed twice, because its first outcome was unknown, is carried out once:
`ReplicatedMachines` keeps the result of every command that may be repeated. It hands the body to
one of the state machines behind it:

    0   the keyspace, which makes a quorum a store
    1   the user's own `StateMachine`

Everything here depends on the log alone: the same entries give the same results, the same table of
results and the same snapshot on every node.

- A client numbers its commands from 1. `floor` says that it has the results of everything below;
  those are dropped, and a command below it is refused.
- A client that was idle for `FORGOTTEN_AFTER` entries is forgotten. A command of a client that is
  not known and yet has a history (`floor` > 1) is refused: it may have been carried out before.
  Without a history it cannot be told from a new client, so what it repeats is carried out again if
  it was forgotten in between. Clients repeat such a command for a minute, so that takes `CLIENTS`
  other names, or `FORGOTTEN_AFTER` entries, within it.
- The kept results take at most `RESULT_BYTES` for one client and `TABLE_BYTES` in all. A command
  whose result does not fit is remembered as carried out, without its result; a client that repeats
  it is told that the outcome is unknown.
- An exception in `apply` is a result: it is the same on every node, and the proposer receives it.
  But a command that this node cannot carry out while others can, because it lacks the state machine
  or is an older release, raises: the node must stop, or its state would differ from the others'.

Imports the keyspace and msgspec; no clock, no random numbers, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import repeat
from struct import Struct as Layout
from typing import Any

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import StoreUnusable
from doyen.quorum.keyspace.state import Keyspace, UnknownCommand
from doyen.quorum.keyspace.versions import FIRST, NEWEST
from doyen.quorum.node.state_machine import StateMachine

KEYSPACE = 0
USER = 1

FORGOTTEN_AFTER = 1 << 20
"""Entries of the log after which an idle client is forgotten."""
CLIENTS = 1 << 17
"""How many clients are remembered; beyond, the one that was idle longest is forgotten."""
RESULTS = 1 << 14
"""How many results are kept for one client."""
RESULT_BYTES = 1 << 18
"""How many bytes of results are kept for one client."""
TABLE_BYTES = 64 << 20
"""How many bytes of results are kept in all; beyond, those of the client that was idle longest are
dropped. The client itself is not forgotten: it could not be told from a new one if it has had no
answer yet, and what it repeats would be carried out again."""
LARGE = 1024
"""In version 1 of the state, a result of the keyspace of more bytes is not kept, and its command is
carried out again when it is repeated."""


class Command(Struct, frozen=True, array_like=True, gc=False):
    """A command for one of the state machines, with the request id of its client."""

    client: str
    seq: int
    floor: int
    target: int
    body: bytes


class Failure(Struct, frozen=True, array_like=True, gc=False):
    """Takes the place of a result."""

    reason: str
    forgotten: bool = False
    """Not carried out now; whether it was carried out earlier is not known any more."""


_IDLE = Failure("its client was idle for so long that it was forgotten", True)
_HAD = Failure("the client has confirmed its result, which is not kept", True)
_NOT_KEPT = Failure("it was carried out before, and its result was too large to be kept", True)

_encode = Encoder().encode
_decode_any: Decoder[Any] = Decoder()

decode_batch: Callable[[bytes], list[Command]] = Decoder(list[Command]).decode
encode_batch: Callable[[Sequence[Command]], bytes] = _encode
"""The data of an entry."""


class _Client:
    """What is remembered of a client. Belongs to an epoch, and does not change after it."""

    __slots__ = ("bytes", "epoch", "floor", "last", "results")

    def __init__(self, epoch: int, floor: int, last: int, results: dict[int, Any]) -> None:
        self.epoch = epoch
        self.floor = floor
        self.last = last
        self.results = results
        self.bytes = 0
        """The size of its results."""

    def settle_below(self, floor: int) -> int:
        """Drop the results below `floor`; returns how many bytes that frees."""
        results = self.results
        near = floor - self.floor <= len(results)
        below = range(self.floor, floor) if near else [each for each in results if each < floor]
        dropped = [*map(results.pop, below, repeat(None))]
        freed = 0
        if self.bytes:
            freed = sum(map(len if {*map(type, dropped)} == {bytes} else _size, dropped))
        self.floor = floor
        self.bytes -= freed
        return freed


class _Kept(Struct, array_like=True):
    """A result in a snapshot."""

    seq: int
    value: Any
    failure: Failure | None


class _Remembered(Struct, array_like=True):
    """A client in a snapshot. Its results are in the order in which they were added, which is the
    order in which they are dropped if there are too many."""

    name: str
    floor: int
    last: int
    results: list[_Kept]


class ReplicatedMachines:
    """The state machines of a node, and the results of the commands carried out on them."""

    def __init__(self, targets: Mapping[int, StateMachine | Keyspace]) -> None:
        self.targets = dict(targets)
        keyspace = targets.get(KEYSPACE)
        self.versioned = keyspace if isinstance(keyspace, Keyspace) else None
        self._applies = {number: target.apply for number, target in targets.items()}
        # In the order of their last commands, the longest idle first.
        self._clients: dict[str, _Client] = {}
        # Clients with results in the same order, and perhaps some without.
        self._keeping: dict[str, None] = {}
        # A snapshot begins a new epoch: a client of an earlier one is copied before it changes, so
        # a snapshot can be read while commands are carried out.
        self._epoch = 0
        self._bytes = 0
        self.on_large: Callable[[Command, Any], None] = lambda *_: None
        """Called with each large result, when its command is carried out."""

    @property
    def version(self) -> int:
        """The version of the cluster; see `keyspace.versions`."""
        return NEWEST if self.versioned is None else self.versioned.version

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        """Carry out the batch at `index` of the log; returns a result or a `Failure` for each."""
        results: list[Any] = []
        add = results.append
        name, client = "", None
        kept: dict[int, Any] = {}
        floor, target, apply = 0, -1, None
        for command in commands:
            if command.client != name or client is None:
                name = command.client
                client = self._client(name, index, command.floor)
                if client is None:
                    add(_IDLE)
                    continue
                kept, floor = client.results, client.floor
            if command.floor > floor:
                floor = command.floor
                self._bytes -= client.settle_below(floor)
            seq = command.seq
            if seq in kept:
                add(kept[seq])
                continue
            if seq < floor:
                add(_HAD)
                continue
            if command.target != target:
                target = command.target
                apply = self._applies.get(target)
            if apply is None:
                raise StoreUnusable(_no_machine(target))
            try:
                result = apply(command.body)
                if type(result) is bytes:
                    size = len(result)
                elif result is None:
                    size = 0
                else:
                    result = _plain(result)
                    size = _size(result)
            except (MemoryError, UnknownCommand):
                raise  # this node cannot carry it out and others can: it must end
            except Exception as error:  # noqa: BLE001 - the same on every node
                result = Failure(f"{type(error).__name__}: {error}")
                size = _size(result)
            add(result)
            bytes_kept = client.bytes + size
            if size <= LARGE and bytes_kept <= RESULT_BYTES:
                kept[seq] = result
                if size:
                    client.bytes = bytes_kept
                    self._bytes += size
            else:
                self._keep_large(client, command, result, size)
            if len(kept) > RESULTS:
                self._bytes -= client.settle_below(next(iter(kept)) + 1)
                floor = client.floor
        clients = self._clients
        if (
            self._bytes > TABLE_BYTES
            or len(clients) > CLIENTS
            or (clients and index - next(iter(clients.values())).last >= FORGOTTEN_AFTER)
        ):
            self._forget(index)
        return results

    def require(self, entries: Iterable[bytes]) -> None:
        """Raise if the data of these entries needs a state machine that this node does not have."""
        for data in entries:
            with suppress(MsgspecError):
                for command in decode_batch(data):
                    if command.target not in self.targets:
                        raise StoreUnusable(_no_machine(command.target))

    def _keep_large(self, client: _Client, command: Command, result: Any, size: int) -> None:
        """Remember that a command was carried out, and its result if it fits."""
        self.on_large(command, result)
        if self.version == FIRST:
            if command.target == KEYSPACE and type(result) is bytes and size > LARGE:
                return
        elif client.bytes + size > RESULT_BYTES:
            result = _NOT_KEPT
            size = _size(result)
        client.results[command.seq] = result
        client.bytes += size
        self._bytes += size

    def _client(self, name: str, index: int, floor: int) -> _Client | None:
        client = self._clients.pop(name, None)
        if client is None:
            if floor > 1:
                return None
            client = _Client(self._epoch, 1, index, {})
        elif client.epoch != self._epoch:
            size = client.bytes
            client = _Client(self._epoch, client.floor, index, dict(client.results))
            client.bytes = size
        client.last = index
        self._clients[name] = client
        self._keeping.pop(name, None)
        self._keeping[name] = None
        return client

    def _forget(self, index: int) -> None:
        clients = self._clients
        while clients:
            name = next(iter(clients))
            idle = index - clients[name].last >= FORGOTTEN_AFTER
            if not idle and len(clients) <= CLIENTS:
                break
            self._bytes -= clients.pop(name).bytes
            self._keeping.pop(name, None)
        if self.version > FIRST:
            while self._bytes > TABLE_BYTES:
                self._drop_results(next(iter(self._keeping)))

    def _drop_results(self, name: str) -> None:
        """Drop a client's results, and refuse the commands that had them."""
        del self._keeping[name]
        client = self._clients[name]
        if client.results:
            self._bytes -= client.bytes
            self._clients[name] = _Client(self._epoch, max(client.results) + 1, client.last, {})

    def snapshot(self) -> Iterator[bytes]:
        """The state as of now, in pieces; see `StateMachine.snapshot`."""
        table = _pieces_of(self._clients.copy())
        self._epoch += 1
        parts = [(number, self.targets[number].snapshot()) for number in sorted(self.targets)]
        return _framed([(_TABLE, table), *parts])

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Replace the state by a snapshot."""
        frames = _Frames(pieces)
        self._clients.clear()
        self._keeping.clear()
        self._bytes = 0
        for piece in frames.of(_TABLE):
            for each in _decode_remembered(piece):
                kept = {one.seq: one.failure or one.value for one in each.results}
                client = _Client(self._epoch, each.floor, each.last, kept)
                client.bytes = sum(map(_size, kept.values()))
                self._bytes += client.bytes
                self._clients[each.name] = client
                self._keeping[each.name] = None
        for number in sorted(self.targets):
            self.targets[number].restore(frames.of(number))
            frames.skip(number)
        if frames.next is not None:
            raise StoreUnusable(_no_machine(frames.next[0]))


NO_MACHINE = "this node has no state machine for it; give every node one, with machine="

_decode_remembered: Callable[[bytes], list[_Remembered]] = Decoder(list[_Remembered]).decode

_PLAIN = (bytes, type(None), bool, str, float, Failure)


def _no_machine(target: int) -> str:
    if target == USER:
        return (
            "the log or a snapshot of this node needs the application's own state machine, which"
            " this node was not given: start it with the same machine= as the others"
            " (doyen.Node; doyen serve has none)"
        )
    return (
        f"the log or a snapshot of this node needs state machine {target}, which this release of"
        " doyen does not have: install the release that the other nodes run"
    )


def _size(result: Any) -> int:
    """The size of a result, which is the same on every node."""
    if result is None:
        return 0
    if type(result) is bytes:
        return len(result)
    if type(result) is Failure:
        return len(result.reason)
    return len(_encode(result))


def _plain(result: Any) -> Any:
    """A copy of a result as msgpack encodes it, which the machine cannot change later."""
    kind = type(result)
    if kind in _PLAIN or (kind is int and -(1 << 63) <= result < 1 << 63):
        return result
    try:
        return _decode_any.decode(_encode(result))
    except (MsgspecError, TypeError, OverflowError, NotImplementedError) as error:
        return Failure(f"carried out, but msgpack cannot encode its result: {error}")


_TABLE = 255
_FRAME = Layout(">BI")
_CLIENTS_PER_PIECE = 256
_MOST_BYTES = 1 << 20


def _pieces_of(clients: Mapping[str, _Client]) -> Iterator[bytes]:
    batch: list[_Remembered] = []
    for name, client in clients.items():
        kept = [
            _Kept(seq, None, each) if type(each) is Failure else _Kept(seq, each, None)
            for seq, each in client.results.items()
        ]
        batch.append(_Remembered(name, client.floor, client.last, kept))
        if len(batch) == _CLIENTS_PER_PIECE:
            yield _encode(batch)
            batch.clear()
    yield _encode(batch)


def _framed(parts: Sequence[tuple[int, Iterator[bytes]]]) -> Iterator[bytes]:
    """Pieces with their part and length in front. They are cut here into lengths that disks and
    connections accept, since those of a user's machine may be longer."""
    for number, pieces in parts:
        for piece in pieces:
            framed = _FRAME.pack(number, len(piece)) + piece
            for start in range(0, len(framed), _MOST_BYTES):
                yield framed[start : start + _MOST_BYTES]


class _Frames:
    """Reads framed pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._buffer = bytearray()
        self.next: tuple[int, bytes] | None = None
        self._advance()

    def of(self, number: int) -> Iterator[bytes]:
        """The pieces of one part."""
        while self.next is not None and self.next[0] == number:
            piece = self.next[1]
            self._advance()
            yield piece

    def skip(self, number: int) -> None:
        """Skip the rest of a part."""
        for _ in self.of(number):
            pass

    def _advance(self) -> None:
        if not self._fill(_FRAME.size):
            self.next = None
            return
        number, length = _FRAME.unpack_from(self._buffer)
        end = _FRAME.size + length
        if not self._fill(end):
            raise StoreUnusable("the snapshot ends in the middle of a piece")
        self.next = number, bytes(self._buffer[_FRAME.size : end])
        del self._buffer[:end]

    def _fill(self, size: int) -> bool:
        while len(self._buffer) < size:
            piece = next(self._pieces, None)
            if piece is None:
                if self._buffer:
                    raise StoreUnusable("the snapshot ends in the middle of a piece")
                return False
            self._buffer += piece
        return True
