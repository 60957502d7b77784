"""SIGTERM in servers: the term is released at once, and not after the last request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from doyen.lease.lifetime import ends_process

__all__ = ["release_on_sigterm"]


def release_on_sigterm(server_handler: Any, release: Callable[[], None]) -> Callable[[], None]:
    """Have `release` called on SIGTERM, before the handler that the server has. It must not block.

    Without such a handler, and on other threads, nothing is changed: that is the business of
    `doyen.lease.lifetime`. Returns a function that restores the handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(server_handler) or ends_process(server_handler):
        return lambda: None
    pid = os.getpid()

    def release_first(signum: int, frame: object) -> None:
        if os.getpid() == pid:
            release()
        server_handler(signum, frame)

    def restore() -> None:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is release_first:
            signal.signal(signal.SIGTERM, server_handler)

    signal.signal(signal.SIGTERM, release_first)
    return restore
