"""`manage.py doyen …`: the command line of doyen, on the store of the settings."""

from __future__ import annotations

import os
import sys
from typing import Any

from django.core.management.base import BaseCommand

from doyen.integrations.django import store_url

SOURCE = "DJANGO_SETTINGS"
"""The variable that has the URL of the store, for messages that state where it is from."""


class DoyenCommand(BaseCommand):
    """Passes its arguments on to doyen's command line."""

    help = "The command line of doyen, on the store of the settings, such as: doyen leader billing"
    requires_system_checks: Any = ()

    def run_from_argv(self, argv: list[str]) -> None:
        command = [sys.executable, "-m", "doyen", *argv[2:]]
        environ, url = {**os.environ}, store_url()
        if url != environ.get("DOYEN_STORE"):
            environ |= {"DOYEN_STORE": f"env:{SOURCE}", SOURCE: url}
        os.execve(sys.executable, command, environ)


Command = DoyenCommand
