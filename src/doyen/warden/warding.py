"""What the leases of a session need of its warden.

Every session imports this; `client`, which has much more to import, is left to those with a warden.
"""

from __future__ import annotations

from typing import Literal, Protocol

from doyen.model import Lease

__all__ = ["Form", "NoWarden", "Warding"]

Form = Literal["process", "host", "auto", "found"]
"""A child of this process; the host's; the host's, or else a child; the host's, if there is one."""


class Warding(Protocol):
    """What the leases of a session need of its warden."""

    def begin(self) -> None:
        """The session is about to have its first lease, or another."""

    def register(self, lease: Lease, warrant: bytes) -> None: ...

    def withdraw(self, lease: Lease) -> None: ...

    def bodies(self, number: int) -> None: ...

    def renewed(self) -> None:
        """A lease was renewed: look for a warden if there is none."""

    def proof(self) -> tuple[int, ...]:
        """Descriptors for a guard, over which it reports that a run's processes are gone."""

    def run_begins(self) -> int:
        """The number of a supervised run that is about to begin."""

    def run_ended(self, run: int) -> None: ...

    def close(self) -> None: ...

    def forked(self) -> None: ...


class NoWarden:
    """For sessions without a warden."""

    def begin(self) -> None:
        pass

    def register(self, lease: Lease, warrant: bytes) -> None:
        pass

    def withdraw(self, lease: Lease) -> None:
        pass

    def bodies(self, number: int) -> None:
        pass

    def renewed(self) -> None:
        pass

    def proof(self) -> tuple[int, ...]:
        return ()

    def run_begins(self) -> int:
        return 0

    def run_ended(self, run: int) -> None:
        pass

    def close(self) -> None:
        pass

    def forked(self) -> None:
        pass
