"""Diagnosis of a ZooKeeper ensemble: servers, versions and their defects, sessions.

Servers are asked by ZooKeeper's four-letter commands, each on a connection of its own: `srvr`,
which is permitted by default, and `conf`, which is not. `findings` is a pure function of the
answers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from doyen.model import Finding
from doyen.stores.kit.diagnosis import Defect, version_findings
from doyen.stores.kit.url import Host
from doyen.stores.zookeeper.connection import ZooKeeperAddress

__all__ = ["ZooKeeperServerState", "findings", "states"]

_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooKeeperServerState:
    """The answers of a server, or the error of the request for them."""

    server: str
    error: str = ""
    version: str = ""
    mode: str = ""
    settings: tuple[tuple[str, str], ...] = ()


_LOSES_WRITES = (
    "a server that crashes while it joins may lose confirmed writes (ZOOKEEPER-4785): two"
    " candidates can both win an election, and only tokens protect"
)
_DEFECTS = (
    Defect((0,), (3, 8, 4), "warning", _LOSES_WRITES),
    Defect((3, 9, 0), (3, 9, 2), "warning", _LOSES_WRITES),
    Defect(
        (3, 9, 3),
        (3, 9, 4),
        "problem",
        "a server that was behind and then leads may pass on a gap, and confirmed writes are lost"
        " (ZOOKEEPER-4925): two candidates can both win an election, and only tokens protect",
    ),
)


async def states(address: ZooKeeperAddress) -> list[ZooKeeperServerState]:
    """Ask every server."""
    return await asyncio.gather(*(_state(address, host) for host in address.hosts))


async def _state(address: ZooKeeperAddress, host: Host) -> ZooKeeperServerState:
    try:
        async with asyncio.timeout(_WITHIN_S):
            about = await _command(address, host, b"srvr")
            settings = await _command(address, host, b"conf")
    except (OSError, TimeoutError) as error:
        return ZooKeeperServerState(server=str(host), error=str(error) or "it does not answer")
    version = re.search(r"version: (\d+(?:\.\d+)*)", about)
    mode = re.search(r"Mode: (\w+)", about)
    return ZooKeeperServerState(
        server=str(host),
        version=version[1] if version else "",
        mode=mode[1] if mode else "",
        settings=tuple(re.findall(r"^(\w+)=(.*)$", settings, re.MULTILINE)),
    )


async def _command(address: ZooKeeperAddress, host: Host, command: bytes) -> str:
    reader, writer = await asyncio.open_connection(
        *host, ssl=address.tls, server_hostname=host.name if address.tls else None
    )
    try:
        writer.write(command)
        return (await reader.read()).decode("utf-8", "replace")
    finally:
        writer.close()


def findings(states: Sequence[ZooKeeperServerState]) -> list[Finding]:
    """The findings for the states of an ensemble's servers."""
    return [*_versions(states), *_servers(states), *_sessions(states)]


def _versions(states: Sequence[ZooKeeperServerState]) -> Iterator[Finding]:
    for version in sorted({state.version for state in states if state.version}):
        same = [state for state in states if state.version == version]
        # The defects are of ensembles. A standalone server joins none.
        defects = _DEFECTS if any(state.mode != "standalone" for state in same) else ()
        yield from version_findings("ZooKeeper", version, (state.server for state in same), defects)


def _servers(states: Sequence[ZooKeeperServerState]) -> Iterator[Finding]:
    for state in states:
        if state.error:
            yield Finding.warning(
                "servers",
                f"{state.server}: {state.error}",
                "bring the server back, or take it out of the URL",
            )
        elif not state.version:
            yield Finding.note(
                "servers",
                f"{state.server} reports no version: it forbids srvr, or does not serve",
                "permit it: 4lw.commands.whitelist=srvr, conf",
            )
    answering = [state for state in states if state.mode]
    if len(states) > 1 and any(state.mode == "standalone" for state in answering):
        yield Finding.problem(
            "servers",
            "the URL names several servers and one of them is standalone: they do not hold"
            " the same data, and each may elect a leader",
            "name the servers of one ensemble only",
        )
    if len(states) == 1:
        alone = states[0].mode == "standalone"
        yield Finding.note(
            "servers",
            f"{states[0].server} is the only server"
            + (": if it fails, no leader can be elected" if alone else " in the URL, of several"),
            "run an ensemble of three" if alone else "name all, separated by commas",
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
                f" a ttl of {4 * tick_s:g} s or more leaves the whole stop budget",
                remedy="leave minSessionTimeout at two ticks or more: the worst case depends on it"
                if least_s < 2 * tick_s
                else "",
            )
