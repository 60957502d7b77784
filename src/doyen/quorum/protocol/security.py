"""Who may do what on a quorum: roles, shared secrets, TLS certificates.

    Security, TLS         secrets per role, certificates, both or neither; read from files
    allows(granted, …)    whether a granted role covers a needed one
    check_exposure(…)     refuses to listen beyond loopback without any authentication
    parse_address(text)   "host:port" -> (host, port)

The roles are `peer`, `admin`, `client` and `onlooker`; each includes those after it. A server has a
secret for each role, and the secret that the client proves decides its role. With mutual TLS, the
organizational unit of the client's certificate decides it (`doyen-peer`, `doyen-admin`, …). If both
are in use, the lesser of the two roles applies. A certificate without such a unit is treated as a
client's or, if there is a peer secret, leaves the decision to the secrets. If neither is in use,
every connection has every role.

A secret without TLS is for trusted networks: an attacker that can alter packets can take over an
established connection. Imports the error tree.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from doyen.errors import ConfigError
from doyen.events.log_lines import log_line

log = logging.getLogger("doyen")

MIN_SECRET = 16
Role = Literal["peer", "admin", "client", "onlooker"]
"""Each includes those after it. A connection is opened as a peer, a client or an onlooker. An
onlooker can only ask for a node's status, also while there is no leader."""

_RANKS: dict[str, int] = {"onlooker": 0, "client": 1, "admin": 2, "peer": 3}
_UNIT = "doyen-"
"""Prefix of a certificate's organizational unit that names a role."""


def allows(granted: Role, needed: Role) -> bool:
    """Whether the granted role includes the needed one."""
    return _RANKS[granted] >= _RANKS[needed]


def certificate_role(certificate: Mapping[str, Any] | None) -> Role | None:
    """The role that the organizational unit of a certificate names."""
    for name, value in _subject(certificate):
        if name == "organizationalUnitName" and value.startswith(_UNIT):
            role = value.removeprefix(_UNIT)
            # An unknown role (of a later release, or misspelt) gets the least privileges.
            return role if role in _RANKS else "onlooker"  # type: ignore[return-value]
    return None


def certificate_names(certificate: Mapping[str, Any] | None) -> set[str]:
    """The names that a certificate is valid for: common name, host names and addresses."""
    names = {value for name, value in _subject(certificate) if name == "commonName"}
    others = (certificate or {}).get("subjectAltName", ())
    return names | {value for kind, value in others if kind in {"DNS", "IP Address"}}


