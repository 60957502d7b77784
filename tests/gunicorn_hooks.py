"""The configuration of gunicorn in `test_flask.py`."""

from doyen.integrations.gunicorn import post_worker_init, worker_exit

__all__ = ["post_worker_init", "worker_exit"]

workers = 3
