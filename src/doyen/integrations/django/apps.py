"""The application, as `INSTALLED_APPS` names it."""

from __future__ import annotations

from django.apps import AppConfig


class DoyenConfig(AppConfig):
    """Has the commands `lead` and `doyen`. It has no models."""

    name = "doyen.integrations.django"
    label = "doyen"
    verbose_name = "doyen"
