"""PostgreSQL."""

from __future__ import annotations

import ctypes
import shutil
from signal import SIGINT
from typing import Self

from . import wire
from .fetch import Debian, Recipe
from .process import HOST, Server, ServerFailed
from .tally import fault, tidying

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
            # Used for JIT compilation, which is off, and for managing installations.
            without=("libllvm", "libz3", "postgresql-common", "postgresql-client", "ssl-cert"),
        ),
    ),
)
IPC_RMID = 0


class Postgres(Server):
    """One server without authentication."""

    engine = "postgresql"
    recipe = RECIPE
    user = "nobody"
    stop_signal = SIGINT  # SIGTERM waits for clients to disconnect

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def prepare(self) -> None:
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale"]
        data = self.folder / "data"
        initdb = [str(self._program.home / "initdb"), *options, "--no-sync", str(data)]
        with self.log.open("ab") as log:
            if self.spawn(initdb, log).wait() != 0:
                raise ServerFailed(f"initdb failed:\n{self.log_tail()}")

    def command(self) -> list[str]:
        arguments = [f"--{name}={value}" for name, value in self.settings().items()]
        return [str(self._program.path), "-D", str(self.folder / "data"), *arguments]

    def settings(self) -> dict[str, str]:
        return {
            "listen_addresses": HOST,
            "port": str(self.port),
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # in the data directory
            "shared_buffers": "16MB",
            "max_connections": "300",
            "timezone": "GMT",
            "jit": "off",
            # Tests kill processes, not machines, so written data survives in the page cache.
            "fsync": "off",
            **self.options,
        }

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
        """Have the kernel remove the shared memory segment when its last process ends."""
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


class PostgresStandby(Postgres):
    """A streaming replica of a primary, until it is promoted."""

    def __init__(self, primary: Postgres) -> None:
        super().__init__()
        self._primary = primary

    @property
    def url(self) -> str:
        """Names both servers, the primary first. Clients use the first one that is writable."""
        hosts = f"{HOST}:{self._primary.port},{HOST}:{self.port}"
        return f"postgresql://postgres@{hosts}/postgres?connect_timeout_s=2"

    def prepare(self) -> None:
        """Copy the data of the primary, which is stopped meanwhile."""
        with tidying():
            self._primary.stop()
        data = self.folder / "data"
        shutil.copytree(self._primary.folder / "data", data)
        (data / "standby.signal").touch()
        if self._owner:
            for path in (data, *data.rglob("*")):
                shutil.chown(path, self._owner)
        self._primary.start()

    def settings(self) -> dict[str, str]:
        follows = f"host={HOST} port={self._primary.port} user=postgres"
        return {**super().settings(), "primary_conninfo": follows}

    def ping(self) -> None:
        """Ready when it streams from the primary or has been promoted."""
        query = "SELECT pg_is_in_recovery() AND NOT EXISTS (SELECT FROM pg_stat_wal_receiver"
        if self.query(f"{query} WHERE status = 'streaming')") != [["f"]]:
            raise ValueError("the standby does not stream from the primary yet")

    @fault
    def promote(self) -> None:
        """Make it a primary. The old primary is not stopped, so if it runs there are two."""
        if self.query("SELECT pg_promote()") != [["t"]]:
            raise ServerFailed(f"the standby was not promoted:\n{self.log_tail()}")
