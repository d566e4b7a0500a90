"""Faster ways to write into the result's storage, for the operators that models spend their time in.

Most operators have a function in torch's Python binding with `out=`, which costs half a call by schema. Matrix products
are flattened once, when the call is bound, where strides can say it. Operators that change some elements of an operand
write in place where the plan put the result on that operand. Products with a stored matrix, and convolutions over two
dimensions, have a form with a packed weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pipeline.errors import Unsupported
from pipeline.ir import InputRef
from pipeline.ir.graph import TensorSpec
from pipeline.ops import Kind
from pipeline.ops.aten import TYPED
from pipeline.runtime.devices import TARGET, Device
from pipeline.runtime.kernels.aten.call import AtenCall, CallTemplate, may_write_into
from pipeline.runtime.kernels.base import Attrs, Launch, Outs, copy_result, in_turn
from pipeline.runtime.kernels.packing import (
    PackedWeight,
    Stored,
    is_same_memory,
    launch_convolution,
    pack_convolution,
    pack_product,
)
from pipeline.runtime.kernels.products import (
    PoolWindow,
    flatten_rows,
    launch_max_pool,
    multiply_batches,
    multiply_matrices,
)
from pipeline.runtime.kernels.weight_forms import Convolution, FusedOperands, ProductWeight
from pipeline.runtime.operators import CPU_FALLBACKS

FastPath = Callable[[AtenCall, Outs], Launch | None]
"""A faster launch than by the operator's schema; None where it does not fit this call."""

nn: Any = vars(torch._C)["_nn"]  # its stubs leave this module out


def with_out(function: Callable[..., Any]) -> FastPath:
    """A function with the operator's own arguments and `out=`, where that writes what it should."""

    def bind(call: AtenCall, outs: Outs) -> Launch | None:
        return partial(function, *call.args, **call.kwargs, out=outs[0]) if may_write_into(call, outs) else None

    return bind


def then_copy(function: Callable[..., Any]) -> FastPath:
    """A function with the operator's own arguments and no `out=`; its result is copied."""

    def bind(call: AtenCall, outs: Outs) -> Launch:
        return copy_result(partial(function, *call.args, **call.kwargs), outs, call.unread)

    return bind


def relu(call: AtenCall, outs: Outs) -> Launch:
    """As torch's relu, which has no `out=`."""
    return partial(torch.clamp_min, call.args[0], 0, out=outs[0])


def gelu(call: AtenCall, outs: Outs) -> Launch | None:
    """oneDNN, by which torch 2.13 computes it on the CPU, writes nothing into a result with other strides."""
    has_its_strides = outs[0].stride() == call.args[0].stride()
    return (with_out if has_its_strides else then_copy)(nn.gelu)(call, outs)


def convert(call: AtenCall, outs: Outs) -> Launch:
    """Copy into the result, which has the graph's dtype and memory order."""
    return partial(outs[0].copy_, call.args[0])


def linear(call: AtenCall, outs: Outs) -> Launch | None:
    """One product of matrices with the bias, as torch computes it for contiguous rows."""
    x, weight = call.args[:2]
    bias = call.given.get("bias")
    rows, out = flatten_rows(x, 1), flatten_rows(outs[0], 1)
    if rows is None or out is None or weight.dim() != 2:
        return then_copy(nn.linear)(call, outs)
    return multiply_matrices(rows, weight.t(), bias, out)


def matmul(call: AtenCall, outs: Outs) -> Launch:
    """A vector is a row on the left and a column on the right, as in numpy; torch's out= is unreliable for vectors.

    Two vectors have torch's own product of vectors, which sums in another order than a product of matrices.
    """
    (a, b), out = call.args, outs[0]
    if a.dim() == b.dim() == 1 and a.shape == b.shape:
        return partial(torch.dot, a, b, out=out)
    if b.dim() == 1:
        b, out = b.unsqueeze(1), out.unsqueeze(-1)
    if a.dim() == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    if out.shape != (*batch, a.shape[-2], b.shape[-1]) or a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"the product of {list(a.shape)} and {list(b.shape)} is not {list(out.shape)}")
    return multiply_batches(a, b, out, batch) or partial(torch.matmul, a, b, out=out)


