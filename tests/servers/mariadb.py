"""MariaDB, which also represents MySQL."""

from __future__ import annotations

import os
from pathlib import Path

from . import wire
from .fetch import Debian, Recipe
from .process import HOST, Server, ServerFailed

RECIPE = Recipe(
    engine="mysql",
    variable="DOYEN_MARIADB_BIN",
    name="mariadbd",
    found=("usr/sbin/mariadbd",),
    minimum=(10, 5),
    beside=("../share/*/*_system_tables.sql",),
    sources=(Debian(("mariadb-server-core",)),),
)
USER = PASSWORD = DATABASE = "doyen"


class MariaDB(Server):
    """One server with one user and one database."""

    engine = "mysql"
    recipe = RECIPE

    @property
    def url(self) -> str:
        return f"mysql://{USER}:{PASSWORD}@{HOST}:{self.port}/{DATABASE}"

    def prepare(self) -> None:
        """Create the system tables, as mariadb-install-db does, and the user and database."""
        (self.folder / "data").mkdir()
        scripts = [self._script("system_tables"), self._script("system_tables_data")]
        text = "".join(["CREATE DATABASE mysql;\nUSE mysql;\n", *(s.read_text() for s in scripts)])
        (self.folder / "bootstrap.sql").write_text(text)
        (self.folder / "init.sql").write_text(
            f"CREATE DATABASE IF NOT EXISTS {DATABASE};\n"
            f"CREATE USER IF NOT EXISTS {USER}@'%' IDENTIFIED BY '{PASSWORD}';\n"
            f"GRANT ALL ON *.* TO {USER}@'%' WITH GRANT OPTION;\n"
        )
        with self.log.open("ab") as log, (self.folder / "bootstrap.sql").open("rb") as script:
            if self.spawn([*self._basics(), "--bootstrap"], log, stdin=script).wait() != 0:
                raise ServerFailed(f"mariadbd --bootstrap failed:\n{self.log_tail()}")

    def _script(self, name: str) -> Path:
        share = self._program.home.parent / "share"
        found = [*share.glob(f"*/*_{name}.sql"), *share.glob(f"*_{name}.sql")]
        if not found:
            raise ServerFailed(f"MariaDB's {name}.sql is not under {share}")
        return found[0]

    def _basics(self) -> list[str]:
        settings = {
            "basedir": str(self._program.home.parent),
            "lc-messages-dir": str(self._script("system_tables").parent),
            "datadir": str(self.folder / "data"),
            "tmpdir": str(self.folder),
            "innodb-buffer-pool-size": "16M",
            "innodb-log-file-size": "8M",
            "innodb-use-native-aio": "OFF",
            # Tests kill processes, not machines, so written data survives in the page cache.
            "innodb-flush-log-at-trx-commit": "2",
            "innodb-flush-method": "nosync",
            "performance-schema": "OFF",
        }
        if os.geteuid() == 0:
            settings["user"] = "root"
        arguments = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self._program.path), "--no-defaults", *arguments]

    def command(self) -> list[str]:
        settings = {
            "bind-address": HOST,
            "port": str(self.port),
            "socket": str(self.folder / "socket"),
            "pid-file": str(self.folder / "pid"),
            "init-file": str(self.folder / "init.sql"),
            "skip-name-resolve": "ON",
            "max-connections": "300",
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        return [*self._basics(), *(f"--{name}={value}" for name, value in settings.items())]

    def ping(self) -> None:
        self.query("SELECT 1")

    def query(self, text: str) -> list[list[str | None]]:
        """Run one statement."""
        return wire.mysql_query(self.port, text, USER, PASSWORD)

    def put(self, key: str, value: bytes) -> None:
        table = f"{DATABASE}.mark"
        self.query(f"CREATE TABLE IF NOT EXISTS {table} (k varchar(99) PRIMARY KEY, v text)")
        self.query(f"INSERT INTO {table} VALUES ('{key}', '{value.decode()}')")

    def get(self, key: str) -> bytes | None:
        found = self.query(f"SELECT v FROM {DATABASE}.mark WHERE k = '{key}'")
        return found[0][0].encode() if found and found[0][0] is not None else None
