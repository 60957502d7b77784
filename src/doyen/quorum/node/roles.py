"""What each role may do. The table in docs/stores/quorum.md shows the same.

    onlooker    status, reads, watches
    client      also writes and leases
    admin       also changes of members and leader, backups, raising the token floor
    peer        acts as a node of the cluster

A node checks the requests of its own clients. A batch that it forwards to the leader carries the
role too: one with an administrator's command is marked, and the leader refuses it otherwise.
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
"""Commands of the keyspace that only an administrator may propose."""

_TAGS = {kind.__struct_config__.tag for kind in ADMIN_COMMANDS}


def allowed(role: Role) -> frozenset[type[requests.Request]]:
    """The requests that a client with this role may send."""
    return frozenset(kind for kind, needed in NEEDED.items() if allows(role, needed))


def refusal(role: Role, needed: Role) -> str:
    """The text of a refusal."""
    return (
        f"this needs the role {needed!r}, and this connection has {role!r}: use the secret or the"
        " certificate of that role"
    )


def needs_admin(commands: Iterable[Command]) -> bool:
    """Whether one of these commands is reserved for administrators."""
    for command in commands:
        body = command.body
        # This runs for every forwarded write, so the tag is read in place if the encoding is the
        # usual one: a short array that begins with a small number.
        usual = len(body) >= 2 and 0x90 < body[0] <= 0x9F and body[1] <= 0x7F
        if command.target == KEYSPACE and (body[1] in _TAGS if usual else _is_admins(body)):
            return True
    return False


def _is_admins(body: bytes) -> bool:
    """`needs_admin` for bytes with an unusual encoding, or that are not a command."""
    try:
        return isinstance(decode_command(body), ADMIN_COMMANDS)
    except (MsgspecError, UnicodeDecodeError):
        return False
