"""The protocols of the lab, and the features of each."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, cast

from doyen.errors import ConfigError
from doyen.lab.disk import SimulatedDisk
from doyen.lab.plan import Plan
from doyen.quorum.consensus.core import LogEntry, Making, ProtocolSettings, Send


def settings_of(plan: Plan) -> ProtocolSettings:
    """The settings that every protocol has."""
    return ProtocolSettings(
        election_timeout_s=plan.election_timeout_s,
        heartbeat_s=plan.heartbeat_s,
        message_bytes=plan.message_bytes,
    )


def _raft_settings(plan: Plan) -> ProtocolSettings:
    from doyen.quorum.consensus.raft import RaftSettings

    return RaftSettings(
        election_timeout_s=plan.election_timeout_s,
        heartbeat_s=plan.heartbeat_s,
        message_bytes=plan.message_bytes,
        tail_entries=plan.tail_entries,
    )


class Protocol:
    """A protocol, and what the lab needs to know of it."""

    def __init__(
        self,
        name: str,
        make: Making,
        *,
        module: str = "",
        snapshots: bool = False,
        membership: bool = False,
        ballots: bool = False,
        make_disk: Callable[[], SimulatedDisk] = SimulatedDisk,
        vote_in: Callable[[Send], tuple[int, str | None] | None] | None = None,
        log_position: Callable[[SimulatedDisk], tuple[int, ...]] | None = None,
        make_settings: Callable[[Plan], ProtocolSettings] = settings_of,
    ) -> None:
        self.name = name
        self.make = make
        self.module = module
        """The module of its messages and its state."""
        self.snapshots = snapshots
        self.membership = membership
        self.ballots = ballots
        """Whether the same value may be chosen again under a later generation."""
        self.make_disk = make_disk
        self.make_settings = make_settings
        self.vote_in = vote_in
        """Returns the generation and the candidate of a message that is a vote, where None stands
        for the sender; None for other messages."""
        self.log_position = log_position
        """The position of the log on a disk as elections compare it; None if they compare none."""

    def replace(self, **changes: Any) -> Protocol:
        """A copy with some attributes changed: tests use it for broken cores and disks."""
        return Protocol(**{**vars(self), **changes})

    def holds(self, disk: SimulatedDisk, index: int, entry: LogEntry) -> bool:
        """Whether this entry is durable on the disk."""
        if not self.ballots:
            return disk.has(index, entry)
        at = index - disk.base - 1
        if at < 0:
            return True
        if at >= len(disk.entries):
            return False
        stored = disk.entries[at]
        return stored.kind == entry.kind and stored.data == entry.data


def _vote_in(send: Send) -> tuple[int, str | None] | None:
    """A server that asks for votes, or opens an epoch, has voted for itself."""
    message = send.message
    match type(message).__name__:
        case "Vote" if not hasattr(message, "granted"):
            return message.generation, None
        case "Stand" | "LeaderInfo":
            return message.generation, None
        case "VoteReply" | "Vote" if getattr(message, "granted", False):
            return message.generation, send.peer
        case "AckEpoch" if getattr(message, "counts", False):
            return message.generation, send.peer
        case "Promise" | "DoViewChange":
            return message.generation, send.peer
    return None


def _last(disk: SimulatedDisk) -> tuple[int, int]:
    """Generation and index of the last entry."""
    if disk.entries:
        return disk.entries[-1].generation, disk.base + len(disk.entries)
    return (disk.snapshot.generation if disk.snapshot is not None else 0), disk.base


def _zab_position(disk: SimulatedDisk) -> tuple[int, ...]:
    return (disk.state.current_epoch if disk.state is not None else 0), *_last(disk)


def _viewstamped_position(disk: SimulatedDisk) -> tuple[int, ...]:
    return (disk.state.normal if disk.state is not None else 0), len(disk.entries)


_RAFT = {
    "snapshots": True,
    "membership": True,
    "make_settings": _raft_settings,
    "log_position": _last,
}
_MODULES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "raft": ("doyen.quorum.consensus.raft", "Raft", _RAFT),
    "zab": ("doyen.quorum.consensus.zab", "Zab", {"log_position": _zab_position}),
    "viewstamped": (
        "doyen.quorum.consensus.viewstamped",
        "Viewstamped",
        {"log_position": _viewstamped_position},
    ),
    "paxos": ("doyen.quorum.consensus.paxos", "Paxos", {"ballots": True}),
    "smallest-id": ("doyen.quorum.consensus.smallest_id", "SmallestId", {"log_position": _last}),
}

PROTOCOLS = tuple(_MODULES)


def known(name: str) -> Protocol:
    """The protocol of that name."""
    if name not in _MODULES:
        raise ConfigError(f"unknown protocol {name!r}: choose one of {', '.join(PROTOCOLS)}")
    module, core, options = _MODULES[name]
    make = cast("Making", getattr(import_module(module), core))
    return Protocol(name, make, module=module, vote_in=_vote_in, **options)