def batch_norm(call: AtenCall, outs: Outs) -> Launch | None:
    """In inference torch's out= variant writes into the result; a copy would take as long again.

    It takes the memory of the result for that of the operand, so both need one order.
    """
    x, *rest, training, momentum, epsilon, _ = call.args
    in_one_order = x.stride() == outs[0].stride() and _is_dense(x)
    if training or not in_one_order or any(item is not None and item.dtype != x.dtype for item in rest):
        return then_copy(torch.batch_norm)(call, outs)
    saved = {"save_mean": x.new_empty(0), "save_invstd": x.new_empty(0)}  # empty without training
    return partial(torch.ops.aten.native_batch_norm.out, x, *rest, False, momentum, epsilon, out=outs[0], **saved)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lies in rows or with its channels last, without gaps."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=last)


def max_pool(call: AtenCall, outs: Outs) -> Launch | None:
    """On the CPU as the maximum of shifted views, which allocates nothing; one number may stand for each axis."""
    if not TARGET.get().is_host:
        return None  # a launch for each element of the window costs more than the kernel of torch
    expected = call.operator(call.args[0].to("meta"), *call.args[1:], **call.kwargs)
    if expected.shape != outs[0].shape or expected.dtype is not outs[0].dtype:
        return None  # torch's own call names what does not fit
    axes = int(call.kind[len("aten.max_pool")])
    sizes = _repeat_by_axis(call.args[1], axes)
    strides = _repeat_by_axis(call.given.get("stride") or sizes, axes)
    pads, dilations = (
        _repeat_by_axis(call.given.get(name, usual), axes) for name, usual in (("padding", 0), ("dilation", 1))
    )
    return launch_max_pool(call.args[0], outs[0], PoolWindow(sizes, strides, pads, dilations))


def _repeat_by_axis(value: int | Sequence[int], axes: int) -> Sequence[int]:
    sizes = [value] if isinstance(value, int) else list(value)
    return sizes * axes if len(sizes) == 1 else sizes


def as_strided(call: AtenCall, outs: Outs) -> Launch:
    """Offsets count from the first element of the operand, which may be anywhere in the arena."""
    x, sizes, strides = call.args[:3]
    offset = call.given.get("storage_offset") or 0
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if 0 not in sizes and last >= x.numel():
        raise Unsupported(
            f"as_strided({sizes}, {strides}, {offset}) leaves the {x.numel()} elements of its operand; a plan holds "
            "values, not storage: use slices in its place"
        )
    return partial(_strided_into, outs[0], x, sizes, strides, offset)


def _strided_into(out: torch.Tensor, x: torch.Tensor, sizes: list[int], strides: list[int], offset: int) -> None:
    rows = x.contiguous()
    out.copy_(rows.as_strided(sizes, strides, int(rows.storage_offset()) + offset))


def embedding(call: AtenCall, outs: Outs) -> Launch | None:
    """Select rows of the table directly into the result, as torch does."""
    table, indices = call.args[:2]
    if not (indices.is_contiguous() and outs[0].is_contiguous() and outs[0].numel() and table.dim() == 2):
        return None
    return partial(torch.index_select, table, 0, indices.view(-1), out=outs[0].view(-1, table.shape[1]))


def embedding_gradient(call: AtenCall, outs: Outs) -> Launch | None:
    """On a GPU torch's kernel makes the gradient of a whole table, of which a copy would be made: rows are added to the
    result where it is, by a kernel that sorts them, so that their order is always the same. That kernel rounds after
    each row, and torch's own adds halves as float32."""
    gradient, indices = call.args[:2]
    rows, given, out = flatten_rows(gradient, 1), call.given, outs[0]
    is_plain = given["padding_idx"] < 0 and not given["scale_grad_by_freq"] and out.element_size() > 2
    if TARGET.get().is_host or rows is None or not is_plain or not indices.is_contiguous() or out.nbytes < LARGE_TABLE:
        return None
    add = partial(torch.ops.aten.index_put_.default, out, [indices.view(-1)], rows, accumulate=True)
    return in_turn(out.zero_, add)


