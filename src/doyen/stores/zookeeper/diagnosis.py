"""What `doyen doctor` says about a ZooKeeper: servers, versions and their defects, sessions.

Servers are asked by ZooKeeper's four-letter words, each on a connection of its own: `srvr`, which
is allowed unless somebody has forbidden it, and `conf`, which is not unless somebody has allowed
it. `findings` is a pure function of what they said.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from doyen.model import Finding, Level
from doyen.stores.zookeeper.connection import ZooKeeperAddress

__all__ = ["ZooKeeperServerState", "findings", "states"]

_WITHIN_S = 2.0
_Release = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperServerState:
    """What a server said of itself, or why it said nothing."""

    server: str
    silent_because: str = ""
    version: str = ""
    mode: str = ""
    settings: tuple[tuple[str, str], ...] = ()


_DEFECTS: tuple[tuple[_Release, _Release, Level, str], ...] = (
    (
        (0,),
        (3, 8, 4),
        "warning",
        "a server that crashes while it joins may lose writes that were confirmed"
        " (ZOOKEEPER-4785): a record may be won twice, and only tokens protect",
    ),
    (
        (3, 9, 0),
        (3, 9, 2),
        "warning",
        "a server that crashes while it joins may lose writes that were confirmed"
        " (ZOOKEEPER-4785): a record may be won twice, and only tokens protect",
    ),
    (
        (3, 9, 3),
        (3, 9, 4),
        "problem",
        "a server that was behind and then leads may pass on a gap, and writes that were confirmed"
        " are lost (ZOOKEEPER-4925): a record may be won twice, and only tokens protect",
    ),
)


async def states(address: ZooKeeperAddress) -> list[ZooKeeperServerState]:
    """Ask every server."""
    return await asyncio.gather(*(_state(address, *each) for each in address.hosts))


async def _state(address: ZooKeeperAddress, host: str, port: int) -> ZooKeeperServerState:
    server = f"{host}:{port}"
    try:
        async with asyncio.timeout(_WITHIN_S):
            about = await _word(address, host, port, b"srvr")
            settings = await _word(address, host, port, b"conf")
    except (OSError, TimeoutError) as error:
        return ZooKeeperServerState(
            server=server, silent_because=str(error) or "it does not answer"
        )
    version = re.search(r"version: (\d+(?:\.\d+)*)", about)
    mode = re.search(r"Mode: (\w+)", about)
    return ZooKeeperServerState(
        server=server,
        version=version[1] if version else "",
        mode=mode[1] if mode else "",
        settings=tuple(re.findall(r"^(\w+)=(.*)$", settings, re.MULTILINE)),
    )


async def _word(address: ZooKeeperAddress, host: str, port: int, word: bytes) -> str:
    reader, writer = await asyncio.open_connection(
        host.strip("[]"), port, ssl=address.tls, server_hostname=host if address.tls else None
    )
    try:
        writer.write(word)
        return (await reader.read()).decode("utf-8", "replace")
    finally:
        writer.close()


def findings(states: Sequence[ZooKeeperServerState]) -> list[Finding]:
    """What the states of an ensemble's servers mean."""
    return [*_versions(states), *_servers(states), *_sessions(states)]


def _versions(states: Sequence[ZooKeeperServerState]) -> Iterator[Finding]:
    for version in sorted({state.version for state in states if state.version}):
        those = [state for state in states if state.version == version]
        who = ", ".join(state.server for state in those)
        release = tuple(map(int, version.split(".")))
        found = False
        for first, mended, level, text in _DEFECTS:
            # A single server has nobody to join.
            if first <= release < mended and any(each.mode != "standalone" for each in those):
                found = True
                since = ".".join(map(str, mended))
                yield Finding(
                    level=level,
                    subject="version",
                    text=f"ZooKeeper {version} at {who}: {text}",
                    remedy=f"update ZooKeeper to {since} or later",
                )
        if not found:
            yield Finding(level="ok", subject="version", text=f"ZooKeeper {version} at {who}")


def _servers(states: Sequence[ZooKeeperServerState]) -> Iterator[Finding]:
    for state in states:
        if state.silent_because:
            yield Finding(
                level="warning",
                subject="servers",
                text=f"{state.server}: {state.silent_because}",
                remedy="bring the server back, or take it out of the URL",
            )
        elif not state.version:
            yield Finding(
                level="note",
                subject="servers",
                text=f"{state.server} does not say what it is: it forbids srvr, or does not serve",
                remedy="allow it: 4lw.commands.whitelist=srvr, conf",
            )
    answering = [state for state in states if state.mode]
    if len(states) > 1 and any(state.mode == "standalone" for state in answering):
        yield Finding(
            level="problem",
            subject="servers",
            text="the URL names several servers and one of them stands alone: they do not hold"
            " the same data, and each may have a leader of its own",
            remedy="name the servers of one ensemble only",
        )
    if len(states) == 1:
        alone = states[0].mode == "standalone"
        yield Finding(
            level="note",
            subject="servers",
            text=f"{states[0].server} is the only server"
            + (": without it nobody is elected" if alone else " in the URL, of several"),
            remedy="run an ensemble of three" if alone else "name all, separated by commas",
        )


def _sessions(states: Sequence[ZooKeeperServerState]) -> Iterator[Finding]:
    for state in states:
        settings = dict(state.settings)
        ticks = [settings.get(each, "") for each in ("tickTime", "minSessionTimeout")]
        if all(each.isdigit() for each in ticks):
            tick_s, least_s = (int(each) / 1000 for each in ticks)
            yield Finding(
                level="warning" if least_s < 2 * tick_s else "ok",
                subject="sessions",
                text=f"{state.server} has a tick of {tick_s:g} s and sessions from {least_s:g} s:"
                f" a ttl of {4 * tick_s:g} s or more leaves the stop budget whole",
                remedy="leave minSessionTimeout at two ticks or more: the worst case counts on it"
                if least_s < 2 * tick_s
                else "",
            )
