"""A headless Chromium for tests of pages; without one, a reason to skip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from benchmarks.browser import NoBrowser, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture
def browser() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_browser())
        except NoBrowser as why:
            pytest.skip(str(why))
        yield opened
