"""Several servers of one engine that elect a leader among themselves."""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, Generic, Self, TypeVar

from .process import READY_WITHIN_S, Server, ServerFailed, start_or_close


class Member(Server):
    """One server of a cluster, by default the only one."""

    def __init__(self, name: str = "n1", **options: Any) -> None:
        super().__init__(**options)
        self.name = name
        self.peers = [self]

    @abstractmethod
    def leads(self) -> bool:
        """Whether the server itself reports that it leads its cluster."""


S = TypeVar("S", bound=Member)


class Cluster(Generic[S]):
    """The members in order. Each can be killed, frozen and restarted separately."""

    member: type[S]

    def __init__(self, size: int = 3, **options: Any) -> None:
        self.members = [self.member(f"n{number}", **options) for number in range(1, size + 1)]
        for member in self.members:
            member.peers = [*self.members]

    @property
    def url(self) -> str:
        """The store URL for doyen, which names all members."""
        return f"{self.member.scheme}://" + ",".join(member.address for member in self.members)

    def leader(self, within_s: float = READY_WITHIN_S) -> S:
        """Wait for a leader and return it. Members that do not answer are passed over."""
        give_up = time.monotonic() + within_s
        while time.monotonic() < give_up:
            for member in self.members:
                if member.alive and not member.frozen and self._leads(member):
                    return member
            time.sleep(0.02)
        raise ServerFailed(f"no leader after {within_s:g} s")

    def followers(self) -> list[S]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    @staticmethod
    def _leads(member: S) -> bool:
        try:
            return member.leads()
        except (OSError, ValueError):
            return False

    def start(self) -> Self:
        """Start all members, then wait for all: none is ready without a majority."""
        for member in self.members:
            member.launch()
        for member in self.members:
            member.await_ready()
        return self

    def close(self) -> None:
        for member in self.members:
            member.close()

    def __enter__(self) -> Self:
        return start_or_close(self, self.members)

    def __exit__(self, *_: object) -> None:
        self.close()
