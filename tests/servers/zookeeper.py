"""ZooKeeper: one server, or an ensemble of them."""

from __future__ import annotations

from pathlib import Path

from . import wire
from .cluster import Cluster, Member
from .fetch import Debian, Recipe, obtain
from .process import HOST

BESIDE = tuple(
    f"{name}*.jar"
    for name in (
        "zookeeper-jute",
        "slf4j-api",
        "slf4j-simple",
        "metrics-core",
        "snappy-java",
        "netty-",
    )
)
"""The installed jars that the server needs."""
JAVA = Recipe(
    engine="zookeeper",
    variable="DOYEN_JAVA_BIN",
    name="java",
    found=("usr/lib/jvm/*/bin/java",),
    version=("-version",),
    minimum=(11,),
    beside=("keytool",),
    # The libraries are for sound, printing and fonts, which the server does not need.
    sources=(Debian(("default-jre-headless",), without=("lib", "font", "ca-certificates")),),
)
JARS = Recipe(
    engine="zookeeper",
    variable="DOYEN_ZOOKEEPER_JAR",
    name="zookeeper.jar",
    found=("usr/share/java/zookeeper.jar",),
    beside=BESIDE,
    sources=(
        Debian(
            (
                "libzookeeper-java",
                "libdropwizard-metrics-java",
                "libnetty-java",
                "libslf4j-java",
                "libsnappy-java",
            ),
            dependencies=False,
        ),
    ),
)
MAIN = "org.apache.zookeeper.server.quorum.QuorumPeerMain"


class ZooKeeper(Member):
    """One server. Options are settings of its configuration, with underscores for dots."""

    engine = scheme = "zookeeper"
    recipe = JAVA
    port_count = 3

    def __init__(self, name: str = "n1", **options: str) -> None:
        self._jar = obtain(JARS)
        super().__init__(name, **options)

    def prepare(self) -> None:
        data = self.folder / "data"
        data.mkdir()
        settings = {
            "tickTime": "200",  # the bounds of session timeouts are set below
            "minSessionTimeout": "400",
            "maxSessionTimeout": "40000",
            "initLimit": "50",
            "syncLimit": "10",
            "maxClientCnxns": "0",
            "dataDir": str(data),
            "clientPort": str(self.port),
            "clientPortAddress": HOST,
            "admin.enableServer": "false",
            "4lw.commands.whitelist": "*",
            **{name.replace("_", "."): value for name, value in self.options.items()},
        }
        for number, server in enumerate(self.peers if len(self.peers) > 1 else (), 1):
            settings[f"server.{number}"] = f"{HOST}:{server.ports[1]}:{server.ports[2]}"
            if server is self:
                (data / "myid").write_text(str(number))
        lines = (f"{name}={value}\n" for name, value in settings.items())
        (self.folder / "zoo.cfg").write_text("".join(lines))

    def command(self) -> list[str]:
        properties = {
            "org.slf4j.simpleLogger.defaultLogLevel": "warn",
            # Tests kill processes, not machines, so written data survives in the page cache.
            "zookeeper.forceSync": "no",
            "java.io.tmpdir": str(self.folder),
        }
        return [
            str(self._program.path),
            "-Xmx128m",
            "-XX:+UseSerialGC",
            "-XX:TieredStopAtLevel=1",
            "-XX:-UsePerfData",
            *(f"-D{name}={value}" for name, value in properties.items()),
            "-cp",
            ":".join(map(str, self._class_path())),
            MAIN,
            str(self.folder / "zoo.cfg"),
        ]

    def _class_path(self) -> list[Path]:
        """The jar and its dependencies in the same directory."""
        beside = (jar for pattern in BESIDE for jar in self._jar.home.glob(pattern))
        return [self._jar.path, *beside]

    def ping(self) -> None:
        if self.mode() not in ("leader", "follower", "standalone"):
            raise ValueError("ZooKeeper is not serving")

    def mode(self) -> str:
        """leader, follower or standalone; empty if it is not serving."""
        answer = wire.zookeeper_command(self.port, b"srvr")
        return next((line[6:] for line in answer.splitlines() if line.startswith("Mode: ")), "")

    def leads(self) -> bool:
        return self.mode() == "leader"

    def put(self, key: str, value: bytes) -> None:
        with wire.ZooKeeperConnection(self.port) as connection:
            connection.create(f"/{key}", value)

    def get(self, key: str) -> bytes | None:
        with wire.ZooKeeperConnection(self.port) as connection:
            return connection.get(f"/{key}")


class ZooKeeperEnsemble(Cluster[ZooKeeper]):
    """Servers of one ensemble."""

    member = ZooKeeper
