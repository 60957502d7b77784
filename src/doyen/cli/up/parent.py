"""What every process of `doyen up` does first: see to it that it does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["die_with"]

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, frozen or not."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):
        return  # not Linux: the end of the pipe has to do
    if os.getppid() != parent:  # it died before it could be asked for
        sys.exit(1)
