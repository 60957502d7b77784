"""doyen in web applications and other frameworks.

`forwarding` decides, without I/O, which process serves a request; `asgi` and `wsgi` carry it out,
and need the extra `forward`. Each framework has a module. Three mechanisms serve them:

- `starlette` campaigns on the event loop of an application.
- `background` campaigns on threads: `flask`, with the hooks of `gunicorn`, `apscheduler`, `celery`.
- `programs` runs a program on the main thread of the leader: `django`, `click`, `rq`.

`last_runs` is what the next leader of a schedule has to know.
"""
