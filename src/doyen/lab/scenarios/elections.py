"""Scenarios about elections held in a store: who is told of an end, how many are woken by it, and
what somebody who has missed it can still do.

Sessions, elections and fencing are those that users run. Models: the master row that nothing ends,
and a register that takes whatever is written to it.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from functools import partial

from doyen.election.options import Recipe
from doyen.errors import LeadershipLost, StaleToken
from doyen.fencing import SQLGuard
from doyen.lab.scenarios.place import TTL_S, Place, meet
from doyen.lab.scenarios.play import Script
from doyen.session import Session
from doyen.term import Term

__all__ = ["MasterRow", "Register", "herd", "master_row", "paused_leader"]


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


# The master row.


class MasterRow:
    """The model: a row whose primary key one server can insert, and nobody else while it stands.
    With `ttl_s` it would stand only for so long after it was last written."""

    def __init__(self, *, ttl_s: float | None = None) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE TABLE master (id INTEGER PRIMARY KEY, name TEXT, at REAL)")
        self._ttl_s = ttl_s

    def claim(self, name: str, now: float) -> bool:
        """Insert the row. False if the database finds a conflict of keys."""
        with self._database:
            if self._ttl_s is not None:
                self._database.execute("DELETE FROM master WHERE at < ?", (now - self._ttl_s,))
            try:
                self._database.execute("INSERT INTO master VALUES (1, ?, ?)", (name, now))
            except sqlite3.IntegrityError:
                return False
        return True

    def holder(self) -> str:
        return str(self._database.execute("SELECT name FROM master").fetchone()[0])

    def close(self) -> None:
        self._database.close()


def master_row(script: Script, *, row_ttl_s: float | None = None) -> None:
    """Who tells anybody that the master is gone?"""
    script.note("A model: INSERT INTO master (id, …) VALUES (1, …); the primary key lets one in.")
    with closing(MasterRow(ttl_s=row_ttl_s)) as row:
        first, second = row.claim("server1", 0.0), row.claim("server2", 0.1)
        script.say(0.0, "server1", "inserts the row: it is master")
        script.say(0.1, "server2", "has a duplicate key: it is not")
        script.say(3.0, "server1", "is killed; the database does not know what that means")
        tries = [row.claim("server2", 3.0 + second) for second in range(1, 61)]
        holder = row.holder()
    script.say(63.0, "server2", f"has asked {len(tries)} times; the row names {holder}")
    script.fact("the primary key lets exactly one in", first and not second)
    script.fact(
        "a minute after the master's death the row still stands, and nobody was told",
        not any(tries) and holder == "server1",
    )
    script.note("A lease that ends by itself, and a store that tells whoever watches:")
    took_s, tokens = meet(script, _lease_and_notification)
    script.fact(
        f"server2 led {took_s:.2f} s after server1's death, within its lease of {TTL_S:g} s",
        0 < took_s <= TTL_S + 0.1,
    )
    script.fact("it leads under a later token", tokens == sorted(set(tokens)))


async def _lease_and_notification(place: Place) -> tuple[float, list[int]]:
    """Gives how long it took server2 to lead, and the tokens."""
    terms: list[Term] = []
    led_at = asyncio.get_running_loop().create_future()

    def stand(name: str) -> None:
        async def live(session: Session) -> None:
            async with session.campaign("/SystemExpert/leader", name=name) as term:
                terms.append(term)
                place.say(name, f"leads, token {term.token}")
                if len(terms) == 2:
                    led_at.set_result(place.now)
                await for_ever()

        place.member(name, live)

    stand("server1")
    await asyncio.sleep(0.5)
    stand("server2")
    await asyncio.sleep(2.5)
    place.members["server1"].kill()
    killed_at = place.now
    place.say("server2", "watches; it has nothing to do until it is told")
    at: float = await led_at
    woken_at = min(when for when, name in place.woken if name == "server2" and when > killed_at)
    place.script.fact(
        "until the lease had ended it asked the store for nothing; then it was told",
        not [what for when, what in place.calls if killed_at < when < woken_at and what != "renew"],
    )
    return at - killed_at, [term.token for term in terms]


# The herd.


def herd(script: Script, *, crowded: Recipe = "race", most: int = 1000) -> None:
    """One leader goes. Who is woken?"""
    script.note("Candidates wait behind guid_0000000001, which leads and then lets go.")
    crowds = (most // 100, most // 10, most)
    rows = {
        (recipe, crowd): meet(script, partial(_let_go, recipe=recipe, crowd=crowd), near=True)
        for recipe in dict.fromkeys((crowded, "line"))
        for crowd in crowds
    }
    all_woken, asked = rows[crowded, most]
    (one_woken,) = {tuple(rows["line", crowd][0]) for crowd in crowds}
    script.note(f"If all watch the leader's key, {all_woken[0]} to {all_woken[-1]} are woken.")
    script.note(f"If each watches the one ahead of it, {' and '.join(one_woken)} is woken.")
    script.note("")
    script.note("waiting   woken, all on one key   woken, in a line")
    for crowd in crowds:
        script.note(f"{crowd:7}   {len(rows[crowded, crowd][0]):21}   {len(one_woken):16}")
    script.fact(
        f"all {most} who watched the leader's key were woken, for the one of them that leads",
        len(all_woken) == most,
    )
    script.fact(
        f"the store was asked {asked} times to create it, {asked - 1} of them in vain",
        asked >= most,
    )
    script.fact(
        "in a line one was woken and tried, however many waited",
        [rows["line", crowd] for crowd in crowds] == [(["guid_0000000002"], 1)] * 3,
    )


async def _let_go(place: Place, *, recipe: Recipe, crowd: int) -> tuple[list[str], int]:
    """Gives who was woken when the leader let go, and how often the store was asked to elect."""
    led = asyncio.Semaphore(0)
    ended = asyncio.Event()

    def stand(number: int) -> None:
        async def live(session: Session) -> None:
            async with session.campaign(
                "/app/leader_election", name=f"guid_{number:010}", recipe=recipe
            ):
                led.release()
                if number == 1:
                    await ended.wait()
                else:
                    await for_ever()

        place.member(f"guid_{number:010}", live, ttl_s=60.0)

    for number in range(1, crowd + 2):
        stand(number)
    await led.acquire()
    await asyncio.sleep(0.01)
    place.woken.clear()
    place.calls.clear()
    ended.set()
    await led.acquire()
    await asyncio.sleep(0.01)
    woken = sorted({name for _, name in place.woken} - {"guid_0000000001"})
    return woken, [what for _, what in place.calls].count("create")


# The paused leader.


class Register:
    """The model: takes whatever is written to it."""

    def __init__(self) -> None:
        self.value = ""

    def write(self, value: str, token: int) -> None:
        self.value = value


class GuardedRegister(Register):
    """A row in a database, with `SQLGuard` in the same transaction."""

    def __init__(self) -> None:
        super().__init__()
        self._database = sqlite3.connect(":memory:")
        self._guard = SQLGuard()
        self._guard.create(self._database)

    def write(self, value: str, token: int) -> None:
        with self._database:
            self._guard.check(self._database, "report", token)
            self.value = value

    def close(self) -> None:
        self._database.close()


def paused_leader(script: Script, *, bare: Register | None = None) -> None:
    """A leader that does not know how late it is."""
    with closing(GuardedRegister()) as guarded:
        bare = bare or Register()
        refused, tokens, overlap = meet(
            script, lambda place: _pause(place, {"the bare file": bare, "the guarded row": guarded})
        )
        script.fact(
            "the file that takes no token has server1's late write in it", bare.value == "server1's"
        )
        script.fact(
            f"the row had seen token {tokens[-1]} and refused token {tokens[0]}: it has server2's",
            refused == ["the guarded row"] and guarded.value == "server2's",
        )
    script.fact("on waking, server1's own term said that it was over", not overlap)
    script.fact("tokens increase", tokens == sorted(set(tokens)))


async def _pause(place: Place, registers: dict[str, Register]) -> tuple[list[str], list[int], bool]:
    """Gives which registers refused a write, the tokens, and whether server1 still took itself for
    the leader when it woke."""
    refused: list[str] = []
    terms: list[Term] = []

    def write(name: str, term: Term) -> None:
        for where, register in registers.items():
            try:
                register.write(f"{name}'s", term.token)
                place.say(name, f"writes to {where}, token {term.token}")
            except StaleToken:
                refused.append(where)
                place.say(name, f"is refused by {where}: it has seen a later token")

    def stand(name: str, in_s: float) -> None:
        async def live(session: Session) -> None:
            try:
                async with session.campaign("/SystemExpert/leader", name=name) as term:
                    terms.append(term)
                    place.say(name, f"leads, token {term.token}")
                    await asyncio.sleep(1.0)
                    term.check()
                    # Handed to another thread, say: nothing can stop it but the other end.
                    place.say(name, "has checked that it leads, and lets a write go")
                    asyncio.get_running_loop().call_later(in_s, write, name, term)
                    await for_ever()
            except LeadershipLost:
                place.say(name, "is told that it leads no more: LeadershipLost")

        place.member(name, live)

    stand("server1", 0.1)
    await asyncio.sleep(0.1)
    stand("server2", 0.0)
    await asyncio.sleep(0.95)
    place.members["server1"].freeze()
    await place.until(lambda: len(terms) == 2)
    await asyncio.sleep(2.0)
    place.members["server1"].thaw()
    overlap = terms[0].valid
    await asyncio.sleep(1.0)
    return refused, [term.token for term in terms], overlap
