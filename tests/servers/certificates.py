"""An authority, and the certificates it has signed, for servers that speak TLS."""

from __future__ import annotations

import subprocess
from pathlib import Path

NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


class Certificates:
    """For a server at 127.0.0.1 and a client, by an authority whom nobody else knows; and a
    stranger's, whom the server does not know."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        for name in ("ca", "stranger"):
            new = ("-x509", "-subj", f"/CN={name}", "-keyout", self.key(name))
            _openssl(*NEW, *new, "-out", self.certificate(name))
        for name in ("server", "client"):
            request = folder / f"{name}.csr"
            new = ("-new", "-subj", f"/CN={name}", "-keyout", self.key(name))
            _openssl(*NEW, *new, "-out", request)
            by = ("-CA", self.certificate("ca"), "-CAkey", self.key("ca"), "-CAcreateserial")
            what = ("-req", "-in", request, "-out", self.certificate(name))
            _openssl("x509", *what, "-extfile", folder / "names", *by)

    def certificate(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def key(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def options(self, *, ca: str = "ca", own: str = "client") -> str:
        """What is added to a store's URL to trust an authority, and to show a certificate."""
        mine = f"&cert={self.certificate(own)}&key={self.key(own)}" if own else ""
        return f"tls=true&ca={self.certificate(ca)}{mine}"


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
