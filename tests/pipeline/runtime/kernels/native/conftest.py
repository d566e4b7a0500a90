"""The kernels in C++, or a reason why there are none."""

import pytest

from pipeline.errors import UsageError
from pipeline.runtime.kernels import NativeLibrary, load_library


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    try:
        return load_library()
    except UsageError as error:
        pytest.skip(f"the kernels in C++ cannot be built here: {error}")
