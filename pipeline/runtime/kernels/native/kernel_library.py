"""Launches of the kernels in `sources/`, as calls of one operator of torch for each number of operands."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs
from pipeline.runtime.kernels.launches import OverloadCall
from pipeline.runtime.kernels.threads import planned_threads

SHARED = 2**15
"""Numbers from which on torch shares them among its threads (`at::internal::GRAIN_SIZE`)."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernels, loaded. It stays loaded as long as the process lives, so addresses in launches stay right."""

    handle: ctypes.CDLL

    @property
    def panel(self) -> int:
        """Columns of a panel: two registers of numbers."""
        return ctypes.c_int.in_dll(self.handle, "panel_columns").value

    @property
    def lanes(self) -> int:
        """Numbers of a register."""
        return self.panel // 2

    def launch(
        self, kernel: str, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], settings: Sequence[float]
    ) -> Launch:
        """A launch that reads the addresses of its operands at each call, so these may be pointed elsewhere."""
        address = ctypes.cast(getattr(self.handle, kernel), ctypes.c_void_p).value
        overload = getattr(getattr(torch.ops.onnxline, f"call_{len(outs)}"), f"reads_{len(ins)}")
        return OverloadCall.bind(overload, address, _pack(settings), *outs, *ins)


NativeKernel = Callable[[NativeLibrary, Ins, Outs, Attrs], Launch | None]
"""As `kernels.base.Kernel`; None where the operands are none that the kernel takes."""


def _pack(settings: Sequence[float]) -> torch.Tensor:
    """Eight bytes for each number: an int as a whole number, a float in double precision."""
    forms = "".join("d" if isinstance(number, float) else "q" for number in settings)
    return torch.frombuffer(bytearray(struct.pack(forms, *settings) or bytes(8)), dtype=torch.int64)


def has_native(launch: object) -> bool:
    """Whether `launch` calls a kernel in C++, alone or among other calls."""
    if isinstance(launch, OverloadCall):
        return launch.overload.namespace == "onnxline"
    parts = launch.args if isinstance(launch, partial) else launch if isinstance(launch, tuple) else ()
    return any(map(has_native, parts))


def are_floats(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take tensors like these: float32, with at least one number."""
    return all(tensor.dtype is torch.float32 and tensor.numel() > 0 for tensor in tensors)


def is_dense_like(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `out` has the sizes of `x`, and lies without gaps.

    A graph may declare other sizes than a call has: then torch's kernel names the call, and ours would write elsewhere.
    """
    return out.shape == x.shape and out.is_contiguous()


def is_for_one_thread(out: torch.Tensor) -> bool:
    """Whether torch would not share the computation of `out`, number by number or row by row, among the threads that
    kernels are chosen for."""
    return planned_threads() == 1 or out.numel() < SHARED


def as_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor` as a matrix over the same memory whose rows lie without gaps; None where strides cannot say it."""
    if tensor.dim() == 0:
        return None
    try:
        rows = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else None
