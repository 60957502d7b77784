"""gunicorn: the workers campaign from their start to their end.

    # gunicorn.conf.py
    from doyen.integrations.gunicorn import post_worker_init, worker_exit

Every `Leadership` of `doyen.integrations.flask` is opened when a worker has loaded the application,
with and without `--preload`; the master opens nothing. A worker that gets SIGTERM releases its term
at once, completes its requests and ends.

For the workers `sync` and `gthread`. Those of uvicorn have a lifespan; see
`doyen.integrations.starlette`.
"""

from __future__ import annotations

import logging
import sys

from doyen.events.log_lines import log_line
from doyen.integrations.background import close_all, open_all
from doyen.integrations.signals import given_up_on_sigterm

__all__ = ["post_worker_init", "worker_exit"]

log = logging.getLogger("doyen")


def post_worker_init(worker: object) -> None:
    """The hook of gunicorn after a worker has loaded the application. A hook of your own calls it:

    def post_worker_init(worker):
        doyen.integrations.gunicorn.post_worker_init(worker)
    """
    patched = sys.modules.get("gevent.monkey")
    if patched is not None and patched.is_module_patched("threading"):
        line = log_line(
            event="threads_are_greenlets",
            effect="a request that does not yield delays renewals, and may cost leadership",
            remedy='worker_class = "gthread"',
        )
        log.warning("%s", line)
    with given_up_on_sigterm():
        open_all()


def worker_exit(server: object, worker: object) -> None:
    """The hook of gunicorn at the end of a worker."""
    close_all()
