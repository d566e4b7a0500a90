"""The gradient of attention with dropout, which torch has for CUDA alone, on fake tensors of a CUDA device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.runtime.devices import TARGET, Device
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.aten.fast_paths import FAST_PATHS
from pipeline.runtime.recording import RecordingDevice

GRADIENT = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default


class CallsOfGradient(TorchDispatchMode):
    """Where the seed and the offset of each call of the operator lie."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[set[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is GRADIENT:
            self.places.append({tensor.device.type for tensor in args[7:9]})
        return func(*args, **(kwargs or {}))


class DeviceInRecord(RecordingDevice):
    def is_recording(self) -> bool:
        return True


@pytest.mark.parametrize(("device", "place"), [(RecordingDevice(2**10), "cpu"), (DeviceInRecord(2**10), "cuda")])
def test_random_numbers_begin_where_torch_reads_it(device: Device, place: str) -> None:
    with FakeTensorMode(), CallsOfGradient() as calls:
        x, sums = torch.empty(2, 4, 32, 16, device="cuda"), torch.empty(2, 4, 32, device="cuda")
        number = torch.empty((), dtype=torch.int64, device="cuda")
        args = (x, x, x, x, None, x, sums, number, number, 0.1, [True, True, True, False])
        names = [parameter.name for parameter in GRADIENT._schema.arguments]
        call = AtenCall(str(GRADIENT), GRADIENT, dict(zip(names, args, strict=False)), args, {}, range(4))
        token = TARGET.set(device)
        try:
            launch = FAST_PATHS[str(GRADIENT)](call, [torch.empty_like(x) for _ in range(4)])
        finally:
            TARGET.reset(token)
        assert launch is not None
        launch()
    assert calls.places == [{place}]
