"""A real node, put together: a driver on a journal in a data directory and on TCP connections.

`NodeOptions` are the checked settings of a node; `NodeServer.open` starts it on the running loop.
`doyen.Node` runs one on a thread of its own, `doyen serve` in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from msgspec.msgpack import Decoder
from msgspec.structs import replace

from doyen.errors import ConfigError, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.events.telemetry import FLUSH_S, LogRelay
from doyen.lease.clock import SystemClock
from doyen.quorum.consensus.core import ChangeAsked, Making, Membership, ProtocolSettings, Role
from doyen.quorum.keyspace.state import QUOTA, Keyspace
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node.admin import place
from doyen.quorum.node.data_directory import DirectoryIdentity as Owner
from doyen.quorum.node.data_directory import read_identity, read_member, survey, write_member
from doyen.quorum.node.disk_space import DiskUsage
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.framed_files import FileSystem
from doyen.quorum.node.http import pages
from doyen.quorum.node.journal import FileJournal
from doyen.quorum.node.listener import Listener
from doyen.quorum.node.membership import Members, NodeMember, initial_member
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.proposals import Batch, ProposalLimits
from doyen.quorum.node.replicated import KEYSPACE, USER, ReplicatedMachines
from doyen.quorum.node.service import Service
from doyen.quorum.node.state_machine import StateMachine
from doyen.quorum.protocol.connection import ConnectionErrors
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import TLS, Security, check_exposure, parse_address

log = logging.getLogger("doyen.quorum.node")

PROTOCOLS = {
    "raft": ("doyen.quorum.consensus.raft", "Raft"),
    "zab": ("doyen.quorum.consensus.zab", "Zab"),
    "viewstamped": ("doyen.quorum.consensus.viewstamped", "Viewstamped"),
    "paxos": ("doyen.quorum.consensus.paxos", "Paxos"),
    "smallest-id": ("doyen.quorum.consensus.smallest_id", "SmallestId"),
}
"""Module and class of each protocol. Only Raft has everything; the others elect, replicate and
restart."""

MIN_QUOTA = 1 << 20
RECORD_RETRY_S = 0.1
"""Pause before member ids are proposed again, if another change was under way."""
FOUNDING_GRACE_S = 5.0
"""How long a founder waits for the others before it logs which are missing."""
LAST_TURNS = 5
"""Turns of the loop at the end, in which it closes aborted connections."""
CANNOT_GO_ON = 70
"""The exit code of a process that was ended by its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """The settings of a node, checked together when the object is made."""

    id: str
    peers: Mapping[str, str]
    """Every node's address, `host:port`, including this one's."""
    data_dir: str | os.PathLike[str]
    listen: str | None = None
    """Where to listen, if not at this node's own address."""
    cluster: str = "doyen"
    """The name of the cluster. Nodes accept only connections of the same name."""
    secret: str | None = None
    """The secret that clients have to know. Each of the four secrets may have several lines: all
    are accepted, and the first is used."""
    peer_secret: str | None = None
    """The secret that nodes have to know."""
    admin_secret: str | None = None
    onlooker_secret: str | None = None
    tls: TLS | None = None
    insecure: bool = False
    """Allow listening beyond this machine with neither secret nor TLS."""
    join: bool = False
    """Wait to be added to a cluster that exists."""
    found: bool = False
    """Found a new cluster with all peers if the data directory is empty. It has no effect if the
    directory has data, so it may stay in a node's settings."""
    election_s: float = 1.0
    heartbeat_s: float = 0.1
    protocol: str = "raft"
    quota_bytes: int = QUOTA
    """The size limit of the keyspace. The setting of the node that leads applies."""
    limits: ProposalLimits = field(default_factory=ProposalLimits)

    def __post_init__(self) -> None:
        if self.id not in self.peers:
            raise ConfigError(
                f"node {self.id!r} is not among its peers {sorted(self.peers)}: include its own"
                " address"
            )
        for address in (*self.peers.values(), self.listen):
            if address is not None:
                parse_address(address)
        if len({*map(place, self.peers.values())}) != len(self.peers):
            raise ConfigError(f"two nodes have one address: {dict(self.peers)}")
        security = self.security
        peers_known = self.peer_secret or security.certified or len(self.peers) == 1
        if security.accepted and not peers_known:
            raise ConfigError(
                "a secret is set and no peer secret, so any client could act as a node."
                " Set a peer secret that only nodes have (--peer-secret-file, peer_secret=)."
                " While a cluster of an earlier release is upgraded, it has to be the secret"
                " that the nodes shared until now"
            )
        if self.join and self.found:
            raise ConfigError("a node either founds a cluster (found) or joins one (join)")
        if self.join and len(self.peers) == 1:
            raise ConfigError("a node that joins needs the addresses of those it joins")
        if self.protocol not in PROTOCOLS:
            raise ConfigError(
                f"there is no protocol {self.protocol!r}; there are {', '.join(PROTOCOLS)}"
            )
        if not MIN_QUOTA <= self.quota_bytes < 2**62:
            raise ConfigError(
                f"quota_bytes={self.quota_bytes} is out of range: {MIN_QUOTA} bytes at least"
            )
        if not 0 < 2 * self.heartbeat_s <= self.election_s:
            raise ConfigError(
                f"heartbeat_s={self.heartbeat_s:g} must be positive and at most half of"
                f" election_s={self.election_s:g}, or a healthy leader would be taken for dead"
            )

    @property
    def membership(self) -> Membership:
        """The membership at the founding. A membership on disk takes precedence."""
        others = tuple(sorted(peer for peer in self.peers if peer != self.id))
        if self.join:
            return Membership(others, (self.id,), dict(self.peers))
        return Membership(tuple(sorted(self.peers)), (), dict(self.peers))

    @property
    def url(self) -> str:
        """The URL of this quorum for clients, with this node first."""
        from urllib.parse import quote, urlencode

        hosts = [self.peers[self.id], *(self.peers[peer] for peer in self.peers if peer != self.id)]
        options = {"cluster": self.cluster}
        if self.tls is not None:
            files = {"ca": self.tls.authority, "cert": self.tls.certificate, "key": self.tls.key}
            options |= {"tls": "true"} | {name: str(file) for name, file in files.items() if file}
        key = self.security.key("client")
        secret = f"{quote(key.decode(), safe='')}@" if key else ""
        return f"doyen://{secret}{','.join(dict.fromkeys(hosts))}?{urlencode(options)}"

    @property
    def security(self) -> Security:
        return Security(
            secret=_encoded(self.secret),
            peer_secret=_encoded(self.peer_secret),
            admin_secret=_encoded(self.admin_secret),
            onlooker_secret=_encoded(self.onlooker_secret),
            tls=self.tls,
        )


