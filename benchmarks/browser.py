"""A headless Chromium of this machine, for what looks at pages; nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class NoBrowser(Exception):
    """Why there is none."""


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Raises NoBrowser: none is installed, none starts, or playwright is missing."""
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise NoBrowser("playwright is not installed; the extra dev has it: pip install -e '.[dev]'") from error
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        raise NoBrowser(f"no browser on this machine: none of {', '.join(BROWSERS)}")
    with sync_playwright() as playwright:
        try:
            # Without the sandbox, which root may not use; the pages are our own.
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            raise NoBrowser(f"{found} does not start: {error.message.splitlines()[0]}") from error
        yield browser
        browser.close()
