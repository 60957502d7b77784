"""Raft's behaviour, as transcripts (see `raft_transcript`).

`DOYEN_REWRITE=1 pytest tests/test_raft_transcripts.py` rewrites them; explain the difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from raft_transcript import play

FILES = sorted((Path(__file__).parent / "transcripts" / "raft").glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_transcript(path: Path) -> None:
    was = path.read_text(encoding="utf-8")
    played = play(was)
    if os.environ.get("DOYEN_REWRITE"):
        path.write_text(played, encoding="utf-8")
    assert played == path.read_text(encoding="utf-8")
