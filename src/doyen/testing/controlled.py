"""A store inside the test process whose leaders lose, freeze and cannot reach it on command.

    store = ControlledStore()
    with store.installed():            # the pytest fixture `doyen_store` does this
        worker.start()                 # connects to store.url, or to what DOYEN_STORE names
        store.wait_for_leader("billing")
        store.lose("billing")          # the lease of the leader ends at the store
        store.freeze(successor="b")    # the process stood still, and another was elected meanwhile
        store.fail(); store.heal()     # the store cannot be reached; it can again

All of it is within what the port allows. `lose` ends a lease as an operator does who removes it, so
for an instant the old leader may not know; then only tokens protect, as always. A freeze is a jump
of the clock on which this process counts its leases, as after SIGSTOP or in a suspended machine:
all terms of this process are over when it wakes. Only sessions that are opened while the store is
installed have that clock.

Imports the memory store, the faults and what sessions use for their time.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from doyen.election.queries import leader_of
from doyen.errors import ConfigError
from doyen.lease import lifetime, runtime
from doyen.lease.clock import SystemClock
from doyen.lease.runtime import ThreadRuntime
from doyen.model import Claim, Entry, Kind, Leader, Lease, Meta, leader_key
from doyen.stores import port
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, StoreURL
from doyen.testing.faults import Faults, FaultyStore, Odds

__all__ = ["ControlledStore", "open_store"]

SCHEME = "controlled"
AGES_S = 1e9
"""The ttl of leaders in other processes, which only the test ends."""

PATIENCE_S = 5.0

_stores: dict[str, ControlledStore] = {}
_numbers = itertools.count(1)


async def open_store(url: StoreURL, context: Context) -> FaultyStore:
    """Open `controlled://name`, while the store of that name is installed."""
    url.refuse_unknown()
    store = _stores.get(url.parts.netloc)
    if store is None:
        raise ConfigError(
            f"{url.text} exists only in the test that uses the fixture doyen_store, and in its"
            " process: other processes need a store of their own, such as sqlite:///path"
        )
    return store._opened(context)


class _SteppedClock(SystemClock):
    """The clocks of the machine, with what was added to them."""

    __slots__ = ("ahead_s",)

    def __init__(self) -> None:
        super().__init__()
        self.ahead_s = 0.0
        machine = self.now
        self.now = lambda: machine() + self.ahead_s


class ControlledStore:
    """A store for tests, with its leaders under control. Its methods may be called on any
    thread."""

    def __init__(self) -> None:
        self.url = f"{SCHEME}://test-{next(_numbers)}"
        self.faults = Faults()
        """The faults of all sessions on this store; for single calls `faults.next("create", …)`."""
        self._clock = _SteppedClock()
        self._server = MemoryServer(self._clock)
        self._others: dict[str, Lease] = {}
        self._clients: list[FaultyStore] = []

    @contextmanager
    def installed(self) -> Iterator[ControlledStore]:
        """Sessions can be opened on this store, by its URL and by DOYEN_STORE."""
        if ThreadRuntime._shared:
            raise ConfigError(
                "a session is open already, whose clock the test cannot control: request the"
                " fixture doyen_store before the fixtures that connect, and close every session"
            )
        name = self.url.partition("://")[2]
        with (
            patch.dict(_stores, {name: self}),
            patch.dict(port._BUILT_IN, {SCHEME: __name__}),
            patch.dict(os.environ, {"DOYEN_STORE": self.url}),
            patch.object(runtime, "SystemClock", lambda: self._clock),
        ):
            try:
                yield self
            finally:
                self.heal()
                self._close_sessions()

    def leader(self, election: str, *, kind: Kind = "elections") -> Leader | None:
        """Who leads according to the store, which is asked even while it fails for others."""
        record = self._server.get(leader_key(election, kind))
        return None if record is None else leader_of(election, record, kind)

    def wait_for_leader(
        self,
        election: str,
        *,
        after: Leader | None = None,
        kind: Kind = "elections",
        within_s: float = 10.0,
    ) -> Leader:
        """Wait until there is a leader, of a later term than `after` if that is given."""
        give_up_at = time.monotonic() + within_s
        while True:
            leader = self.leader(election, kind=kind)
            if leader is not None and (after is None or leader.token > after.token):
                return leader
            if time.monotonic() > give_up_at:
                later = f" after token {after.token}" if after else ""
                raise AssertionError(f"no leader of {election!r}{later} after {within_s:g} s")
            time.sleep(0.005)

    def lose(self, election: str, *, kind: Kind = "elections") -> Leader:
        """End the lease of the leader at the store. The leader is notified, as fast as the store
        can do it. Returns who it was. The session goes on with a new lease, and may be elected
        again."""
        record = self._server.get(leader_key(election, kind))
        if record is None or record.lease is None:
            raise AssertionError(f"no leader of {election!r} could lose its lease")
        self._server.revoke(record.lease)
        return leader_of(election, record, kind)

    def freeze(self, for_s: float = 3600.0, *, successor: str | None = None) -> None:
        """This process stood still for `for_s`, and has just gone on. Leases that were not renewed
        in that time have expired, so every term in this process is over.

        With `successor`, another process of that name was elected meanwhile in every election that
        had a leader. It leads until `resign_other`.
        """
        led = [entry.key for entry in self._server.list("elections") if _is_leader(entry.key)]
        with self._server._lock:
            self._clock.ahead_s += for_s
            for key in led if successor is not None else ():
                if self._server.get(key) is None:  # its lease has expired
                    self._elect(key, str(successor), {})
        self._server.get("")  # ends what has expired, and notifies

    def fail(self, *, silent: bool = False) -> None:
        """The store cannot be reached until `heal`: every call is refused, or with `silent` not
        answered. Leaders stay valid until their deadline; `freeze` brings that about at once."""
        if silent:
            self.faults.cut()
        else:
            self.faults.odds = Odds(refused=1.0)

    def heal(self) -> None:
        """The store can be reached again."""
        self.faults.odds = Odds()
        self.faults.heal()

    def elect_other(
        self, election: str, name: str = "other", *, meta: Meta | None = None
    ) -> Leader:
        """Another process leads `election`, until `resign_other`. It must not have a leader now: if
        the code under test leads, use `freeze(successor=…)`."""
        key = leader_key(election)
        with self._server._lock:
            leader = self.leader(election)
            if leader is not None:
                raise AssertionError(
                    f"{leader.name!r} leads {election!r}: freeze(successor={name!r}) lets another"
                    " process take over"
                )
            return leader_of(election, self._elect(key, name, meta or {}))

    def resign_other(self, election: str) -> None:
        """The leader in another process gives up."""
        lease = self._others.pop(leader_key(election), None)
        if lease is None:
            raise AssertionError(f"no other process leads {election!r}: see elect_other")
        self._server.revoke(lease.id)

    def _elect(self, key: str, name: str, meta: Meta) -> Entry:
        lease = self._others[key] = self._server.grant(AGES_S)
        claim = Claim(name, f"{name}-{lease.id}", meta, since=self._clock.wall())
        return self._server.create(key, claim.encode(), lease.id).entry

    def _opened(self, context: Context) -> FaultyStore:
        store = FaultyStore(MemoryStore(self._server, context), self.faults)
        self._clients.append(store)
        return store

    def _close_sessions(self) -> None:
        """Close what the test left open, such as `while_leader` on a thread, which ends by that."""
        left = [core for core in [*lifetime._sessions] if core.store in self._clients]
        for core in left:
            if isinstance(core.runtime, ThreadRuntime) and not core.closed:
                core.runtime.submit(core.close()).result(PATIENCE_S)
        give_up_at = time.monotonic() + PATIENCE_S
        while left and ThreadRuntime._shared and time.monotonic() < give_up_at:
            time.sleep(0.005)  # until the threads that used them have noticed


def _is_leader(key: str) -> bool:
    return key.endswith("/leader")
