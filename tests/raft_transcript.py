"""Transcripts: what a cluster of Raft cores does, as text.

A transcript is a file of comments (`# …`), commands (`> …`) and, below each command, what the
servers then said. `play` runs the commands and gives the file as it should be; a test compares.
Nothing happens that is not commanded: a message flies until it is delivered, a write waits until
the disk is synced. Sends that wait for a write are shown with it: `after 3`.

    servers a b c [joining d e]      who there is (three founders; two that wait to be added)
    elapse a                         a's deadline comes
    deliver [a b]                    the first message (from a to b)
    deliver all                      every message, and those that follow from them
    lose [a b]                       likewise
    sync a …                         the disk finishes what waits
    settle                           deliver and sync until nothing is left
    run 2.5                          let that many seconds pass; messages and writes not shown
    propose a x, read a 7, transfer a b, compact a, connect a b, disconnect a b, crash a, start a
    change a voters a b c learners d
    cut a b, mend                    links that lose everything, in silence
    status [a …]                     role, generation, leader, commit, log by generations

`quietly` before a command leaves out what the servers say.
"""

from __future__ import annotations

from collections.abc import Callable

from doyen.quorum.consensus.core import (
    Accepted,
    ChangeAsked,
    Committed,
    Connected,
    Disconnected,
    Effect,
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Message,
    Persist,
    ProposalRefused,
    Propose,
    ReadReady,
    ReadRefused,
    Role,
    RoleChanged,
    Send,
    SendSnapshot,
    TransferAsked,
    TransferFailed,
    TransferRefused,
)
from doyen.quorum.consensus.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    PreVote,
    PreVoteReply,
    Vote,
    VoteReply,
)
from raft_cluster import SETTINGS, RaftCluster


def entry(it: LogEntry) -> str:
    what = {EntryKind.NOTHING: "-", EntryKind.MEMBERSHIP: "membership"}.get(
        EntryKind(it.kind), it.data.decode(errors="replace")
    )
    return f"{what}@{it.generation}"


def entries(them: tuple[LogEntry, ...] | list[LogEntry]) -> str:
    return " ".join(map(entry, them))


def message(it: Message) -> str:
    name = f"{type(it).__name__} {it.generation}"
    if isinstance(it, PreVote | Vote):
        transfer = " by transfer" if isinstance(it, Vote) and it.transfer else ""
        return f"{name}, log to {it.last_index}@{it.last_generation}{transfer}"
    if isinstance(it, PreVoteReply | VoteReply):
        return f"{name}, {'yes' if it.granted else 'no'}"
    if isinstance(it, Append):
        after = f"after {it.previous_index}@{it.previous_generation}"
        return f"{name}, {after} [{entries(it.entries)}], commit {it.commit}, round {it.round}"
    if isinstance(it, AppendReply):
        if it.rejected:
            hint = f"meet at {it.hint_index}@{it.hint_generation}"
            return f"{name}, not after {it.index}: {hint}, round {it.round}"
        return f"{name}, has {it.index}, round {it.round}"
    if isinstance(it, Heartbeat):
        return f"{name}, commit {it.commit}" + (f", round {it.round}" if it.round else "")
    if isinstance(it, HeartbeatReply):
        return f"{name}, round {it.round}"
    return name


def effect(it: Effect) -> str:
    match it:
        case Persist():
            parts = [f"write {it.token}:"]
            if it.state is not None:
                parts.append(f"generation {it.state.generation}, vote {it.state.vote or '-'}")
            if it.first:
                parts.append(f"from {it.first} [{entries(list(it.entries))}]")
            return " ".join(parts)
        case Send():
            waits = f"   (after {it.after})" if it.after else ""
            return f"to {it.peer}: {message(it.message)}{waits}"
        case Committed():
            return f"committed from {it.first} [{entries(list(it.entries))}]"
        case RoleChanged():
            whom = f" {it.leader}" if it.role is Role.FOLLOWING else ""
            return f"{it.role}{whom} in generation {it.generation}"
        case Accepted():
            return f"accepted at {it.index}@{it.generation}"
        case ProposalRefused():
            return f"refused: {it.reason}"
        case ReadReady():
            return f"read {it.token} at {it.index}"
        case ReadRefused():
            return f"read {it.token} refused"
        case TransferFailed() | TransferRefused():
            return f"no transfer: {it.reason}"
        case SendSnapshot():
            return f"stream a snapshot to {it.peer}, generation {it.generation}"
        case Install():
            voters = " ".join(it.snapshot.membership.voters)
            at = f"{it.snapshot.index}@{it.snapshot.generation}"
            return f"install {it.token}: snapshot to {at}, voters {voters}"
    return repr(it)


