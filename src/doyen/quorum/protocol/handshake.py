"""The handshake of a connection: both sides prove who they are, frame by frame.

The client (the side that dials) sends `Hello`: the protocol versions it supports, whether it is a
peer, a client or an onlooker, its cluster, its own id, and the node it wants to reach. The server
answers with `Challenge`: the chosen version and who it is. The client sends `Proof`, the server
`Welcome`, or `Refusal` with the reason. Both also send `MemberInfo`: the id of the cluster and,
between nodes, the id of the data directory and how far the node's log goes. The first release
neither sends nor reads it.

With a shared secret, both sides prove that they know it: HMAC-SHA256 over the complete `Hello` and
`Challenge`, including both nonces, under a label that differs between the two sides. A recorded
proof is therefore useless on another connection, and cannot be reflected on the same one.

Performs no I/O: `connection` carries the frames over asyncio. Imports `frames`, `security`, the
versions of the keyspace and the error tree.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from hashlib import sha256
from secrets import token_bytes
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from doyen.quorum.consensus.core import Position
from doyen.quorum.keyspace import versions
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.protocol.frames import (
    CloseReason,
    ConnectionRefused,
    FrameError,
    FrameKind,
    frame,
)
from doyen.quorum.protocol.security import Role, Security, allows, certificate_role

OLDEST, NEWEST = 1, 1
"""The supported versions of the protocol. A connection uses the newest one that both sides
support."""

SUPPORTED = versions.OLDEST, versions.NEWEST
"""The versions of the replicated state that this release supports; see `versions`."""

ANY = ""
"""As the wanted cluster or node: accept any."""

MAX_NAME = 200
Name = Annotated[str, Meta(max_length=MAX_NAME)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]


class ConnectionIdentity(Struct, frozen=True, array_like=True):
    """Who one side of a connection is."""

    cluster: Name
    node: Name
    incarnation: int
    """Random number of the process. Distinguishes two processes that use the same id."""


class MemberInfo(Struct, frozen=True, array_like=True):
    """What a node sends about itself besides its name. All fields are empty in the first release;
    a client knows the cluster id only."""

    cluster_id: Name = ""
    """Random id from the founding of the cluster. Distinguishes clusters of the same name."""
    member: Name = ""
    """Random id of the data directory. Distinguishes data directories of nodes of the same name."""
    position: Position = Position()
    founding: Name = ""
    """Digest of the peers with which this node waits to be founded; empty if it is not waiting."""


CheckRemote = Callable[[ConnectionIdentity, MemberInfo], None]
"""Raises `ConnectionRefused` if the other side must not be connected to."""


class _Versions(Struct, frozen=True, array_like=True):
    """The fields with which every version of `Hello` begins."""

    magic: Literal["doyen"]
    oldest: int
    newest: int


class _Hello(Struct, frozen=True, array_like=True):
    magic: Literal["doyen"]
    oldest: int
    newest: int
    role: Role
    client: ConnectionIdentity
    wanted: Name
    nonce: Nonce
    supports: tuple[int, int] = (FIRST, FIRST)
    """The supported versions of the replicated state (see `versions`)."""
    info: MemberInfo = MemberInfo()


class _Challenge(Struct, frozen=True, array_like=True):
    version: int
    server: ConnectionIdentity
    secret: bool
    nonce: Nonce
    supports: tuple[int, int] = (FIRST, FIRST)
    info: MemberInfo = MemberInfo()


class _Refusal(Struct, frozen=True, array_like=True):
    reason: str
    text: Annotated[str, Meta(max_length=2000)]


T = TypeVar("T")

_versions = Decoder(_Versions)
_hello = Decoder(_Hello)
_challenge = Decoder(_Challenge)
_refusal = Decoder(_Refusal)


def _decode(decoder: Decoder[T], payload: bytes) -> T:
    try:
        return decoder.decode(payload)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(
            CloseReason.GARBAGE, f"not a handshake of this protocol: {error}"
        ) from None


_CLIENT_LABEL, _SERVER_LABEL = b"doyen dialler ", b"doyen listener "


def _proof(secret: bytes | None, label: bytes, hello: bytes, challenge: bytes) -> bytes:
    if secret is None:
        return b""
    transcript = sha256(hello).digest() + sha256(challenge).digest()
    return hmac.digest(secret, label + transcript, "sha256")


class _Handshake:
    """What one side has learnt about the other."""

    def __init__(self, local: ConnectionIdentity) -> None:
        self._local = local
        self._hello = b""
        self._challenge = b""
        self.certificate: Mapping[str, Any] | None = None
        """The other side's certificate, if it has sent one."""
        self.remote = ConnectionIdentity(ANY, ANY, 0)
        self.supports = FIRST, FIRST
        self.info = MemberInfo()
        self.version = 0
        self.role: Role = "peer"
        """The role in which the client connects. A server is taken for a peer."""
        self.granted: Role = "peer"
        """The role that the client's secret and its certificate grant."""


