"""Patroni, which keeps a cluster of PostgreSQL and has its leader elected in etcd's API."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from . import wire
from .environments import environment
from .fetch import Debian, Recipe
from .postgres import IPC_RMID
from .process import HOST, Server

NEEDS = ("patroni[etcd3]==4.1.5", "psycopg[binary]==3.3.8")
RECIPE = Recipe(
    engine="postgresql",
    variable="DOYEN_POSTGRES_BIN",
    name="postgres",
    found=("usr/lib/postgresql/*/bin/postgres",),
    minimum=(13,),
    beside=("initdb", "pg_basebackup", "pg_ctl", "pg_isready", "pg_rewind"),
    sources=(
        Debian(("postgresql",), without=("libllvm", "libz3", "postgresql-common", "ssl-cert")),
    ),
)
TTL_S = 20
"""The shortest that Patroni allows."""
MAIN = """
import ctypes, os, subprocess, sys
libc = ctypes.CDLL(None)
libc.prctl(36, 1)  # become the parent of processes whose parent has ended
if os.geteuid() == 0 and libc.unshare(0x10000000) == 0:
    for name, text in ("setgroups", "deny"), ("uid_map", "1000 0 1"), ("gid_map", "1000 0 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
patroni = subprocess.Popen([sys.executable, "-m", "patroni", sys.argv[1]])
while os.wait()[0] != patroni.pid:
    pass
"""
"""Patroni starts PostgreSQL so that it outlives Patroni; here both are one family. PostgreSQL
refuses to run as root, so root has another number here."""


class Patroni(Server):
    """One member of a cluster: Patroni and the PostgreSQL server that it runs."""

    engine = "patroni"
    scheme = "postgresql"
    recipe = RECIPE
    port_count = 2

    def __init__(self, name: str, doors: list[str], *, proxied: bool = False) -> None:
        """`doors` are addresses of etcd's API; with `proxied` Patroni uses no others."""
        super().__init__()
        self.name = name
        self._doors = doors
        self._proxied = proxied

    @property
    def database(self) -> str:
        return f"{HOST}:{self.ports[1]}"

    def prepare(self) -> None:
        trust = ["host all all 127.0.0.1/32 trust", "host replication all 127.0.0.1/32 trust"]
        settings = {
            "scope": "demo",
            "name": self.name,
            "restapi": {"listen": self.address, "connect_address": self.address},
            "etcd3": {"hosts": self._doors, "use_proxies": self._proxied},
            "bootstrap": {
                "dcs": {
                    "ttl": TTL_S,
                    "loop_wait": 1,
                    "retry_timeout": 3,
                    "synchronous_mode": True,
                    "primary_start_timeout": 0,
                    "postgresql": {"use_pg_rewind": True, "pg_hba": trust},
                },
                "initdb": [{"encoding": "UTF8"}, "no-sync", {"auth": "trust"}, "no-locale"],
            },
            "postgresql": {
                "listen": self.database,
                "connect_address": self.database,
                "data_dir": str(self.folder / "data"),
                "bin_dir": str(self._program.home),
                "pgpass": str(self.folder / "pgpass"),
                "pg_hba": trust,
                "authentication": {
                    each: {"username": "postgres", "password": "unused"}
                    for each in ("superuser", "replication", "rewind")
                },
                "parameters": {
                    "unix_socket_directories": "",
                    "dynamic_shared_memory_type": "mmap",
                    "shared_buffers": "16MB",
                    "jit": "off",
                    "fsync": "off",  # processes are killed, not machines
                    "timezone": "GMT",
                },
            },
        }
        # JSON is YAML.
        (self.folder / "patroni.yml").write_text(json.dumps(settings))

    def command(self) -> list[str]:
        python = environment("patroni", NEEDS) / "bin/python"
        return [str(python), "-c", MAIN, str(self.folder / "patroni.yml")]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "LC_ALL": "C", "HOME": str(self.folder)}

    def ping(self) -> None:
        if self.status()["state"] not in ("running", "streaming"):
            raise ValueError("PostgreSQL does not run yet")

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = wire.http_json(self.port, "GET", "/patroni")
        return status

    def leads(self) -> bool:
        return wire.http(self.port, "GET", "/primary", timeout_s=2)[0] == 200

    def roles(self) -> dict[str, str]:
        """The role of each member, for those that run."""
        members = wire.http_json(self.port, "GET", "/cluster")["members"]
        return {
            each["name"]: each["role"]
            for each in members
            if each["state"] in ("running", "streaming")
        }

    def switch(self, to: str) -> None:
        """Have the cluster choose another primary."""
        body = json.dumps({"leader": self.name, "candidate": to}).encode()
        answer = wire.http(self.port, "POST", "/switchover", body, timeout_s=60)
        if answer[0] != 200:
            raise ValueError(f"no switchover: {answer}")

    def kill(self) -> None:
        """Also have the kernel remove the shared memory of PostgreSQL."""
        try:
            lines = (self.folder / "data/postmaster.pid").read_text().splitlines()
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), IPC_RMID, None)
        except (OSError, IndexError):
            pass
        super().kill()

    def put(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def get(self, key: str) -> bytes | None:
        raise NotImplementedError
