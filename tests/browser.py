"""A browser for tests of the web pages: Debian's Chromium, driven by Playwright.

One browser serves all tests of a file. Each page fails its test if it makes a request to another
origin than its own, or logs an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from servers.chromium import chromium, chromium_environment

WITHIN_MS = 30_000
expect.set_options(timeout=WITHIN_MS)

PICTURES = Path(os.environ.get("DOYEN_PICTURES", ""))
"""Where screenshots are written; by default nowhere."""
ARGUMENTS = (
    "--host-resolver-rules=MAP evil.example 127.0.0.1",
    "--disable-gpu",
    "--no-sandbox",  # containers and root have no user namespaces
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = chromium()
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program.path, env=dict(chromium_environment(program)), args=ARGUMENTS
        )
        try:
            yield started
        finally:
            started.close()


@contextmanager
def opened(
    browser: Browser, url: str, *, allowed_errors: tuple[str, ...] = (), **options: Any
) -> Iterator[Page]:
    """A page at an address. Its requests stay at its origin, and it logs no error."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 1000}, **options})
    context.set_default_timeout(WITHIN_MS)
    page = context.new_page()
    requests: list[str] = []
    errors: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on(
        "console", lambda message: errors.append(message.text) if message.type == "error" else None
    )
    try:
        page.goto(url)
        yield page
        origin = _origin(url)
        assert not [each for each in requests if _origin(each) != origin]
        assert not [
            each for each in errors if not any(allowed in each for allowed in allowed_errors)
        ]
    finally:
        context.close()


def _origin(url: str) -> tuple[str, str]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc


def picture(page: Page, name: str, **options: Any) -> None:
    """Take a screenshot, if `DOYEN_PICTURES` names a directory for them."""
    if str(PICTURES) != ".":
        page.screenshot(path=PICTURES / f"{name}.png", **options)
