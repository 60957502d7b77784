"""What nodes and clients of a quorum say on a connection: frames, the handshake, who is let in.

No sockets here: `link` carries it over asyncio, the tests over nothing at all.

    Frames                bytes in, frames out: `feed(data) -> [(kind, payload), …]`
    frame(kind, *parts)   one frame as bytes
    Dialler, Listener     the two sides of the handshake, frame by frame
    Security, TLS         secrets for each role, certificates, both or neither; made from files
    check_exposure(…)     refuses to listen beyond loopback with neither
    parse_address(text)   "host:port" -> (host, port)

**A frame** is a length (4 bytes, big-endian, of what follows), a kind (1 byte) and a payload, which
is msgpack unless its owner says otherwise. Kinds below 16 are the wire's own; the rest belong to
whoever owns the link. No frame is longer than `MAX_FRAME`, and none before the handshake is over
than `MAX_GREETING`. The first byte of a connection is therefore 0, which no HTTP request begins
with.

**The handshake**: the dialler says `Hello` (the protocol versions that it speaks, whether it is a
peer, a client or an onlooker, its cluster, its own id, whom it wants), the listener `Challenge`
(the version chosen, who it is), the dialler `Proof`, the listener `Welcome`, or `Refusal` with the
reason. Both also send `MemberInfo`: the id of the cluster and, between nodes, of the data folder,
and how far the node has come. Releases before it neither send nor read it.

With a secret both prove that they know it: HMAC-SHA256 over everything that was said in `Hello` and
`Challenge`, both nonces included, under a label that differs for the two sides. What was heard on
one connection is therefore worth nothing on another, nor sent back on the same. Without TLS,
whoever can alter packets on the way can still take over a connection once it is made; a secret is
for networks that one trusts, and TLS for the others.

**Roles**: `peer`, `admin`, `client`, `onlooker`, each of which includes those after it. A listener
has a secret for each, and the one that the dialler proves decides its role; with mutual TLS, the
organizational unit of the dialler's certificate does (`doyen-peer`, `doyen-admin`, …). If both are
in use, the lesser of the two roles counts; a certificate without such a unit is a client's, or, if
there is a peer secret, leaves it to the secrets. With neither, everybody has every role.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from hashlib import sha256
from pathlib import Path
from secrets import token_bytes
from struct import Struct as Layout
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from doyen.errors import ConfigError, StoreError
from doyen.quorum.consensus.core import Position
from doyen.quorum.keyspace import versions
from doyen.quorum.keyspace.versions import FIRST

__all__ = [
    "ANY",
    "FIRST_FREE",
    "MAX_FRAME",
    "MAX_GREETING",
    "NEWEST",
    "OLDEST",
    "TLS",
    "ClientHandshake",
    "CloseReason",
    "ConnectionIdentity",
    "ConnectionRefused",
    "FrameError",
    "FrameKind",
    "Frames",
    "Judge",
    "MemberInfo",
    "Role",
    "Security",
    "ServerHandshake",
    "allows",
    "certificate_names",
    "check_exposure",
    "frame",
    "parse_address",
]

log = logging.getLogger("doyen")

OLDEST, NEWEST = 1, 1
"""The versions of the protocol that are spoken here. Both sides take the newest they share."""

SUPPORTED = versions.OLDEST, versions.NEWEST
"""The versions of the replicated state that this release supports; see `versions`."""

MAX_FRAME = 8 << 20
MAX_GREETING = 4096
FIRST_FREE = 16
ANY = ""
"""As a cluster or a node that is wanted: whichever it is."""

MIN_SECRET = 16
Role = Literal["peer", "admin", "client", "onlooker"]
"""Each includes those after it. As what a connection is made, it is a peer's, a client's, or an
onlooker's, which only asks how a node is doing, and may while there is no leader."""

_RANKS: dict[str, int] = {"onlooker": 0, "client": 1, "admin": 2, "peer": 3}
_UNIT = "doyen-"
"""What the organizational unit of a certificate begins with, if the rest is a role."""

_HEAD = Layout(">IB")
HEAD_SIZE = _HEAD.size
pack_head = _HEAD.pack
_unpack_head = _HEAD.unpack_from


