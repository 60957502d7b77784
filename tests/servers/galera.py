"""MariaDB Galera: all members accept writes, which commit when a majority has certified them."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Self

from .cluster import Cluster, Member
from .fetch import Debian, Recipe, obtain
from .mariadb import DATABASE, PASSWORD, USER, MariaDB
from .process import HOST, ServerFailed
from .tally import tidying

RECIPE = Recipe(
    engine="mysql",
    variable="DOYEN_GALERA_LIB",
    name="libgalera_smm.so",
    found=("usr/lib/galera/libgalera_smm.so",),
    sources=(Debian(("galera-4",), dependencies=False),),
)
METHOD = "writes"
PROGRAM = Path(__file__).with_name("sst.py")
TIMES = {
    "evs.keepalive_period": "PT0.2S",
    "evs.inactive_check_period": "PT0.2S",
    "evs.suspect_timeout": "PT2S",  # a member that is silent for longer is expelled
    "evs.inactive_timeout": "PT5S",
    "evs.install_timeout": "PT5S",
}


class GaleraMember(MariaDB, Member):
    """One member. It receives its state as writes from the others, never as a copy of files."""

    port_count = 3

    def __init__(self, name: str = "n1") -> None:
        self._provider = obtain(RECIPE).path
        super().__init__(name)

    def adopt(self, other: GaleraMember) -> None:
        """Copy the data of another member, which is stopped, before the first start."""
        shutil.copytree(other.folder / "data", self.folder / "data")
        (self.folder / "init.sql").touch()
        self._prepared = True

    def command(self) -> list[str]:
        own = [*super().command(), *self._settings()]
        if not any(peer.alive for peer in self.peers if peer is not self):
            return [*own, "--wsrep-new-cluster"]
        return [*own, f"--wsrep-start-position={self._position()}"]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "PATH": f"{self.folder}:{os.environ['PATH']}"}

    def launch(self) -> None:
        script = self.folder / f"wsrep_sst_{METHOD}"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -I {PROGRAM} "$@"\n')
        script.chmod(0o755)
        super().launch()

    def _settings(self) -> list[str]:
        _, group, transfer = self.ports
        options = {
            "gmcast.listen_addr": f"tcp://{HOST}:{group}",
            "ist.recv_addr": f"{HOST}:{transfer}",
            "gcache.size": "32M",
            **TIMES,
        }
        settings = {
            "wsrep-on": "ON",
            "wsrep-provider": str(self._provider),
            "wsrep-provider-options": ";".join(
                f"{name}={value}" for name, value in options.items()
            ),
            "wsrep-cluster-name": "doyen",
            "wsrep-cluster-address": "gcomm://"
            + ",".join(f"{HOST}:{peer.ports[1]}" for peer in self.peers),
            "wsrep-node-address": f"{HOST}:{group}",
            "wsrep-sst-method": METHOD,
            "binlog-format": "ROW",
            "innodb-autoinc-lock-mode": "2",
        }
        return [f"--{name}={value}" for name, value in settings.items()]

    def _position(self) -> str:
        """Recover the position in the log of writes, which a killed member has not recorded."""
        report = self.folder / "recovery"
        with report.open("wb") as output:
            recover = [*super().command(), *self._settings(), "--wsrep-recover"]
            self.spawn(recover, output).wait()
        found = re.search(r"Recovered position: (\S+)", report.read_text(errors="replace"))
        if found is None:
            raise ServerFailed(
                f"mariadbd --wsrep-recover printed no position:\n{report.read_text()[-2000:]}"
            )
        return found[1]

    def ping(self) -> None:
        if self.query("SHOW STATUS LIKE 'wsrep_ready'") != [["wsrep_ready", "ON"]]:
            raise ValueError("the member is not synchronised with the cluster")

    def leads(self) -> bool:
        """Whether it serves clients. Galera has no leader: clients use the first member of their
        URL that serves."""
        self.ping()
        return True


class GaleraCluster(Cluster[GaleraMember]):
    """Members that replicate the same tables."""

    member = GaleraMember

    @property
    def url(self) -> str:
        return self.url_from(0)

    def url_from(self, number: int) -> str:
        """A URL that names all members, beginning with this one."""
        order = [*self.members[number:], *self.members[:number]]
        hosts = ",".join(member.address for member in order)
        return f"mysql://{USER}:{PASSWORD}@{hosts}/{DATABASE}?connect_timeout_s=1"

    def start(self) -> Self:
        """Initialise the first member, copy its data to the others, and start all."""
        first, *others = self.members
        first.start()
        with tidying():
            first.stop()
        (first.folder / "init.sql").write_text("")
        for other in others:
            other.adopt(first)
        for member in self.members:
            member.start()
        return self
