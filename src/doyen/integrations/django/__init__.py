"""Django: commands that run only in the leader, and views that only the leader serves.

    INSTALLED_APPS = [..., "doyen.integrations.django"]

    python manage.py lead billing pay_invoices --limit 100

The setting `DOYEN` is a dictionary of options for `connect`, such as `{"ttl_s": 10}`, and has two
more: `store`, a URL, and `database`, an alias. The store is, in this order: `DOYEN["store"]`,
`DOYEN_STORE` in the environment, the database of Django that `DOYEN["database"]` names, or else
`DATABASES["default"]`.

Needs the extra `django`, and that of the database: `doyen[django,postgresql]`. `manage.py lead` is
`doyen.integrations.programs`; `Leadership` is for web processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.db import connections

from doyen.blocking import BlockingSession, connect_blocking
from doyen.errors import ConfigError
from doyen.integrations.django.databases import REMEDY, database_url
from doyen.integrations.django.leadership import DjangoLeadership
from doyen.integrations.programs import current_term
from doyen.stores.choice import StoreChoice, choose_store

__all__ = ["Leadership", "connect", "current_term", "store_url"]

Leadership = DjangoLeadership


def connect(**options: Any) -> BlockingSession:
    """A session on the store of the settings, for code without asyncio. Options are those of
    `doyen.connect`, which go before those of the settings.

        with doyen.integrations.django.connect() as session:
            print(session.leader("billing"))
    """
    configured = {name: value for name, value in _configured().items() if name not in _OWN}
    return connect_blocking(store_url(), **{**configured, **options})


def store_url() -> str:
    """The URL of the store that the settings, the environment or `DATABASES` name."""
    return store_choice().url


def store_choice() -> StoreChoice:
    """The store, and who named it."""
    if named := _configured().get("store"):
        return choose_store(str(named), "DOYEN in the settings")
    if named := os.environ.get("DOYEN_STORE"):
        return choose_store(named, "DOYEN_STORE")
    alias = _configured().get("database", "default")
    if alias not in settings.DATABASES:
        raise ConfigError(f"DATABASES in the settings has no {alias!r}: {REMEDY}")
    connection = connections[alias]
    url = database_url(connection.vendor, connection.settings_dict)
    return StoreChoice(url, f"DATABASES[{alias!r}] in the settings")


_OWN = ("store", "database")


def _configured() -> Mapping[str, Any]:
    configured = getattr(settings, "DOYEN", {})
    if not isinstance(configured, Mapping):
        raise ConfigError(f"DOYEN in the settings is a dictionary, not {configured!r}")
    return configured
