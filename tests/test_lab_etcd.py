"""etcd's API on whole nodes in the lab: faults by seed, checked by an oracle, and mutants that it
must detect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from doyen.lab.outcome import RunOutcome
from doyen.lab.quorum_plan import draw
from doyen.quorum.etcd_api import elections
from doyen.quorum.etcd_api.elections import Elections
from doyen.quorum.etcd_api.replica import Replica
from doyen.quorum.etcd_api.service import LeaseService
from doyen.quorum.etcd_api.watches import WatchHub, WatchStream
from doyen.quorum.keyspace.etcd_requests import DeleteKeys
from doyen.quorum.keyspace.etcd_state import EtcdKeyspace
from doyen.quorum.node.proposals import Batch, Proposals, _Identity
from etcd_world import EtcdWorld

FOR_S = 10.0
SEEDS = 40

Mutant = Callable[[pytest.MonkeyPatch], None]


def explore(seed: int, for_s: float = FOR_S) -> tuple[RunOutcome, EtcdWorld]:
    world = EtcdWorld(draw("raft", 3, seed, for_s=for_s))
    return world.run(), world


def test_nothing_breaks() -> None:
    for seed in (3, 4):
        outcome, world = explore(seed)
        assert outcome.ok, (seed, outcome.violations)
        assert world.etcd.answers > 50
        assert world.etcd.told > 50
        assert world.etcd.renewed
        assert world.etcd.elected > 5


@pytest.mark.chaos
def test_nothing_breaks_with_more_seeds() -> None:
    cancelled = installs = 0
    for seed in range(100, 130):
        outcome, world = explore(seed, 15.0)
        assert outcome.ok, (seed, outcome.violations)
        cancelled += world.etcd.cancelled
        installs += sum(node.installs for node in world.nodes())
    assert cancelled, "some watches wanted what had been compacted"
    assert installs, "some nodes received a snapshot"


def stale_reads(patch: pytest.MonkeyPatch) -> None:
    """Reads do not wait until the node shows what was acknowledged."""

    async def current(self: Replica) -> None:
        self.check_version()

    patch.setattr(Replica, "current", current)


def told_twice(patch: pytest.MonkeyPatch) -> None:
    """A watch is told of the last revision again."""
    tell = WatchStream._tell

    def again(self: WatchStream, watch: Any) -> Any:
        response = tell(self, watch)
        watch.position -= not watch.behind and watch.position > 2
        return response

    patch.setattr(WatchStream, "_tell", again)
    mark = WatchStream.mark

    def marked(self: WatchStream, watch: Any, since: int) -> None:
        mark(self, watch, min(since, watch.position or since))

    patch.setattr(WatchStream, "mark", marked)


def resumed_at_the_latest(patch: pytest.MonkeyPatch) -> None:
    """A watch that names an earlier revision is told only of what happens from now on."""
    create = WatchStream._create

    def late(self: WatchStream, request: Any) -> None:
        request.start_revision = 0
        create(self, request)

    patch.setattr(WatchStream, "_create", late)


def snapshots_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Watches do not notice that a snapshot of the leader has replaced the state."""
    applied = WatchHub._applied

    def skip(self: WatchHub, index: int) -> None:
        etcd = self._keyspace.etcd
        if etcd.revision > self.seen + 3:
            self.seen = etcd.revision
        else:
            applied(self, index)

    patch.setattr(WatchHub, "_applied", skip)


def cancelled_silently(patch: pytest.MonkeyPatch) -> None:
    """A watch that wants what has been compacted goes on with what is left."""
    tell = WatchStream._tell

    def go_on(self: WatchStream, watch: Any) -> Any:
        watch.position = max(watch.position, self._keyspace.etcd.compacted)
        return tell(self, watch)

    patch.setattr(WatchStream, "_tell", go_on)


def history_not_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    """A node that restores a snapshot has no history, and does not say so."""

    def snapshot(self: EtcdKeyspace) -> Any:
        return iter([*self._live.between(b"", None)]), []

    patch.setattr(EtcdKeyspace, "snapshot", snapshot)


