"""The network that trials of a quorum cut: what passes, what does not, and what is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from servers import Lan, Skipped, Unavailable
from servers.janitor import is_running

HEAR = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
    ear.bind((sys.argv[1], 9))
    print(flush=True)
    while (text := ear.recv(100)) != b"enough":
        print(text.decode(), flush=True)
"""
SAY = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as mouth:
    mouth.sendto(sys.argv[2].encode(), (sys.argv[1], 9))
"""


def send(lan: Lan, source: str, target: str, text: str) -> None:
    command = [*lan.inside(source), sys.executable, "-S", "-c", SAY, lan.address(target), text]
    subprocess.run(command, check=True, timeout=30)


def test_what_is_cut_does_not_pass() -> None:
    with Lan("a", "b", "c") as lan:
        ear = subprocess.Popen(
            [*lan.inside("b"), sys.executable, "-S", "-c", HEAR, lan.address("b")],
            stdout=subprocess.PIPE,
            text=True,
        )
        with ear:
            assert ear.stdout is not None
            ear.stdout.readline()
            send(lan, "a", "b", "whole")
            lan.cut("b", "a")
            send(lan, "a", "b", "the other way")
            lan.cut("a", ["b", "c"])
            send(lan, "a", "b", "never heard")
            send(lan, "c", "b", "from another")
            lan.heal()
            send(lan, "a", "b", "healed")
            lan.part(["a"], ["b", "c"])
            send(lan, "a", "b", "never heard")
            send(lan, "c", "b", "enough")
            heard = ear.stdout.read().splitlines()
        pids = [lan._router, *lan._pids.values()]
    assert heard == ["whole", "the other way", "from another", "healed"]
    assert not any(map(is_running, pids))


def test_where_there_are_no_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOYEN_SKIP_STORES", "netns")
    with pytest.raises(Skipped), Lan("a"):
        pass
    monkeypatch.delenv("DOYEN_SKIP_STORES")
    denied = tmp_path / "unshare"
    denied.write_text("#!/bin/sh\necho unshare: not permitted >&2\nexit 1\n")
    denied.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin:/usr/sbin:/sbin")
    with pytest.raises(Unavailable, match=r"DOYEN_SKIP_STORES=netns \(unshare: not permitted\)"):
        Lan("a").__enter__()