class FrameKind(IntEnum):
    """The wire's own kinds of frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSAL = 5
    PING = 6
    PONG = 7


class CloseReason(StrEnum):
    """Why a connection was refused or closed; also the names under which this is counted."""

    GARBAGE = "garbage"
    TOO_LARGE = "too-large"
    MALFORMED = "malformed"
    OUT_OF_TURN = "out-of-turn"
    VERSION = "version"
    CLUSTER = "cluster"
    NODE = "node"
    DUPLICATE = "duplicate"
    SECRET = "secret"
    ROLE = "role"
    MEMBER = "member"
    TLS = "tls"
    CROWDED = "crowded"
    DEADLINE = "deadline"
    NOT_SERVING = "not-serving"
    SILENT = "silent"
    OVERFLOW = "overflow"


class FrameError(Exception):
    """What arrived is no frame of this protocol. The connection is of no use any more."""

    def __init__(self, fault: CloseReason, text: str) -> None:
        super().__init__(text)
        self.fault = fault


class ConnectionRefused(StoreError):
    """The two sides do not belong together, or one of them has no room."""

    def __init__(self, fault: CloseReason, text: str) -> None:
        super().__init__(text)
        self.fault = fault

    @property
    def lasting(self) -> bool:
        """Whether trying again is of no use until somebody changes a setting."""
        return self.fault not in {
            CloseReason.CROWDED,
            CloseReason.DEADLINE,
            CloseReason.NOT_SERVING,
            CloseReason.DUPLICATE,
        }


def frame(kind: int, *parts: bytes) -> bytes:
    """One frame, whatever its size."""
    return b"".join((pack_head(1 + sum(map(len, parts)), kind), *parts))


class Frames:
    """Cuts what arrives into frames. Whatever is split, however it is split."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.control: list[tuple[int, bytes]] = []
        """Frames of the wire's own kinds, in order, for its owner to take out."""
        self._parts: list[bytes] = []
        self._have = 0
        self._need = 0

    def feed(self, data: bytes, most: int = 1 << 30) -> Sequence[tuple[int, bytes]]:
        """The frames that are whole now; at most so many, the rest with the next call. Raises
        `FrameError` for a length that cannot be, as soon as it is seen."""
        if self._parts:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return ()
            data = b"".join(self._parts)
            self._parts.clear()
        frames: list[tuple[int, bytes]] = []
        at, end, need, limit = 0, len(data), 0, self.limit
        while most and end - at >= HEAD_SIZE:
            length, kind = _unpack_head(data, at)
            if not 0 < length <= limit:
                raise self._wrong(length)
            stop = at + 4 + length
            if stop > end:
                need = 4 + length
                break
            (frames if kind >= FIRST_FREE else self.control).append((kind, data[at + 5 : stop]))
            at = stop
            most -= 1
        if at < end:
            self._parts.append(data[at:] if at else data)
            self._have, self._need = end - at, need
        return frames

    def _wrong(self, length: int) -> FrameError:
        if not length:
            return FrameError(CloseReason.MALFORMED, "a frame of no length")
        return FrameError(
            CloseReason.TOO_LARGE, f"a frame of {length} bytes, where {self.limit} are allowed"
        )


Name = Annotated[str, Meta(max_length=200)]
Nonce = Annotated[bytes, Meta(min_length=32, max_length=32)]


class ConnectionIdentity(Struct, frozen=True, array_like=True):
    """Who one is."""

    cluster: Name
    node: Name
    incarnation: int
    """Drawn when the process starts: tells a process from another that uses the same id."""


class MemberInfo(Struct, frozen=True, array_like=True):
    """What a node says of itself besides its name. All of it is empty in releases before it; a
    client knows the cluster's id only."""

    cluster_id: Name = ""
    """Drawn when the cluster was founded: tells it from another of the same name."""
    member: Name = ""
    """Drawn with the data folder: tells it from another folder of a node of the same name."""
    position: Position = Position()
    founding: Name = ""
    """A digest of the peers with which it waits to be founded; empty if it does not wait."""


Judge = Callable[[ConnectionIdentity, MemberInfo], None]
"""Raises `ConnectionRefused`."""


class _Versions(Struct, frozen=True, array_like=True):
    """What every version of `Hello` begins with."""

    magic: Literal["doyen"]
    oldest: int
    newest: int


class _Hello(Struct, frozen=True, array_like=True):
    magic: Literal["doyen"]
    oldest: int
    newest: int
    role: Role
    me: ConnectionIdentity
    wanted: Name
    nonce: Nonce
    supports: tuple[int, int] = (FIRST, FIRST)
    """The versions of the replicated state that it supports (see `versions`)."""
    info: MemberInfo = MemberInfo()


