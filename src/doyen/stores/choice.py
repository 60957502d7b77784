"""Which store a session uses: the one that is named, one from the environment, or the default.

    1. the URL that was given: an argument of `connect`, or `--store`
    2. DOYEN_STORE
    3. DATABASE_URL (PostgreSQL or MySQL), ETCDCTL_ENDPOINTS or ZK_HOSTS, if exactly one is set
    4. a file of this user, on this machine only; refused if DOYEN_REQUIRE_STORE=1

`env:NAME` names an environment variable instead of a URL. Relative paths become absolute, so that
what is reported does not depend on the current directory. Imports the port and the errors.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from doyen._values import Value
from doyen.errors import ConfigError
from doyen.stores.port import SECRET_USERS, canonical_scheme, cuts_a_secret, split_url

__all__ = ["StoreChoice", "choose_store", "without_password"]

HIDDEN = "…"


class StoreChoice(Value):
    """The URL of a store, and where it came from."""

    url: str
    origin: str = ""
    """Who named it, such as `DOYEN_STORE`; empty for the default."""
    passed_over: str = ""
    """Of the default: which variable is set and names no store, and why."""

    @property
    def defaulted(self) -> bool:
        """Whether no store was named, so that the default is used."""
        return not self.origin

    def __str__(self) -> str:
        if self.defaulted:
            return (
                f"store {without_password(self.url)}, on this machine only, because no store was"
                f" named{self.passed_over}: other machines and other users do not share it; set"
                " DOYEN_STORE"
            )
        return f"store {without_password(self.url)} (from {self.origin})"


def choose_store(given: str | None, origin: str = "connect", *, create: bool = True) -> StoreChoice:
    """The store for a session. `given` is the URL that was named by `origin`, if any.

    With `create`, the directory of the default store is created, private to this user.
    """
    if given is None:
        return _from_environment(create)
    if not isinstance(given, str):
        raise ConfigError(f"the URL of a store is a string, not {given!r}")
    return _named(given, origin)


def _named(text: str, origin: str) -> StoreChoice:
    text = text.strip()
    if not text:
        raise ConfigError(
            f"the URL of the store is empty ({origin}), probably because a variable is not set:"
            " give a URL, or leave it out"
        )
    if text.startswith("env:"):
        name = text.removeprefix("env:")
        value = os.environ.get(name, "").strip()
        if not value:
            raise ConfigError(f"{origin} names the environment variable {name}, which is not set")
        convert = _CONVERSIONS.get(name, str)
        return StoreChoice(absolute(convert(value) or value), name)
    return StoreChoice(absolute(text), origin)


def _from_environment(create: bool) -> StoreChoice:
    named = os.environ.get("DOYEN_STORE")
    if named is not None:
        return _named(named, "DOYEN_STORE")
    found = {}
    for name, convert in _CONVERSIONS.items():
        value = os.environ.get(name, "").strip()
        url = convert(value) if value else ""
        if url:
            found[name] = url
    if len(found) > 1:
        first = next(iter(found))
        raise ConfigError(
            f"{' and '.join(found)} each name a store: choose one, such as DOYEN_STORE=env:{first}"
        )
    for name, url in found.items():
        return StoreChoice(url, name)
    passed_over = ""
    if os.environ.get("DATABASE_URL", "").strip():
        passed_over = " (DATABASE_URL is for neither PostgreSQL nor MySQL)"
    if required():
        raise ConfigError(
            f"no store was named{passed_over}, and DOYEN_REQUIRE_STORE forbids the default, a file"
            " on this machine only: set DOYEN_STORE to the URL of the store that all candidates"
            " share"
        )
    from urllib.parse import quote  # as in `port`

    url = f"sqlite://{quote(_default_path(create))}"
    return StoreChoice(url, passed_over=passed_over)


def required() -> bool:
    """Whether DOYEN_REQUIRE_STORE refuses the default store."""
    text = os.environ.get("DOYEN_REQUIRE_STORE", "").strip().lower()
    if text not in ("", "0", "1", "false", "true", "no", "yes", "off", "on"):
        raise ConfigError(f"DOYEN_REQUIRE_STORE is 1 or 0, not {text!r}")
    return text in ("1", "true", "yes", "on")


def _default_path(create: bool) -> str:
    directory = os.path.join(_state_home(), "doyen")
    if create:
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"the directory of the default store, {directory}, cannot be created:"
                f" {error.strerror}; name another store with --store or DOYEN_STORE"
            ) from error
    return os.path.join(directory, "doyen.db")


def _state_home() -> str:
    named = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(named):
        return named
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise ConfigError(
            "this user has no home directory; name a store with --store or DOYEN_STORE"
        )
    return os.path.join(home, ".local", "state")


def absolute(url: str) -> str:
    """The URL with a relative path of a local store made absolute, also one below `~`. Shells
    replace that in some places only, and processes must not use different files.

    >>> from urllib.parse import quote
    >>> absolute("sqlite:doyen.db") == f"sqlite://{quote(os.getcwd())}/doyen.db"
    True
    >>> absolute("sqlite:///var/lib/doyen.db"), absolute("etcd://h1/app")
    ('sqlite:///var/lib/doyen.db', 'etcd://h1/app')
    """
    from urllib.parse import quote, unquote

    parts = split_url(url)
    if canonical_scheme(parts.scheme) != "sqlite" or parts.netloc not in ("", ".", ".."):
        return url
    path = unquote(parts.netloc + parts.path)
    if not path or path.startswith((":", "/")) or path.endswith("/"):
        return url  # absolute, or refused by the adapter
    path = os.path.expanduser(path)
    if path.startswith(("~", "$")):
        raise ConfigError(
            f"the path of {url!r} begins with {path.partition('/')[0]!r}, which a shell would have"
            " replaced: write an absolute path"
        )
    try:
        path = os.path.abspath(path)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{url!r} has a relative path, and the current directory does not exist any more: name"
            " an absolute path"
        ) from error
    query = f"?{parts.query}" if parts.query else ""
    fragment = f"#{parts.fragment}" if parts.fragment else ""
    return f"sqlite://{quote(path)}{query}{fragment}"


def without_password(url: str) -> str:
    """The URL without its secrets, for output.

    >>> without_password("postgresql://app:secret@db:5432/x?sslmode=require")
    'postgresql://app:…@db:5432/x?sslmode=require'
    >>> without_password("doyen://secret@h1:7400"), without_password("nats://h1:4222")
    ('doyen://…@h1:7400', 'nats://h1:4222')
    """
    parts = split_url(url)
    if cuts_a_secret(parts):
        name, colon, _ = parts.netloc.partition(":")
        user = f"{name}:" if colon else ""
        return f"{parts.scheme}://{user}{HIDDEN}@{url.rpartition('@')[2]}"
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    if at and colon:
        parts = parts._replace(netloc=f"{name}:{HIDDEN}@{host}")
    elif at and parts.scheme in SECRET_USERS:
        parts = parts._replace(netloc=f"{HIDDEN}@{host}")
    options = parts.query.split("&")
    if any(map(_is_secret, options)):
        shown = [
            f"{each.partition('=')[0]}={HIDDEN}" if _is_secret(each) else each for each in options
        ]
        parts = parts._replace(query="&".join(shown))
    elif not at:
        return url  # geturl would normalise it
    return parts.geturl()


def _is_secret(option: str) -> bool:
    from urllib.parse import unquote

    name, _, value = option.partition("=")
    by_name = re.search("password|secret", name) and not name.endswith("_file")
    return bool(by_name) or "@" in unquote(value)


def _database_url(value: str, environ: Mapping[str, str] = os.environ) -> str:
    """DATABASE_URL, if doyen can elect in that database."""
    scheme = canonical_scheme(split_url(value).scheme)
    return value if scheme in ("postgresql", "mysql") else ""


def _etcdctl_endpoints(value: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL for the variables of etcdctl.

    >>> _etcdctl_endpoints("https://h1:2379,https://h2:2379", {"ETCDCTL_CACERT": "/etc/ca.pem"})
    'etcd://h1:2379,h2:2379?tls=true&ca=/etc/ca.pem'
    """
    from urllib.parse import quote, urlencode

    endpoints = [endpoint.strip() for endpoint in value.split(",")]
    secure = {endpoint.startswith("https://") for endpoint in endpoints if endpoint}
    if len(secure) > 1:
        raise ConfigError(
            "ETCDCTL_ENDPOINTS has endpoints with https:// and without, and doyen uses TLS for all"
            " members or for none: give all of them the same scheme, or set DOYEN_STORE"
        )
    hosts = ",".join(re.sub("^https?://", "", endpoint).rstrip("/") for endpoint in endpoints)
    names = {"ca": "ETCDCTL_CACERT", "cert": "ETCDCTL_CERT", "key": "ETCDCTL_KEY"}
    options = {"tls": "true"} if True in secure else {}
    options |= {name: environ[each] for name, each in names.items() if environ.get(each)}
    user, colon, password = environ.get("ETCDCTL_USER", "").partition(":")
    password = password if colon else environ.get("ETCDCTL_PASSWORD", "")
    login = f"{quote(user, safe='')}:{quote(password, safe='')}@" if user else ""
    query = f"?{urlencode(options, safe='/')}" if options else ""
    return f"etcd://{login}{hosts}{query}"


def _zk_hosts(value: str, environ: Mapping[str, str] = os.environ) -> str:
    """The URL for ZooKeeper's own form of a connection string, `h1:2181,h2:2181/chroot`."""
    return f"zookeeper://{value}"


_CONVERSIONS: dict[str, Callable[[str], str]] = {
    "DATABASE_URL": _database_url,
    "ETCDCTL_ENDPOINTS": _etcdctl_endpoints,
    "ZK_HOSTS": _zk_hosts,
}
"""Variables that other programs read, and how their values become URLs; "" if they cannot."""
