"""What a page may ask for, if the server allows actions.

An action names the term that the page showed, by its token. If another term has begun since, the
action is refused: what was confirmed is not what would happen.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

from doyen.errors import ConfigError, OrderFailed, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.model import KINDS, Kind
from doyen.session import Session

__all__ = ["ProcessControls", "act"]

log = logging.getLogger("doyen")

FIELDS = ("kind", "name", "to", "token", "set", "shard", "member", "process")
"""What an action may name. It is logged."""
ORDER_WAIT_S = 10.0
SHARD_WAIT_S = 60.0


class ProcessControls(Protocol):
    """Processes that a page may kill and freeze: those of `doyen up`."""

    def processes(self) -> list[dict[str, Any]]:
        """Each process: name, kind, state, detail, and the actions that apply to it."""
        ...

    def silent_s(self) -> float:
        """How long ago the processes were looked at."""
        ...

    async def act(self, action: str, process: str) -> str:
        """Carry out an action, and say what was done. Raises `OrderFailed`."""
        ...


async def act(
    session: Session | None,
    controls: ProcessControls | None,
    asked: Mapping[str, Any],
    *,
    by: str,
) -> str:
    """Carry out one action, and say what was done. Raises a `DoyenError` if that failed. Without a
    session, which is so while the store cannot be opened, only processes can be acted upon."""
    action = _text(asked, "action")
    fields = {name: str(asked[name])[:200] for name in FIELDS if name in asked}
    log.info("%s", log_line(event="action", action=action, by=by, **fields))
    if action in ("kill", "freeze", "thaw", "ask"):
        if controls is None:
            raise ConfigError("this page does not control processes")
        return await controls.act(action, _text(asked, "process"))
    if session is None:
        raise StoreUnavailable("the store does not answer; nothing was done")
    match action:
        case "resign":
            name, kind = _text(asked, "name"), _kind(asked)
            await _same_term(session, name, kind, asked)
            before = await session.resign(name, kind=kind, wait_s=ORDER_WAIT_S)
            return f"{before.name} has resigned from {name}"
        case "transfer":
            name, kind, to = _text(asked, "name"), _kind(asked), _text(asked, "to")
            await _same_term(session, name, kind, asked)
            now = await session.transfer(name, to=to, kind=kind, wait_s=ORDER_WAIT_S)
            return f"{now.name} leads {name}, with token {now.token}"
        case "move":
            name, to, shard = _text(asked, "set"), _text(asked, "to"), asked.get("shard")
            if type(shard) is not int:
                raise ConfigError("a shard is a number")
            await session.shards(name).move(shard, to=to, wait_s=SHARD_WAIT_S)
            return f"{to} owns shard {shard} of {name}"
        case "drain" | "undrain":
            name, member, undo = _text(asked, "set"), _text(asked, "member"), action == "undrain"
            await session.shards(name).drain(member, undo=undo, wait_s=SHARD_WAIT_S)
            if undo:
                return f"{member} may own shards of {name} again"
            return f"{member} owns no shard of {name} any more"
    raise ConfigError(f"there is no action {action!r}")


async def _same_term(session: Session, name: str, kind: Kind, asked: Mapping[str, Any]) -> None:
    leader = await session.leader(name, kind=kind)
    if leader is None:
        raise OrderFailed(f"{name} has no leader at present; nothing was done")
    if leader.token != asked.get("token"):
        raise OrderFailed(
            f"{leader.name} leads {name} with token {leader.token} by now; nothing was done"
        )


def _text(asked: Mapping[str, Any], field: str) -> str:
    value = asked.get(field)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{field} is missing")
    return value


def _kind(asked: Mapping[str, Any]) -> Kind:
    kind = asked.get("kind", "elections")
    for known in KINDS:
        if kind == known:
            return known
    raise ConfigError(f"there is no kind {kind!r}")
