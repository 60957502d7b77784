"""`doyen dash` and `doyen verify --html` as commands."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from doyen.cli import main

DOYEN = [sys.executable, "-c", "from doyen.cli import main; raise SystemExit(main())"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_serves_until_it_is_interrupted(store: str, number: signal.Signals, code: int) -> None:
    command = [*DOYEN, "dash", "--store", store, "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = json.loads(process.stdout.readline())
            assert said["store"] == store
            with urllib.request.urlopen(said["url"], timeout=20) as answer:
                assert b"<title>doyen</title>" in answer.read()
            # A stream that is open does not keep it from ending.
            with urllib.request.urlopen(f"{said['url']}api/stream", timeout=20) as stream:
                assert b"event: hello" in stream.readline()
                process.send_signal(number)
                assert process.wait(20) == code
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_an_address_in_use_is_an_error_of_usage(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["dash", "--store", store, "--listen", "nowhere"]) == 2
    assert "HOST:PORT" in capsys.readouterr().err


def test_no_address_is_printed_for_a_store_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = f"sqlite://{tmp_path}/absent.db"
    assert main(["dash", "--store", absent, "--listen", "127.0.0.1:0"]) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "absent.db" in printed.err


def test_a_store_of_an_unknown_kind_is_an_error_of_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["dash", "--store", "nothing://x", "--listen", "127.0.0.1:0"]) == 2
    assert "no store for nothing://" in capsys.readouterr().err


def test_without_the_extra_it_says_how_to_install_it(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["dash", "--store", store]) == 2
    assert "pip install 'doyen[web]'" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_an_error_of_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text("")
    page = tmp_path / "absent" / "report.html"
    assert main(["verify", str(tmp_path / "log"), "--html", str(page)]) == 2
    assert "cannot be written" in capsys.readouterr().err
