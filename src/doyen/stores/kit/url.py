"""Store URLs: hosts, credentials, options with types and bounds, TLS files.

    scheme://user:password@h1,h2:2379,[::1]:2379/path?connect_timeout_s=3&ca=/etc/ca.pem

Every function takes a `StoreURL` and raises `ConfigError` for what cannot work, naming the option.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote

from doyen.errors import ConfigError
from doyen.stores.kit.durations import parse_duration
from doyen.stores.port import StoreURL

if TYPE_CHECKING:
    import ssl

TLS_OPTIONS = ("tls", "ca", "cert", "key")

_LARGEST = 2**62 - 1


class Host(NamedTuple):
    """A server of the URL. The name of an IPv6 address has no brackets; the text form has them.

    >>> str(Host("::1", 2379))
    '[::1]:2379'
    """

    name: str
    port: int

    def __str__(self) -> str:
        return f"[{self.name}]:{self.port}" if ":" in self.name else f"{self.name}:{self.port}"


def renamed(url: StoreURL, names: Mapping[str, str], ignored: Collection[str] = ()) -> StoreURL:
    """The URL with options of other clients under doyen's names, and without those that are
    `ignored`, because doyen needs none of them or decides itself.

    >>> other = StoreURL.parse("mysql://h/x?ssl_ca=/ca.pem&charset=utf8mb4")
    >>> renamed(other, {"ssl_ca": "ca"}, ["charset"]).options
    {'ca': '/ca.pem'}
    """
    options: dict[str, str] = {}
    for name, value in url.options.items():
        if name in ignored:
            continue
        known = names.get(name, name)
        if known in options:
            raise ConfigError(f"{name} and {known} say the same thing: give one of them")
        options[known] = value
    return replace(url, options=options)


def hosts(url: StoreURL, default_port: int, *, empty: str | None = None) -> tuple[Host, ...]:
    """The servers of the URL. With `empty`, a host may be empty and has that name.

    >>> [str(host) for host in hosts(StoreURL.parse("etcd://me:secret@h1,h2:9,[::1]/app"), 2379)]
    ['h1:2379', 'h2:9', '[::1]:2379']
    """
    if url.parts.netloc in ("http:", "https:"):
        raise ConfigError(
            f"{url.parts.scheme}:// is followed by {url.parts.netloc}//: leave that out; the option"
            " tls=true encrypts"
        )
    found = []
    for text in url.parts.netloc.rpartition("@")[2].split(","):
        name, colon, port = text.rpartition(":")
        if not colon or port.endswith("]"):
            name, port = text, str(default_port)
        bracketed = name.startswith("[") and name.endswith("]")
        if (not name and empty is None) or (":" in name and not bracketed):
            raise ConfigError(
                f"{text!r} is not a host: write {url.parts.scheme}://h1,h2:{default_port},"
                f"[::1]:{default_port}; the port is optional"
            )
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ConfigError(f"a port is a number from 1 to 65535, not {port!r}")
        found.append(Host(unquote(name.strip("[]")) or empty or "", int(port)))
    return tuple(found)


def login(url: StoreURL) -> tuple[str, str | None]:
    """The user and the password, decoded. The password is None if there is no colon.

    >>> login(StoreURL.parse("etcd://me:p%40ss@h1")), login(StoreURL.parse("etcd://h1"))
    (('me', 'p@ss'), ('', None))
    """
    user, colon, password = url.parts.netloc.rpartition("@")[0].partition(":")
    return unquote(user), unquote(password) if colon else None


def number(
    url: StoreURL, name: str, default: float, low: float = 0, high: float = _LARGEST
) -> float:
    """The value of an option that is a duration from `low` to `high`, in seconds.

    >>> number(StoreURL.parse("etcd://h1?connect_timeout_s=500ms"), "connect_timeout_s", 3.0)
    0.5
    """
    try:
        value = parse_duration(url.options.get(name, str(default)))
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise _out_of_bounds(url, name, "a number", low, high)
    return value


def whole_number(url: StoreURL, name: str, default: int = 0, high: int = _LARGEST) -> int:
    """The value of an option that is a whole number from 0 to `high`, without rounding."""
    text = url.options.get(name, str(default))
    if not (text.isascii() and text.isdigit() and int(text) <= high):
        raise _out_of_bounds(url, name, "a whole number", 0, high)
    return int(text)


def _out_of_bounds(url: StoreURL, name: str, kind: str, low: float, high: float) -> ConfigError:
    bounds = f"of {low:g} or more" if high == _LARGEST else f"from {low:g} to {high:g}"
    return ConfigError(f"{name} is {kind} {bounds}, not {url.options[name]!r}")


def choice(url: StoreURL, name: str, default: str, *allowed: str) -> str:
    """The value of an option that is one of a few words."""
    value = url.options.get(name, default)
    if value not in allowed:
        raise ConfigError(f"{name} is {' or '.join(filter(None, allowed))}, not {value!r}")
    return value


def read_file(url: StoreURL, name: str) -> bytes | None:
    """The content of the file that an option names; None without the option."""
    path = url.options.get(name)
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={path} cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class TLSFiles:
    """The files of a TLS connection: the authority's certificates, the client's certificate and
    its key."""

    ca: str | None
    cert: str | None
    key: str | None

    def context(self) -> ssl.SSLContext:
        """A context that verifies the server and presents the client's certificate."""
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert:
                context.load_cert_chain(self.cert, self.key)
        except OSError as error:  # SSLError is a subclass
            raise ConfigError(f"ca, cert or key cannot be used: {error}") from error
        return context


def tls_files(
    url: StoreURL, *, default: str = "", implied: bool = True, combined: bool = False
) -> TLSFiles | None:
    """The files for TLS; None if the connection is not encrypted.

    `default` is the value of a missing `tls`. With `implied`, ca, cert or key turn TLS on; without,
    they need `tls=true`. With `combined`, the key may be in the certificate's file.
    """
    wanted = choice(url, "tls", default, "", "true", "false")
    files = TLSFiles(*(url.options.get(name) for name in ("ca", "cert", "key")))
    given = any((files.ca, files.cert, files.key))
    if wanted != "true":
        if given and wanted == "false":
            raise ConfigError("tls=false goes with none of ca, cert and key: leave them out")
        if given and not implied:
            raise ConfigError("ca, cert and key go with tls=true")
        if not given:
            return None
    if (files.key and not files.cert) or (files.cert and not files.key and not combined):
        raise ConfigError("cert and key go together: a certificate and its key")
    return files


@contextmanager
def requires(extra: str, library: str, scheme: str | None = None) -> Iterator[None]:
    """Turn an `ImportError` into the advice to install the extra that has the library."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f'{scheme or extra}:// needs {library} ({error}): pip install "doyen[{extra}]"'
        ) from error
