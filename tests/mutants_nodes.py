"""Mutants of whole nodes and their clients: each breaks one promise, which the lab must detect.

Each is a function that patches what runs in a world of the lab. The promises are those of
`docs/stores/quorum.md` and, as far as a quorum has a part in them, of `docs/guarantees.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from doyen.election.attempt import Attempt
from doyen.election.candidate import Claiming
from doyen.lab.files import Files
from doyen.lab.processes import MachineClock
from doyen.lease.keepalive import Keepalive
from doyen.model import Entry
from doyen.quorum.keyspace import commands, snapshot, state
from doyen.quorum.keyspace.commands import StoredEntry
from doyen.quorum.keyspace.history import Change, ChangeKind, History
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node import lease_keeper as keeper
from doyen.quorum.node import membership as members
from doyen.quorum.node import replicated as machine
from doyen.quorum.node import roles
from doyen.quorum.node.applier import Applier
from doyen.quorum.node.clients import RefusedCreate, ServedClient
from doyen.quorum.node.lease_clock import LeaseClock
from doyen.quorum.node.lists import Lists
from doyen.quorum.node.membership import Members
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.proposals import Proposals
from doyen.quorum.node.reads import LinearizableReads
from doyen.quorum.node.replicated import Command, ReplicatedMachines
from doyen.quorum.node.watches import Watches
from doyen.quorum.protocol import security
from doyen.quorum.protocol.requests import WatchNotification, WatchRequest
from doyen.stores.quorum.connection import QuorumConnection

Mutant = Callable[[pytest.MonkeyPatch], None]


# Terms: `docs/guarantees.md`.


def on_the_wall_clock(patch: pytest.MonkeyPatch) -> None:
    """Leases are measured by the wall clock, which administrators set (mutant 24)."""
    now = MachineClock.now
    patch.setattr(MachineClock, "now", lambda self: now(self) + self._wall)


def answer_ignored(patch: pytest.MonkeyPatch) -> None:
    """A failed renewal counts as confirmed (27)."""
    patch.setattr(Keepalive, "_failed", lambda self, _: self._confirm(self._clock.now()))


def removed_by_another(patch: pytest.MonkeyPatch) -> None:
    """The first candidate in line deletes the leader record of a live holder (28)."""
    wait_for = Claiming._wait_for

    async def remove(self: Claiming, entry: Entry, *until: float) -> None:
        if entry.key == self.attempt.record_key:
            await self.attempt.core.call(self.attempt.core.store.delete(entry.key))
        else:
            await wait_for(self, entry, *until)

    patch.setattr(Claiming, "_wait_for", remove)


def announced_unread(patch: pytest.MonkeyPatch) -> None:
    """A candidate that has waited considers any leader record its own (26)."""
    is_mine, wait_for = Attempt.is_mine, Claiming._wait_for
    waited: set[str] = set()

    async def wait(self: Claiming, entry: Entry, *until: float) -> None:
        waited.add(self.attempt.id)
        await wait_for(self, entry, *until)

    def trust(self: Attempt, entry: Entry) -> bool:
        return is_mine(self, entry) or (self.id in waited and entry.key == self.record_key)

    patch.setattr(Claiming, "_wait_for", wait)
    patch.setattr(Attempt, "is_mine", trust)


# Leases.


def not_extended(patch: pytest.MonkeyPatch) -> None:
    """A new leader does not extend the leases that it finds (29)."""
    take_in = LeaseClock.take_in

    def hasty(self: LeaseClock, now: float) -> bool:
        found = self.taken_in == 0
        more = take_in(self, now)
        if found:
            self._until = dict.fromkeys(self._until, now)
            self._heap = [(now, lease) for lease in self._until]
        return more

    patch.setattr(LeaseClock, "take_in", hasty)


def renewed_by_a_read(patch: pytest.MonkeyPatch) -> None:
    """A leader confirms renewals and answers reads without a majority's confirmation (30)."""
    patch.setattr(LinearizableReads, "when_current", lambda self, call: call())


