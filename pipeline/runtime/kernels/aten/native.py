"""Operators of torch by kernels in C++, where the program has them and their operands allow it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from pipeline.ops.fused import Activation
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.kernels.native.kernel_library import NativeLibrary
from pipeline.runtime.kernels.native.products import launch_any, launch_small
from pipeline.runtime.kernels.native.rows import (
    in_one_order,
    launch_activation,
    launch_class_loss,
    launch_class_loss_gradient,
    launch_log_softmax,
    launch_log_softmax_gradient,
    launch_norm,
    launch_row_sum,
    launch_softmax,
    launch_threshold_gradient,
)

NativeCall = Callable[[NativeLibrary, AtenCall, Outs], Launch | None]


def launch_native(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    """The call by a kernel in C++; None where there is none for it."""
    native = CALLS.get(call.kind)
    return native and native(library, call, outs)


def mm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    x, matrix = call.args
    return launch_small(library, x, matrix, outs[0]) or launch_any(library, x, matrix, None, outs[0])


def addmm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    bias, x, matrix = call.args[:3]
    if bias.dim() != 1 or any(call.given.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    return launch_small(library, x, matrix, outs[0], bias=bias) or launch_any(library, x, matrix, bias, outs[0])


def linear(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    x, weight = call.args[:2]
    return launch_any(library, x, weight.t(), call.given.get("bias"), outs[0]) if weight.dim() == 2 else None


def activate(after: Activation, library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    rows = in_one_order(outs[0], call.args[0])
    return None if rows is None else launch_activation(library, rows[1], rows[0], after)


def gelu(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    return activate(Activation(GELUS[call.given.get("approximate", "none")]), library, call, outs)


def layer_norm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    given = call.given
    if given.get("weight") is None:
        return None
    weights = [given[name] for name in ("weight", "bias") if given.get(name) is not None]
    over, eps = given["normalized_shape"], given.get("eps", 1e-5)
    return launch_norm(library, given["input"], weights, over, eps, outs[0], is_centered=True)


def rms_norm(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    given = call.given
    if given.get("eps") is None:
        return None
    weights, over = [] if given.get("weight") is None else [given["weight"]], given["normalized_shape"]
    return launch_norm(library, given["input"], weights, over, given["eps"], outs[0], is_centered=False)


def nll_loss(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    x, labels, weight, reduction, ignored = call.args
    return None if weight is not None else launch_class_loss(library, x, labels, reduction, ignored, outs)


def nll_loss_backward(library: NativeLibrary, call: AtenCall, outs: Outs) -> Launch | None:
    gradient, _, labels, weight, reduction, ignored, counted = call.args
    if weight is not None:
        return None
    return launch_class_loss_gradient(library, gradient, labels, counted, reduction, ignored, outs[0])


GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
"""By torch's word for how it is computed."""

CALLS: Mapping[str, NativeCall] = {
    "aten.mm.default": mm,
    "aten.addmm.default": addmm,
    # Where the columns of the matrix are rows in memory.
    "aten.mv.default": lambda library, call, outs: launch_row_sum(library, call.args[0].t(), call.args[1], outs[0]),
    "aten.matmul.default": lambda library, call, outs: launch_any(library, call.args[0], call.args[1], None, outs[0]),
    "aten.linear.default": linear,
    "aten.gelu.default": gelu,
    "aten.relu.default": partial(activate, Activation("relu")),
    "aten.silu.default": partial(activate, Activation("silu")),
    "aten.sigmoid.default": partial(activate, Activation("sigmoid")),
    "aten.tanh.default": partial(activate, Activation("tanh")),
    "aten.hardswish.default": partial(activate, Activation("hardswish")),
    "aten.layer_norm.default": layer_norm,
    "aten.rms_norm.default": rms_norm,
    "aten.softmax.int": lambda library, call, outs: (
        launch_softmax(library, call.args[0], call.args[1], outs[0]) if call.given.get("dtype") is None else None
    ),
    "aten.threshold_backward.default": lambda library, call, outs: launch_threshold_gradient(
        library, call.args[0], call.args[1], call.args[2], outs[0]
    ),
    "aten._log_softmax.default": lambda library, call, outs: launch_log_softmax(
        library, call.args[0], call.args[1], outs[0]
    ),
    "aten._log_softmax_backward_data.default": lambda library, call, outs: launch_log_softmax_gradient(
        library, call.args[0], call.args[1], call.args[2], outs[0]
    ),
    "aten.nll_loss_forward.default": nll_loss,
    "aten.nll_loss_backward.default": nll_loss_backward,
}