def _subject(certificate: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    return [pair for part in (certificate or {}).get("subject", ()) for pair in part]


@dataclass(frozen=True, kw_only=True)
class TLS:
    """Certificates, as PEM files. A node uses the same ones to listen and to dial."""

    certificate: str | Path | None = None
    key: str | Path | None = None
    authority: str | Path | None = None
    """The CA that signs the other side's certificates. Without it, a client trusts the system's
    CAs."""
    mutual: bool = True
    """Whether a server requires a certificate of the CA from its clients."""

    def for_listening(self) -> ssl.SSLContext:
        if not self.certificate:
            raise ConfigError("TLS needs a certificate and a key to listen with")
        if self.mutual and not self.authority:
            raise ConfigError(
                "mutual TLS needs the authority that signs the others' certificates (or set "
                "mutual=False to accept clients without a certificate)"
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
                _check_readable(Path(path))
        if self.authority:
            try:
                context.load_verify_locations(self.authority)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"no certificate of an authority in {self.authority}: {error}"
                ) from error
        if self.certificate:
            try:
                context.load_cert_chain(self.certificate, self.key, password=_refuse_password)
            except (OSError, ssl.SSLError, ValueError) as error:
                key = self.key or self.certificate
                raise ConfigError(
                    f"the certificate in {self.certificate} and the key in {key} do not go "
                    f"together, or one of them is invalid: {error}"
                ) from error


def _check_readable(path: Path) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _refuse_password() -> bytes:
    """Prevents OpenSSL from asking for the password at the terminal."""
    raise ValueError("the key is encrypted; a node needs one that is not")


class _ReloadingContext:
    """A TLS context that is rebuilt when its files change. If the new files are unusable, the
    current context stays in use and the reason is logged."""

    def __init__(self, make: Callable[[], ssl.SSLContext], tls: TLS) -> None:
        self._make = make
        self._files = [file for file in (tls.certificate, tls.key, tls.authority) if file]
        self._loaded = self._fingerprints()
        self._context = make()

    def _fingerprints(self) -> list[tuple[int, int, int]]:
        found = []
        for file in self._files:
            try:
                status = os.stat(file)
            except OSError:
                continue  # being replaced; if it stays missing, building the context reports it
            found.append((status.st_ino, status.st_mtime_ns, status.st_size))
        return found

    def get(self) -> ssl.SSLContext:
        fingerprints = self._fingerprints()
        if fingerprints != self._loaded:
            self._loaded = fingerprints
            try:
                self._context = self._make()
                files = ", ".join(map(str, self._files))
                log.warning("%s", log_line(event="certificates_reloaded", files=files))
            except ConfigError as error:
                effect = "the earlier certificates stay in use"
                line = log_line(event="certificates_refused", error=error, effect=effect)
                log.warning("%s", line)
        return self._context


@dataclass(frozen=True, kw_only=True)
class Security:
    """How nodes and clients authenticate each other. Servers and clients load the TLS context once
    at startup, so that unusable files are reported then, and again for each connection, so that
    replaced certificates are used without a restart.

    A secret may have several lines. A server accepts each of them; a client proves the first."""

    secret: bytes | None = None
    """For a node, the clients' secret. For a client, its own secret, of whatever role."""
    tls: TLS | None = None
    peer_secret: bytes | None = None
    admin_secret: bytes | None = None
    onlooker_secret: bytes | None = None
    _contexts: dict[str, _ReloadingContext] = field(default_factory=dict, init=False, compare=False)

    def __post_init__(self) -> None:
        for _, secret in self.accepted:
            if len(secret) < MIN_SECRET:
                raise ConfigError(
                    f"the shared secret has {len(secret)} bytes; it needs {MIN_SECRET} or more, "
                    "since an eavesdropper can guess shorter ones offline "
                    "(python -c 'import secrets; print(secrets.token_hex(16))')"
                )

    @property
    def certified(self) -> bool:
        """Whether clients are identified by their certificates."""
        return self.tls is not None and self.tls.mutual

    @property
    def accepted(self) -> list[tuple[Role, bytes]]:
        """The secrets that a server accepts, with the role that each grants."""
        given: list[tuple[Role, bytes | None]] = [
            ("peer", self.peer_secret),
            ("admin", self.admin_secret),
            ("client", self.secret),
            ("onlooker", self.onlooker_secret),
        ]
        if self.certified and not (self.peer_secret or self.admin_secret or self.onlooker_secret):
            # One secret for all roles: the certificates decide the role.
            given = [("peer", self.secret)]
        return [(role, line) for role, secret in given for line in (secret or b"").splitlines()]

    def key(self, role: Role) -> bytes | None:
        """The secret to prove when dialling in this role."""
        if role == "peer":
            secret = self.peer_secret or (self.secret if self.certified else None)
        else:
            secret = self.secret or self.admin_secret or self.peer_secret or self.onlooker_secret
        return secret.splitlines()[0] if secret else None

    @property
    def listening(self) -> ssl.SSLContext | None:
        return self._context("listening", self.tls.for_listening) if self.tls else None

    def listening_for(self, *protocols: str) -> ssl.SSLContext | None:
        """A context with which a server listens that has application protocols (ALPN). It uses
        replaced certificates for new connections by itself."""
        if self.tls is None:
            return None
        tls, use = self.tls, " ".join(protocols)

        def make() -> ssl.SSLContext:
            context = tls.for_listening()
            context.set_alpn_protocols(list(protocols))
            return context

        def renew(connection: ssl.SSLObject, name: object, context: ssl.SSLContext) -> None:
            connection.context = self._context(use, make)

        listening = make()
        listening.sni_callback = renew  # it is called for clients without a name as well
        return listening

    @property
    def dialling(self) -> ssl.SSLContext | None:
        return self._context("dialling", self.tls.for_dialling) if self.tls else None

    def _context(self, use: str, make: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        assert self.tls is not None
        if use not in self._contexts:
            self._contexts[use] = _ReloadingContext(make, self.tls)
        return self._contexts[use].get()


def check_exposure(host: str, security: Security, *, insecure: bool = False) -> None:
    """Refuse to listen beyond loopback without authentication. TLS without client certificates
    does not authenticate clients."""
    if insecure or security.accepted or _loopback(host):
        return
    one_way = security.tls is not None and not security.tls.mutual
    if security.tls is not None and not one_way:
        return
    why = (
        "TLS without client certificates does not authenticate clients"
        if one_way
        else "anyone could join"
    )
    raise ConfigError(
        f"listening on {host or 'every address'} with neither a shared secret nor mutual TLS: "
        f"{why}. Set a secret or TLS, listen on 127.0.0.1, or pass --insecure (insecure=True)"
    )


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host:port` or `[v6]:port`; `:port` stands for every address of this machine."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{text!r} is not an address: write IPv6 as [::1]:port")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text!r} is not an address: it must be host:port")
    try:
        possible = host.isprintable() and host.encode("idna") is not None
    except UnicodeError:
        possible = False
    if not possible:  # resolving it would raise something else than `OSError`
        raise ConfigError(f"{text!r} is not an address: {host!r} cannot be a host name")
    return host, int(port)
