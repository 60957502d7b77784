"""`doyen.testing` as users see it: its names, the cost of importing it, its pytest plugin."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import doyen.testing

PATIENCE_S = 60


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S
    )


def test_every_exported_name_exists() -> None:
    for name in doyen.testing.__all__:
        assert getattr(doyen.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        doyen.testing.Nothing  # noqa: B018


def test_the_plugin_and_doyen_do_not_import_the_testing_modules() -> None:
    program = """
import sys, doyen
assert not [name for name in sys.modules if name.startswith("doyen.testing")]
import doyen.testing.plugin
assert sorted(name for name in sys.modules if name.startswith("doyen.testing")) == [
    "doyen.testing", "doyen.testing.plugin"
]
"""
    assert python("-c", program).stderr == ""


def test_virtual_time_and_faults_need_no_pytest() -> None:
    program = """
import sys
from doyen.testing import FaultyStore, run_virtual
assert "pytest" not in sys.modules
"""
    assert python("-c", program).stderr == ""


def test_a_suite_without_a_harness_names_the_missing_fixture(tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(
        "from doyen.testing import StoreConformance\nclass TestMine(StoreConformance): pass\n"
    )
    run = python("-m", "pytest", "-q", "-k", "racers", cwd=tmp_path)
    assert run.returncode == 1
    assert "needs a fixture named store_harness" in run.stdout
