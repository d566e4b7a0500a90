"""The kernels in C++, or a reason why there are none; torch has one thread, since with more it keeps what is large."""

from collections.abc import Iterator

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.runtime.kernels import NativeLibrary, load_library


@pytest.fixture(scope="session")
def library() -> NativeLibrary:
    try:
        return load_library()
    except UsageError as error:
        pytest.skip(f"the kernels in C++ cannot be built here: {error}")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
