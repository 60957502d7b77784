"""The identity of this node, and which nodes it accepts as peers.

Every data directory has a random **member id**, created with it; every cluster has a random
**cluster id**, created when it is founded. The cluster records the member id of each node, so a
node that comes back with an emptied data directory is not taken for the one that voted and
acknowledged writes.

**Founding** happens once. A node with an empty data directory takes part only if it was started
with `found=True`, and only together with every other node in its list of peers: each of them must
be connected, with an empty data directory and the same list. The first by name then creates the
cluster id, writes it to its disk together with the member ids of all, and sends this record to the
others, which write it too. No node votes before that. So a node that has lost its data directory
cannot found a second cluster: at least one of the nodes that it needs has data, and refuses.

**Joining.** A node with an empty data directory that was started with `join=True` waits until the
leader dials it. The leader records its member id, in a log entry, as soon as it has connected.

**Peers** are checked when a connection is made (`check`): by cluster id, by member id, and by how
far their log reaches. A node that has acknowledged more than it now has, has lost data.

**Clusters of earlier releases** have no ids. Their leader records all of them in one entry when
every member is connected and has stated its own; until then no member is refused for lack of one.

The ids in the log (`Membership.members`) take precedence over the founding record. Knows no sockets
and no files: `save` writes, and `peers` exchanges the records.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import sha256
from secrets import token_hex
from typing import Any

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, encode
from msgspec.structs import replace

from doyen.errors import ConfigError, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.quorum.consensus.core import Core, Membership, Position
from doyen.quorum.protocol.frames import NOT_FOUNDED, CloseReason, ConnectionRefused
from doyen.quorum.protocol.handshake import CheckRemote, ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.security import certificate_names

log = logging.getLogger("doyen.quorum.node")

FOUNDING, JOINING = "founding", "joining"


class NodeMember(Struct, frozen=True):
    """The identity that is kept in a data directory."""

    member: str
    """The random id of the data directory."""
    cluster_id: str = ""
    founders: dict[str, str] = {}
    """The member ids of the nodes that founded the cluster, by name."""
    pending: str = ""
    """`founding` or `joining`, until that has happened."""


class _Founding(Struct, frozen=True, array_like=True):
    """The founding record, as it is sent to peers."""

    cluster_id: str
    founders: dict[str, str]


_founding = Decoder(_Founding).decode

REMEDY = (
    "Stop it, remove it from the cluster (doyen cluster remove {node}), empty its data directory,"
    " start it with --join, add it again (doyen cluster add {node} {address}), and let it vote"
    " (doyen cluster promote {node})."
)


def not_founded(node: str, missing: Sequence[str]) -> str:
    """What a node states while it waits for these other founders."""
    return (
        f"{NOT_FOUNDED}: node {node} waits for {', '.join(missing)}: start every node of its"
        " --peers with --found and an empty data directory"
    )


def initial_member(
    found: NodeMember | None,
    *,
    blank: bool,
    node: str,
    peers: Mapping[str, str],
    founding: bool,
    joining: bool,
    folder: str,
) -> NodeMember:
    """The identity with which a node starts. `found` is the one in its data directory, and `blank`
    whether its log is empty. Raises if the directory is empty and the node was started neither to
    found a cluster nor to join one."""
    if found is None and not blank:  # of an earlier release, or restored from a backup
        return NodeMember(token_hex(8))
    if found is not None and (not found.pending or (found.pending == JOINING and not blank)):
        return replace(found, pending="")
    member = found.member if found is not None else token_hex(8)
    if founding:
        if len(peers) == 1:
            return NodeMember(member, token_hex(8), {node: member})
        return NodeMember(member, pending=FOUNDING)
    if joining:
        return NodeMember(member, pending=JOINING)
    raise StoreUnusable(
        f"{folder} is empty, so what node {node!r} has acknowledged is not known. To found a new"
        " cluster, start every node with --found (found=True). To add this node to a cluster that"
        f" exists, use --join (join=True) and doyen cluster add. If {node!r} is a member that has"
        " lost its data directory: "
        + REMEDY.format(node=node, address=peers.get(node, "HOST:PORT"))
    )


class DataDirectoryRolledBack(ConnectionRefused):
    """The node's data directory is an older copy of itself: the node must take no part any more."""


