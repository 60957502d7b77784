"""`manage.py lead ELECTION COMMAND …`: run a command of Django only while this process leads."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from django.core.management import ManagementUtility
from django.core.management.base import BaseCommand, CommandError, CommandParser

from doyen.errors import DoyenError
from doyen.integrations.django import connect, store_choice
from doyen.integrations.programs import lead
from doyen.stores.kit.durations import parse_duration
from doyen.term import Term


class LeadCommand(BaseCommand):
    """Campaigns, and runs another command for the duration of each term."""

    help = (
        "Run a command only while this process leads an election; start it on several machines,"
        " and one of them runs it. Options come before the name of the election."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("election", help="the election's name")
        parser.add_argument("name_of_command", metavar="command", help="the command to run")
        parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments and options")
        parser.add_argument("--name", help="the candidate's name (default: host name and pid)")
        parser.add_argument("--priority", type=int, default=0, help="higher ones lead first")
        for option, text in {
            "--wait": "give up if not elected within this time, such as 5m (default: never)",
            "--ttl": "the time after which a silent leader is replaced (default: the store's)",
            "--stop-budget": "the time in which the command has to end after a loss",
            "--store-wait": "how long to wait for a store that cannot be reached at first",
        }.items():
            parser.add_argument(option, type=_seconds, metavar="TIME", help=text)
        parser.add_argument(
            "--once", action="store_true", help="end after a loss instead of campaigning again"
        )

    def handle(self, **options: Any) -> None:
        command, arguments = options["name_of_command"], options["arguments"]
        utility = ManagementUtility([sys.argv[0], command])
        fetched = utility.fetch_command(command)  # an unknown one is reported at once
        if fetched.requires_system_checks:  # made by now, so that the successor loses no time
            arguments = ["--skip-checks", *arguments]

        def run(term: Term) -> None:
            fetched.run_from_argv([sys.argv[0], command, *arguments])

        try:
            if options["verbosity"] > 0:
                self._state_store()
            lead(
                lambda: connect(
                    **_given(
                        ttl_s=options["ttl"],
                        stop_budget_s=options["stop_budget"],
                        wait_s=options["store_wait"],
                    )
                ),
                options["election"],
                run,
                once=options["once"],
                **_given(
                    name=options["name"], priority=options["priority"], wait_s=options["wait"]
                ),
            )
        except DoyenError as error:
            raise CommandError(str(error), returncode=75) from error

    def _state_store(self) -> None:
        """State on standard error which store is used, and if only this machine has it."""
        choice = store_choice()
        reach = ", on this machine only" if choice.url.startswith("sqlite:") else ""
        self.stderr.write(f"doyen: {choice}{reach}", lambda text: text)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _seconds(text: str) -> float:
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


Command = LeadCommand
