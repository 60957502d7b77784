"""A certificate authority and certificates signed by it, for servers with TLS.

They have the extensions that RFC 5280 requires and that Python checks from 3.13 on
(`ssl.VERIFY_X509_STRICT`).
"""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
AUTHORITY = (
    "subjectKeyIdentifier=hash",
    "basicConstraints=critical,CA:true,pathlen:0",
    "keyUsage=critical,keyCertSign,cRLSign",
)
LEAF = (
    "subjectKeyIdentifier=hash",
    "authorityKeyIdentifier=keyid:always",
    "basicConstraints=critical,CA:false",
    "keyUsage=critical,digitalSignature",
    "subjectAltName=IP:127.0.0.1,DNS:localhost",
)


class Certificates:
    """Certificates of an authority `ca`, and of a `server` at 127.0.0.1 and a `client`, both signed
    by it; of another authority `stranger`, which the server does not know, and its client `guest`.

    `authority` replaces the extensions of the certificate of `ca`.
    """

    def __init__(self, folder: Path, *, authority: tuple[str, ...] = AUTHORITY) -> None:
        self.folder = folder
        self._self_signed("ca", *authority)
        self._self_signed("stranger", *AUTHORITY)
        # The members of a cluster are clients of each other.
        node = "extendedKeyUsage=serverAuth,clientAuth"
        self._signed("server", "ca", *LEAF, node, unit="doyen-peer")
        self._signed("client", "ca", *LEAF, "extendedKeyUsage=clientAuth")
        self._signed("guest", "stranger", *LEAF, "extendedKeyUsage=clientAuth")

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def options(self, *, ca: str = "ca", own: str = "client") -> str:
        """The options of a store URL that name the trusted authority and the client certificate."""
        mine = f"&cert={self.certificate(own)}&key={self.key(own)}" if own else ""
        return f"tls=true&ca={self.certificate(ca)}{mine}"

    def _self_signed(self, name: str, *extensions: str) -> None:
        # The default configuration of the system would add extensions.
        plain = self.folder / "plain.cnf"
        plain.write_text("[req]\ndistinguished_name=name\n[name]\n")
        added = [word for each in extensions for word in ("-addext", each)]
        new = ("-x509", "-config", plain, "-subj", f"/CN={name}", "-keyout", self.key(name))
        _openssl(*NEW, *new, *added, "-out", self.certificate(name))

    def sign(self, name: str, unit: str = "") -> None:
        """Create another certificate of a client or of a node, for 127.0.0.1."""
        use = "serverAuth,clientAuth" if unit == "doyen-peer" else "clientAuth"
        self._signed(name, "ca", *LEAF, f"extendedKeyUsage={use}", unit=unit)

    def _signed(self, name: str, by: str, *extensions: str, unit: str = "") -> None:
        request, wanted = self.folder / f"{name}.csr", self.folder / f"{name}.ext"
        subject = f"/OU={unit}/CN={name}" if unit else f"/CN={name}"
        _openssl(*NEW, "-new", "-subj", subject, "-keyout", self.key(name), "-out", request)
        wanted.write_text("\n".join([*extensions, ""]))
        signer = ("-CA", self.certificate(by), "-CAkey", self.key(by), "-CAcreateserial")
        what = ("-req", "-in", request, "-extfile", wanted, "-out", self.certificate(name))
        _openssl("x509", *what, *signer)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
