"""Other libraries, in environments of their own beside the servers' cache: their dependencies
do not go together with ours, nor with one another's."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from servers.fetch import cache_folder

__all__ = ["PEER", "interpreter"]

PEER = str(Path(__file__).with_name("peer.py"))

NEEDS = {
    "etcd3": ("etcd3==0.12.0", "protobuf==3.20.3", "setuptools<81"),
    "pysyncobj": ("pysyncobj==0.3.17",),
    "tooz": ("tooz[etcd3gw,mysql,postgresql,redis,zookeeper]==9.1.0", "python-consul==1.1.0"),
}


def interpreter(kind: str) -> str:
    """A Python that has what this kind of peer needs, made at the first call."""
    need = next((name for name in NEEDS if kind.startswith(name)), None)
    if need is None:
        return sys.executable
    folder = cache_folder().with_name("peers") / need
    python = folder / "bin" / "python"
    ready = folder / ".ready"
    if not ready.exists():
        print(f"making an environment for {need}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *NEEDS[need]], check=True)
        ready.touch()
    return str(python)