LARGE_TABLE = 2**24
"""Bytes from which a copy takes longer than the launches that sort."""


def index(call: AtenCall, outs: Outs) -> Launch | None:
    """By places of one axis, negative ones from its end: rows are selected directly into the result."""
    x, places = call.args
    axis, index = len(places) - 1, places[-1]
    by_one = all(part is None for part in places[:-1]) and index.dtype in (torch.int32, torch.int64)
    if not by_one or outs[0].numel() < MANY_ELEMENTS or x.dtype in WITHOUT_SELECTION or not outs[0].is_contiguous():
        return None
    rows = outs[0].view((*x.shape[:axis], index.numel(), *x.shape[axis + 1 :]))
    return partial(_select_into, rows, x, axis, index)


def _select_into(out: torch.Tensor, x: torch.Tensor, axis: int, index: torch.Tensor) -> None:
    places = torch.where(index < 0, index + x.shape[axis], index)
    torch.index_select(x, axis, places.reshape(-1), out=out)


MANY_ELEMENTS = 2**12
"""Results from which `index_select` takes half the time of `index`, or less."""

WITHOUT_SELECTION = (torch.uint16, torch.uint32, torch.uint64)


def attention_gradient(call: AtenCall, outs: Outs) -> Launch | None:
    """torch's kernel for CUDA reads on the host where the random numbers of its dropout begin, but on the device while
    a graph is recorded. The values of a plan lie on the device."""
    device = TARGET.get()
    if device.is_host or not call.given["dropout_p"]:
        return None
    return copy_result(partial(_attention_gradient, call.operator, device, **call.given), outs, call.unread)


def _attention_gradient(operator: Callable[..., Any], device: Device, **given: Any) -> Any:
    if not device.is_recording():
        given |= {name: given[name].cpu() for name in ("philox_seed", "philox_offset")}
    return operator(**given)


def repeat(call: AtenCall, outs: Outs) -> Launch | None:
    """Every axis split in (repeat, size): the copy then broadcasts over the repeats, without scratch."""
    x, repeats = call.args
    if not outs[0].is_contiguous():
        return None
    sizes = [*(1,) * (len(repeats) - x.dim()), *x.shape]
    spread = [part for pair in zip(repeats, sizes, strict=True) for part in pair]
    once = [part for size in sizes for part in (1, size)]
    return partial(outs[0].view(spread).copy_, x.view(once))  # axes of size 1 fit between any strides


def constant_pad(call: AtenCall, outs: Outs) -> Launch:
    """Fill the result, then copy what is inside of it; a negative pad crops."""
    x, pads, inner = call.args[0], call.args[1], outs[0]
    for axis, begin in zip(reversed(range(x.dim())), pads[::2], strict=False):
        first = max(-begin, 0)  # of the elements of x that stay
        count = min(x.shape[axis] - first, inner.shape[axis] - max(begin, 0))
        x, inner = x.narrow(axis, first, max(count, 0)), inner.narrow(axis, max(begin, 0), max(count, 0))
    return in_turn(partial(outs[0].fill_, call.given.get("value", 0)), partial(inner.copy_, x))


def write_in_place(in_place: Callable[..., Any]) -> FastPath:
    """By torch's in-place operator where the plan put the result on the operand; else as any other operator."""

    def bind(call: AtenCall, outs: Outs) -> Launch | None:
        operand, *rest = call.args
        return partial(in_place, outs[0], *rest, **call.kwargs) if is_same_memory(outs[0], operand) else None

    return bind


def replace_part(part_of: Callable[..., torch.Tensor]) -> FastPath:
    """Replace a part of the operand by the second argument; the other arguments say which part."""

    def bind(call: AtenCall, outs: Outs) -> Launch:
        operand, new, *rest = call.args
        part = part_of(outs[0], *rest, **call.kwargs)
        if is_same_memory(outs[0], operand):
            return partial(part.copy_, new)
        return partial(_copy_and_replace, outs[0], operand, part, new)

    return bind


