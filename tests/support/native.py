"""The kernels in C++ for tests, which are skipped where no compiler can build them."""

from __future__ import annotations

import pytest

from pipeline.errors import UsageError
from pipeline.runtime.kernels import NativeLibrary, load_library


def native_library() -> NativeLibrary:
    """The library; skips the test where this machine cannot build it."""
    try:
        return load_library()
    except UsageError as error:
        pytest.skip(f"the kernels in C++ cannot be built here: {error}")
