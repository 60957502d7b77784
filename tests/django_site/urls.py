"""The URLs of the project."""

from __future__ import annotations

from typing import Any

urlpatterns: list[Any] = []
