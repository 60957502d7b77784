"""The application, as `INSTALLED_APPS` names it."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.signals import request_started

from doyen.integrations.django.leadership import open_for_requests


class DoyenConfig(AppConfig):
    """Has the commands `lead` and `doyen`, and opens each `Leadership` with the first request."""

    name = "doyen.integrations.django"
    label = "doyen"
    verbose_name = "doyen"

    def ready(self) -> None:
        """Called when Django has loaded its applications, in every process."""
        request_started.connect(open_for_requests, dispatch_uid="doyen")
