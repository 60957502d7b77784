"""PostgreSQL."""

from __future__ import annotations

import ctypes
from signal import SIGINT
from typing import Self

from . import wire
from .fetch import Debian, Recipe, obtain
from .folders import readable
from .process import HOST, Server, ServerFailed

RECIPE = Recipe(
    engine="postgresql",
    variable="DOYEN_POSTGRES_BIN",
    name="postgres",
    found=("usr/lib/postgresql/*/bin/postgres",),
    minimum=(13,),
    beside=("initdb",),
    sources=(
        Debian(
            ("postgresql",),
            # For compiling queries, which is off, and for managing installations.
            without=("libllvm", "libz3", "postgresql-common", "postgresql-client", "ssl-cert"),
        ),
    ),
)
IPC_RMID = 0


class Postgres(Server):
    """One server that trusts everybody. Options are its settings.

    With `own_clock` its wall clock can be stepped: `server.step_clock(3600)`.
    """

    engine = "postgresql"
    user = "nobody"
    stop_signal = SIGINT  # the default waits for clients to leave

    def __init__(self, *, own_clock: bool = False, **options: str) -> None:
        self._program = obtain(RECIPE)
        super().__init__(own_clock=own_clock)
        self.options = options

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def prepare(self) -> None:
        if self.user:
            self._program = readable(self._program)
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        data = self.folder / "data"
        initdb = [str(self._program.home / "initdb"), *options, "--no-sync", str(data)]
        with self.log.open("ab") as log:
            if self.spawn(initdb, log).wait() != 0:
                raise ServerFailed(f"initdb failed:\n{self.log_tail()}")

    def command(self) -> list[str]:
        settings = {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # within the folder
            "shared_buffers": "16MB",
            "max_connections": "300",
            "timezone": "GMT",
            "jit": "off",
            # Processes are killed here, machines are not: what was written is in the page cache.
            "fsync": "off",
            **self.options,
        }
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self._program.path), "-D", str(self.folder / "data"), *arguments]

    def environment(self) -> dict[str, str]:
        return {**self._program.environment(), "LC_ALL": "C"}

    def ping(self) -> None:
        self.query("SELECT 1")

    def query(self, text: str) -> list[list[str | None]]:
        return wire.postgres_query(self.port, text)

    def start(self) -> Self:
        super().start()
        self._leave_no_shared_memory()
        return self

    def _leave_no_shared_memory(self) -> None:
        """Have the kernel drop the interlock's segment with the last process attached to it."""
        lines = (self.folder / "data/postmaster.pid").read_text().splitlines()
        ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), IPC_RMID, None)

    def put(self, key: str, value: bytes) -> None:
        self.query(
            "CREATE TABLE IF NOT EXISTS mark (key text PRIMARY KEY, value text);"
            f"INSERT INTO mark VALUES ('{key}', '{value.decode()}')"
        )

    def get(self, key: str) -> bytes | None:
        found = self.query(f"SELECT value FROM mark WHERE key = '{key}'")
        return found[0][0].encode() if found and found[0][0] is not None else None
