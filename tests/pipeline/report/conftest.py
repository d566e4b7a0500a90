from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from benchmarks.browser import NoBrowser, open_browser
from tests.support.run_fixtures import config_file, config_in, running_workers

if TYPE_CHECKING:
    from playwright.sync_api import Browser


__all__ = ["browser", "config_file", "config_in", "running_workers"]


@pytest.fixture
def browser() -> Iterator[Browser]:
    with ExitStack() as stack:
        try:
            opened = stack.enter_context(open_browser())
        except NoBrowser as why:
            pytest.skip(str(why))
        yield opened
