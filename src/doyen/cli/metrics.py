"""`doyen metrics WHAT`: print the Grafana dashboard or the alert rules that doyen ships."""

from __future__ import annotations

import argparse
import sys
from importlib.resources import files

from doyen.cli._output import Exit, print_json

MANUAL = """\
Prints what makes doyen's metrics useful: "dashboard" is a dashboard for Grafana, to be imported
there, and "alerts" are alert rules for Prometheus. How to have metrics exported is in
docs/metrics.md. With --json the output is one line of JSON with the text of the file.

exit codes:
  0    printed
  others as for every command: see doyen --help

examples:
  doyen metrics dashboard > doyen.json
  doyen metrics alerts > /etc/prometheus/doyen.rules.yaml
"""

FILES = {"dashboard": "grafana.json", "alerts": "alerts.yaml"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", metavar="WHAT", choices=FILES, help="dashboard or alerts")


def run(args: argparse.Namespace) -> int:
    text = (files("doyen.metrics") / FILES[args.what]).read_text(encoding="utf-8")
    if args.json:
        print_json({"file": FILES[args.what], "text": text})
    else:
        sys.stdout.write(text)
    return Exit.DONE
