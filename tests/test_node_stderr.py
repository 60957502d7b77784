"""A node whose log nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from servers import free_port

NODE = """
import asyncio, logging, os, sys
import doyen
from doyen.quorum.node.driver import log

logging.basicConfig(level=logging.WARNING)

class Machine(doyen.StateMachine):
    def apply(self, command): return command
    def snapshot(self): return iter(())
    def restore(self, pieces): list(pieces)

async def main(address, folder):
    node = doyen.Node("n1", peers={"n1": address}, data_dir=folder, machine=Machine(), found=True)
    async with node:
        async with asyncio.timeout(20):
            await node.propose(b"before")

        async def shout():
            for n in range(300):
                log.warning("%d %s", n, "x" * 1000)

        async with asyncio.timeout(20):
            await node._do(shout())
            print((await node.propose(b"after")).decode(), flush=True)

asyncio.run(main(sys.argv[1], sys.argv[2]))
os._exit(0)  # the interpreter itself would wait for its standard error
"""


def test_a_node_whose_standard_error_is_not_read_goes_on(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    try:
        process = subprocess.run(
            [sys.executable, "-c", NODE, f"127.0.0.1:{free_port()}", str(tmp_path / "n1")],
            stdout=subprocess.PIPE,
            stderr=writing,
            timeout=30,
        )
        assert (process.returncode, process.stdout) == (0, b"after\n")
    finally:
        os.close(reading)
        os.close(writing)
