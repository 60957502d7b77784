"""What a leader knows of one peer's log, and how it sends to it.

    PROBING       one message at a time, to find the point up to which the logs agree
    STREAMING     many messages in flight, within the window
    SNAPSHOT      the peer needs entries that the log no longer has; nothing is sent until it has
                  the snapshot

`match` is what the peer has confirmed to be on disk; it only grows. `next` is what is sent next.
"""

from __future__ import annotations

from collections import deque
from enum import IntEnum

__all__ = ["PROBING", "SNAPSHOT", "STREAMING", "Pace", "Progress"]


class Pace(IntEnum):
    PROBING = 0
    STREAMING = 1
    SNAPSHOT = 2


PROBING, STREAMING, SNAPSHOT = Pace.PROBING, Pace.STREAMING, Pace.SNAPSHOT


class Progress:
    """A peer, as its leader sees it."""

    __slots__ = (
        *("active", "flying", "flying_bytes", "lately", "match"),
        *("next", "pace", "paused", "round", "commit_sent"),
    )

    def __init__(self, following: int) -> None:
        self.match = 0
        self.next = following
        self.pace: Pace = PROBING
        self.paused = False
        """While probing: a probe is in flight, or the peer is not connected."""
        self.active = True
        """Whether it was heard from since the last check of the quorum; initially assumed. See
        `heard`."""
        self.lately = True
        """The same for the interval before."""
        self.round = 0
        """The latest round that it has answered."""
        self.commit_sent = 0
        """The commit index that it was sent last, as far as its log goes."""
        self.flying: deque[tuple[int, int]] = deque()
        """While streaming: the last index and the size of each message that is not answered."""
        self.flying_bytes = 0

    @property
    def heard(self) -> bool:
        """Whether it has answered this leader, which is never assumed."""
        return self.match > 0 or self.round > 0

    def matched(self, index: int) -> None:
        """The peer has everything up to `index` on disk."""
        if index > self.match:
            self.match = index
            if self.next <= index:
                self.next = index + 1
        flying = self.flying
        while flying and flying[0][0] <= index:
            self.flying_bytes -= flying.popleft()[1]

    def stream(self) -> None:
        self._land(STREAMING, self.match + 1)

    def probe(self, following: int) -> None:
        self._land(PROBING, max(following, self.match + 1))

    def resume(self, *, paused: bool = False) -> None:
        """Probe from the last known or assumed position: everything in flight may be lost."""
        self.probe(self.match + 1 if self.pace is STREAMING else self.next)
        self.paused = paused

    def await_snapshot(self) -> None:
        self._land(SNAPSHOT, self.next)

    def _land(self, pace: Pace, following: int) -> None:
        self.pace = pace
        self.next = following
        self.paused = False
        self.flying.clear()
        self.flying_bytes = 0
