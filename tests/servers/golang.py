"""Programs in Go, built from source with packages of Debian: the compiler and etcd's client."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path

from .fetch import Debian, Program, Recipe, Unavailable, cache_directory, locked, obtain

BUILT_WITHIN_S = 900.0

PACKAGES = (
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-etcd-server-dev",
    "golang-github-coreos-go-semver-dev",
    "golang-github-coreos-go-systemd-dev",
    "golang-github-coreos-pkg-dev",
    "golang-github-gogo-protobuf-dev",
    "golang-github-golang-protobuf-1-3-dev",
    "golang-github-google-uuid-dev",
    "golang-go.uber-atomic-dev",
    "golang-go.uber-multierr-dev",
    "golang-go.uber-zap-dev",
    "golang-golang-x-net-dev",
    "golang-golang-x-sys-dev",
    "golang-golang-x-text-dev",
    "golang-google-genproto-dev",
    "golang-google-grpc-dev",
)
"""The compiler, and what the client needs to be built."""

RECIPE = Recipe(
    engine="go",
    variable="DOYEN_GO_BIN",
    name="go",
    found=("usr/lib/go-*/bin/go",),
    # Packages of Go are installed as source below /usr/share.
    beside=("../../../share/gocode/src/go.etcd.io/etcd/clientv3/concurrency/election.go",),
    # Later suites have a later version of the client, under other names.
    sources=(Debian(PACKAGES, suite="bookworm", dependencies=False),),
)


def built(source: Path) -> Path:
    """The program that a file of Go source contains, built at the first call, which takes minutes
    on a busy machine."""
    go = obtain(RECIPE)
    text = source.read_bytes() + str(go.path).encode()
    cache = cache_directory().with_name("go")
    program = cache / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:10]}"
    with locked("go"):
        if not program.exists():
            cache.mkdir(parents=True, exist_ok=True)
            fresh = program.with_suffix(f".{os.getpid()}")
            _build(go, source, fresh, cache)
            fresh.rename(program)
    return program


def _build(go: Program, source: Path, program: Path, cache: Path) -> None:
    root = go.home.parent
    settings = {
        "GOROOT": str(root),
        "GOPATH": str(root.parents[1] / "share/gocode"),
        "GOCACHE": str(cache / "objects"),
        "GO111MODULE": "off",
        "GOFLAGS": "",
        "CGO_ENABLED": "0",  # no compiler for C is needed
    }
    try:
        done = subprocess.run(
            [str(go.path), "build", "-o", str(program), str(source)],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=BUILT_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise Unavailable(f"{source.name} was not built within {BUILT_WITHIN_S:g} s") from late
    if done.returncode:
        raise Unavailable(f"{source.name} cannot be built with {go.path}: {done.stderr.strip()}")