def overwrite(in_place: Callable[..., Any]) -> FastPath:
    """For operators that replace every element, so the values of the operand do not matter."""

    def bind(call: AtenCall, outs: Outs) -> Launch:
        return partial(in_place, outs[0], *call.args[1:], **call.kwargs)

    return bind


def _in_place(name: str) -> Callable[..., Any]:
    """`torch.Tensor.index_add_` of `index_add.default`."""
    return getattr(torch.Tensor, f"{name.partition('.')[0]}_")


def _copy_and_replace(out: torch.Tensor, operand: torch.Tensor, part: torch.Tensor, new: torch.Tensor) -> None:
    out.copy_(operand)
    part.copy_(new)


def fill_masked(call: AtenCall, outs: Outs) -> Launch:
    """`masked_fill` by a tensor of one element, which `masked_fill_` of CUDA reads on the host."""
    x, mask, value = call.args
    return partial(torch.where, mask, value, x, out=outs[0])


def fill_rows(call: AtenCall, outs: Outs) -> Launch:
    """`index_fill` by a tensor of one element, which `index_fill_` of CUDA reads on the host."""
    (x, axis, index, value), out = call.args, outs[0]
    narrow = torch.empty_like(value, dtype=x.dtype)
    return in_turn(
        partial(narrow.copy_, value),
        None if is_same_memory(out, x) else partial(out.copy_, x),
        partial(torch.ops.aten.index_put_.default, out, [None] * (axis % max(x.dim(), 1)) + [index], narrow),
    )


WITH_OUT = """
add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode fmod.Tensor remainder.Tensor pow.Tensor_Scalar
pow.Tensor_Tensor eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor gt.Scalar
ge.Tensor ge.Scalar bitwise_and.Tensor bitwise_or.Tensor bitwise_not.default logical_and.default logical_or.default
logical_xor.default logical_not.default maximum.default minimum.default neg.default abs.default sign.default
floor.default ceil.default round.default exp.default log.default sqrt.default rsqrt.default reciprocal.default
sin.default cos.default erf.default tanh.default sigmoid.default clamp.default clamp.Tensor where.self mm.default
addmm.default bmm.default baddbmm.default softmax.int log_softmax.int sum.dim_IntList mean.dim amax.default
amin.default logsumexp.default argmin.default argmax.default cumsum.default cat.default stack.default gather.default
index_select.default
"""

WITHOUT_OUT = "conv1d.default conv2d.default conv3d.default layer_norm.default group_norm.default rms_norm.default"

NN_WITH_OUT = "silu leaky_relu hardtanh hardswish hardsigmoid softplus"

CONVERSIONS = "to.dtype to.device to.dtype_layout to.other _to_copy.default clone.default contiguous.default"

REPLACING = "copy.default fill.Scalar fill.Tensor zero.default"

CHANGING = """
index_add.default index_copy.default index_fill.int_Scalar masked_scatter.default
scatter.src scatter.value scatter_add.default scatter_reduce.two
"""

FAST_PATHS: Mapping[str, FastPath] = {
    **{f"aten.{name}": with_out(getattr(torch, name.partition(".")[0])) for name in WITH_OUT.split()},
    **{f"aten.{name}": then_copy(getattr(torch, name.partition(".")[0])) for name in WITHOUT_OUT.split()},
    **{f"aten.{name}.default": with_out(getattr(nn, name)) for name in NN_WITH_OUT.split()},
    **{f"aten.{name}": convert for name in CONVERSIONS.split()},
    **{kind: then_copy(function) for kind, function in CPU_FALLBACKS.items()},
    "aten.relu.default": relu,
    "aten.gelu.default": gelu,
    **{f"aten.max_pool{axes}d.default": max_pool for axes in (1, 2, 3)},
    "aten.linear.default": linear,
    "aten.matmul.default": matmul,
    "aten.scaled_dot_product_attention.default": then_copy(nn.scaled_dot_product_attention),
    "aten._scaled_dot_product_efficient_attention_backward.default": attention_gradient,
    "aten.batch_norm.default": batch_norm,
    "aten.as_strided.default": as_strided,
    "aten.embedding.default": embedding,
    "aten.embedding_dense_backward.default": embedding_gradient,
    "aten.index.Tensor": index,
    "aten.repeat.default": repeat,
    "aten.constant_pad_nd.default": constant_pad,
    **{f"aten.{name}": overwrite(_in_place(name)) for name in REPLACING.split()},
    **{f"aten.{name}": write_in_place(_in_place(name)) for name in CHANGING.split()},
    "aten.index_fill.int_Tensor": fill_rows,
    "aten.masked_fill.Tensor": fill_masked,
    "aten.index_put.default": write_in_place(torch.ops.aten.index_put_.default),  # that of torch.Tensor takes no None
    "aten.select_scatter.default": replace_part(torch.ops.aten.select.int),
    "aten.slice_scatter.default": replace_part(torch.ops.aten.slice.Tensor),
}
"""By operator. All others are called by their schema (`call.py`)."""