def _encoded(secret: str | None) -> bytes | None:
    return secret.encode() if secret else None


def _limits(options: NodeOptions, making: Making) -> ProposalLimits:
    """The limits, without snapshots for a protocol that cannot start from one."""
    if getattr(making, "snapshots", True):
        return options.limits
    return replace(options.limits, snapshot_entries=sys.maxsize, snapshot_bytes=sys.maxsize)


def _open(
    options: NodeOptions, owner: Owner, state: Any
) -> tuple[FileJournal, NodeMember, Callable[[NodeMember], Awaitable[None]]]:
    """Open the data directory, or create it if the options say so. Returns the journal, the node's
    identity, and how to save that."""
    try:
        return _open_directory(options, owner, state)
    except OSError as error:
        raise StoreUnusable(f"{options.data_dir} cannot be used: {error}") from error


def _open_directory(
    options: NodeOptions, owner: Owner, state: Any
) -> tuple[FileJournal, NodeMember, Callable[[NodeMember], Awaitable[None]]]:
    disk, folder = FileSystem(), Path(options.data_dir)
    start = partial(
        initial_member,
        node=options.id,
        peers=options.peers,
        founding=options.found,
        joining=options.join,
        folder=str(folder),
    )
    if not folder.is_dir() or read_identity(disk, folder) is None:
        start(None, blank=not folder.is_dir() or survey(disk, folder) is None)
    journal = FileJournal(folder, owner, state)
    try:
        found, recovered = read_member(disk, folder), journal.recovered
        blank = not (recovered.state or recovered.snapshot or recovered.entries)
        own = start(found, blank=blank)
        if own != found:
            write_member(disk, folder, own)
    except BaseException:
        journal.abandon()
        raise

    async def save(member: NodeMember) -> None:
        await asyncio.to_thread(write_member, disk, folder, member)

    return journal, own, save


async def record_members(driver: Driver, members: Members) -> None:
    """While this node leads, record in the log the member ids that are known and missing there."""

    def elected(role: Role, generation: int, leader: str | None) -> None:
        if role is Role.LEADING:
            members.changes.set()

    driver.observe_role(elected)
    while True:
        members.changes.clear()
        wanted = members.to_record() if driver.role is Role.LEADING else None
        if wanted is not None:
            driver.proposals.append(ChangeAsked(wanted), Batch([], []))
        with suppress(TimeoutError):
            async with asyncio.timeout(RECORD_RETRY_S if wanted is not None else None):
                await members.changes.wait()


def _warn_of_other_peers(options: NodeOptions, members: Membership) -> None:
    """Log a warning if the configured peers differ from the membership on disk."""
    if dict(members.addresses) != dict(options.peers):
        where = ", ".join(f"{node}={members.addresses.get(node, '?')}" for node in members.everyone)
        line = log_line(
            event="peers_differ",
            node=options.id,
            used=where,
            reason=f"the configured peers differ from the members recorded in {options.data_dir}",
            remedy="change the members with doyen cluster add, remove",
        )
        log.warning("%s", line)


def _end_process(error: BaseException) -> None:
    """End the process at once, since the state of the journal is unknown."""
    log.critical("%s", log_line(event="process_ended", error=error))

    def write_out() -> None:
        for relay in _relays:
            relay.flush(FLUSH_S)
        logging.shutdown()

    # A handler that blocks must not keep the process from ending.
    writing = threading.Thread(target=write_out, daemon=True)
    writing.start()
    writing.join(2 * FLUSH_S)
    os._exit(CANNOT_GO_ON)


