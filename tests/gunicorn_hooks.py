"""The configuration of gunicorn in `test_flask.py`."""

import os

from doyen.integrations.gunicorn import post_worker_init, worker_exit

__all__ = ["post_worker_init", "worker_exit"]

workers = int(os.environ.get("WORKERS", "2"))
