"""What each role may do. The table in docs/stores/quorum.md is this one.

    onlooker    status, reads, watches
    client      also writes and leases
    admin       also the members, who leads, backups, and how far tokens are lifted
    peer        speaks for a node of the cluster

A node checks what its own clients ask. What it forwards to the leader carries the role too: a batch
that holds an administrator's command says so, and the leader refuses one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import MsgspecError

from doyen.quorum.keyspace.commands import AdvanceRevision, decode_command
from doyen.quorum.node.replicated import KEYSPACE, Command
from doyen.quorum.protocol import requests
from doyen.quorum.protocol.security import Role, allows

__all__ = ["ADMIN_COMMANDS", "NEEDED", "allowed", "needs_admin", "refusal"]

NEEDED: dict[type[requests.Request], Role] = {
    requests.StatusRequest: "onlooker",
    requests.Get: "onlooker",
    requests.Scan: "onlooker",
    requests.Head: "onlooker",
    requests.Ahead: "onlooker",
    requests.WatchRequest: "onlooker",
    requests.CancelWatch: "onlooker",
    requests.IdentifyClient: "onlooker",
    requests.Write: "client",
    requests.RenewLease: "client",
    requests.Administer: "admin",
    requests.BackupRequest: "admin",
}

ADMIN_COMMANDS: tuple[type[AdvanceRevision], ...] = (AdvanceRevision,)
"""Commands of the keyspace that only an administrator may have carried out."""

_TAGS = {kind.__struct_config__.tag for kind in ADMIN_COMMANDS}


def allowed(role: Role) -> frozenset[type[requests.Request]]:
    """What a client with this role may ask."""
    return frozenset(kind for kind, needed in NEEDED.items() if allows(role, needed))


def refusal(role: Role, needed: Role) -> str:
    """Why it was not done."""
    return (
        f"this needs the role {needed!r}, and this connection has {role!r}: use the secret or the"
        " certificate of that role"
    )


def needs_admin(commands: Iterable[Command]) -> bool:
    """Whether one of them is for administrators only."""
    for command in commands:
        body = command.body
        # Every write that is forwarded is looked at, so the tag is read in place where it is
        # encoded in the usual way: a short array that begins with a small number.
        usual = len(body) >= 2 and 0x90 < body[0] <= 0x9F and body[1] <= 0x7F
        if command.target == KEYSPACE and (body[1] in _TAGS if usual else _is_admins(body)):
            return True
    return False


def _is_admins(body: bytes) -> bool:
    """`needs_admin` for a command that is encoded in an unusual way, or is none."""
    try:
        return isinstance(decode_command(body), ADMIN_COMMANDS)
    except (MsgspecError, UnicodeDecodeError):
        return False
