"""The pytest plugin.

It is loaded in every pytest run where doyen is installed, so it imports nothing of doyen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from doyen.testing.controlled import ControlledStore

pytest.register_assert_rewrite("doyen.testing.conformance")


@pytest.fixture
def store_harness() -> object:
    """The store that `doyen.testing.StoreConformance` tests. Override this fixture."""
    raise pytest.UsageError(
        "StoreConformance needs a fixture named store_harness, in the test class or a conftest,"
        " that returns a doyen.testing.StoreHarness for your store"
    )


@pytest.fixture
def doyen_store() -> Iterator[ControlledStore]:
    """A store whose leaders lose, freeze and cannot reach it on command; DOYEN_STORE names it. See
    `doyen.testing.ControlledStore`."""
    from doyen.testing.controlled import ControlledStore

    with ControlledStore().installed() as store:
        yield store
