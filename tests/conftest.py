"""What many tests of passes and of whole runs need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from passes.context import PassContext, open_context


@pytest.fixture(scope="session")
def bench() -> Iterator[PassContext]:
    """Workers and a folder, for all tests: they take seconds to start. A worker that dies is replaced."""
    with open_context() as opened:
        yield opened
