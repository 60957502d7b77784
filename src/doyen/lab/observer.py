"""What can be observed of a world while it runs.

A world calls its observer, if it has one, and does not depend on it: a run with an observer is the
same run. `recorder` uses this to draw a run. Imports the interface of cores.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from doyen.quorum.consensus.core import Core, CoreEvent, Effect, Received, Recovered

if TYPE_CHECKING:
    from doyen.lab.network import SimulatedLink


class Fate(StrEnum):
    """Why a message does not arrive."""

    CUT = "cut"
    DISCONNECTED = "disconnected"
    """The sender knows that there is no connection."""
    LOST = "lost"
    """The network loses a share of all messages."""
    DROPPED = "dropped"
    """The plan names this very message."""


class WorldObserver:
    """Is called with everything that happens. Each method does nothing by itself."""

    # Servers and other processes.

    def started(self, name: str, core: Core | None, recovered: Recovered | None) -> None:
        """A process has started; if it is a server, with what its disk has kept."""

    def stopped(self, name: str) -> None:
        """A process has ended."""

    def paused(self, name: str, paused: bool) -> None:
        """A process is paused, or resumes."""

    def clock_adjusted(self, name: str, rate: float | None, jump_s: float) -> None:
        """A clock runs at another rate from now on, or has jumped ahead."""

    def stepped(self, name: str, core: Core, event: CoreEvent, effects: Sequence[Effect]) -> None:
        """A core has handled an event. The effects have not been carried out yet."""

    def term_changed(
        self,
        name: str,
        token: int | None,
        *,
        election: str = "",
        ended_at: float | None = None,
    ) -> None:
        """A candidate leads an election with this token, or no longer leads it. A process that was
        paused learns that only later; `ended_at` is when its term ended."""

    # The network.

    def sent(self, link: SimulatedLink, event: Received, result: float | Fate) -> None:
        """A message was sent. The result is when it arrives, or why it does not."""

    def link_changed(self, source: str, target: str, cut: bool, extra_s: float) -> None:
        """A link in one direction is cut or slow from now on, or no longer."""

    def network_degraded(self, loss: float, duplicate: float, reorder: float) -> None:
        """From now on the network loses, repeats and reorders these shares of all messages."""

    # Requests to a store.

    def asked(self, name: str, operation: str, about: str) -> int:
        """A process sends a request to the store. Returns its number."""
        return 0

    def answered(self, number: int, result: str) -> None:
        """The store answers a request."""

    def notified(self, name: str, scope: str) -> int:
        """The store notifies a process that watches something. Returns a number."""
        return 0

    def received(self, number: int) -> None:
        """A process receives the answer to its request, or a notification."""

    # The narration.

    def reported(self, subject: str, predicate: str) -> None:
        """Something happens that a reader wants to know."""
