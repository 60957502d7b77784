"""Three servers, one of which leads: the classic etcd demonstration, on any store.

    python3 examples/leader_election.py server1
    python3 examples/leader_election.py server2
    python3 examples/leader_election.py server3

Each in a terminal of its own. Kill the leader, freeze it (Ctrl-Z), stop it with Ctrl-C, and see
another take over. A second argument names the store; without one it is a file in the current
folder, which servers on one machine can share.
"""

from __future__ import annotations

import asyncio
import sys

import doyen

ELECTION = "/SystemExpert/leader"


async def main(server: str, store: str) -> None:
    async with doyen.connect(store, ttl_s=5) as session, asyncio.TaskGroup() as tasks:
        tasks.create_task(follow(session, server))
        while True:
            await campaign(session, server)


async def campaign(session: doyen.Session, server: str) -> None:
    """Lead once: from standing in line until the work fails or leadership is lost."""
    try:
        # Entered when elected. The lease is renewed behind the scenes; if it cannot be, the work
        # is cancelled before the store gives the leadership to another. However the scope is
        # left, leadership has been given up by then.
        async with session.campaign(ELECTION, name=server) as term:
            say("I am the leader.")
            while True:
                await do_work()
                say(f"Lease refreshed; still the leader, with token {term.token}.")
    except doyen.LeadershipLost as loss:
        say(f"No longer the leader: {loss}")
    except Exception as error:  # noqa: BLE001 - whatever the work raised, another may do better
        say(f"The work failed, so another shall lead: {error!r}")
        await asyncio.sleep(1)


async def follow(session: doyen.Session, server: str) -> None:
    """Everyone knows who leads, at once."""
    say("New leader election happening.")
    first = True
    async for leader in session.observe(ELECTION):
        if leader is None:
            continue
        if not first:
            say("New leader election happening.")
        first = False
        if leader.name != server:
            say("I am a follower.")


async def do_work() -> None:
    """This is where the business logic would go."""
    await asyncio.sleep(1)


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {sys.argv[0]} SERVER [STORE], such as: server1 sqlite:election.db")
    try:
        asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "sqlite:election.db"))
    except KeyboardInterrupt:
        say("\nStopped; no longer the leader.")
        sys.exit(1)
