"""The protocols of the lab, and the features of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, cast

from doyen.errors import ConfigError
from doyen.lab.disk import SimulatedDisk
from doyen.lab.plan import Plan
from doyen.quorum.consensus.core import LogEntry, Making, ProtocolSettings, Send


def settings_of(
    plan: Plan, make: Callable[..., ProtocolSettings] = ProtocolSettings, **more: int
) -> ProtocolSettings:
    """The settings that every protocol has, and more of its own."""
    return make(
        election_timeout_s=plan.election_timeout_s,
        heartbeat_s=plan.heartbeat_s,
        message_bytes=plan.message_bytes,
        **more,
    )


def _raft_settings(plan: Plan) -> ProtocolSettings:
    from doyen.quorum.consensus.raft import RaftSettings

    return settings_of(plan, RaftSettings, tail_entries=plan.tail_entries)


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A protocol, and what the lab needs to know of it."""

    name: str
    make: Making
    module: str = ""
    """The module of its messages and its state."""
    snapshots: bool = False
    membership: bool = False
    ballots: bool = False
    """Whether the same value may be chosen again under a later generation."""
    make_disk: Callable[[], SimulatedDisk] = SimulatedDisk
    make_settings: Callable[[Plan], ProtocolSettings] = settings_of
    vote_in: Callable[[Send], tuple[int, str | None] | None] | None = None
    """Returns the generation and the candidate of a message that is a vote, where None stands for
    the sender; None for other messages."""
    log_position: Callable[[SimulatedDisk], tuple[int, ...]] | None = None
    """The position of the log on a disk as elections compare it; None if they compare none."""

    def replace(self, **changes: Any) -> Protocol:
        """A copy with some attributes changed: tests use it for broken cores and disks."""
        return replace(self, **changes)

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
_CORES: dict[str, tuple[str, dict[str, Any]]] = {
    "raft": ("Raft", _RAFT),
    "zab": ("Zab", {"log_position": _zab_position}),
    "viewstamped": ("Viewstamped", {"log_position": _viewstamped_position}),
    "paxos": ("Paxos", {"ballots": True}),
    "smallest-id": ("SmallestId", {"log_position": _last}),
}

PROTOCOLS = tuple(_CORES)


def known(name: str) -> Protocol:
    """The protocol of that name."""
    if name not in _CORES:
        raise ConfigError(f"unknown protocol {name!r}: choose one of {', '.join(PROTOCOLS)}")
    core, options = _CORES[name]
    module = f"doyen.quorum.consensus.{name.replace('-', '_')}"
    make = cast("Making", getattr(import_module(module), core))
    return Protocol(name=name, make=make, module=module, vote_in=_vote_in, **options)
