"""Operators of torch by kernels in C++, where the program has them and their operands allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.native.elementwise import launch_activation
from pipeline.runtime.kernels.native.library import NativeLibrary
from pipeline.runtime.kernels.native.products import launch_any
from pipeline.runtime.kernels.post_ops import PostOp

__all__ = ["launch_native"]

NativeCall = Callable[[NativeLibrary, AtenCall, Outs], Launch | None]


def launch_native(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    """The call by a kernel in C++; None where there is none for it."""
    native = CALLS.get(call.kind)
    return native and native(library, call, outs)


def mm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    return launch_any(library, call.args[0], call.args[1], None, outs[0])


def addmm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    bias, x, matrix = call.args[:3]
    if bias.dim() != 1 or any(call.given.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    return launch_any(library, x, matrix, bias, outs[0])


def relu(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    return launch_activation(library, call.args[0], outs[0], PostOp("relu"))


CALLS: Mapping[str, NativeCall] = {
    "aten.mm.default": mm,
    "aten.addmm.default": addmm,
    "aten.relu.default": relu,
}