def era_ignored(patch: pytest.MonkeyPatch) -> None:
    """An end of leases takes effect in any era. Commands of a deposed leader are
    forwarded to its successor; otherwise only an entry already in the log would show the defect."""

    def forward_internal(self: Proposals, reason: str) -> None:
        self.queue.extend(self.internal)
        self.internal.clear()

    patch.setattr(Proposals, "refuse_internal", forward_internal)

    def expire(self: Keyspace, command: commands.Expire) -> bytes:
        self._end(command.leases)
        return commands.encode(commands.Done())

    patch.setattr(Keyspace, "_expire", expire)


def confirmed_without_an_era(patch: pytest.MonkeyPatch) -> None:
    """A leader confirms renewals before it has begun an era, and ends of leases take effect in
    any."""

    def begin(self: keeper.KeyspaceLeases) -> None:
        self._era = self._keyspace.era
        self._clock = LeaseClock(self._keyspace)
        self._take_in()

    patch.setattr(keeper.KeyspaceLeases, "_begin", begin)
    era_ignored(patch)


def never_ended(patch: pytest.MonkeyPatch) -> None:
    """Leaders do not end leases whose ttl has passed."""
    patch.setattr(keeper.KeyspaceLeases, "_end_due", lambda self: None)


def ended_late(patch: pytest.MonkeyPatch) -> None:
    """Leaders end leases 5 s too late."""
    due = LeaseClock.due
    patch.setattr(LeaseClock, "due", lambda self, now: due(self, now - 5.0))


def seen_until_removed(patch: pytest.MonkeyPatch) -> None:
    """Entries of an ended lease are visible until they are removed."""
    patch.setattr(Keyspace, "_live", lambda self, record: record)


def removed_by_key(patch: pytest.MonkeyPatch) -> None:
    """The removal of an ended lease's keys also removes entries that were written there since."""

    def remove(self: Keyspace, key: str, lease: int) -> bool:
        record = self._entries.get(key)
        if record is None:
            return False
        self._remove(record, ChangeKind.END)
        return True

    patch.setattr(Keyspace, "_remove_bound", remove)


def updated_without_its_lease(patch: pytest.MonkeyPatch) -> None:
    """An update writes an entry that is not bound to a lease."""

    def update(self: Keyspace, command: commands.Update) -> bytes:
        return self._put(commands.Put(command.key, command.value, command.if_version))

    patch.setattr(Keyspace, "_update", update)


def updated_in_any_version(patch: pytest.MonkeyPatch) -> None:
    """An update replaces whatever version it finds."""
    update = Keyspace._update

    def blindly(self: Keyspace, command: commands.Update) -> bytes:
        found = self.get(command.key)
        return update(self, replace(command, if_version=found.version if found else 0))

    patch.setattr(Keyspace, "_update", blindly)


