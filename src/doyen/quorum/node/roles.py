"""What each role may do, and which commands of the keyspace clients may propose, within which
bounds. The table in docs/stores/quorum.md shows the same.

    onlooker    status, reads, watches
    client      also writes and leases
    admin       also changes of members and leader, backups, raising the token floor
    peer        acts as a node of the cluster

A node checks the requests of its own clients. A batch that it forwards to the leader carries the
role too: one with an administrator's command is marked, and the leader refuses it otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from msgspec import MsgspecError

from doyen.quorum.keyspace.commands import (
    AdvanceRevision,
    Create,
    Delete,
    Enqueue,
    Grant,
    Put,
    RaiseVersion,
    Revoke,
    Update,
    decode_command,
)
from doyen.quorum.keyspace.versions import UPDATES
from doyen.quorum.node.replicated import KEYSPACE, Command
from doyen.quorum.protocol import requests
from doyen.quorum.protocol.requests import MAX_KEY, MAX_LEVELS, MAX_TTL_S, MAX_VALUE, MIN_TTL_S
from doyen.quorum.protocol.security import Role, allows

NEEDED: dict[type[requests.Request], Role] = {
    requests.StatusRequest: "onlooker",
    requests.Get: "onlooker",
    requests.Scan: "onlooker",
    requests.Head: "onlooker",
    requests.Ahead: "onlooker",
    requests.LeaseTimesRequest: "onlooker",
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

_ENTRIES = frozenset({Create, Put, Update})
"""Commands that write a value at a key."""
_TAGS = {kind.__struct_config__.tag for kind in ADMIN_COMMANDS}


def allowed(role: Role) -> frozenset[type[requests.Request]]:
    """The requests that a client with this role may send."""
    return frozenset(kind for kind, needed in NEEDED.items() if allows(role, needed))


def needed_for(request: requests.Requests) -> Role:
    """The role that allows everything in this request."""
    if isinstance(request, requests.Write) and any(map(_is_admins, request.bodies)):
        return "admin"
    return NEEDED[type(request)]


def refusal(role: Role, needed: Role) -> str:
    """The text of a refusal."""
    return (
        f"this needs the role {needed!r}, and this connection has {role!r}: use the secret or the"
        " certificate of that role"
    )


def needs_admin(commands: Iterable[Command]) -> bool:
    """Whether one of these commands is reserved for administrators."""
    bodies = [command.body for command in commands if command.target == KEYSPACE]
    # This runs for every forwarded write, so the tag is read in place if the encoding is the usual
    # one: a short array that begins with a small number. Few commands begin differently.
    for begin in {body[:2] for body in bodies}:
        if len(begin) == 2 and 0x90 < begin[0] <= 0x9F and begin[1] <= 0x7F:
            if begin[1] in _TAGS:
                return True
        elif any(_is_admins(body) for body in bodies if body[:2] == begin):
            return True
    return False


def _is_admins(body: bytes) -> bool:
    """`needs_admin` for bytes with an unusual encoding, or that are not a command."""
    try:
        return isinstance(decode_command(body), ADMIN_COMMANDS)
    except (MsgspecError, UnicodeDecodeError, RecursionError):
        return False


_FREEING = {kind.__struct_config__.tag for kind in (Revoke, Delete)}
_RAISING = {RaiseVersion.__struct_config__.tag}


def created_key(command: Command) -> str | None:
    """The key, if this is a create that a client has proposed."""
    if command.target != KEYSPACE:
        return None
    create = decode_command(command.body)
    return create.key if isinstance(create, Create) else None


def frees(command: Command) -> bool:
    """Whether a command only removes something."""
    return _has_tag(command.target, command.body, _FREEING)


def raises_version(target: int, body: bytes) -> bool:
    """Whether a command raises the version of the cluster."""
    return _has_tag(target, body, _RAISING)


def _has_tag(target: int, body: bytes, tags: Container[object]) -> bool:
    """The tag is read in place if the encoding is the usual one: a short array that begins with a
    small number."""
    usual = target == KEYSPACE and len(body) >= 2 and 0x90 < body[0] <= 0x9F
    return usual and body[1] in tags


def flaw(body: bytes, role: Role) -> str | None:
    """Why a client may not have this carried out; None if it may."""
    try:
        command = decode_command(body)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return f"not a command of this version of doyen: {error}"
    kind = type(command)
    if (
        kind in _ENTRIES
        and len(body) <= MAX_KEY  # and so is its key
        and body.count(b"/") < MAX_LEVELS
        and command.key  # type: ignore[union-attr]
    ):
        return None  # without the calls that name a flaw: this runs for every write
    if kind in ADMIN_COMMANDS and not allows(role, "admin"):
        return refusal(role, "admin")
    check = _CHECKS.get(kind)
    return "only the quorum's leader may propose this" if check is None else check(command)


def is_early(body: bytes, version: int) -> bool:
    """Whether a command, which a client may propose, needs a later version of the cluster."""
    return version < UPDATES and isinstance(decode_command(body), Update)


def _flaw_of_write(command: Create | Put | Update) -> str | None:
    return _flaw_of_entry(command.key, command.value)


def _flaw_of_ticket(command: Enqueue) -> str | None:
    return _flaw_of_entry(command.line, command.value)


def _flaw_of_entry(key: str, value: bytes) -> str | None:
    if not 0 < len(key) <= MAX_KEY:
        return f"a key has 1 to {MAX_KEY} characters, not {len(key)}"
    if key.count("/") >= MAX_LEVELS:
        return f"a key has at most {MAX_LEVELS} parts between slashes, not {key.count('/') + 1}"
    if len(value) > MAX_VALUE:
        return (
            f"a value has at most {MAX_VALUE} bytes, not {len(value)}: keep large data elsewhere,"
            " and store here where it is"
        )
    return None


def _flaw_of_lease(command: Grant) -> str | None:
    if not MIN_TTL_S <= command.ttl_s <= MAX_TTL_S:
        return f"a ttl is between {MIN_TTL_S:g} and {MAX_TTL_S:g} s, not {command.ttl_s:g}"
    return None


def _flaw_of_floor(command: AdvanceRevision) -> str | None:
    if not 0 <= command.floor < 2**62 or command.by:
        return f"a token floor is between 0 and 2^62, not {command.floor}"
    return None


def _flawless(command: Revoke | Delete) -> None:
    return None


_CHECKS: dict[type, Callable[[Any], str | None]] = {
    Create: _flaw_of_write,
    Put: _flaw_of_write,
    Update: _flaw_of_write,
    Enqueue: _flaw_of_ticket,
    Grant: _flaw_of_lease,
    AdvanceRevision: _flaw_of_floor,
    Revoke: _flawless,
    Delete: _flawless,
}
"""What clients may propose, within which bounds."""
