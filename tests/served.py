"""A quorum of `doyen serve` processes, as an operator has it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from candidates import DOYEN
from nodes import addresses

PATIENCE_S = 30.0


class Served:
    """One node in a process of its own."""

    def __init__(
        self, name: str, address: str, command: list[str], log: Path | None = None
    ) -> None:
        self.name, self.address, self._command, self._log = name, address, command, log
        self.start()

    def start(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        with (self._log or Path(os.devnull)).open("a") as log:
            self.process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        self._reader.start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.heard(line)

    def heard(self, line: str) -> None:
        """Runs on a thread, for each line that the process prints."""
        self._lines.put(line)

    def hear(self, event: str, **fields: Any) -> dict[str, Any]:
        """Wait until it prints this event."""
        while True:
            line = json.loads(self._lines.get(timeout=PATIENCE_S))
            self.events.append(line)
            if line["event"] == event and fields.items() <= line.items():
                found: dict[str, Any] = line
                return found

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def stop(self) -> int:
        """In good order; its exit code."""
        self.process.terminate()
        return self.process.wait(PATIENCE_S)


class Quorum:
    """Some of them."""

    def __init__(self, folder: Path, count: int = 3, *options: str, cluster: str = "test") -> None:
        self._folder, self._options, self.cluster = folder, options, cluster
        self.peers = {f"n{number}": where for number, where in enumerate(addresses(count), 1)}
        self.nodes: dict[str, Served] = {}

    @property
    def url(self) -> str:
        return f"doyen://{','.join(self.peers.values())}"

    @property
    def peers_text(self) -> str:
        return ",".join(f"{name}={where}" for name, where in self.peers.items())

    def start(self, name: str, *options: str) -> Served:
        options = options if "--join" in options else ("--found", *options)
        command = [*DOYEN, "serve", "--json", "--id", name, "--cluster", self.cluster]
        command += ["--peers", self.peers_text, "--data-dir", str(self._folder / name)]
        node = Served(name, self.peers[name], [*command, *self._options, *options])
        self.nodes[name] = node
        node.hear("listening")
        return node

    def join(self, name: str) -> Served:
        (self.peers[name],) = addresses(1)
        return self.start(name, "--join")

    def leader(self) -> Served:
        """Whoever says of itself that it leads; waits until there is one."""
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            for node in self.nodes.values():
                try:
                    with urllib.request.urlopen(f"http://{node.address}/leader", timeout=1):
                        return node
                except urllib.error.HTTPError as refusal:
                    refusal.close()
                except OSError:
                    continue
        raise TimeoutError("there is no leader")

    def __enter__(self) -> Self:
        try:
            for name in self.peers:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes.values():
            if node.process.poll() is None:
                node.thaw()
                node.kill()
