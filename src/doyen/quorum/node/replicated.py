"""What every node of a quorum does with what has been agreed on.

An entry of the log is a batch of `Command`s. Each names who asks (`client`, `seq`), so that a
command which is proposed twice, because nobody knew whether the first time counted, is carried out
once: `ReplicatedMachines` keeps the result of everything whose answer may still be asked for. It
hands the body to one of the state machines behind it:

    0   the keyspace, which makes a quorum of nodes a Store
    1   the user's own `StateMachine`

Everything here is a function of the log: the same entries give the same results, the same table
and the same snapshot on every node.

- A client counts its commands from 1. `floor` says that it has had the answer to everything
  below; those results are let go, and a command below it is refused.
- A client that was idle for `FORGOTTEN_AFTER` entries is forgotten. A command of one that is not
  known, yet has a history (`floor` > 1), is refused: its first attempt may have counted.
- The results that are kept for one client take `RESULT_BYTES` at most, and those for all of them
  `TABLE_BYTES`. What does not fit is remembered as carried out, without its result: whoever asks
  again is told that the outcome is unknown.
- An exception in `apply` is a result like any other: every node gets the same, and the proposer
  is told. But what this node cannot carry out while others can, since it lacks the state machine or
  is of an older release, raises: the node must stop, or it would differ from the others.

Imports the keyspace and msgspec; no clock, no chance, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from struct import Struct as Layout
from typing import Any, Protocol

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import StoreUnusable
from doyen.quorum.keyspace.state import Keyspace, UnknownCommand
from doyen.quorum.keyspace.versions import FIRST, NEWEST

__all__ = [
    "KEYSPACE",
    "USER",
    "Command",
    "Failure",
    "ReplicatedMachines",
    "decode_batch",
    "encode_batch",
]

KEYSPACE = 0
USER = 1

FORGOTTEN_AFTER = 1 << 20
"""Entries of the log after which an idle client is forgotten."""
CLIENTS = 1 << 17
"""How many clients are remembered; beyond, whoever was idle longest is forgotten."""
RESULTS = 1 << 14
"""How many results of one client are kept for it to ask again."""


RESULT_BYTES = 1 << 18
"""How many bytes the results take that are kept for one client."""
TABLE_BYTES = 64 << 20
"""How many bytes the results of all clients take; beyond, those of whoever was idle longest are let
go. The client is not forgotten for that: if it has had no answer yet, it could not be told from a
new one, and what it asks again would be carried out again."""
LARGE = 1024
"""In version 1 of the state, a result of the keyspace beyond this many bytes was not kept, and its
command was carried out again if it was asked for again."""


class Command(Struct, frozen=True, array_like=True, gc=False):
    """One thing to do, and who asks for it, for the how manieth time."""

    client: str
    seq: int
    floor: int
    target: int
    body: bytes


class Target(Protocol):
    """A `StateMachine`, by its shape."""

    def apply(self, command: bytes, /) -> Any: ...

    def snapshot(self) -> Iterator[bytes]: ...

    def restore(self, pieces: Iterable[bytes], /) -> None: ...


class Failure(Struct, frozen=True, array_like=True, gc=False):
    """Stands where a result would."""

    reason: str
    forgotten: bool = False
    """Not carried out now, and nobody knows any more whether it once was."""


_IDLE = Failure("its proposer was idle for so long that it was forgotten", True)
_HAD = Failure("its result was had before, and is not kept", True)
_TOO_LARGE = Failure("it was carried out before, and its result was too large to be kept", True)

_encode = Encoder().encode
_decode_any: Decoder[Any] = Decoder()

decode_batch: Callable[[bytes], list[Command]] = Decoder(list[Command]).decode
encode_batch: Callable[[Sequence[Command]], bytes] = _encode
"""The data of an entry."""


class _Client:
    """What is remembered of a client. Belongs to an epoch, and is not changed after it."""

    __slots__ = ("bytes", "epoch", "floor", "last", "results")

    def __init__(self, epoch: int, floor: int, last: int, results: dict[int, Any]) -> None:
        self.epoch = epoch
        self.floor = floor
        self.last = last
        self.results = results
        self.bytes = 0
        """What its results take."""

    def settle_below(self, floor: int) -> int:
        """Let the results below go; how many bytes that frees."""
        results, freed = self.results, 0
        near = floor - self.floor <= len(results)
        for seq in range(self.floor, floor) if near else [each for each in results if each < floor]:
            result = results.pop(seq, None)
            if result is not None:
                freed += len(result) if type(result) is bytes else _size(result)
        self.floor = floor
        self.bytes -= freed
        return freed


class _Kept(Struct, array_like=True):
    """A result in a snapshot."""

    seq: int
    value: Any
    failure: Failure | None


class _Remembered(Struct, array_like=True):
    """A client in a snapshot. Its results are in the order they came: those that came first are
    the first to be let go if there are too many."""

    name: str
    floor: int
    last: int
    results: list[_Kept]


class ReplicatedMachines:
    """The state machines of a node, behind a memory of what has been done already."""

    def __init__(self, targets: Mapping[int, Target]) -> None:
        self.targets = dict(targets)
        keyspace = targets.get(KEYSPACE)
        self._keyspace = keyspace if isinstance(keyspace, Keyspace) else None
        self._applies = {number: target.apply for number, target in targets.items()}
        # The one that was idle longest stands first.
        self._clients: dict[str, _Client] = {}
        # In the same order, all that have results, and perhaps some that have none.
        self._keeping: dict[str, None] = {}
        # Every snapshot ends one: whoever is changed later is copied first, so that a snapshot
        # can take its time over those that it has seen.
        self._epoch = 0
        self._bytes = 0

    @property
    def version(self) -> int:
        """The cluster's; see `versions`."""
        return NEWEST if self._keyspace is None else self._keyspace.version

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        """Carry out the batch at `index` of the log: a result, or a `Failure`, for each."""
        results: list[Any] = []
        name, client = "", None
        applies, grown = self._applies, 0
        for command in commands:
            if command.client != name or client is None:
                name = command.client
                client = self._client(name, index, command.floor)
            if client is None:
                result: Any = _IDLE
            else:
                if command.floor > client.floor:
                    self._bytes -= client.settle_below(command.floor)
                seq, kept = command.seq, client.results
                if seq in kept:
                    result = kept[seq]
                elif seq < client.floor:
                    result = _HAD
                else:
                    apply = applies.get(command.target)
                    if apply is None:
                        raise StoreUnusable(_nobody(command.target))
                    try:
                        result = apply(command.body)
                        if type(result) is bytes:
                            size = len(result)
                        else:
                            result = _plain(result)
                            size = _size(result)
                    except (MemoryError, UnknownCommand):
                        raise  # this node cannot carry it out and others can: it must end
                    except Exception as error:  # noqa: BLE001 - the same on every node
                        result = Failure(f"{type(error).__name__}: {error}")
                        size = _size(result)
                    if size <= LARGE and client.bytes + size <= RESULT_BYTES:
                        kept[seq] = result
                        client.bytes += size
                        grown += size
                    else:
                        self._keep_large(client, command, result, size)
                    if len(kept) > RESULTS:
                        self._bytes -= client.settle_below(next(iter(kept)) + 1)
            results.append(result)
        self._bytes += grown
        clients = self._clients
        if (
            self._bytes > TABLE_BYTES
            or len(clients) > CLIENTS
            or (clients and index - next(iter(clients.values())).last >= FORGOTTEN_AFTER)
        ):
            self._forget(index)
        return results

    def require(self, entries: Iterable[bytes]) -> None:
        """Raise if the data of these entries needs a state machine that this node has not."""
        for data in entries:
            with suppress(MsgspecError):
                for command in decode_batch(data):
                    if command.target not in self.targets:
                        raise StoreUnusable(_nobody(command.target))

    def _keep_large(self, client: _Client, command: Command, result: Any, size: int) -> None:
        """Remember that a command was carried out, and its result if there is room for it."""
        if self.version == FIRST:
            if command.target == KEYSPACE and type(result) is bytes and size > LARGE:
                return
        elif client.bytes + size > RESULT_BYTES:
            result = _TOO_LARGE
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
                self._let_go(next(iter(self._keeping)))

    def _let_go(self, name: str) -> None:
        """Keep of a client only up to where it has counted."""
        del self._keeping[name]
        client = self._clients[name]
        if client.results:
            self._bytes -= client.bytes
            self._clients[name] = _Client(self._epoch, max(client.results) + 1, client.last, {})

    def snapshot(self) -> Iterator[bytes]:
        """Everything as it is now, in pieces; see `StateMachine.snapshot`."""
        table = _pieces_of(self._clients.copy())
        self._epoch += 1
        parts = [(number, self.targets[number].snapshot()) for number in sorted(self.targets)]
        return _framed([(_TABLE, table), *parts])

    def restore(self, pieces: Iterable[bytes]) -> None:
        """Put a snapshot in the place of everything."""
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
            raise StoreUnusable(_nobody(frames.next[0]))


