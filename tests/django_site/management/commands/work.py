"""Works until it is interrupted. It knows nothing of terms, except for the ledger."""

from __future__ import annotations

import time
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from doyen.integrations.django import current_term
from framework_crew import recording


class Command(BaseCommand):
    """A command without an end."""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--note", required=True)

    def handle(self, **options: Any) -> None:
        with recording(current_term()) as book:
            while True:
                book.write("work")
                time.sleep(0.002)
