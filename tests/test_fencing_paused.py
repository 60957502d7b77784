"""A former leader is paused, another leader writes, and then the former leader resumes and writes.

The processes are real and are stopped by a real signal: between the last check of leadership and
the write, then before each single step of a guarded write. Without the guard, the same pause lets
the stale write succeed, so these tests can fail.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
import uvicorn

from doyen.errors import StaleToken
from doyen.fencing import FileTokens, GuardedFile, SQLGuard, asgi, token_headers, wsgi

REFUSED = 3

PRELUDE = f"""
import os, signal, sqlite3, sys, threading
from pathlib import Path
from doyen.errors import StaleToken
from doyen.fencing import GuardedFile, SQLGuard

REFUSED = {REFUSED}

def pause():
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

def refusable(action):
    try:
        action()
    except StaleToken:
        sys.exit(REFUSED)
"""

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", PRELUDE + script, *map(str, arguments)]
        process = subprocess.Popen(command)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()


def stopped(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process has stopped (True) or ended (False)."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    if os.WIFSTOPPED(status):
        return True
    process.returncode = os.waitstatus_to_exitcode(status)
    return False


def wake(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGCONT)
    return process.wait(timeout=30)


STALE_FILE = """
path, guarded = sys.argv[1], sys.argv[2] == "guarded"
still_leader = True
pause()
if still_leader and guarded:
    refusable(lambda: GuardedFile(path).write(1, b"stale"))
elif still_leader:
    Path(path).write_bytes(b"stale")
"""

STALE_SQL = """
path, guarded = sys.argv[1], sys.argv[2] == "guarded"
connection = sqlite3.connect(path)
def write():
    with connection:
        if guarded:
            SQLGuard().check(connection, "state", 1)
        connection.execute("UPDATE state SET content = 'stale'")
still_leader = True
pause()
if still_leader:
    refusable(write)
"""

STALE_REQUEST = """
import urllib.error, urllib.request
from doyen.fencing import token_headers
url = sys.argv[1]
request = urllib.request.Request(url, b"stale", headers=token_headers(1), method="PUT")
still_leader = True
pause()
try:
    urllib.request.urlopen(request).close()
except urllib.error.HTTPError as error:
    assert error.code == 412 and b"seen the later token 2" in error.read(), error
    sys.exit(REFUSED)
"""


class State:
    """What a service keeps, for ASGI and for WSGI."""

    def __init__(self) -> None:
        self.content = b"first"

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        self.content = (await receive())["body"]
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    def wsgi(self, environ: Any, start_response: Any) -> list[bytes]:
        self.content = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        start_response("204 No Content", [])
        return []


class Quiet(WSGIRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(kind: str, app: Any) -> Iterator[str]:
    """Serve an application on a thread."""
    if kind == "wsgi":
        with (
            make_server("127.0.0.1", 0, app, handler_class=Quiet) as server,
            thread(partial(server.serve_forever, 0.01), stop=server.shutdown),
        ):
            yield f"http://127.0.0.1:{server.server_port}/"
        return
    options: dict[str, Any] = {"interface": "asgi3", "lifespan": "off", "log_level": "warning"}
    uvicorn_server = uvicorn.Server(uvicorn.Config(app, port=0, **options))
    with thread(uvicorn_server.run, stop=partial(setattr, uvicorn_server, "should_exit", True)):
        while not uvicorn_server.started:
            time.sleep(0.01)
        port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/"


@contextmanager
def thread(run: Callable[[], None], stop: Callable[[], None]) -> Iterator[None]:
    running = threading.Thread(target=run, daemon=True)
    running.start()
    try:
        yield
    finally:
        stop()
        running.join(30)


@pytest.mark.parametrize("kind", ["asgi", "wsgi"])
@pytest.mark.parametrize(("how", "content"), [("guarded", b"new"), ("bare", b"stale")])
def test_a_service_and_a_leader_that_wakes_too_late(
    start: Start, tmp_path: Path, kind: str, how: str, content: bytes
) -> None:
    state = State()
    app = getattr(state, kind)
    if how == "guarded":
        middleware: Any = {"asgi": asgi, "wsgi": wsgi}[kind].FencingMiddleware
        app = middleware(app, resource="state", tokens=FileTokens(tmp_path))
    with served(kind, app) as url:
        ex_leader = start(STALE_REQUEST, url)
        assert stopped(ex_leader)
        new = urllib.request.Request(url, b"new", headers=token_headers(2), method="PUT")
        urllib.request.urlopen(new).close()
        assert wake(ex_leader) == (REFUSED if how == "guarded" else 0)
    assert state.content == content


@pytest.mark.parametrize(("how", "content"), [("guarded", b"new"), ("bare", b"stale")])
def test_a_file_and_a_leader_that_wakes_too_late(
    start: Start, tmp_path: Path, how: str, content: bytes
) -> None:
    path = tmp_path / "state"
    GuardedFile(path).write(1, b"first")
    ex_leader = start(STALE_FILE, path, how)
    assert stopped(ex_leader)
    GuardedFile(path).write(2, b"new")
    assert wake(ex_leader) == (REFUSED if how == "guarded" else 0)
    assert path.read_bytes() == content


@pytest.mark.parametrize(("how", "content"), [("guarded", "new"), ("bare", "stale")])
def test_a_database_and_a_leader_that_wakes_too_late(
    start: Start, tmp_path: Path, how: str, content: str
) -> None:
    path = tmp_path / "app.db"
    guard = SQLGuard()
    with closing(sqlite3.connect(path)) as connection:
        guard.create(connection)
        connection.execute("CREATE TABLE state (content TEXT)")
        with connection:
            guard.check(connection, "state", 1)
            connection.execute("INSERT INTO state VALUES ('first')")
        ex_leader = start(STALE_SQL, path, how)
        assert stopped(ex_leader)
        with connection:
            guard.check(connection, "state", 2)
            connection.execute("UPDATE state SET content = 'new'")
        assert wake(ex_leader) == (REFUSED if how == "guarded" else 0)
        assert connection.execute("SELECT content FROM state").fetchall() == [(content,)]


# An audit hook reports each step that touches the file system; the process gets the signal
# just before the step of the given number.
STEP_BY_STEP = """
path, call, number, fate = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
steps = 0
def step(event, arguments):
    global steps
    if event in ("open", "os.listdir", "os.mkdir", "os.remove", "os.rename", "fcntl.flock"):
        steps += 1
        if steps == number:
            os.kill(os.getpid(), fate)