NO_MACHINE = "this node has no state machine for it; give every node one, with machine="

_decode_remembered: Callable[[bytes], list[_Remembered]] = Decoder(list[_Remembered]).decode

_PLAIN = (bytes, type(None), bool, str, float, Failure)


def _nobody(target: int) -> str:
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
    """How many bytes a result takes, about, and the same on every node."""
    if result is None:
        return 0
    if type(result) is bytes:
        return len(result)
    if type(result) is Failure:
        return len(result.reason)
    return len(_encode(result))


def _plain(result: Any) -> Any:
    """A result as msgpack carries it, apart from whatever the machine may change later."""
    kind = type(result)
    if kind in _PLAIN or (kind is int and -(1 << 63) <= result < 1 << 63):
        return result
    try:
        return _decode_any.decode(_encode(result))
    except (MsgspecError, TypeError, OverflowError, NotImplementedError) as error:
        return Failure(f"carried out, but msgpack cannot carry its result: {error}")


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
    """Pieces, each saying whose it is and how long: they may be cut elsewhere on their way, and
    are here, since a user's may be longer than disks and links take in one piece."""
    for number, pieces in parts:
        for piece in pieces:
            framed = _FRAME.pack(number, len(piece)) + piece
            for start in range(0, len(framed), _MOST_BYTES):
                yield framed[start : start + _MOST_BYTES]


class _Frames:
    """Framed pieces, taken apart again."""

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
        """Pass over what is left of a part."""
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