class ClientHandshake(_Handshake):
    """The side that dials: send `begin()`, then `receive` each frame until `done`."""

    def __init__(
        self,
        local: ConnectionIdentity,
        role: Role,
        wanted: str = ANY,
        secret: bytes | None = None,
        *,
        info: MemberInfo = MemberInfo(),  # noqa: B008  (frozen)
        check: CheckRemote | None = None,
    ) -> None:
        """`check` may refuse the server by its identity and `MemberInfo`."""
        super().__init__(local)
        self._own_role = role
        self._wanted = wanted
        self._secret = secret
        self._local_info = info
        self._check_remote = check
        self._hello = encode(
            _Hello("doyen", OLDEST, NEWEST, role, local, wanted, token_bytes(32), SUPPORTED, info)
        )
        self.done = False

    def begin(self) -> bytes:
        return frame(FrameKind.HELLO, self._hello)

    def receive(self, kind: int, payload: bytes) -> bytes:
        """Process one frame and return what to send. Raises `ConnectionRefused` or
        `FrameError`."""
        if kind == FrameKind.REFUSAL:
            refused = _decode(_refusal, payload)
            known = refused.reason in list(CloseReason)
            reason = CloseReason(refused.reason) if known else CloseReason.OUT_OF_TURN
            raise ConnectionRefused(reason, refused.text)
        if kind == FrameKind.CHALLENGE and not self._challenge:
            self._check(_decode(_challenge, payload))
            self._challenge = payload
            return frame(FrameKind.PROOF, self._sign(_CLIENT_LABEL))
        if kind == FrameKind.WELCOME and self._challenge:
            if not hmac.compare_digest(payload, self._sign(_SERVER_LABEL)):
                raise ConnectionRefused(
                    CloseReason.SECRET, "the node does not know the secret that is set here"
                )
            self.done = True
            return b""
        raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in the handshake")

    def _sign(self, label: bytes) -> bytes:
        return _proof(self._secret, label, self._hello, self._challenge)

    def _check(self, challenge: _Challenge) -> None:
        """Check that the server is the wanted one. What it claims is proved only by `Welcome`."""
        self.remote, self.version, self.info = challenge.server, challenge.version, challenge.info
        self.supports = challenge.supports
        if not OLDEST <= challenge.version <= NEWEST:
            raise FrameError(
                CloseReason.VERSION,
                f"the node chose version {challenge.version} of the protocol, which is not"
                " supported here",
            )
        if self._local.cluster not in {ANY, challenge.server.cluster}:
            raise ConnectionRefused(
                CloseReason.CLUSTER, _other_cluster(challenge.server.cluster, self._local.cluster)
            )
        if self._wanted not in {ANY, challenge.server.node}:
            raise ConnectionRefused(
                CloseReason.NODE, _other_node(challenge.server.node, self._wanted)
            )
        _check_cluster_id(challenge.info.cluster_id, self._local_info.cluster_id)
        if certificate_role(self.certificate) not in {None, "peer"}:
            raise ConnectionRefused(
                CloseReason.ROLE,
                "the server's certificate is a client's, not a node's: give the node a certificate"
                " with OU=doyen-peer",
            )
        if self._check_remote is not None:
            self._check_remote(challenge.server, challenge.info)
        if challenge.secret and self._secret is None:
            text = "a peer secret" if self._own_role == "peer" else "a shared secret"
            raise ConnectionRefused(
                CloseReason.SECRET, f"the node requires {text}, and none is set here"
            )
        if self._secret is not None and not challenge.secret:
            raise ConnectionRefused(
                CloseReason.SECRET,
                "a shared secret is set here, and the node has none: set the same one there",
            )


