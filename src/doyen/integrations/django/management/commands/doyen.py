"""`manage.py doyen …`: the command line of doyen, on the store of the settings."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand

from doyen.integrations.django import store_url


class DoyenCommand(BaseCommand):
    """Passes its arguments on to doyen's command line."""

    help = "The command line of doyen, on the store of the settings, such as: doyen leader billing"
    requires_system_checks: Any = ()

    def run_from_argv(self, argv: list[str]) -> None:
        command = [sys.executable, "-m", "doyen", *argv[2:]]
        os.execve(sys.executable, command, {**os.environ, "DOYEN_STORE": store_url()})


Command = DoyenCommand
