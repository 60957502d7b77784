"""Nodes of a quorum in a process of their own, until it is told to stop.

    python quorum_nodes.py FOLDER '{"n1": "127.0.0.1:7401", …}' '{"election_s": 1.0}' n1 n2 …

Several nodes may share the process; then they fail together.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.quorum.protocol.security import TLS


async def serve(folder: Path, peers: dict[str, str], settings: dict[str, Any]) -> None:
    if "tls" in settings:
        settings["tls"] = TLS(**settings["tls"])
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    nodes = [
        await NodeServer.open(
            NodeOptions(id=node, peers=peers, data_dir=folder / node, **{"found": True} | settings)
        )
        for node in sys.argv[4:]
    ]
    await stopped.wait()
    for node in nodes:
        await node.close()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])))
