"""What `test_deploy.py` puts behind a load balancer: a process that answers with its name, and at
/leader whether it leads."""

from __future__ import annotations

import sys
import threading
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import doyen
from doyen.integrations.forwarding import LeaderView
from doyen.integrations.wsgi import LeaderRoute


class Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None: ...


def main(url: str, name: str, address: str, ttl_s: str) -> None:
    view = LeaderView("app")
    leader = LeaderRoute(view)

    def answer(environ, start_response):  # type: ignore[no-untyped-def]
        if environ["PATH_INFO"] == "/leader":
            return leader(environ, start_response)
        start_response("200 OK", [("content-type", "text/plain")])
        return [name.encode()]

    host, port = address.split(":")
    server = make_server(host, int(port), answer, Server, Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with doyen.connect_blocking(url, ttl_s=float(ttl_s), wait_s=30) as session:
        for campaign in session.campaigns("app", name=name):
            with campaign as term, view.leading(term):
                ended = threading.Event()
                term.on_end(ended.set)
                ended.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
