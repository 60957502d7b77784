"""The pytest plugin.

It is loaded in every pytest run where doyen is installed, so it imports nothing of doyen.
"""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("doyen.testing.conformance")


@pytest.fixture
def store_harness() -> object:
    """The store that `doyen.testing.StoreConformance` tests. Override this fixture."""
    raise pytest.UsageError(
        "StoreConformance needs a fixture named store_harness, in the test class or a conftest,"
        " that returns a doyen.testing.StoreHarness for your store"
    )
