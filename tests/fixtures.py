"""Fixtures that are alike in many modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

import pytest


def shared(
    start: Callable[[], AbstractContextManager[Any]],
    scope: Literal["function", "module", "session"] = "module",
) -> Any:
    """A server, started for the first test that needs it and closed after the last. The fixture has
    the name of the variable to which it is assigned."""

    @pytest.fixture(scope=scope)
    def server() -> Iterator[Any]:
        with start() as server:
            yield server

    return server