class Player:
    """Runs commands on a cluster and writes down what it says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.quiet = False
        self.brief = False
        self.world: RaftCluster | None = None

    @property
    def cluster(self) -> RaftCluster:
        assert self.world is not None, "begin with: servers …"
        return self.world

    def command(self, text: str) -> list[str]:
        self.lines = []
        word, *rest = text.split()
        self.quiet = word == "quietly"
        if self.quiet:
            word, *rest = rest
        act: Callable[..., None] = getattr(self, f"do_{word}")
        act(*rest)
        return self.lines

    def see(self, name: str, it: Effect) -> None:
        if not self.quiet and not (self.brief and isinstance(it, Send | Persist)):
            self.lines.append(f"{name}  {effect(it)}")

    def do_servers(self, *names: str) -> None:
        cut = names.index("joining") if "joining" in names else len(names)
        self.world = RaftCluster(names[:cut], joiners=names[cut + 1 :], settings=SETTINGS)
        self.world.seen = self.see

    def find(self, names: tuple[str, ...]) -> int:
        for place, (sender, receiver, _) in enumerate(self.cluster.flying):
            if not names or names == (sender, receiver):
                return place
        raise AssertionError(f"nothing is on its way from {' to '.join(names)}")

    def do_deliver(self, *names: str) -> None:
        if names != ("all",):
            self.cluster.deliver(self.find(names))
            return
        while self.cluster.flying:
            self.cluster.deliver()

    def do_lose(self, *names: str) -> None:
        if names != ("all",):
            self.cluster.lose(self.find(names))
            return
        while self.cluster.flying:
            self.cluster.lose()

    def do_elapse(self, name: str) -> None:
        self.cluster.elapse(name)

    def do_sync(self, *names: str) -> None:
        for name in names:
            self.cluster.sync(name)

    def do_settle(self) -> None:
        self.cluster.settle()

    def do_run(self, seconds: str) -> None:
        self.brief = True
        self.cluster.run(float(seconds))
        self.brief = False

    def do_propose(self, name: str, data: str) -> None:
        self.cluster.tell(name, Propose(data.encode()))

    def do_read(self, name: str, token: str) -> None:
        self.cluster.ask_read(name, int(token))

    def do_transfer(self, name: str, to: str = "") -> None:
        self.cluster.tell(name, TransferAsked(to))

    def do_change(self, name: str, *rest: str) -> None:
        cut = rest.index("learners") if "learners" in rest else len(rest)
        assert rest[0] == "voters"
        self.cluster.tell(name, ChangeAsked(Membership(rest[1:cut], rest[cut + 1 :])))

    def do_compact(self, name: str) -> None:
        self.cluster.compact(name)

    def do_connect(self, name: str, peer: str) -> None:
        self.cluster.tell(name, Connected(peer))

    def do_disconnect(self, name: str, peer: str) -> None:
        self.cluster.tell(name, Disconnected(peer))

    def do_crash(self, name: str) -> None:
        self.cluster.crash(name)

    def do_start(self, name: str) -> None:
        self.cluster.start(name)

    def do_cut(self, one: str, other: str) -> None:
        self.cluster.cut(one, other)

    def do_mend(self) -> None:
        self.cluster.cuts.clear()

    def do_status(self, *names: str) -> None:
        for name in names or self.cluster.boxes:
            core = self.cluster.boxes[name].core
            if core is None:
                self.lines.append(f"{name}  down")
                continue
            log = core.log
            base = f"snapshot to {log.base}@{log.base_generation}, then " if log.base else ""
            self.lines.append(
                f"{name}  {core.role} in {core.generation}, leader {core.leader or '-'}, "
                f"commit {core.commit}, log {base}[{entries(log.entries)}]"
            )


def play(text: str) -> str:
    """The transcript as it should be."""
    player = Player()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("> "):
            lines.append(line)
            lines.extend("    " + said for said in player.command(line[2:]))
        elif not line.startswith("    "):
            lines.append(line)
    return "\n".join(lines) + "\n"
