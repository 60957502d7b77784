"""A replicated counter: three processes that form a quorum, without any other store.

    python3 examples/replicated_counter.py n1
    python3 examples/replicated_counter.py n2
    python3 examples/replicated_counter.py n3

Run each in its own terminal. All three are needed to found the quorum; after that, two of the three
are enough. No count is lost if any of them is killed, the leader included. Needs doyen[quorum].
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator

import doyen

PEERS = {"n1": "127.0.0.1:7401", "n2": "127.0.0.1:7402", "n3": "127.0.0.1:7403"}


class Counter(doyen.StateMachine):
    """A state machine. Every node applies the same commands in the same order."""

    def __init__(self) -> None:
        self.total = 0

    def apply(self, command: bytes) -> int:
        self.total += int(command)
        return self.total

    def snapshot(self) -> Iterator[bytes]:
        return iter([b"%d" % self.total])

    def restore(self, pieces: Iterable[bytes]) -> None:
        self.total = int(b"".join(pieces))


async def main(name: str, peers: dict[str, str], folder: str) -> None:
    counter = Counter()
    data_dir = f"{folder}/{name}"
    async with doyen.Node(
        name, peers=peers, data_dir=data_dir, machine=counter, found=True
    ) as node:
        while True:
            total = await node.propose(b"1")  # on the disks of a majority when this returns
            print(f"{total}: counted by {name}, {node.role} in {node.generation}", flush=True)
            await node.barrier()  # now the local copy includes this command
            assert counter.total >= total
            await asyncio.sleep(1)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PEERS:
        sys.exit(f"usage: {sys.argv[0]} NODE, one of {', '.join(PEERS)}")
    try:
        asyncio.run(main(sys.argv[1], PEERS, "counter-data"))
    except KeyboardInterrupt:
        sys.exit(1)
