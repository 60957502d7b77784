"""When each task of a schedule ran last, for the next leader.

A schedule that is kept in the memory of a process does not know what other processes have run. So
the leader writes the times to the store, and its successor goes on from there. They are one
document, which carries the token of the leader that wrote it, so that a leader that was frozen
cannot undo what a later one has written. A write is one request, and does not wait for the disk of
a local store, because a leader that is stopped waits for it.
"""

from __future__ import annotations

import logging

from doyen.blocking import BlockingSession
from doyen.election.core import SessionCore
from doyen.errors import BadDocument, Conflict, DoyenError, StaleToken
from doyen.events.log_lines import log_line
from doyen.manage.documents import Document, Versioned
from doyen.model import schedule_key

__all__ = ["LastRuns"]

log = logging.getLogger("doyen")


class LastRuns:
    """The last runs of the tasks of one schedule, as one leader reads and writes them."""

    def __init__(self, session: BlockingSession, election: str, token: int) -> None:
        """Read them. Raises `StoreUnavailable` and the like."""
        self._session = session
        self._key = schedule_key(election)
        self._token = token
        self._known = session._run(self._read)
        times = {} if self._known is None else self._known.body.get("times")
        if not isinstance(times, dict):
            raise BadDocument(f"{self._key} is not about the runs of a schedule")
        self.times: dict[str, float] = {name: float(at) for name, at in times.items()}
        """In seconds since 1970."""

    def note(self, times: dict[str, float]) -> None:
        """Tasks have run. A store that does not answer is logged; the next call makes up for it."""
        self.times |= times
        try:
            self._session._run(self._write)
        except (Conflict, StaleToken):
            pass  # another leads by now
        except DoyenError as error:
            line = log_line(
                event="runs_not_recorded",
                schedule=self._key,
                error=error,
                effect="a successor may run these tasks again",
                tasks=",".join(sorted(times)),
            )
            log.warning("%s", line)

    def _document(self, core: SessionCore) -> Document:
        return Document(core.calls, self._key, durable=False)

    async def _read(self, core: SessionCore) -> Versioned | None:
        return await self._document(core).read()

    async def _write(self, core: SessionCore) -> None:
        document, body = self._document(core), {"times": self.times}
        while True:
            try:
                self._known = await document.write(body, expect=self._known, token=self._token)
                return
            except Conflict as conflict:
                current: Versioned | None = conflict.current
                if current is not None and current.token != self._token:
                    raise
                self._known = current  # a write of this term, whose outcome was not known
