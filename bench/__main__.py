"""`python -m bench [NAME…]`: measure, print a line per figure, and fail if a limit is missed."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.cost import importing, valid
from bench.engines import engines
from bench.etcd_api import etcd_api
from bench.failover import crash, handover
from bench.figures import Figure
from bench.forwarding import forwarding
from bench.frameworks import frameworks
from bench.frozen import frozen
from bench.idle import idle
from bench.lab import lab
from bench.loss import loss
from bench.manage import config, members, partitioners, shards
from bench.outages import outages
from bench.page import page
from bench.quorum import upkeep, writes
from bench.scale import herd, many
from bench.soak import soak
from bench.transfer import transfer
from bench.warden import warden

BENCHES: dict[str, Callable[..., Iterable[Figure]]] = {
    "crash": crash,
    "handover": handover,
    "transfer": transfer,
    "loss": loss,
    "frozen": frozen,
    "valid": valid,
    "import": importing,
    "forwarding": forwarding,
    "herd": herd,
    "many": many,
    "idle": idle,
    "lab": lab,
    "engines": engines,
    "writes": writes,
    "outages": outages,
    "etcd_api": etcd_api,
    "upkeep": upkeep,
    "soak": soak,
    "members": members,
    "config": config,
    "shards": shards,
    "partitioners": partitioners,
    "page": page,
    "warden": warden,
    "frameworks": frameworks,
}
LONG = (
    *("engines", "writes", "outages", "etcd_api", "upkeep", "soak"),
    *("members", "config", "shards", "partitioners", "page", "warden", "frameworks"),
)

QUICK: dict[str, dict[str, Any]] = {
    "crash": {"trials": 2},
    "handover": {"trials": 2},
    "transfer": {"trials": 2, "candidates": 3},
    "loss": {"trials": 1},
    "frozen": {"trials": 1, "ttl_s": 0.6, "observe_s": 0.1},
    "valid": {"rounds": 3, "calls": 1000},
    "import": {"trials": 1},
    "forwarding": {"rounds": 2, "calls": 5},
    "herd": {"processes": 2, "sessions": 4, "changes": 2},
    "many": {"elections": 50, "traced": 20, "settle_s": 0.1, "hold_s": 0.1},
    "idle": {"seconds": 0.5, "sessions": 2},
    "lab": {"seeds": 1, "hours": 0.01},
    "engines": {"trials": 2, "crashes": 1, "only": "redis", "peers": False},
    "writes": {"rounds": 1, "seconds": 0.2, "levels": (1, 16), "peers": False},
    "outages": {"trials": 1, "freezes": 1, "transfers": 1, "peers": False},
    "etcd_api": {
        "rounds": 1,
        "calls": 5,
        "seconds": 0.2,
        "watchers": 20,
        "changes": 2,
        "trials": 1,
    },
    "upkeep": {"seconds": 0.5, "keys": 100, "entries": 100, "peers": False},
    "soak": {"minutes": 0.02},
    "page": {
        "elections": 20,
        "loads": 1,
        "changes": 3,
        "pages": 2,
        "crowd": 40,
        "events": 1000,
        "seconds": 0.3,
    },
    "members": {
        "processes": 1,
        "sessions": 4,
        "observers": 2,
        "changes": 1,
        "burst": 2,
        "only": "sqlite",
    },
    "config": {"processes": 1, "sessions": 3, "trials": 2, "only": "sqlite"},
    "shards": {"count": 30, "members": 4, "handovers": 1, "traced": 10, "only": "sqlite"},
    "warden": {"trials": 2, "freezes": 0, "idle_s": 0.1, "only": "quorum"},
    "partitioners": {"count": 20, "members": 2, "ttl_s": 2.0, "kinds": "kazoo"},
    "frameworks": {"trials": 1, "only": "click"},
}
"""Parameters that only show that a bench works. The figures are meaningless."""


def machine() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        "load": os.getloadavg()[0],
    }


def options(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    given = dict(QUICK[name]) if arguments.quick else {}
    if name == "soak":
        given["load"] = arguments.load
        if arguments.minutes is not None:
            given["minutes"] = arguments.minutes
    known = inspect.signature(BENCHES[name]).parameters
    for option in ("only", "trials"):
        asked = getattr(arguments, option)
        if asked is not None and option in known:
            given[option] = asked
    return given


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"default: all but {', '.join(LONG)}"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--table", action="store_true", help="print a Markdown table")
    parser.add_argument(
        "--quick", action="store_true", help="tiny runs, only to check that the benches work"
    )
    parser.add_argument("--trials", type=int, help="for crash, handover, frozen, import")
    parser.add_argument(
        "--only", help="for engines, soak, members, config, shards, frameworks: a list of names"
    )
    parser.add_argument("--minutes", type=float, help="for soak")
    parser.add_argument("--load", action="store_true", help="for soak: keep every core busy")
    parser.add_argument("--list", action="store_true", help="list the benches")
    arguments = parser.parse_args()
    if arguments.list:
        for name, bench in BENCHES.items():
            print(f"{name:<10} {(bench.__doc__ or '').splitlines()[0]}")
        return 0
    for name in arguments.names:
        if name not in BENCHES:
            parser.error(f"no bench {name!r}; there are {', '.join(BENCHES)}")
    names = arguments.names or [name for name in BENCHES if name not in LONG]
    report: dict[str, Any] = {"machine": machine(), "figures": []}
    if arguments.table:
        print(", ".join(f"{name} {value}" for name, value in report["machine"].items()))
        print("\n| figure | measured | limit | |\n|---|---|---|---|", flush=True)
    began = time.monotonic()
    missed = False
    for name in names:
        for figure in BENCHES[name](**options(name, arguments)):
            missed |= figure.met is False
            report["figures"].append({"bench": name, **figure.as_json()})
            if not arguments.json:
                print(figure.row() if arguments.table else figure.line(), flush=True)
    report["took_s"] = round(time.monotonic() - began, 1)
    if arguments.json:
        print(json.dumps(report, indent=1))
    return 1 if missed and not arguments.quick else 0


if __name__ == "__main__":
    sys.exit(main())