Given = Mapping[str, Any]


def may_pack(kind: Kind) -> bool:
    """Whether calls of this kind may have a weight to pack."""
    return kind is Kind.Aten or any(
        name in PRODUCTS or name in CONVOLUTIONS for name in TYPED[kind].signature.operators
    )


def pack_call(
    template: CallTemplate, specs: Sequence[TensorSpec], stored: Stored, attrs: Attrs
) -> ProductWeight | None:
    """The weight of a call in the form for it, where one is stored and packing pays."""
    names = PRODUCTS.get(template.kind) or CONVOLUTIONS.get(template.kind)
    if names is None:
        return None
    x, weight = (template.tensors.get(name) for name in names)
    if not (isinstance(x, InputRef) and isinstance(weight, InputRef)) or weight.index not in stored:
        return None
    spec, tensor = specs[x.index], stored[weight.index]
    if template.kind in CONVOLUTIONS:
        shape = _convolution(template.fixed)
        return pack_convolution(spec, tensor, shape) if shape and spec.rank == 4 else None
    if spec.rank < 2 or any(template.fixed.get(name, 1) != 1 for name in ("alpha", "beta")):
        return None
    if template.kind == "aten.bmm.default":
        if tensor.dim() != 3 or tensor.stride(0) != 0:  # one matrix for all of the batch
            return None
        tensor = tensor[0]
    if tensor.dim() != 2:
        return None
    bias = template.tensors.get("self") if template.kind == "aten.addmm.default" else None
    if isinstance(bias, InputRef) and specs[bias.index].rank != 1:
        return None
    columns_first = tensor if template.kind == "aten.linear.default" else tensor.t()
    return pack_product(spec.numel // max(spec.sizes[-1], 1), columns_first, native=attrs.get("native"))


def launch_packed(call: AtenCall, packed: PackedWeight, out: torch.Tensor) -> Launch | None:
    """The call with its packed weight; None where strides do not allow it."""
    given = call.given
    if call.kind in CONVOLUTIONS:
        shape = _convolution(given)
        return (
            launch_convolution(packed, FusedOperands(given["input"], out, given.get("bias")), shape) if shape else None
        )
    bias = given["self"] if call.kind == "aten.addmm.default" else given.get("bias")
    return packed.launch(FusedOperands(given[PRODUCTS[call.kind][0]], out, bias))


def _convolution(given: Given) -> Convolution | None:
    if given.get("transposed") or not all(isinstance(given.get(name, 0), int | list) for name in ("padding", "stride")):
        return None
    sizes = [_pair(given.get(name, default)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    return Convolution(sizes[0], sizes[1], sizes[2], given.get("groups", 1))


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else (*value, *value)[-2:]


PRODUCTS = {
    "aten.linear.default": ("input", "weight"),
    "aten.addmm.default": ("mat1", "mat2"),
    "aten.mm.default": ("self", "mat2"),
    "aten.bmm.default": ("self", "mat2"),
    "aten.matmul.default": ("self", "other"),
}
"""Kind → its operand with rows, and its matrix."""

CONVOLUTIONS = {"aten.conv2d.default": ("input", "weight"), "aten.convolution.default": ("input", "weight")}
