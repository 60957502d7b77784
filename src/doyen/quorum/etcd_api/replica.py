"""The etcd keyspace as one node shows it: proposals, reads, and the headers of responses.

Writes are proposed on this node and go to the leader as those of doyen's own clients do. A read
waits until this node shows every write that was acknowledged before it, unless it is serializable.
Errors of the node are translated to those of etcd here. Lives on the driver's event loop.
"""

from __future__ import annotations

import asyncio
from functools import lru_cache
from hashlib import sha256
from typing import Any

from doyen.errors import DoyenError
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import (
    NO_SPACE,
    REFUSALS,
    Code,
    EtcdError,
    fail,
    translated,
)
from doyen.quorum.keyspace.commands import (
    EtcdApply,
    EtcdDone,
    EtcdRefused,
    KeyspaceCommand,
    QuotaExceeded,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.etcd_requests import EtcdRequests, EtcdResults
from doyen.quorum.keyspace.etcd_state import RequestRefused
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import ETCD
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.membership import Members
from doyen.quorum.node.replicated import KEYSPACE


class Replica:
    """The etcd keyspace on one node, and the tasks of its services."""

    def __init__(self, driver: Driver, keyspace: Keyspace, members: Members) -> None:
        self.driver = driver
        self.keyspace = keyspace
        self.members = members
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._seen = 0
        """The latest revision that a response has named. On a follower it may be later than what
        this node has applied."""

    def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()

    def start(self, work: Any) -> None:
        """Run a task until the API is closed."""
        if self._closed:
            work.close()
            return
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def header(self, revision: int = 0) -> Any:
        """The header of a response."""
        driver = self.driver
        self._seen = max(self._seen, revision, self.keyspace.etcd.revision)
        return rpc.ResponseHeader(
            cluster_id=_id(self.members.cluster_id),
            member_id=self.member_id(driver.id),
            revision=revision or self._seen,
            raft_term=driver.generation,
        )

    def member_id(self, node: str) -> int:
        return _id(self.members.ids.get(node) or node)

    async def propose(self, command: KeyspaceCommand) -> EtcdDone:
        """Have a command carried out. Raises `EtcdError`."""
        self.check_version()
        try:
            result = decode_result(await self.driver.propose(KEYSPACE, encode(command)))
        except DoyenError as error:
            raise translated(error) from error
        if isinstance(result, EtcdRefused):
            raise fail(REFUSALS[result.refusal])
        if isinstance(result, QuotaExceeded):
            raise fail(NO_SPACE)
        assert isinstance(result, EtcdDone)
        return result

    def check_version(self) -> None:
        """Raises `EtcdError` while the cluster has no etcd keyspace."""
        version = self.keyspace.version
        if version < ETCD:
            raise EtcdError(
                Code.UNAVAILABLE,
                f"the cluster is at version {version} of its state, which has no etcd keyspace: the"
                " version rises when all members are connected and run this release",
            )
        if not self.driver.membership.cluster:  # clients refuse a cluster whose id changes
            raise EtcdError(Code.UNAVAILABLE, "the cluster is being founded and has no id yet")

    async def current(self) -> None:
        """Wait until this node shows every write that was acknowledged before. Raises
        `EtcdError`."""
        self.check_version()
        try:
            await self.driver.barrier()
        except DoyenError as error:
            raise translated(error) from error

    async def change(self, request: EtcdRequests) -> EtcdResults:
        """Carry out a request that may change something."""
        done = await self.propose(EtcdApply(request))
        assert done.result is not None
        return done.result

    def read(self, request: EtcdRequests) -> EtcdResults:
        """Carry out a request that only reads, on what this node has applied."""
        try:
            return self.keyspace.etcd.apply(request)
        except RequestRefused as refused:
            raise fail(REFUSALS[refused.refusal]) from None


@lru_cache(maxsize=256)
def _id(text: str) -> int:
    """etcd's ids are numbers of 64 bits."""
    return int.from_bytes(sha256(text.encode()).digest()[:8])
