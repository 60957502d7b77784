"""The program of `test_click.py`: a command without an end that records its work."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated

import click
import typer

from doyen.integrations.click import current_term, lead
from framework_crew import TTL_S, recording


@lead("e", lambda: os.environ["STORE"], ttl_s=TTL_S, connect_wait_s=10)
def work(note: Annotated[str, typer.Option()]) -> None:
    """Works until it is interrupted."""
    with recording(current_term()) as book:
        while True:
            book.write("work")
            time.sleep(0.002)


if __name__ == "__main__":
    if sys.argv.pop(1) == "click":
        click.command()(click.option("--note")(work))()
    else:
        typer.run(work)
