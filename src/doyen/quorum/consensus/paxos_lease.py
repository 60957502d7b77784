"""PaxosLease: which server holds a lease, agreed on by Paxos with nothing on disk.

One decision is made again and again: which server holds the lease. Acceptors keep what they
promised and accepted in memory only, and forget the latter when its time is up. Time makes that
safe:

- The proposer's own timer starts *before* its proposal is sent, so it ends before any acceptor's,
  whose time is longer by what clocks may differ.
- A server that starts stays silent for the longest possible lease: whatever it accepted before a
  crash has then run out. A start cannot be told from a restart, so every start counts as one.
- Durations are measured on a clock that never jumps.

The token is the ballot: it increases from one holder to the next as long as a majority has not
forgotten it. `floor` is where the count begins, for callers that can number their starts.

This is not a `core.Core`: there is no log. It takes `Received` and `Elapsed`, and returns `Send`
and `LeaseChanged`. Imports `core` only.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from doyen.quorum.consensus.common import order
from doyen.quorum.consensus.core import (
    CoreEvent,
    Effect,
    Elapsed,
    Membership,
    Message,
    Received,
    Send,
)

__all__ = ["LeaseChanged", "PaxosLease", "Prepare", "Promise", "Propose", "Proposed", "Refuse"]


class Prepare(Message, frozen=True, gc=False):
    """Requests a promise of this ballot."""


class Promise(Message, frozen=True, gc=False):
    """The sender promises. As far as it knows, this server holds the lease, or none does."""

    holder: str | None


class Propose(Message, frozen=True, gc=False):
    """Requests the lease for this long."""

    for_s: float


class Proposed(Message, frozen=True, gc=False):
    """The proposal is accepted."""


class Refuse(Message, frozen=True, gc=False):
    """The sender has promised this ballot, which is later than the receiver's."""


MESSAGES = Prepare | Promise | Propose | Proposed | Refuse


class LeaseChanged(Effect, frozen=True, gc=False):
    """This server holds the lease until then, under this token; or no longer, if `until` is
    past."""

    token: int
    until: float


class PaxosLease:
    """One server: an acceptor, and a proposer of itself."""

    def __init__(
        self,
        id: str,  # noqa: A002
        membership: Membership,
        *,
        lease_s: float,
        drift: float = 0.01,
        floor: int = 0,
        jitter: Callable[[], float],
        now: float,
    ) -> None:
        self.id = id
        self._names = sorted(membership.voters, key=order)
        self._majority = membership.majority
        self._lease_s = lease_s
        self._accept_s = lease_s * (1 + 2 * drift)
        self._jitter = jitter
        self._silent_until = now + self._silence(drift)
        self._promised = self._seen = floor
        self._accepted: str | None = None
        self._expires = -inf
        """When the accepted proposal is forgotten."""
        self.token = 0
        self.until = -inf
        """This server holds the lease until then."""
        self._ballot = 0
        """The ballot of the current attempt; 0 if there is none."""
        self._timer = -inf
        """What `until` becomes if this ballot wins; set before it is proposed."""
        self._promises: set[str] = set()
        self._votes: set[str] = set()
        self.next_deadline = self._silent_until
        self._effects: list[Effect] = []

    def _silence(self, drift: float) -> float:
        """How long a server stays silent after a start."""
        return self._accept_s * (1 + 2 * drift)

    def holds(self, now: float) -> bool:
        return now < self.until

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Process one event and return what has to be done."""
        if now >= self._silent_until:
            if isinstance(event, Received) and event.peer in self._names:
                self._hear(event.peer, event.message, now)
            elif isinstance(event, Elapsed) and now >= self.next_deadline:
                self._campaign(now)
        effects, self._effects = self._effects, []
        return effects

    # Proposing.

    def _campaign(self, now: float) -> None:
        """Try to get or to prolong the lease, with a ballot of this server's own."""
        if self.token and not self.holds(now):
            self._effects.append(LeaseChanged(self.token, self.until))
            self.token = 0
        # Waiting servers try at random instants: two that try at once void each other's ballots.
        wait = self._lease_s / 3 if self.holds(now) else self._lease_s * (0.2 + self._jitter())
        self.next_deadline = now + wait
        n = len(self._names)
        rank = self._names.index(self.id)
        self._ballot = (self._seen // n + 1) * n + rank
        self._seen = self._ballot
        self._timer = -inf
        self._promises = set()
        self._votes = set()
        self._send_all(Prepare(self._ballot), now)

    def _send_all(self, message: Message, now: float) -> None:
        for name in self._names:
            if name != self.id:
                self._effects.append(Send(name, message))
        self._hear(self.id, message, now)

    def _reply(self, peer: str, message: Message, now: float) -> None:
        if peer == self.id:
            self._hear(peer, message, now)
        else:
            self._effects.append(Send(peer, message))

    def _start_timer(self, now: float) -> None:
        self._timer = now + self._lease_s

    def _hear(self, peer: str, message: Message, now: float) -> None:
        ballot = message.generation
        self._seen = max(self._seen, ballot)
        if isinstance(message, Prepare | Propose):
            self._judge(peer, message, now)
        elif ballot != self._ballot:
            return
        elif isinstance(message, Promise):
            self._promised_by(peer, message, now)
        elif isinstance(message, Proposed):
            self._votes.add(peer)
            if len(self._votes) == self._majority:
                self._won(now)

    def _promised_by(self, peer: str, message: Promise, now: float) -> None:
        if message.holder not in (None, self.id) or self._timer > -inf:
            return
        self._promises.add(peer)
        if len(self._promises) >= self._majority:
            self._start_timer(now)
            self._send_all(Propose(self._ballot, self._accept_s), now)

    def _won(self, now: float) -> None:
        if now >= self._timer:
            return
        if not self.holds(now):
            self.token = self._ballot
        self.until = self._timer
        self.next_deadline = min(self.next_deadline, now + self._lease_s / 3)
        self._effects.append(LeaseChanged(self.token, self.until))

    # Accepting.

    def _judge(self, peer: str, message: Prepare | Propose, now: float) -> None:
        if message.generation < self._promised:
            self._reply(peer, Refuse(self._promised), now)
            return
        self._promised = message.generation
        if isinstance(message, Prepare):
            holder = self._accepted if now < self._expires else None
            self._reply(peer, Promise(message.generation, holder), now)
        else:
            self._accepted = peer
            self._expires = now + message.for_s
            self._reply(peer, Proposed(message.generation), now)
