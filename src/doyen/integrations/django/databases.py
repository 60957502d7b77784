"""The store in a database of Django. Imports nothing of Django."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from doyen.errors import ConfigError

__all__ = ["database_url"]

REMEDY = "name a store: DOYEN_STORE in the environment, or DOYEN = {'store': …} in the settings"


def database_url(vendor: str, database: Mapping[str, Any]) -> str:
    """The URL of a store in a database of Django.

    >>> database_url("postgresql", {"NAME": "app", "USER": "u", "PASSWORD": "p@", "HOST": "db"})
    'postgresql://u:p%40@db/app'
    >>> database_url("postgresql", {"NAME": "app", "OPTIONS": {"sslmode": "require"}})
    'postgresql:///app?sslmode=require'
    >>> database_url("mysql", {"NAME": "app", "HOST": "db", "PORT": "3307", "USER": "u"})
    'mysql://u@db:3307/app'
    >>> database_url("sqlite", {"NAME": "/var/lib/app/db.sqlite3"})
    'sqlite:///var/lib/app/db.sqlite3.doyen'
    """
    if vendor == "sqlite":
        return _beside(database)
    if vendor not in ("postgresql", "mysql"):
        raise ConfigError(f"doyen has no store in a database of {vendor}: {REMEDY}")
    translate = _postgresql_options if vendor == "postgresql" else _mysql_options
    options = urlencode(translate(database), safe="/")
    default = "localhost" if vendor == "mysql" else ""  # libpq knows where its socket is
    location = _location({**database, "HOST": database.get("HOST") or default})
    name = quote(str(database.get("NAME") or ""), safe="")
    return f"{vendor}://{location}/{name}{'?' if options else ''}{options}"


def _location(database: Mapping[str, Any]) -> str:
    user, password, host, port = (
        str(database.get(key) or "") for key in ("USER", "PASSWORD", "HOST", "PORT")
    )
    if ":" in host and not host.startswith(("[", "/")):
        host = f"[{host}]"
    elif not host.startswith("["):
        host = quote(host, safe=",")
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    return f"{login}{'@' if login else ''}{host}{':' if port else ''}{port}"


_OF_LIBPQ = ("sslmode", "sslrootcert", "sslcert", "sslkey", "connect_timeout", "options")


def _postgresql_options(database: Mapping[str, Any]) -> dict[str, str]:
    """What matters to doyen of the options of Django's backend, which it hands to libpq."""
    options = database.get("OPTIONS") or {}
    if "service" in options:
        raise ConfigError(f"the database is configured by a service file of libpq: {REMEDY}")
    return {name: str(options[name]) for name in _OF_LIBPQ if options.get(name) is not None}


def _mysql_options(database: Mapping[str, Any]) -> dict[str, str]:
    options = database.get("OPTIONS") or {}
    files = [name for name in ("read_default_file", "unix_socket") if options.get(name)]
    if files or str(database.get("HOST") or "").startswith("/"):
        raise ConfigError(f"the database is configured by a file, or has a socket: {REMEDY}")
    tls = options.get("ssl") or {}
    given = {name: str(tls[name]) for name in ("ca", "cert", "key") if tls.get(name)}
    return {"tls": "true", **given} if tls else {}


def _beside(database: Mapping[str, Any]) -> str:
    """A file of doyen's beside that of Django. Django's own would be locked by its transactions."""
    name = str(database.get("NAME") or "")
    if not name or name == ":memory:" or name.startswith("file:"):
        raise ConfigError(
            f"the database is in memory, where other processes cannot see it: {REMEDY}"
        )
    return f"sqlite://{quote(str(Path(name).absolute()))}.doyen"
