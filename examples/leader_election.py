"""Three servers, one of which leads: the classic etcd demonstration, on any store.

    python3 examples/leader_election.py server1
    python3 examples/leader_election.py server2
    python3 examples/leader_election.py server3

Run each in its own terminal. Kill the leader, freeze it (Ctrl-Z) or stop it with Ctrl-C, and
another server takes over. A second argument names the store. The default is a file in the current
directory, which servers on one machine can share.
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
    """Wait in line, then lead until the work fails or leadership is lost."""
    try:
        # Entered when elected. The lease is renewed in the background. If renewals fail, the work
        # is cancelled before another server can be elected. Leaving the scope, for any reason,
        # gives up leadership.
        async with session.campaign(ELECTION, name=server) as term:
            say("I am the leader.")
            while True:
                await do_work()
                say(f"Lease refreshed; still the leader, with token {term.token}.")
    except doyen.LeadershipLost as loss:
        say(f"No longer the leader: {loss}")
    except Exception as error:  # noqa: BLE001 - let another server lead after any failure
        say(f"The work failed, so another shall lead: {error!r}")
        await asyncio.sleep(1)


async def follow(session: doyen.Session, server: str) -> None:
    """Print whether another server leads, at every change of leader."""
    say("New leader election happening.")
    first = True
    async for leader in session.observe(ELECTION):
        if not leader:
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
