"""doyen in web applications: requests are served by the leader, and forwarded to it by the others.

`forwarding` decides, without I/O. `asgi` and `wsgi` carry it out; they need the extra `forward`.
`starlette` is the lifespan, the tasks and the dependency of applications of Starlette and FastAPI.
"""
