"""Work that is due once per interval, on any one of several hosts: a nightly job that all of them
have in their crontabs.

    async with session.campaign("nightly") as term:
        result = await run_once(session, term, within_s=12 * 3600, work=job)

The leader looks for the result of an earlier run. If that began less than `within_s` ago, it is
returned and nothing runs. Otherwise the work runs, and its result is recorded while the term
lasts, so the next leader finds it. A run without a result, because its leader crashed, lost its
term or was told to stop, is not recorded: the next leader runs the work again.

So after a result is recorded no host runs the work until `within_s` has passed, if the clocks of
the hosts differ by less than that. A leader that dies between the end of the work and the record
makes it run twice: the work has to bear that, or has to record its end together with what it does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from doyen.election.core import SessionCore
from doyen.errors import BadDocument, Conflict, OutcomeUnknown, StaleToken, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned
from doyen.model import run_key
from doyen.session import Session
from doyen.term import Term

__all__ = ["RunResult", "run_once"]

log = logging.getLogger("doyen")


class RunResult(NamedTuple):
    """A run that has ended."""

    name: str
    """Of the leader that ran the work."""
    token: int
    began: float
    """On the wall clock of that leader, as `ended`."""
    ended: float
    code: int


async def run_once(
    session: Session, term: Term, *, within_s: float, work: Callable[[], Awaitable[int | None]]
) -> RunResult | None:
    """The result of the last run, if it began less than `within_s` ago; otherwise that of `work`,
    which returns an exit code, or None if it has no result."""
    wall = session._opened.runtime.clock.wall
    earlier = await session._run(_find, term)
    if earlier is not None and wall() - earlier.began < within_s:
        return earlier
    began = wall()
    code = await work()
    if code is None:
        return None
    result = RunResult(term.name, term.token, began, wall(), code)
    await session._run(_record, term, result)
    return result


async def read_result(core: SessionCore, election: str) -> RunResult | None:
    """The result of the last run, if one was recorded."""
    return _decode(await Document(core.calls, run_key(election)).read())


def _decode(found: Versioned | None) -> RunResult | None:
    if found is None:
        return None
    try:
        body = found.body
        times = float(body["began"]), float(body["ended"])
        return RunResult(str(body["name"]), found.token, *times, int(body["code"]))
    except (KeyError, TypeError, ValueError) as error:
        raise BadDocument(f"{found.entry.key} is not the result of a run: {error!r}") from error


async def _find(core: SessionCore, term: Term) -> RunResult | None:
    """The result of the last run, from a store that may have to be asked again."""
    while True:
        try:
            return await read_result(core, term.election)
        except (OutcomeUnknown, StoreUnavailable):
            if not term.valid:
                raise
            await asyncio.sleep(core.calls.retry_pause())


async def _record(core: SessionCore, term: Term, result: RunResult) -> None:
    """Record a result, for as long as the term lasts. After that the next leader runs the work."""
    document = Document(core.calls, run_key(term.election))
    body = {name: value for name, value in result._asdict().items() if name != "token"}
    while term.valid:
        try:
            await document.write(body, expect=await document.read(), token=result.token)
            return
        except StaleToken:
            return  # a later leader has recorded its own
        except (Conflict, OutcomeUnknown, StoreUnavailable):
            await asyncio.sleep(core.calls.retry_pause())
    line = log_line(
        event="result_not_recorded",
        election=term.election,
        code=result.code,
        effect="another candidate may run the work again",
    )
    log.warning("%s", line)