def ends_left_out(patch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out ended leases whose keys are not all removed."""
    pieces = snapshot.encode_pieces

    def fewer(head: Any, leases: Any, ended: list[int], *others: Any) -> Iterator[bytes]:
        return pieces(head, leases, [], *others)

    patch.setattr(state, "encode_pieces", fewer)


# Writes: executed once, and durable.


def done_again(patch: pytest.MonkeyPatch) -> None:
    """A repeated write is executed again."""

    def apply(self: ReplicatedMachines, index: int, commands: Sequence[Command]) -> list[Any]:
        return [self._applies[command.target](command.body) for command in commands]

    patch.setattr(ReplicatedMachines, "apply", apply)


def large_done_again(patch: pytest.MonkeyPatch) -> None:
    """A repeated command whose result has more than 1,024 bytes is executed again, as in version
    1."""
    keep = ReplicatedMachines._keep_large

    def skip(
        self: ReplicatedMachines, client: Any, command: Command, result: Any, size: int
    ) -> None:
        if command.target != machine.KEYSPACE or size <= machine.LARGE:
            keep(self, client, command, result, size)

    patch.setattr(ReplicatedMachines, "_keep_large", skip)


def results_left_out(patch: pytest.MonkeyPatch) -> None:
    """A snapshot leaves out the results of earlier commands."""
    patch.setattr(machine, "_pieces_of", lambda clients: iter([machine._encode([])]))


def renamed(patch: pytest.MonkeyPatch) -> None:
    """A client repeats its requests under another name."""
    use = QuorumConnection._connected

    def anew(self: QuorumConnection, link: Any) -> None:
        ids = self._write_ids
        ids.name, ids.known, ids._floor = f"{ids.name}+", False, 1
        for call in self._calls.values():
            call.name = ids.name
        use(self, link)

    patch.setattr(QuorumConnection, "_connected", anew)


def not_synced(patch: pytest.MonkeyPatch) -> None:
    """The journal reports writes to its log as durable without a sync."""
    sync = Files.sync

    def skip(self: Files, fd: int, path: Path) -> None:
        if not path.name.startswith("log-") or path.suffix == ".new":
            sync(self, fd, path)

    patch.setattr(Files, "sync", skip)


def raised_late(patch: pytest.MonkeyPatch) -> None:
    """The version of a new cluster does not rise before all its members are connected to a leader,
    so writes with large results may be carried out twice until then."""

    def supports(self: Peers, peer: str) -> int:
        connection = self.connections.get(peer)
        return 0 if connection is None else connection.supports[1]

    patch.setattr(Peers, "supports", supports)


def unknown_skipped(patch: pytest.MonkeyPatch) -> None:
    """A node skips a command that its release does not know."""

    class Never(Exception):
        pass

    patch.setattr(machine, "UnknownCommand", Never)


# Reads.


def read_while_behind(patch: pytest.MonkeyPatch) -> None:
    """A node answers reads before it has applied what the leader had committed."""
    patch.setattr(Applier, "when", lambda self, index, call: call())


def refused_while_behind(patch: pytest.MonkeyPatch) -> None:
    """A node reads the large entry because of which a create was refused before it has applied what
    the leader had committed."""
    read = Lists.read

    def at_once(self: Lists, client: ServedClient, reads: list[Any]) -> None:
        if isinstance(reads[0], RefusedCreate):
            self._current(client, reads)
        else:
            read(self, client, reads)

    patch.setattr(Lists, "read", at_once)


def large_in_results(patch: pytest.MonkeyPatch) -> None:
    """The result of a create carries the entry that exists, whatever its size."""
    init = Keyspace.__init__

    def unlimited(self: Keyspace, *arguments: Any, **limits: Any) -> None:
        init(self, *arguments, **{**limits, "result_value": 1 << 20})

    patch.setattr(Keyspace, "__init__", unlimited)


# Watches.


def deaf_when_resumed(patch: pytest.MonkeyPatch) -> None:
    """A resumed watch is not notified of what it has missed."""
    watch = Watches.add

    def deaf(self: Watches, client: Any, request: WatchRequest) -> None:
        watch(self, client, replace(request, since=-1))

    patch.setattr(Watches, "add", deaf)


def never_too_old(patch: pytest.MonkeyPatch) -> None:
    """A watch that is resumed from before the history is not notified."""

    def changed(self: History, scope: str, since: int) -> bool:
        self._extend_index()
        return self._index.get(scope, 0) > since

    patch.setattr(History, "changed", changed)


def ends_without_notification(patch: pytest.MonkeyPatch) -> None:
    """Watches are not notified of the removal of an ended lease's entries."""
    add = History.add

    def fewer(self: History, change: Change) -> None:
        if change.kind != ChangeKind.END:
            add(self, change)

    patch.setattr(History, "add", fewer)


def history_left_out(patch: pytest.MonkeyPatch) -> None:
    """A snapshot has no history, and claims that the history is complete."""
    pieces = snapshot.encode_pieces

    def fewer(head: Any, leases: Any, ended: Any, records: Any, _: Any) -> Iterator[bytes]:
        return pieces(head, leases, ended, records, [])

    patch.setattr(state, "encode_pieces", fewer)


def installed_without_notification(patch: pytest.MonkeyPatch) -> None:
    """Watches are not notified of changes that a snapshot from the leader contains."""
    restore, notify = Keyspace.restore, Watches.notify
    fresh: dict[Keyspace, None] = {}

    def note(self: Keyspace, pieces: Any) -> None:
        restore(self, pieces)
        fresh[self] = None

    def skip(self: Watches, index: int = 0) -> None:
        if self._keyspace in fresh:
            del fresh[self._keyspace]
            self._notified = self._keyspace.revision
        notify(self, index)

    patch.setattr(Keyspace, "restore", note)
    patch.setattr(Watches, "notify", skip)


def failed_notification(patch: pytest.MonkeyPatch) -> None:
    """A notification that cannot be sent ends the round of the others, which are not told
    later. The lab sees that a node has caught an exception."""

    def notify(self: Watches, client: ServedClient, watches: list[int], entries: Any) -> None:
        if self._notified % 50 == 0:
            raise ValueError("the frame has too many bytes")
        client.send(WatchNotification(watches, self._notified, entries))

    patch.setattr(Watches, "_notify", notify)


def carried_too_late(patch: pytest.MonkeyPatch) -> None:
    """A notification carries the entry that the one before should have carried."""
    send = Watches._notify
    before: dict[tuple[ServedClient, int], StoredEntry] = {}

    def late(
        self: Watches, client: ServedClient, watches: list[int], entries: dict[int, StoredEntry]
    ) -> None:
        older = {watch: before.get((client, watch), entry) for watch, entry in entries.items()}
        before.update({(client, watch): entry for watch, entry in entries.items()})
        send(self, client, watches, older)

    patch.setattr(Watches, "_notify", late)


def one_position(patch: pytest.MonkeyPatch) -> None:
    """All watches of a client are resumed from the last revision that any of them received. That
    harms a watch if the link breaks after another was confirmed, and before it was itself. The lab
    delivers what a node writes in one turn as a whole, so only `test_quorum_watches` sees it."""
    use = QuorumConnection._connected

    def share(self: QuorumConnection, link: Any) -> None:
        latest = max((watch.position for watch in self._watches.values()), default=-1)
        for watch in self._watches.values():
            if watch.position >= 0:
                watch.position = max(latest, self._notified)
        use(self, link)

    patch.setattr(QuorumConnection, "_connected", share)


# The quota.


def quota_ignored(patch: pytest.MonkeyPatch) -> None:
    """The keyspace accepts writes beyond its quota."""
    patch.setattr(Keyspace, "_full", lambda self, more: None)


def no_deletes_when_full(patch: pytest.MonkeyPatch) -> None:
    """While the keyspace is full, deletes are refused as well."""
    delete = Keyspace._delete

    def refuse(self: Keyspace, command: commands.Delete) -> bytes:
        if self.alarm:
            return commands.encode(commands.QuotaExceeded(self.bytes, self.quota))
        return delete(self, command)

    patch.setattr(Keyspace, "_delete", refuse)


def no_ends_when_full(patch: pytest.MonkeyPatch) -> None:
    """While the keyspace is full, no lease expires."""
    expire = Keyspace._expire

    def refuse(self: Keyspace, command: commands.Expire) -> bytes:
        return commands.encode(commands.ConditionFailed()) if self.alarm else expire(self, command)

    patch.setattr(Keyspace, "_expire", refuse)


# Identity and roles.


def one_id(patch: pytest.MonkeyPatch) -> None:
    """Every data directory has the same id, and a member may have less than it acknowledged."""
    patch.setattr(members, "token_hex", lambda size: "0" * 2 * size)
    older_copy_accepted(patch)


def older_copy_accepted(patch: pytest.MonkeyPatch) -> None:
    """A member that has acknowledged more than it has is accepted."""
    patch.setattr(Members, "_check_position", lambda *_: None)


def lifted_by_anyone(patch: pytest.MonkeyPatch) -> None:
    """Every client may raise tokens."""
    patch.setattr(roles, "ADMIN_COMMANDS", ())
    patch.setattr(roles, "needs_admin", lambda commands: False)


def peers_by_any_secret(patch: pytest.MonkeyPatch) -> None:
    """A client's secret is accepted as a peer's."""
    accepted = vars(security.Security)["accepted"].fget

    def accept_all(self: security.Security) -> list[tuple[security.Role, bytes]]:
        return [("peer", secret) for _, secret in accepted(self)]

    patch.setattr(security.Security, "accepted", property(accept_all))