class ServerHandshake(_Handshake):
    """The side that listens: `receive` each frame until `authenticated`, then send `welcome()`.

    If `receive` raises `ConnectionRefused`, send `refusal(error)` so that the client learns why.
    """

    def __init__(
        self,
        local: ConnectionIdentity,
        secret: bytes | None = None,
        *,
        security: Security | None = None,
        info: Callable[[], MemberInfo] = MemberInfo,
    ) -> None:
        """`secret` alone grants every role to a client that knows it."""
        super().__init__(local)
        self._security = security or Security(peer_secret=secret)
        self._secret: bytes | None = None
        """The secret that the client has proved to know."""
        self._local_info = info
        self.role, self.granted = "client", "onlooker"
        self.authenticated = False

    def receive(self, kind: int, payload: bytes) -> bytes:
        """Process one frame and return what to send. Raises `ConnectionRefused` or
        `FrameError`."""
        if kind == FrameKind.HELLO and not self._hello:
            self._check(payload)
            self._hello = payload
            info = self._local_info()
            if self.role != "peer":
                info = MemberInfo(info.cluster_id)
            secret = bool(self._security.accepted)
            self._challenge = encode(
                _Challenge(self.version, self._local, secret, token_bytes(32), SUPPORTED, info)
            )
            return frame(FrameKind.CHALLENGE, self._challenge)
        if kind == FrameKind.PROOF and self._hello and not self.authenticated:
            self._grant(payload)
            self.authenticated = True
            return b""
        raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in the handshake")

    def _grant(self, proof: bytes) -> None:
        """Determine the client's role and check that it covers the role it connects in."""
        by_secret: Role = "peer"
        if self._security.accepted:
            for role, secret in self._security.accepted:
                expected = _proof(secret, _CLIENT_LABEL, self._hello, self._challenge)
                if hmac.compare_digest(proof, expected):
                    by_secret, self._secret = role, secret
                    break
            else:
                raise _wrong_secret()
        elif proof:
            raise _wrong_secret()
        by_certificate: Role = "peer"
        if self._security.certified:
            # Many certificates name a host only, and a host may run nodes and clients. One that
            # names no role is treated as a client's, unless nodes have a secret that clients lack.
            assumed: Role = "peer" if self._security.peer_secret else "client"
            by_certificate = certificate_role(self.certificate) or assumed
        self.granted = by_certificate if allows(by_secret, by_certificate) else by_secret
        if self.role == "peer" and self.granted != "peer":
            what = "secret" if by_secret != "peer" else "certificate"
            raise ConnectionRefused(
                CloseReason.ROLE,
                f"the {what} is of role {self.granted!r}, and only nodes may connect as peers: a"
                f" node needs the peers' {what}"
                + (" (--peer-secret-file)" if what == "secret" else " (OU=doyen-peer)"),
            )
        if self.granted == "peer" and self.role != "peer":
            self.granted = "admin"

    def welcome(self) -> bytes:
        proof = _proof(self._secret, _SERVER_LABEL, self._hello, self._challenge)
        return frame(FrameKind.WELCOME, proof)

    def _check(self, payload: bytes) -> None:
        theirs = _decode(_versions, payload)
        self.version = min(NEWEST, theirs.newest)
        if self.version < max(OLDEST, theirs.oldest):
            raise ConnectionRefused(
                CloseReason.VERSION,
                f"node {self._local.node!r} supports versions {OLDEST} to {NEWEST} of the protocol,"
                f" the client {theirs.oldest} to {theirs.newest}: upgrade the older one",
            )
        hello = _decode(_hello, payload)
        self.remote, self.role, self.info = hello.client, hello.role, hello.info
        self.supports = hello.supports
        if hello.client.cluster != self._local.cluster and (
            hello.role == "peer" or hello.client.cluster != ANY
        ):
            raise ConnectionRefused(
                CloseReason.CLUSTER, _other_cluster(self._local.cluster, hello.client.cluster)
            )
        if hello.wanted not in {ANY, self._local.node}:
            raise ConnectionRefused(CloseReason.NODE, _other_node(self._local.node, hello.wanted))
        if hello.role == "peer" and not hello.client.node:
            raise ConnectionRefused(CloseReason.NODE, "a peer must send its id")
        if hello.role == "peer" and hello.client.node == self._local.node:
            raise ConnectionRefused(CloseReason.DUPLICATE, _same_id(self._local, hello.client))
        _check_cluster_id(self._local_info().cluster_id, hello.info.cluster_id)


def refusal(error: ConnectionRefused) -> bytes:
    """The frame that tells the client why it is refused."""
    return frame(FrameKind.REFUSAL, encode(_Refusal(error.reason.value, str(error)[:1000])))


def _wrong_secret() -> ConnectionRefused:
    return ConnectionRefused(
        CloseReason.SECRET, "the shared secret is not the one that is set here"
    )


def _other_cluster(here: str, wanted: str) -> str:
    return f"this node belongs to cluster {here!r}, not to {wanted!r}: check the addresses"


def _other_node(here: str, wanted: str) -> str:
    return f"this is node {here!r}, not {wanted!r}: check the addresses"


def _same_id(local: ConnectionIdentity, remote: ConnectionIdentity) -> str:
    if remote.incarnation == local.incarnation:
        return f"node {local.node!r} has dialled itself: check the addresses of its peers"
    return f"another process runs as node {local.node!r}: every node needs an id of its own"


def _check_cluster_id(here: str, wanted: str) -> None:
    if here and wanted and here != wanted:
        raise ConnectionRefused(
            CloseReason.CLUSTER,
            f"this node belongs to the cluster with id {here}, not to the one with id {wanted}: a"
            " cluster of the same name was founded separately. Check the addresses. If the old"
            " cluster is gone for good: a client has to connect anew; a node has to be removed from"
            " the cluster (doyen cluster remove) if it is a member, to be started with an empty"
            " data directory and --join, and to be added (doyen cluster add)",
        )
