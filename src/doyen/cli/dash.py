"""`doyen dash`: a live page of a store, in the browser."""

from __future__ import annotations

import argparse
import stat
from pathlib import Path

from doyen.cli._output import (
    add_option,
    add_store_option,
    console,
    follow,
    print_json,
    store_url,
)
from doyen.errors import ConfigError
from doyen.stores.choice import without_password

ADDRESS = "127.0.0.1:7480"

MANUAL = """\
Serves a live page with every election and lock of a store: who leads, what is left of the lease,
who waits, and a timeline of terms; the members of groups, the owners of shards, configurations with
their history, and the nodes of a quorum. The page loads nothing from the network, and the store has
one watch for each election, however many pages are open.

By default the page can only be read, and only on this machine. With --allow-actions it can have a
leader resign or hand over, move a shard and drain a member, after a confirmation that says what
will happen. Actions need the token that is part of the printed address. If --listen names an
address that other machines can reach, reading needs the token as well; put a server with TLS in
front of it, and name the host that browsers use with --host.

exit codes:
  0    ended by Ctrl-C, the usual way to end it
  others as for every command: see doyen --help

examples:
  doyen dash --store doyen://h1:7400,h2:7400,h3:7400
  # causes of failovers, from the audit logs of processes on this machine
  doyen dash --audit /var/log/app/doyen.jsonl
  # behind a server with TLS
  doyen dash --allow-actions --token-file ~/.doyen-token --host dash.example
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_store_option(parser)
    add_option(parser, "--listen HOST:PORT", "the address to serve on; port 0 is any", ADDRESS)
    named = "a name by which browsers reach the page (default: those of the address); repeatable"
    parser.add_argument("--host", metavar="NAME", action="append", default=[], help=named)
    add_option(parser, "--allow-actions", "let holders of the token resign, transfer, move, drain")
    add_option(parser, "--token-file FILE", "a file with the token (default: a new one is made)")
    logs = "an audit log to take terms and causes from (default: none); repeatable"
    parser.add_argument("--audit", metavar="LOG", action="append", default=[], help=logs)


def run(args: argparse.Namespace) -> int:
    from doyen.web.serving import listen, require_web

    require_web()
    url = store_url(args, create=False)
    token = _token(Path(args.token_file)) if args.token_file else ""
    listener = listen(args.listen, hosts=args.host, allow_actions=args.allow_actions, token=token)
    shown = without_password(url)

    def ready() -> None:
        if args.json:
            print_json({"url": listener.url, "store": shown})
        else:
            console().print(f"the page of {shown} is at {listener.url}")

    from doyen.web.observation import StoreObservation
    from doyen.web.serving import serve

    async def serving() -> None:
        audit = [Path(path) for path in args.audit]
        await serve(StoreObservation(url, shown_url=shown, audit=audit), listener, ready)

    with listener.socket:
        return follow(serving())


def _token(path: Path) -> str:
    """The token in a file that other users cannot read."""
    try:
        if stat.S_IMODE(path.stat().st_mode) & (stat.S_IRGRP | stat.S_IROTH):
            raise ConfigError(f"{path} can be read by other users: chmod 600 {path}")
        token = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the token file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the token file {path} is not text") from error
    if len(token) < 16:
        raise ConfigError(f"the token in {path} must have 16 characters or more")
    return token
