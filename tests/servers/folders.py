"""Temporary directories that are removed at the end, and programs that every user can read."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from .fetch import Program
from .janitor import janitor


def held_folder(prefix: str, owner: str | None = None) -> Path:
    """Create a temporary directory that is removed when this process ends, even if it is killed."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    janitor.hold_folder(folder)
    if owner:
        shutil.chown(folder, owner)
    return folder


def release_folder(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    janitor.release_folder(folder)


_readable: dict[Path, Path] = {}


def readable(program: Program) -> Program:
    """The program at a path that every user can read. Other users cannot read a cache in the home
    directory of root, so the program is copied."""
    if program.tree is None or all(folder.stat().st_mode & 1 for folder in program.path.parents):
        return program
    if program.tree not in _readable:
        folder = held_folder("doyen-tree-")
        folder.chmod(0o755)
        shutil.copytree(program.tree, folder / "tree", symlinks=True, copy_function=_link)
        _readable[program.tree] = folder / "tree"
    tree = _readable[program.tree]
    return Program(tree / program.path.relative_to(program.tree), tree)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
