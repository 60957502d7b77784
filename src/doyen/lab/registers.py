"""Registers that proposers on nodes swap, and the check of what they saw.

`Registers` is the state machine that applications would replicate. `RegisterChecker` keeps the
history of all operations. During the run it checks that all nodes apply the same commands in the
same order; at the end, that each was executed at most once, that refused ones were not executed,
and that the history is linearizable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from random import Random

import msgspec
from msgspec.msgpack import Decoder

from doyen.lab.linearizability import Operation, decode_swap, linearizable, witnessed
from doyen.quorum.node.state_machine import StateMachine

_encode = msgspec.msgpack.Encoder().encode
_decode_state = Decoder(tuple[int, dict[int, int]]).decode


class Registers(StateMachine):
    """The replicated registers of one node. Reports each command with its number in the order of
    application."""

    def __init__(self, applied: Callable[[int, bytes], None]) -> None:
        self._applied = applied
        self.count = 0
        self.values: dict[int, int] = {}

    def apply(self, command: bytes) -> int | None:
        _, _, key, value = decode_swap(command)
        before = self.values.get(key)
        self.values[key] = value
        self.count += 1
        self._applied(self.count, command)
        return before

    def snapshot(self) -> Iterator[bytes]:
        return iter([_encode((self.count, self.values))])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.count, self.values = _decode_state(b"".join(pieces))


class RegisterChecker:
    """The history of all swaps and reads."""

    def __init__(self, keys: int, fail: Callable[[str, str], None]) -> None:
        self._keys = keys
        self._fail = fail
        self._history: list[Operation] = []
        self._sequence: list[bytes] = []
        """The commands in the order in which they were applied."""
        self._stamp = 0
        self._seqs: dict[int, int] = {}
        self._refused: dict[tuple[int, int], None] = {}

    def begin(self, client: int, rng: Random, *, writes: bool) -> Operation:
        """Draw the next operation of a client."""
        self._stamp += 1
        seq = self._seqs[client] = self._seqs.get(client, 0) + 1
        value = self._stamp if writes else None
        operation = Operation(client, seq, rng.randrange(self._keys), value, self._stamp)
        self._history.append(operation)
        return operation

    def end(self, operation: Operation, result: int | None) -> None:
        self._stamp += 1
        operation.ended, operation.result = self._stamp, result

    def refused(self, operation: Operation) -> None:
        """The client was told that the operation was not executed and will not be."""
        if operation.value is not None:
            self._refused[operation.client, operation.seq] = None

    def applied(self, number: int, command: bytes) -> None:
        """A node has applied a command as its `number`th."""
        sequence = self._sequence
        if number <= len(sequence):
            if sequence[number - 1] != command:
                self._fail("applied", f"two commands were applied as number {number}")
        elif number == len(sequence) + 1:
            sequence.append(command)
        else:
            self._fail("applied", f"command {number} was applied after {len(sequence)}")

    def check(self, *, linearizable_by_log: bool) -> None:
        """Check the whole history. With `linearizable_by_log` the order of the log must explain it;
        otherwise any order may."""
        positions: dict[tuple[int, int], float] = {}
        for position, command in enumerate(self._sequence):
            client, seq, _, _ = decode_swap(command)
            if (client, seq) in positions:
                self._fail("applied", f"request {seq} of client {client} was executed twice")
            positions[client, seq] = position
        for key in self._refused:
            if key in positions:
                self._fail("refused", f"request {key} was refused, but it was executed")
        for operation in self._history:
            if operation.value is not None:
                operation.position = positions.get((operation.client, operation.seq), inf)
                if operation.ended < inf and operation.position == inf:
                    self._fail("lost write", f"{operation!r}, but it is not in the log")
            elif operation.ended == inf:
                operation.position = inf
        history = [
            operation
            for operation in self._history
            if (operation.client, operation.seq) not in self._refused
        ]
        contradicted = witnessed(history)
        if contradicted is not None and linearizable_by_log:
            self._fail("linearizability", f"the log contradicts {contradicted!r}")
        elif contradicted is not None and (operations := linearizable(history)) is not None:
            self._fail("linearizability", f"no order explains {operations[-6:]}")
