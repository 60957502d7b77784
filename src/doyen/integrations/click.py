"""Click and Typer: commands that run only in the leader.

    @click.command()
    @lead("billing", "postgresql://db/app")
    def pay() -> None: ...

Start the command on every machine: one runs it, the others wait to take over. How it is interrupted
when its term ends, and on SIGTERM, is described in `doyen.integrations.programs`. Works with every
library that calls a function with the arguments of a command line; it imports none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar, Unpack

from doyen.blocking import WhileLeaderOptions, connect_blocking, divided_options
from doyen.errors import ConfigError, DoyenError
from doyen.integrations.programs import NOT_LEADING, current_term
from doyen.integrations.programs import lead as lead_program

__all__ = ["current_term", "lead"]

P = ParamSpec("P")
R = TypeVar("R")
USAGE = 2


def lead(
    election: str,
    store: str | Callable[[], str] | None = None,
    *,
    once: bool = False,
    **options: Unpack[WhileLeaderOptions],
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Have a command run only while its process leads. It stands below `@click.command()` or
    `@app.command()`, so that the arguments are checked before the election.

        @app.command()
        @lead("billing")
        def pay(limit: int = 100) -> None:
            print(current_term().token)

    After a loss the command is run again in the next term; with `once`, the process exits with code
    75 instead, as it does if it is not elected within `wait_s`. `store` is a URL, or a function
    that returns one when the command is run; without it, the environment names the store. Options
    are those of `doyen.while_leader`.
    """
    of_session, of_campaign = divided_options(election, options)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            url = store() if callable(store) else store
            try:
                return lead_program(
                    lambda: connect_blocking(url, **of_session),
                    election,
                    lambda term: function(*args, **kwargs),
                    once=once,
                    **of_campaign,
                )
            except DoyenError as error:
                sys.stderr.write(f"Error: {error}\n")
                sys.exit(USAGE if isinstance(error, ConfigError) else NOT_LEADING)

        return run

    return decorate
