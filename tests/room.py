"""A few servers in one room: no chance, no faults but those the test asks for.

Messages take a millisecond, disks half of one, and nobody else is in a hurry. For the narrative
tests of the smaller protocols; the lab is where everything goes wrong at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any

from doyen.quorum.consensus.core import (
    Committed,
    Connected,
    CoreEvent,
    Disconnected,
    Effect,
    Elapsed,
    LogEntry,
    Membership,
    Message,
    Persist,
    Persisted,
    Propose,
    ProtocolSettings,
    ReadAsked,
    Received,
    Recovered,
    Role,
    Send,
)
from doyen.quorum.consensus.invariants import check, check_step, facts

SETTINGS = ProtocolSettings(election_timeout_s=1.0, heartbeat_s=0.1)


def role_of(core: Any) -> Role:
    role: Role = core.role
    return role


def hear(core: Any, peer: str, message: Any, now: float = 0.0) -> list[Any]:
    effects: list[Any] = core.handle(Received(peer, message), now)
    return effects


def sent(effects: list[Any], kind: type, peer: str | None = None) -> list[Any]:
    return [
        e.message
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, kind) and peer in (None, e.peer)
    ]


class Room:
    """A cluster of one protocol."""

    def __init__(
        self,
        make: Any,
        names: Sequence[str],
        *,
        settings: ProtocolSettings = SETTINGS,
        disk_s: float = 5e-4,
    ) -> None:
        self.make = make
        self.names = tuple(names)
        self.membership = Membership(self.names)
        self.settings = settings
        self.disk_s = disk_s
        self.now = 0.0
        self.cores: dict[str, Any] = {}
        self.states: dict[str, Any] = {}
        self.entries: dict[str, list[LogEntry]] = {name: [] for name in names}
        self.queues: dict[str, list[Persist]] = {name: [] for name in names}
        self.tokens = dict.fromkeys(names, 0)
        self.held: dict[str, list[Send]] = {name: [] for name in names}
        self.applied: dict[str, list[LogEntry]] = {name: [] for name in names}
        self.said: list[tuple[str, Effect]] = []
        """Everything that any server has said, in order."""
        self.cuts: set[tuple[str, str]] = set()
        self.drop: Callable[[str, str, Message], bool] = lambda sender, to, message: False
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._lives = dict.fromkeys(names, 0)

    def start(self, *names: str) -> None:
        for name in names or self.names:
            self._lives[name] += 1
            self.queues[name], self.held[name], self.applied[name] = [], [], []
            self.tokens[name] = 0
            jitter = (self.names.index(name) + 1) / (len(self.names) + 1)
            self.cores[name] = self.make(
                name,
                self.membership,
                Recovered(self.states.get(name), None, tuple(self.entries[name])),
                settings=self.settings,
                jitter=lambda jitter=jitter: jitter,
                now=self.now,
            )
            for other in self.cores:
                if other != name:
                    self.tell(other, Connected(name))
                    self.tell(name, Connected(other))

    def crash(self, *names: str, seen: bool = True) -> None:
        """End a server's process; its disk keeps what was written. With `seen`, its peers notice
        that their connections end."""
        for name in names:
            del self.cores[name]
            self._lives[name] += 1
        for other in list(self.cores):
            for name in names:
                if seen:
                    self.tell(other, Disconnected(name))

    def tell(self, name: str, event: CoreEvent) -> list[Effect]:
        core = self.cores[name]
        before = facts(core)
        effects: list[Effect] = core.handle(event, self.now)
        check(core)
        check_step(before, core)
        for effect in effects:
            self.said.append((name, effect))
            if isinstance(effect, Persist):
                self.queues[name].append(effect)
                self._at(self.disk_s, name, self._sync)
            elif isinstance(effect, Send):
                if effect.after > self.tokens[name]:
                    self.held[name].append(effect)
                else:
                    self._post(name, effect)
            elif isinstance(effect, Committed):
                assert effect.first == len(self.applied[name]) + 1
                self.applied[name].extend(effect.entries)
        return effects

    def _at(self, delay: float, name: str, what: Callable[[str], None]) -> None:
        life = self._lives[name]
        self._count += 1

        def go() -> None:
            if self._lives[name] == life and name in self.cores:
                what(name)

        heappush(self._heap, (self.now + delay, self._count, go))

    def _sync(self, name: str) -> None:
        if not self.queues[name]:
            return
        for write in self.queues[name]:
            if write.state is not None:
                self.states[name] = write.state
            if write.first:
                log = self.entries[name]
                end = write.first - 1 + len(write.entries)
                rest = log[end:] if write.keep else []
                log[write.first - 1 :] = [*write.entries, *rest]
            self.tokens[name] = write.token
        self.queues[name] = []
        token = self.tokens[name]
        ready = [send for send in self.held[name] if send.after <= token]
        self.held[name] = [send for send in self.held[name] if send.after > token]
        for send in ready:
            self._post(name, send)
        self.tell(name, Persisted(token))

    def _post(self, sender: str, send: Send) -> None:
        to, message = send.peer, send.message
        if to not in self.cores or (sender, to) in self.cuts or self.drop(sender, to, message):
            return
        self._at(0.001, to, lambda to: self._deliver(sender, to, message))

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        self.tell(to, Received(sender, message))

    def run(self, for_s: float) -> None:
        """Let time pass."""
        end = self.now + for_s
        while True:
            name, due = None, end
            for each, core in self.cores.items():
                if max(core.next_deadline, self.now) < due:
                    name, due = each, max(core.next_deadline, self.now)
            if self._heap and self._heap[0][0] <= due:
                self.now, _, go = heappop(self._heap)
                go()
            elif name is not None:
                self.now = due
                self.tell(name, Elapsed())
            else:
                break
        self.now = end

    def cut(self, *names: str) -> None:
        """Nobody hears these any more, nor do they hear others."""
        for name in names:
            for other in self.names:
                if other not in names:
                    self.cuts |= {(name, other), (other, name)}

    def leader(self) -> str | None:
        leading = [
            (core.generation, name)
            for name, core in self.cores.items()
            if core.role is Role.LEADING
        ]
        return max(leading)[1] if leading else None

    def propose(self, data: bytes, name: str | None = None) -> list[Effect]:
        leader = name or self.leader()
        assert leader is not None
        return self.tell(leader, Propose(data))

    def read(self, token: int, name: str | None = None) -> list[Effect]:
        leader = name or self.leader()
        assert leader is not None
        return self.tell(leader, ReadAsked(token))

    def data(self, name: str) -> list[bytes]:
        """What a server has applied, no-ops left out."""
        return [entry.data for entry in self.applied[name] if entry.data]

    def settled(self) -> bool:
        """Whether everybody who is up follows the same leader and has applied the same."""
        leader = self.leader()
        return leader is not None and all(
            core.leader == leader and self.applied[name] == self.applied[leader]
            for name, core in self.cores.items()
        )
