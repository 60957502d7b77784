"""Reports to the service manager: systemd, and others that understand `sd_notify`.

    manager = ServiceManager.of_environment()
    manager.tell(READY=1, STATUS="waiting to lead 'billing'")
    asyncio.create_task(manager.keep_watchdog())
    manager.tell(STOPPING=1)

One datagram for each call, to the Unix socket that NOTIFY_SOCKET names. Without that variable
nothing is sent. Nothing here blocks or raises, because a service must not fail with its manager.

Imports the standard library.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping

__all__ = ["ServiceManager"]

log = logging.getLogger("doyen")
VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class ServiceManager:
    """The manager of this process, if it has one that wants to be notified.

    >>> ServiceManager("", watchdog_s=None).tell(READY=1)
    """

    def __init__(self, address: str, *, watchdog_s: float | None = None) -> None:
        self.watchdog_s = watchdog_s
        """The manager ends this process if it does not receive WATCHDOG=1 for this long; None if
        it does not watch."""
        # A name that begins with @ is in the abstract namespace. Others, such as vsock:, are for
        # virtual machines.
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        self._notified = address.startswith(("/", "@"))
        self._failed = False

    @classmethod
    def of_environment(cls, environ: MutableMapping[str, str] | None = None) -> ServiceManager:
        """The manager that the environment names. Its variables are removed, so that processes
        started from here do not report in the place of this one."""
        environ = os.environ if environ is None else environ
        address, interval, pid = (environ.pop(name, "") for name in VARIABLES)
        watched = interval.isdecimal() and int(interval) > 0 and pid in ("", str(os.getpid()))
        return cls(address, watchdog_s=int(interval) / 1e6 if watched else None)

    def tell(self, **states: object) -> None:
        """Report states, such as READY=1. Any thread."""
        if not self._notified:
            return
        lines = [f"{name}={' '.join(str(value).split())}" for name, value in states.items()]
        try:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            with socket.socket(socket.AF_UNIX, kind) as manager:
                manager.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "the service manager could not be notified of %s: %s", ", ".join(lines), error
                )
            self._failed = True

    async def keep_watchdog(self, alive: Callable[[], Awaitable[object]] | None = None) -> None:
        """Report again and again that this loop runs, and that `alive` returns. Ends at once if the
        manager does not watch."""
        while self.watchdog_s is not None:
            if alive is not None:
                await alive()
            self.tell(WATCHDOG=1)
            await asyncio.sleep(self.watchdog_s / 2)