class _Challenge(Struct, frozen=True, array_like=True):
    version: int
    me: ConnectionIdentity
    secret: bool
    nonce: Nonce
    supports: tuple[int, int] = (FIRST, FIRST)
    info: MemberInfo = MemberInfo()


class _Refusal(Struct, frozen=True, array_like=True):
    fault: str
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
        raise FrameError(CloseReason.GARBAGE, f"not a greeting of this protocol: {error}") from None


def _proof(secret: bytes | None, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    if secret is None:
        return b""
    said = sha256(hello).digest() + sha256(challenge).digest()
    return hmac.digest(secret, side + said, "sha256")


_DIALLER, _LISTENER = b"doyen dialler ", b"doyen listener "


class ClientHandshake:
    """The side that opens the connection: `begin`, then `take` each frame until `done`."""

    def __init__(
        self,
        me: ConnectionIdentity,
        role: Role,
        wanted: str = ANY,
        secret: bytes | None = None,
        *,
        info: MemberInfo = MemberInfo(),  # noqa: B008  (frozen)
        judge: Judge | None = None,
    ) -> None:
        """`judge` may refuse the listener, by what it says of itself."""
        self._me = me
        self._role = role
        self._wanted = wanted
        self._secret = secret
        self._info = info
        self._judgement = judge
        self._hello = encode(
            _Hello("doyen", OLDEST, NEWEST, role, me, wanted, token_bytes(32), SUPPORTED, info)
        )
        self._challenge = b""
        self.certificate: Mapping[str, Any] | None = None
        """The listener's, if it has shown one."""
        self.them = ConnectionIdentity(ANY, ANY, 0)
        self.supports = FIRST, FIRST
        self.info = MemberInfo()
        self.version = 0
        self.done = False

    def begin(self) -> bytes:
        return frame(FrameKind.HELLO, self._hello)

    def take(self, kind: int, payload: bytes) -> bytes:
        """What to send in answer. Raises `ConnectionRefused` or `FrameError`."""
        if kind == FrameKind.REFUSAL:
            refusal = _decode(_refusal, payload)
            fault = (
                CloseReason(refusal.fault)
                if refusal.fault in list(CloseReason)
                else CloseReason.OUT_OF_TURN
            )
            raise ConnectionRefused(fault, refusal.text)
        if kind == FrameKind.CHALLENGE and not self._challenge:
            self._judge(_decode(_challenge, payload))
            self._challenge = payload
            return frame(FrameKind.PROOF, self._sign(_DIALLER))
        if kind == FrameKind.WELCOME and self._challenge:
            if not hmac.compare_digest(payload, self._sign(_LISTENER)):
                raise ConnectionRefused(
                    CloseReason.SECRET, "the node does not know the secret that is set here"
                )
            self.done = True
            return b""
        raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in the handshake")

    def _sign(self, side: bytes) -> bytes:
        return _proof(self._secret, side, self._hello, self._challenge)

    def _judge(self, theirs: _Challenge) -> None:
        """Is it who we wanted? It may say so in error; the proof comes later."""
        self.them, self.version, self.info = theirs.me, theirs.version, theirs.info
        self.supports = theirs.supports
        if not OLDEST <= theirs.version <= NEWEST:
            raise FrameError(
                CloseReason.VERSION, f"version {theirs.version} of the protocol was chosen"
            )
        if self._me.cluster not in {ANY, theirs.me.cluster}:
            raise ConnectionRefused(
                CloseReason.CLUSTER, _other_cluster(theirs.me.cluster, self._me.cluster)
            )
        if self._wanted not in {ANY, theirs.me.node}:
            raise ConnectionRefused(CloseReason.NODE, _other_node(theirs.me.node, self._wanted))
        _check_cluster_id(theirs.info.cluster_id, self._info.cluster_id)
        if _explicit_role(self.certificate) not in {None, "peer"}:
            raise ConnectionRefused(
                CloseReason.ROLE,
                "the certificate of whoever listens there is a client's, not a node's",
            )
        if self._judgement is not None:
            self._judgement(theirs.me, theirs.info)
        if theirs.secret and self._secret is None:
            text = "a peer secret" if self._role == "peer" else "a shared secret"
            raise ConnectionRefused(
                CloseReason.SECRET, f"the node wants {text}, and none is set here"
            )
        if self._secret is not None and not theirs.secret:
            raise ConnectionRefused(
                CloseReason.SECRET,
                "a shared secret is set here, and the node has none: set the same one there",
            )


class ServerHandshake:
    """The side that was called: `take` each frame until `proved`, then `welcome` if there is room.

    `ConnectionRefused` raised by `take` is for the dialler to know: send `refusal(error)`.
    """

    def __init__(
        self,
        me: ConnectionIdentity,
        secret: bytes | None = None,
        *,
        security: Security | None = None,
        info: Callable[[], MemberInfo] = MemberInfo,
    ) -> None:
        """`secret` alone lets whoever knows it act in every role."""
        self._me = me
        self._security = security or Security(peer_secret=secret)
        self._secret: bytes | None = None
        """The one that the dialler has proved to know."""
        self._my_info = info
        self._hello = b""
        self._challenge = b""
        self.certificate: Mapping[str, Any] | None = None
        """The dialler's, if it has shown one."""
        self.them = ConnectionIdentity(ANY, ANY, 0)
        self.supports = FIRST, FIRST
        self.info = MemberInfo()
        self.role: Role = "client"
        """As what it has come."""
        self.granted: Role = "onlooker"
        """What it may do, by its secret and its certificate."""
        self.version = 0
        self.proved = False

    def take(self, kind: int, payload: bytes) -> bytes:
        """What to send in answer. Raises `ConnectionRefused` or `FrameError`."""
        if kind == FrameKind.HELLO and not self._hello:
            self._judge(payload)
            self._hello = payload
            info = self._my_info()
            if self.role != "peer":
                info = MemberInfo(info.cluster_id)
            secret = bool(self._security.accepted)
            self._challenge = encode(
                _Challenge(self.version, self._me, secret, token_bytes(32), SUPPORTED, info)
            )
            return frame(FrameKind.CHALLENGE, self._challenge)
        if kind == FrameKind.PROOF and self._hello and not self.proved:
            self._grant(payload)
            self.proved = True
            return b""
        raise FrameError(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} in the handshake")

    def _grant(self, proof: bytes) -> None:
        """Find out what the dialler may do, and whether that is enough for what it wants."""
        by_secret: Role = "peer"
        if self._security.accepted:
            for role, secret in self._security.accepted:
                expected = _proof(secret, _DIALLER, self._hello, self._challenge)
                if hmac.compare_digest(proof, expected):
                    by_secret, self._secret = role, secret
                    break
            else:
                raise ConnectionRefused(
                    CloseReason.SECRET, "the shared secret is not the one that is set here"
                )
        elif proof:
            raise ConnectionRefused(
                CloseReason.SECRET, "the shared secret is not the one that is set here"
            )
        by_certificate: Role = "peer"
        if self._security.certified:
            # Many certificates name a host only, and a host may have nodes and clients. So one that
            # names no role is a client's, unless nodes have a secret that clients do not have.
            assumed: Role = "peer" if self._security.peer_secret else "client"
            by_certificate = _explicit_role(self.certificate) or assumed
        self.granted = min(by_secret, by_certificate, key=_RANKS.__getitem__)
        if self.role == "peer" and self.granted != "peer":
            what = "secret" if by_secret != "peer" else "certificate"
            raise ConnectionRefused(
                CloseReason.ROLE,
                f"the {what} is of role {self.granted!r}, and only nodes are heard as peers: a node"
                f" needs the peers' {what}"
                + (" (--peer-secret-file)" if what == "secret" else " (OU=doyen-peer)"),
            )
        if self.granted == "peer" and self.role != "peer":
            self.granted = "admin"

    def welcome(self) -> bytes:
        return frame(FrameKind.WELCOME, self._sign(_LISTENER))

    def _sign(self, side: bytes) -> bytes:
        return _proof(self._secret, side, self._hello, self._challenge)

    def _judge(self, payload: bytes) -> None:
        theirs = _decode(_versions, payload)
        self.version = min(NEWEST, theirs.newest)
        if self.version < max(OLDEST, theirs.oldest):
            raise ConnectionRefused(
                CloseReason.VERSION,
                f"node {self._me.node!r} speaks versions {OLDEST} to {NEWEST} of the protocol, "
                f"the caller {theirs.oldest} to {theirs.newest}: upgrade the older one",
            )
        hello = _decode(_hello, payload)
        self.them, self.role, self.info = hello.me, hello.role, hello.info
        self.supports = hello.supports
        if hello.me.cluster != self._me.cluster and (
            hello.role == "peer" or hello.me.cluster != ANY
        ):
            raise ConnectionRefused(
                CloseReason.CLUSTER, _other_cluster(self._me.cluster, hello.me.cluster)
            )
        if hello.wanted not in {ANY, self._me.node}:
            raise ConnectionRefused(CloseReason.NODE, _other_node(self._me.node, hello.wanted))
        if hello.role == "peer" and not hello.me.node:
            raise ConnectionRefused(CloseReason.NODE, "a peer has to say its id")
        if hello.role == "peer" and hello.me.node == self._me.node:
            raise ConnectionRefused(CloseReason.DUPLICATE, _same_id(self._me, hello.me))
        _check_cluster_id(self._my_info().cluster_id, hello.info.cluster_id)


def refusal(error: ConnectionRefused) -> bytes:
    """The frame that tells the other side why."""
    return frame(FrameKind.REFUSAL, encode(_Refusal(error.fault.value, str(error)[:1000])))


def _other_cluster(here: str, wanted: str) -> str:
    return f"this node belongs to cluster {here!r}, not to {wanted!r}: check the addresses"


def _check_cluster_id(here: str, wanted: str) -> None:
    if here and wanted and here != wanted:
        raise ConnectionRefused(
            CloseReason.CLUSTER,
            f"this node belongs to the cluster with id {here}, not to the one with id {wanted}: a"
            " cluster of the same name was founded separately. Check the addresses; if the old"
            " cluster is gone for good, connect anew (a node: start it with an empty data folder)",
        )


def allows(granted: Role, needed: Role) -> bool:
    """Whether whoever was granted the one role may do what needs the other."""
    return _RANKS[granted] >= _RANKS[needed]


def _explicit_role(certificate: Mapping[str, Any] | None) -> Role | None:
    """The role that a certificate names, in its organizational unit."""
    for name, value in _subject(certificate):
        if name == "organizationalUnitName" and value.startswith(_UNIT):
            role = value.removeprefix(_UNIT)
            # A role of a later release, or a misspelt one, must not be taken for a greater one.
            return role if role in _RANKS else "onlooker"  # type: ignore[return-value]
    return None


def certificate_names(certificate: Mapping[str, Any] | None) -> set[str]:
    """The names that a certificate is for: its common name, and its hosts and addresses."""
    names = {value for name, value in _subject(certificate) if name == "commonName"}
    others = (certificate or {}).get("subjectAltName", ())
    return names | {value for kind, value in others if kind in {"DNS", "IP Address"}}


def _subject(certificate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [pair for part in (certificate or {}).get("subject", ()) for pair in part]


def _other_node(here: str, wanted: str) -> str:
    return f"this is node {here!r}, not {wanted!r}: check the addresses"


def _same_id(me: ConnectionIdentity, them: ConnectionIdentity) -> str:
    if them.incarnation == me.incarnation:
        return f"node {me.node!r} has called itself: check the addresses of its peers"
    return f"another process runs as node {me.node!r}: every node needs an id of its own"


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Certificates, as PEM files. A node uses its own both when it listens and when it dials."""

    certificate: str | Path | None = None
    key: str | Path | None = None
    authority: str | Path | None = None
    """Who signs the others' certificates. Without it, a dialler trusts the system's authorities."""
    mutual: bool = True
    """Whether a listener lets in only who has a certificate of the authority."""

    def for_listening(self) -> ssl.SSLContext:
        if not self.certificate:
            raise ConfigError("TLS needs a certificate and a key to listen with")
        if self.mutual and not self.authority:
            raise ConfigError(
                "mutual TLS needs the authority that signs the others' certificates (or say "
                "mutual=False to let in those who have none)"
            )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def for_dialling(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._load(context)
        if not self.authority:
            context.load_default_certs()
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path in (self.certificate, self.key, self.authority):
            if path:
                _readable(Path(path))
        if self.authority:
            try:
                context.load_verify_locations(self.authority)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"no certificate of an authority in {self.authority}: {error}"
                ) from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                key = self.key or self.certificate
                raise ConfigError(
                    f"the certificate in {self.certificate} and the key in {key} do not go "
                    f"together, or one of them is none: {error}"
                ) from error


def _readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _no_password() -> bytes:
    """Without this, OpenSSL asks at the terminal."""
    raise ValueError("the key is encrypted; a node needs one that is not")


class _Reloaded:
    """A TLS context, made anew when its files change. If they cannot be used then, the one in
    force stays, and the reason is logged."""

    def __init__(self, make: Callable[[], ssl.SSLContext], tls: TLS) -> None:
        self._make = make
        self._files = [file for file in (tls.certificate, tls.key, tls.authority) if file]
        self._seen = self._state()
        self._context = make()

    def _state(self) -> list[tuple[int, int, int]]:
        found = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError:
                continue  # it is being replaced, or making the context will say so
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return found

    def get(self) -> ssl.SSLContext:
        state = self._state()
        if state != self._seen:
            self._seen = state
            try:
                self._context = self._make()
                log.warning("certificates reloaded: %s", ", ".join(map(str, self._files)))
            except ConfigError as error:
                log.warning("changed certificates not used, the earlier ones stay: %s", error)
        return self._context


@dataclass(frozen=True, kw_only=True)
class Security:
    """How nodes and clients know one another. Whoever listens or dials looks at the context once
    at its start, so that files which cannot be used are found then; afterwards for each connection,
    so that certificates which were replaced are used without a restart.

    A secret may have several lines: each is accepted, and the first is proved when dialling."""

    secret: bytes | None = None
    """The clients'; for a client, the one that it has, of whatever role."""
    tls: TLS | None = None
    peer_secret: bytes | None = None
    admin_secret: bytes | None = None
    onlooker_secret: bytes | None = None
    _contexts: dict[str, _Reloaded] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        for _, secret in self.accepted:
            if len(secret) < MIN_SECRET:
                raise ConfigError(
                    f"the shared secret has {len(secret)} bytes; it needs {MIN_SECRET} or more, "
                    "since whoever listens in can try short ones at leisure "
                    "(python -c 'import secrets; print(secrets.token_hex(16))')"
                )

    @property
    def certified(self) -> bool:
        """Whether a dialler's certificate tells who it is."""
        return self.tls is not None and self.tls.mutual

    @property
    def accepted(self) -> list[tuple[Role, bytes]]:
        """The secrets that a listener accepts, and the role that each gives."""
        given: list[tuple[Role, bytes | None]] = [
            ("peer", self.peer_secret),
            ("admin", self.admin_secret),
            ("client", self.secret),
            ("onlooker", self.onlooker_secret),
        ]
        if self.certified and not (self.peer_secret or self.admin_secret or self.onlooker_secret):
            # One secret for all, besides certificates: those decide.
            given = [("peer", self.secret)]
        return [(role, line) for role, secret in given for line in (secret or b"").splitlines()]

    def key(self, role: Role) -> bytes | None:
        """What to prove when dialling."""
        if role == "peer":
            secret = self.peer_secret or (self.secret if self.certified else None)
        else:
            secret = self.secret or self.admin_secret or self.peer_secret or self.onlooker_secret
        return secret.splitlines()[0] if secret else None

    @property
    def listening(self) -> ssl.SSLContext | None:
        return self._context("listening", self.tls.for_listening) if self.tls else None

    @property
    def dialling(self) -> ssl.SSLContext | None:
        return self._context("dialling", self.tls.for_dialling) if self.tls else None

    def _context(self, use: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self.tls is not None
        if use not in self._contexts:
            self._contexts[use] = _Reloaded(make, self.tls)
        return self._contexts[use].get()


def check_exposure(host: str, security: Security, *, insecure: bool = False) -> None:
    """Refuse to listen where strangers could speak as a node. TLS that asks nobody for a
    certificate keeps nobody out."""
    if insecure or security.accepted or _loopback(host):
        return
    one_way = security.tls is not None and not security.tls.mutual
    if security.tls is not None and not one_way:
        return
    why = "TLS without clients' certificates keeps nobody out" if one_way else "anyone could join"
    raise ConfigError(
        f"listening on {host or 'every address'} with neither a shared secret nor mutual TLS: "
        f"{why}. Set a secret or TLS, listen on 127.0.0.1, or say --insecure (insecure=True)"
    )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """`host:port`, `[v6]:port`; `:port` is every address of this machine."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is no address: write an IPv6 one as [::1]:port")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is no address: it has to be host:port")
    return host, int(port)
