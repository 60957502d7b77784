"""The application of `test_flask.py`, whose leader records its work."""

from __future__ import annotations

import os

from flask import Flask

import doyen
from doyen.integrations.flask import Leadership
from framework_crew import TTL_S, work

app = Flask(__name__)
leader = Leadership(
    "e", lambda: doyen.connect_blocking(os.environ["STORE"], ttl_s=TTL_S, wait_s=10), app=app
)
leader.task(work)
app.add_url_rule("/healthz", view_func=leader.health)


@app.get("/token")
@leader.required
def token() -> str:
    """The token of the leader."""
    return str(leader().token)
