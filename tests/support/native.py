"""The kernels in C++ for tests, which are skipped where no compiler can build them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.ir import Attr
from pipeline.ops.aten import call_attrs
from pipeline.runtime.kernels import Launch, NativeLibrary, load_library
from pipeline.runtime.kernels.aten import launch_native, read_call

Tensors = Sequence[torch.Tensor]


def native_library() -> NativeLibrary:
    """The library; skips the test where this machine cannot build it."""
    try:
        return load_library()
    except UsageError as error:
        pytest.skip(f"the kernels in C++ cannot be built here: {error}")


def bind_native(operator: str, ins: Tensors, outs: Tensors, **given: Attr) -> Launch | None:
    """The launch of a call of torch's `operator` by a kernel in C++; None where torch takes it."""
    call = read_call({"op": operator, "call": call_attrs(operator, len(ins), given)}).call(ins)
    return launch_native(native_library(), call, outs)