file = GuardedFile(path)
sys.addaudithook(step)
refusable(lambda: getattr(file, call)(2, b"+second"))
"""


@pytest.mark.parametrize("call", ["write", "append"])
def test_a_writer_paused_at_any_step_blocks_no_other_and_wins_nothing(
    start: Start, tmp_path: Path, call: str
) -> None:
    outcomes = set()
    for number in count(1):
        path = tmp_path / f"state-{number}"
        file = GuardedFile(path)
        file.write(1, b"first")
        paused = start(STEP_BY_STEP, path, call, number, int(signal.SIGSTOP))
        if not stopped(paused):
            assert paused.returncode == 0  # there are no more steps
            break
        landed = file.read() != b"first"
        getattr(file, call)(3, b"+third")
        expected = b"+third" if call == "write" else file.read()
        assert file.read() == expected
        code = wake(paused)
        assert code == (0 if landed else REFUSED), f"paused before step {number}"
        assert (file.read(), file.token) == (expected, 3), f"paused before step {number}"
        if call == "append":
            assert expected == (b"first+second+third" if landed else b"first+third")
        with pytest.raises(StaleToken):
            file.write(2, b"late")
        outcomes.add(landed)
    assert outcomes == {True, False}


def test_a_writer_killed_at_any_step_leaves_old_or_new(start: Start, tmp_path: Path) -> None:
    outcomes = set()
    for number in count(1):
        path = tmp_path / f"state-{number}"
        file = GuardedFile(path)
        file.write(1, b"first")
        killed = start(STEP_BY_STEP, path, "write", number, int(signal.SIGKILL))
        if killed.wait(timeout=30) == 0:
            break  # there are no more steps
        assert killed.returncode == -signal.SIGKILL
        outcomes.add(file.read())
        assert file.token in (1, 2)
        if file.read() == b"+second":
            assert file.token == 2
        file.write(2, b"again")
        with pytest.raises(StaleToken):
            file.write(1, b"late")
        file.write(3, b"third")
        assert file.read() == b"third"
        fence = path.with_name(path.name + ".fence")
        assert [left.name for left in fence.iterdir()] == ["3.claim"]
    assert outcomes == {b"first", b"+second"}


RIVAL = """
file, first = GuardedFile(sys.argv[1]), int(sys.argv[2])
for token in range(first, 400, 4):
    try:
        file.write(token, str(token).encode())
    except StaleToken:
        pass
"""


def test_seen_from_outside_the_token_never_goes_back(start: Start, tmp_path: Path) -> None:
    file = GuardedFile(tmp_path / "state")
    file.write(0, b"0")
    rivals = [start(RIVAL, file.path, first) for first in range(1, 5)]
    highest = 0
    while any(rival.poll() is None for rival in rivals):
        seen = int(file.read())
        assert seen >= highest
        highest = seen
    assert [rival.returncode for rival in rivals] == [0] * 4
    assert (file.read(), file.token) == (b"399", 399)


SIBLING = """
for _ in range(50):
    GuardedFile(sys.argv[1]).append(7, b"x")
"""


def test_writers_of_one_token_take_turns(start: Start, tmp_path: Path) -> None:
    file = GuardedFile(tmp_path / "log")
    siblings = [start(SIBLING, file.path) for _ in range(3)]
    assert [sibling.wait(timeout=60) for sibling in siblings] == [0] * 3
    assert file.read() == b"x" * 150
