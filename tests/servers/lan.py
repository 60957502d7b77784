"""A network of hosts that can be partitioned, made of network namespaces, without privileges.

    with servers.Lan("n1", "n2", "n3", "clients") as lan:
        subprocess.Popen([*lan.inside("n1"), "doyen", "serve", ...])
        lan.cut("n1", "n2")
        lan.heal()

Every host has its own network namespace and one interface, which connects it to a router in
another namespace. The router forwards packets, or drops them silently between hosts that are cut
off from each other, as when a cable is unplugged. Each direction is cut separately.

This needs unprivileged user namespaces, `unshare` and `nsenter`. `ip` is fetched if it is not
installed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from .fetch import Debian, Program, Recipe, Unavailable, obtain
from .tally import fault

RECIPE = Recipe(
    engine="netns",
    variable="DOYEN_IP_BIN",
    name="ip",
    found=("sbin/ip", "usr/sbin/ip", "bin/ip", "usr/bin/ip"),
    sources=(Debian(("iproute2",)),),
)
_WAIT = ["sh", "-c", "echo; exec cat"]
"""Prints a line when it runs, and ends with its standard input, hence with its parent process."""


class Lan:
    """A router and its hosts."""

    def __init__(self, *hosts: str) -> None:
        self._hosts = hosts
        self._stack = ExitStack()
        self._program = Program(Path("ip"))
        self._router = 0
        self._pids: dict[str, int] = {}
        self._rules: list[str] = []

    def address(self, host: str) -> str:
        return f"10.79.{self._hosts.index(host) + 1}.2"

    def inside(self, host: str) -> list[str]:
        """The prefix of a command that runs it on this host."""
        return _enter(self._pids[host])

    @fault
    def cut(self, source: str | Iterable[str], target: str | Iterable[str]) -> None:
        """Drop all packets from the sources to the targets."""
        sources = [source] if isinstance(source, str) else source
        targets = [target] if isinstance(target, str) else [*target]
        rules = [
            f"from {self.address(one)} to {self.address(other)} blackhole"
            for one in sources
            for other in targets
            if one != other
        ]
        self._ip(*(f"rule add {rule}" for rule in rules))
        self._rules += rules

    @fault
    def part(self, *sides: Iterable[str]) -> None:
        """Drop all packets between these groups, in both directions."""
        groups = [[*side] for side in sides]
        for one in groups:
            for other in groups:
                if one is not other:
                    self.cut(one, other)

    def heal(self) -> None:
        """Remove all cuts."""
        rules, self._rules = self._rules, []
        self._ip(*(f"rule del {rule}" for rule in rules))

    def _ip(self, *commands: str) -> None:
        if commands:
            self._batch(self._router, *commands)

    def _batch(self, pid: int, *commands: str) -> None:
        """Configure the namespace of a process."""
        ip = [str(self._program.path), "-batch", "-"]
        _run([*_enter(pid), *ip], "\n".join(commands), self._program.environment())

    def __enter__(self) -> Self:
        self._program = obtain(RECIPE)
        try:
            self._start()
        except (OSError, subprocess.SubprocessError) as error:
            self._stack.close()
            raise Unavailable(
                "no network namespaces: install util-linux, and let users create namespaces (sysctl"
                " user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns; in a"
                " container --privileged), or leave netns out with"
                f" DOYEN_SKIP_STORES=netns ({error})"
            ) from error
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        self._router = self._hold(["unshare", "--user", "--map-root-user", "--net"])
        into = _enter(self._router)
        _run([*into, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])
        into.remove("--net")
        for number, host in enumerate(self._hosts, 1):
            pid = self._pids[host] = self._hold([*into, "unshare", "--net"])
            self._ip(
                f"link add v{number} type veth peer name eth0 netns {pid}",
                f"addr add 10.79.{number}.1/24 dev v{number}",
                f"link set v{number} up",
            )
            self._batch(
                pid,
                "link set lo up",
                f"addr add 10.79.{number}.2/24 dev eth0",
                "link set eth0 up",
                f"route add default via 10.79.{number}.1",
            )

    def _hold(self, command: list[str]) -> int:
        """Start a process that keeps a namespace alive."""
        process = subprocess.Popen(
            [*command, *_WAIT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)  # closes its pipes and waits
        assert process.stdout is not None
        assert process.stderr is not None
        if not process.stdout.readline():
            raise OSError(process.stderr.read().strip() or f"{command} ended at once")
        return process.pid

    def close(self) -> None:
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _enter(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--user", "--preserve-credentials", "--net", "--"]


def _run(command: list[str], words: str = "", environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(
        command,
        input=words,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, **(environment or {})},
    )
    if done.returncode:
        raise OSError(done.stderr.strip() or f"{command} failed")
