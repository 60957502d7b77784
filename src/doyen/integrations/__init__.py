"""doyen in web applications and other frameworks.

`forwarding` decides, without I/O, which process serves a request; `asgi` and `wsgi` carry it out,
and need the extra `forward`. Each framework has a module. Three mechanisms serve them:

- `starlette` campaigns on the event loop of an application.
- `background` campaigns on threads: `flask`, with the hooks of `gunicorn`, `apscheduler`, `celery`.
- `programs` runs a program on the main thread of the leader: `django`, `click`, `rq`.

`last_runs` is what the next leader of a schedule has to know.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["needing"]


@contextlib.contextmanager
def needing(extra: str) -> Iterator[None]:
    """Imports of optional libraries. If one is missing, the error names the extra that has it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"doyen.integrations.{extra} needs {error.name}: pip install 'doyen[{extra}]'",
            name=error.name,
        ) from error