class Members:
    """The members of the cluster as this node knows them."""

    def __init__(
        self,
        node: str,
        peers: Mapping[str, str],
        own: NodeMember,
        save: Callable[[NodeMember], Awaitable[None]],
    ) -> None:
        self.node = node
        self.own = own
        self.core: Core | None = None
        self.infos: dict[str, MemberInfo] = {}
        """What each connected peer has stated about itself."""
        self.lost = ""
        """Why this node takes no part any more, if a peer has said so."""
        self._peers = dict(peers)
        self._save = save
        self._adopting = False
        self._recorded: Mapping[str, str] = {}
        self.changes = asyncio.Event()
        """Set when there may be something to record (`to_record`)."""
        self._founders: dict[str, str] = {}
        """Member ids of connected nodes that wait to found the cluster with this one, by name."""
        self.refusals: Callable[[], Mapping[str, str]] = dict
        """The peers that refuse this node, or that it refuses, with the reasons. Set by `Peers`."""
        self._logged: list[str] | None = None
        """The missing founders that were logged last; None until `log_missing`."""

    # This node.

    @property
    def membership(self) -> Membership:
        return self.core.membership if self.core is not None else Membership(())

    @property
    def everyone(self) -> tuple[str, ...]:
        """The members. Until a change is committed, also those before it: they may have to learn of
        the change, or to undo it."""
        return self.membership.everyone + self._before.everyone

    @property
    def _before(self) -> Membership:
        """The membership before a change that is not committed; empty if there is no change."""
        log = getattr(self.core, "log", None)
        if self.core is None or log is None or not hasattr(log, "membership_before"):
            return Membership(())
        before: Membership = log.membership_before
        return before if log.membership_index > self.core.commit else Membership(())

    @property
    def cluster_id(self) -> str:
        return self.membership.cluster or self.own.cluster_id

    @property
    def ids(self) -> Mapping[str, str]:
        """The recorded member ids, by node."""
        return self.membership.members or self.own.founders

    @property
    def waiting(self) -> bool:
        """Whether this node waits for the founding. It takes no part in anything until then."""
        return self.own.pending == FOUNDING

    @property
    def position(self) -> Position:
        default = Position(self.core.generation if self.core is not None else 0)
        position: Position = getattr(self.core, "position", default)
        return position

    def info(self) -> MemberInfo:
        """What this node states about itself when it connects."""
        waiting = self.waiting
        return MemberInfo(
            self.cluster_id,
            self.own.member,
            Position() if waiting else self.position,
            self._digest() if waiting else "",
        )

    def _digest(self) -> str:
        """A digest of the list of peers, which all founders must share."""
        return sha256(encode(sorted(self._peers.items()))).hexdigest()[:32]

    # Checks of peers.

    def checker(self, node: str) -> CheckRemote:
        """`check`, for a node that is about to be dialled. What it acknowledges meanwhile, on a
        connection of its own, may be more than it is going to say on this one."""
        mark = self._mark(node)
        return lambda them, info: self.check(them, info, mark)

    def _mark(self, node: str) -> Position:
        """The position that the node has acknowledged."""
        witnessed: Mapping[str, Position] = getattr(self.core, "witnessed", {})
        return witnessed.get(node, Position())

    def admit(
        self, them: ConnectionIdentity, info: MemberInfo, certificate: Mapping[str, Any] | None
    ) -> None:
        """`check`, for a node that has dialled this one."""
        self._check_certificate(them.node, certificate)
        self.check(them, info, self._mark(them.node))

    def check(self, them: ConnectionIdentity, info: MemberInfo, mark: Position) -> None:
        """Raise `ConnectionRefused` unless this node may be a peer."""
        node = them.node
        if self.lost:
            raise ConnectionRefused(CloseReason.MEMBER, self.lost)
        if self.waiting:
            self._check_founder(node, info)
            return
        if info.founding:
            if self.ids.get(node) != info.member or not self.own.founders:
                raise self._lost(node, "its data directory is empty, and this cluster has data")
            return
        if not self._ahead(info):
            if node not in self.everyone:
                raise ConnectionRefused(
                    CloseReason.MEMBER,
                    f"node {node!r} is not a member of this cluster: add it (doyen cluster add"
                    f" {node} {self._peers.get(node, 'HOST:PORT')}), or stop it if it was removed",
                )
            self._check_identity(node, info)
        self._check_position(node, info, mark)

    def _check_certificate(self, node: str, certificate: Mapping[str, Any] | None) -> None:
        """A certificate is valid for the node that it names, by its id or its host."""
        if certificate is None:
            return
        address = self.membership.addresses.get(node) or self._peers.get(node, "")
        host = address.rpartition(":")[0].strip("[]")
        names = certificate_names(certificate)
        if node not in names and host not in names:
            raise ConnectionRefused(
                CloseReason.ROLE,
                f"the certificate is for {', '.join(sorted(names)) or 'no name'}, not for node"
                f" {node!r} or its host {host or '(unknown)'!r}: every node needs one of its own",
            )

    def _check_founder(self, node: str, info: MemberInfo) -> None:
        if node not in self._peers:
            raise ConnectionRefused(
                CloseReason.NODE,
                f"node {node!r} is not in the list of peers of node {self.node!r}",
            )
        if info.cluster_id:
            return  # it has the founding record, and is going to send it
        if not info.founding:
            raise ConnectionRefused(
                CloseReason.MEMBER,
                f"node {self.node!r} waits for a cluster to be founded, which needs every node to"
                f" have an empty data directory and --found; node {node!r} has data or no --found."
                f" If {self.node!r} has lost its data directory: {self._remedy(self.node)}",
            )
        if info.founding != self._digest():
            raise ConnectionRefused(
                CloseReason.MEMBER,
                f"nodes {node!r} and {self.node!r} have different lists of peers: all founders of a"
                " cluster must be started with the same names and addresses",
            )

    def _ahead(self, info: MemberInfo) -> bool:
        """Whether a node of this cluster has a longer log: then entries that this node lacks may
        have added it, or added it again."""
        same = not self.cluster_id or info.cluster_id == self.cluster_id
        return same and bool(info.member) and self.position.behind(info.position)

    def _check_identity(self, node: str, info: MemberInfo) -> None:
        expected = self.ids.get(node) or self._before.members.get(node)
        if expected and not info.member:
            raise ConnectionRefused(
                CloseReason.MEMBER,
                f"node {node!r} runs an earlier release of doyen, which has no member ids, and all"
                " members of this cluster have one: run the later release there",
            )
        if expected and info.member != expected:
            raise self._lost(node, f"its data directory has id {info.member}, not {expected}")
        blank = info.position == Position() and self.position != Position()
        if not expected and info.member and blank and node in self.membership.voters:
            raise self._lost(node, "its data directory is empty, and it is a voter")

    def _check_position(self, node: str, info: MemberInfo, mark: Position) -> None:
        if info.member and not info.position.covers(mark):
            had, has = mark, info.position
            raise DataDirectoryRolledBack(
                CloseReason.MEMBER,
                f"node {node!r} has lost data that it has acknowledged: it had entry"
                f" {had.last_index} of generation {had.last_generation} in generation"
                f" {had.generation}, and now has entry {has.last_index} of generation"
                f" {has.last_generation} in generation {has.generation}: its data directory is an"
                f" older copy. {self._remedy(node)}",
            )

    def _lost(self, node: str, why: str) -> ConnectionRefused:
        return ConnectionRefused(
            CloseReason.MEMBER,
            f"node {node!r} has lost data that it has acknowledged: {why}. {self._remedy(node)}",
        )

    def _remedy(self, node: str) -> str:
        address = self.membership.addresses.get(node) or self._peers.get(node, "HOST:PORT")
        return REMEDY.format(node=node, address=address)

    def connected(self, node: str, info: MemberInfo) -> None:
        """A peer that passed the checks is connected."""
        self.infos[node] = info
        self.changes.set()

    def membership_changed(self) -> None:
        """Another membership is in force: forget the positions of data directories that it does not
        name."""
        ids, witnessed = dict(self.ids), getattr(self.core, "witnessed", {})
        everyone = self.everyone
        for node in [*witnessed]:
            known = self._recorded.get(node)
            if node not in everyone or (known and ids.get(node) != known):
                del witnessed[node]
        self._recorded = ids
        self.changes.set()

    def disconnected(self, node: str) -> None:
        self.infos.pop(node, None)

    # Founding.

    def founder_connected(self, node: str, info: MemberInfo) -> None:
        """This node has dialled one that waits for the founding, or that has the record."""
        if info.founding:
            self._founders[node] = info.member
            self.log_change()

    def founder_disconnected(self, node: str) -> None:
        """The connection has ended. That is not logged, because it also ends when the cluster has
        been founded; if the node cannot be dialled again, `log_change` follows."""
        self._founders.pop(node, None)

    def log_missing(self) -> None:
        """Log which founders are missing, and every change from now on."""
        self._logged = []
        self.log_change()

    def log_change(self) -> None:
        """Log which founders are missing, if that has changed."""
        missing = self.awaited()
        if self._logged is not None and missing != self._logged:
            self._logged = missing
            if missing:
                reason = not_founded(self.node, missing)
                log.warning("%s", log_line(event="not_founded", node=self.node, reason=reason))

    async def found(self) -> bool:
        """Found the cluster if that is up to this node and all founders are connected. Returns
        whether it did."""
        first = self.waiting and self.node == min(self._peers) and not self.missing()
        if self._adopting or not first:
            return False
        founders = {**self._founders, self.node: self.own.member}
        await self._adopt(_Founding(token_hex(8), founders))
        return True

    def record(self) -> bytes:
        """The founding record, for nodes that wait for it; empty if this node has none."""
        if self.waiting or not self.own.founders:
            return b""
        return encode(_Founding(self.own.cluster_id, self.own.founders))

    async def take_record(self, record: bytes) -> bool:
        """A peer has sent the founding record. Returns whether this node has adopted it."""
        try:
            founding = _founding(record)
        except MsgspecError as error:
            raise ConfigError(f"not a founding record: {error}") from None
        if not self.waiting or self._adopting:
            return False
        if (
            founding.founders.get(self.node) != self.own.member
            or founding.founders.keys() != self._peers.keys()
        ):
            raise self._lost(
                self.node, "the cluster was founded with another data directory of this node"
            )
        await self._adopt(founding)
        return True

    async def _adopt(self, founding: _Founding) -> None:
        self._adopting = True
        try:
            own = NodeMember(self.own.member, founding.cluster_id, founding.founders)
            await self._save(own)
        finally:
            self._adopting = False
        self.own = own
        self.changes.set()
        line = log_line(event="cluster_founded", node=self.node, cluster_id=founding.cluster_id)
        log.info("%s", line)

    def missing(self) -> list[str]:
        """The founders that are not connected."""
        return (
            sorted(self._peers.keys() - self._founders.keys() - {self.node}) if self.waiting else []
        )

    def awaited(self) -> list[str]:
        """The missing founders, as long as no peer refuses this node. One that does has data, so
        nothing is to be founded and no other directory to be emptied; its reason has the remedy."""
        return [] if self.refusals() else self.missing()

    # What the leader records.

    def to_record(self) -> Membership | None:
        """The membership with the ids that are missing from it, if they are known now."""
        membership = self.membership
        if self.waiting or self.node not in membership.everyone:
            return None
        known = {node: info.member for node, info in self.infos.items() if info.member}
        known |= {self.node: self.own.member, **self.ids}
        ids = {node: known[node] for node in membership.everyone if node in known}
        cluster = self.cluster_id
        if not cluster:
            if len(ids) < len(membership.everyone):
                return None  # a cluster of an earlier release, with members that are not connected
            cluster = sha256(encode(sorted(ids.items()))).hexdigest()[:16]
        wanted = replace(membership, members=ids, cluster=cluster)
        return wanted if wanted != membership else None