_relays: list[LogRelay] = []
"""Those of the nodes in this process. They call the handlers of `logging` on a thread, so that a
handler that blocks, on a full pipe for instance, does not stop a node."""


class NodeServer:
    """A node on the running loop. Made by `open`."""

    def __init__(
        self,
        driver: Driver,
        members: Members,
        listener: Listener,
        keyspace: Keyspace,
        service: Service,
        port: int,
    ) -> None:
        self.driver = driver
        self.members = members
        self.keyspace = keyspace
        self.service = service
        self.port = port
        self._listener = listener
        self._relay: LogRelay | None = None

    @classmethod
    async def open(
        cls,
        options: NodeOptions,
        machine: StateMachine | None = None,
        *,
        http: str | None = None,
        abort: Callable[[BaseException], None] = _end_process,
    ) -> NodeServer:
        """Open the data directory, listen, and take part. `http` is an address for probes only."""
        relay = LogRelay()
        _relays.append(relay)
        try:
            server = await cls._open(options, machine, http, abort)
        except BaseException:
            await _stop_relay(relay)
            raise
        server._relay = relay
        return server

    @classmethod
    async def _open(
        cls,
        options: NodeOptions,
        machine: StateMachine | None,
        http: str | None,
        abort: Callable[[BaseException], None],
    ) -> NodeServer:
        where, name = PROTOCOLS[options.protocol]
        protocol = import_module(where)
        making: Making = getattr(protocol, name)
        clock = SystemClock()
        chance = random.SystemRandom()
        me = ConnectionIdentity(options.cluster, options.id, chance.getrandbits(63))
        security = options.security
        host, port = parse_address(options.listen or options.peers[options.id])
        # Before the data directory is created, so that a refusal leaves nothing behind.
        check_exposure(host, security, insecure=options.insecure)
        errors = ConnectionErrors()
        owner = Owner(options.cluster, options.id, options.protocol)
        journal, own, save = await asyncio.to_thread(_open, options, owner, protocol.STATE)

        async def save_or_end(member: NodeMember) -> None:
            try:
                await save(member)
            except (OSError, StoreUnusable) as error:
                abort(error)  # as when the journal cannot be written
                raise

        members = Members(options.id, options.peers, own, save_or_end)
        peers = Peers(
            me, security, decode=Decoder(protocol.MESSAGES).decode, members=members, errors=errors
        )
        driver: Driver | None = None
        try:
            core = members.core = making(
                options.id,
                options.membership,
                journal.recovered,
                settings=ProtocolSettings(
                    election_timeout_s=options.election_s, heartbeat_s=options.heartbeat_s
                ),
                jitter=random.random,
                now=clock.now(),
            )
            _warn_of_other_peers(options, core.membership)
            keyspace, disk = Keyspace(FIRST), DiskUsage(options.data_dir)
            targets: dict[int, Any] = {KEYSPACE: keyspace}
            if machine is not None:
                targets[USER] = machine
            driver = Driver(
                core,
                journal,
                peers,
                ReplicatedMachines(targets),
                clock,
                incarnation=f"{me.incarnation:x}",
                limits=_limits(options, making),
                abort=abort,
            )
            service = Service(
                driver,
                keyspace,
                clock,
                election_s=options.election_s,
                cluster=options.cluster,
                protocol=options.protocol,
                quota_bytes=options.quota_bytes,
                refusals=lambda: peers.refusals,
                missing=members.awaited,
                disk=lambda: (*disk.usage(), journal.syncs.quantile(0.99)),
            )
            listener = Listener(
                me,
                security,
                peers=peers.admit,
                clients=service.admit,
                pages=pages(driver, service, errors, journal.syncs, peers.round_trips),
                info=members.info,
                insecure=options.insecure,
                errors=errors,
            )
            await driver.start()
            port = await listener.listen(host, port)
            # Nodes are started one after the other: waiting for a moment is not worth a warning.
            asyncio.get_running_loop().call_later(FOUNDING_GRACE_S, members.log_missing)
            if options.protocol == "raft":  # the membership of the others is fixed
                driver.pump.start_task(record_members(driver, members))
            if http is not None:
                await listener.listen(*parse_address(http), http_only=True)
        except BaseException:
            if driver is not None:
                driver.crash()
            await peers.close()
            await journal.close()
            raise
        return cls(driver, members, listener, keyspace, service, port)

    async def close(self) -> None:
        """Close clients' connections, transfer leadership, and stop."""
        self.service.close()
        await self._listener.close()  # peers stay connected until the driver stops
        await self.driver.stop()
        for _ in range(LAST_TURNS):
            await asyncio.sleep(0)
        if self._relay is not None:
            await _stop_relay(self._relay)


async def _stop_relay(relay: LogRelay) -> None:
    """Let it write what it holds, within its time limit."""
    _relays.remove(relay)
    await asyncio.to_thread(relay.close)