def bindings_not_in_snapshots(patch: pytest.MonkeyPatch) -> None:
    """A node that restores a snapshot does not know which keys a lease has."""
    restore = EtcdKeyspace.restore

    def forget(self: EtcdKeyspace, *arguments: Any) -> None:
        restore(self, *arguments)
        self._bound = {lease: {} for lease in self._bound}

    patch.setattr(EtcdKeyspace, "restore", forget)


def empty_deletions_count(patch: pytest.MonkeyPatch) -> None:
    """A deletion that finds nothing has a revision of its own."""
    apply = EtcdKeyspace.apply

    def counted(self: EtcdKeyspace, request: Any) -> Any:
        result = apply(self, request)
        if type(request) is DeleteKeys and not result.deleted:  # type: ignore[union-attr]
            self.revision += 1
        return result

    patch.setattr(EtcdKeyspace, "apply", counted)


def renewals_unasked(patch: pytest.MonkeyPatch) -> None:
    """A node confirms renewals without asking the leader."""

    async def renew(self: LeaseService, lease: int) -> int:
        number = await self._number(lease)
        return 0 if number is None else int(self._keyspace.lease(number) or 0)

    patch.setattr(LeaseService, "renew", renew)


def proposed_again(patch: pytest.MonkeyPatch) -> None:
    """A write whose outcome is not known is proposed again under another number."""
    retry = Proposals.retry

    def anew(self: Proposals, batch: Batch) -> None:
        for proposal in batch.proposals:
            if isinstance(proposal.origin, _Identity):
                self._identify(proposal)
        retry(self, batch)

    patch.setattr(Proposals, "retry", anew)


def revision_of_the_node(patch: pytest.MonkeyPatch) -> None:
    """The response to a write has the revision that this node has applied."""
    header = Replica.header
    patch.setattr(Replica, "header", lambda self, revision=0: header(self))


def renewed_after_its_end(patch: pytest.MonkeyPatch) -> None:
    """A lease that has ended is reported as renewed if this node still knows it."""
    renew = LeaseService.renew

    async def hopeful(self: LeaseService, lease: int) -> int:
        return await renew(self, lease) or 3

    patch.setattr(LeaseService, "renew", hopeful)


def withdrawn_by_creation(patch: pytest.MonkeyPatch) -> None:
    """A call that its client has given up withdraws a key with which the client was elected."""

    def unchanged(record: Any) -> Any:
        return elections._created(record.key, record.create)

    patch.setattr(elections, "_unchanged", unchanged)


def elected_without_a_write(patch: pytest.MonkeyPatch) -> None:
    """A candidate is told that it leads, and its key can still be withdrawn by an earlier call."""
    join, turn = Elections._join, Elections._turn

    async def joined(self: Elections, *arguments: Any) -> Any:
        return (await join(self, *arguments))._replace(created=True)

    async def waited(self: Elections, *arguments: Any) -> bool:
        await turn(self, *arguments)
        return False

    patch.setattr(Elections, "_join", joined)
    patch.setattr(Elections, "_turn", waited)


def nobody_is_ahead(patch: pytest.MonkeyPatch) -> None:
    """A candidate does not wait for its turn."""
    patch.setattr(Elections, "_ahead", lambda *_: None)


MUTANTS: list[Mutant] = [
    stale_reads,
    told_twice,
    resumed_at_the_latest,
    snapshots_unnoticed,
    cancelled_silently,
    history_not_in_snapshots,
    bindings_not_in_snapshots,
    empty_deletions_count,
    renewals_unasked,
    proposed_again,
    revision_of_the_node,
    renewed_after_its_end,
    withdrawn_by_creation,
    elected_without_a_write,
    nobody_is_ahead,
]


@pytest.mark.chaos
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.__name__)
def test_the_lab_detects(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    for seed in range(SEEDS):
        outcome, _ = explore(seed)
        if not outcome.ok:
            print(seed, outcome.violations)
            return
    pytest.fail(f"not detected with {SEEDS} seeds")
