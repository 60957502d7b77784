"""Other libraries, each in a virtual environment in the cache directory: their dependencies
conflict with those of doyen and with each other."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from servers.fetch import cache_directory

__all__ = ["PEER", "interpreter"]

PEER = str(Path(__file__).with_name("peer.py"))

NEEDS = {
    "etcd3": ("etcd3==0.12.0", "protobuf==3.20.3", "setuptools<81"),
    "pysyncobj": ("pysyncobj==0.3.17",),
    "tooz": ("tooz[etcd3gw,mysql,postgresql,redis,zookeeper]==9.1.0", "python-consul==1.1.0"),
}


def interpreter(kind: str) -> str:
    """The interpreter of an environment with this library, created at the first call."""
    need = next((name for name in NEEDS if kind.startswith(name)), None)
    if need is None:
        return sys.executable
    folder = cache_directory().with_name("peers") / need
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        print(f"creating an environment for {need}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *NEEDS[need]], check=True)
        ready.touch()
    return str(python)
