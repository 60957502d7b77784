"""Execute the blocks of a document in order, in one directory, with a shell for each terminal.

- A block of Python that begins with `# name.py` is saved under that name.
- A block of shell that begins with `# terminal 1` is typed into that terminal.
- A block of `text` must then appear in one of the terminals: its lines in this order, possibly with
  other lines in between. A number matches any number, `…` any text, spaces any spaces.
- A block of shell without a `text` block after it must succeed.
- The ports of nodes and pages (74xx) are replaced by free ones, the same in all blocks.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from servers import free_port

PATIENCE_S = 30.0
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\w+\.py)\n")
_TERMINAL = re.compile(r"# terminal (\d)\n")
_PORT = re.compile(r"(?<=:)74\d\d\b")


class Block(NamedTuple):
    """A fenced block of a document."""

    where: str
    language: str
    text: str
    section: str

    @property
    def file(self) -> str | None:
        """The file name under which the block is saved."""
        found = _FILE.match(self.text) if self.language == "python" else None
        return found and found[1]

    @property
    def terminal(self) -> str | None:
        """The terminal into which the block is typed."""
        found = _TERMINAL.match(self.text) if self.language == "sh" else None
        return found and found[1]


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a document, in order."""
    text = path.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()]
        section = re.findall(r"^## (.*)$", before, re.MULTILINE)[-1:] or [""]
        yield Block(f"{path.name}:{before.count(chr(10)) + 1}", found[1], found[2], section[0])


class FreePorts:
    """Replaces the ports of documents: another program may have them, or another test."""

    def __init__(self) -> None:
        self._free: dict[str, int] = {}

    def in_place(self, text: str) -> str:
        return _PORT.sub(lambda found: str(self._of(found[0])), text)

    def _of(self, port: str) -> int:
        if port not in self._free:
            self._free[port] = free_port()
        return self._free[port]


class Terminal:
    """A shell and its output."""

    def __init__(self, folder: Path) -> None:
        self._new = threading.Condition()
        self._lines: list[str] = []
        self._read_up_to = 0
        self._shell = subprocess.Popen(
            ["sh"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONWARNINGS": "error",
                "COLUMNS": "100",
            },
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._shell.stdout is not None
        with self._shell.stdout:
            for line in self._shell.stdout:
                with self._new:
                    self._lines.append(line.rstrip("\n"))
                    self._new.notify_all()

    def type(self, text: str) -> None:
        """Send commands to the shell."""
        assert self._shell.stdin is not None
        self._shell.stdin.write(text)
        self._shell.stdin.flush()

    def see(self, patterns: list[str], within_s: float) -> bool:
        """Whether lines that match all patterns, in order, are printed after those seen before."""
        deadline = monotonic() + within_s
        with self._new:
            while (end := self._find(patterns)) is None:
                if not self._new.wait(max(0.0, deadline - monotonic())):
                    return False
            self._read_up_to = end
            return True

    def _find(self, patterns: list[str]) -> int | None:
        wanted = list(patterns)
        for number, line in enumerate(self._lines[self._read_up_to :], self._read_up_to + 1):
            if re.fullmatch(wanted[0], " ".join(line.split())):
                wanted.pop(0)
                if not wanted:
                    return number
        return None

    def __str__(self) -> str:
        with self._new:
            return "\n".join(self._lines)

    def close(self) -> None:
        """End the shell and all processes that it has started."""
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.wait()
        self._reader.join()
        assert self._shell.stdin is not None
        self._shell.stdin.close()


class Story:
    """The execution of a document or of one of its sections."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = FreePorts()
        self._terminals: dict[str, Terminal] = {}

    def run(self, document: list[Block]) -> None:
        """Execute the blocks one after the other."""
        document = [block._replace(text=self._ports.in_place(block.text)) for block in document]
        for block, after in zip(document, [*document[1:], None], strict=True):
            if block.file:
                (self._folder / block.file).write_text(block.text)
            elif block.terminal:
                answered = after is not None and after.language == "text"
                self._type(block, block.terminal, must_end=not answered)
            elif block.language == "text":
                self._expect(block)

    def _type(self, block: Block, name: str, *, must_end: bool) -> None:
        terminal = self._terminals.get(name)
        if terminal is None:
            terminal = self._terminals[name] = Terminal(self._folder)
        if not must_end:
            terminal.type(block.text)
            return
        done = f"[{block.where} ended with 0]"
        terminal.type(f'{block.text}echo "[{block.where} ended with $?]"\n')
        if not terminal.see([re.escape(done)], PATIENCE_S):
            raise AssertionError(f"{block.where} did not succeed:\n\n{self}")

    def _expect(self, block: Block) -> None:
        patterns = [_pattern(line) for line in block.text.splitlines() if line.strip()]
        deadline = monotonic() + PATIENCE_S
        while monotonic() < deadline:
            if any(each.see(patterns, 0.02) for each in self._terminals.values()):
                return
        raise AssertionError(f"{block.where} was not printed:\n\n{block.text}\n{self}")

    def __str__(self) -> str:
        return "\n\n".join(f"terminal {name}:\n{each}" for name, each in self._terminals.items())

    def close(self) -> None:
        """Close all terminals."""
        for terminal in self._terminals.values():
            terminal.close()


def _pattern(line: str) -> str:
    words = re.escape(" ".join(line.split())).replace("…", ".*")
    return re.sub(r"(?<![A-Za-z\d])\d+", r"\\d+", words)
