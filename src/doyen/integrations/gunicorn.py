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

from doyen.integrations.background import close_all, open_all

__all__ = ["post_worker_init", "worker_exit"]


def post_worker_init(worker: object) -> None:
    """The hook of gunicorn after a worker has loaded the application. A hook of your own calls it:

    def post_worker_init(worker):
        doyen.integrations.gunicorn.post_worker_init(worker)
    """
    open_all()


def worker_exit(server: object, worker: object) -> None:
    """The hook of gunicorn at the end of a worker."""
    close_all()
