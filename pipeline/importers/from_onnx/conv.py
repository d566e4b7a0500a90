"""Convolution and pooling. Pads are explicit: all begins, then all ends, one for each spatial dimension."""

from __future__ import annotations

import math

import numpy as np

from passes.suggest import plural
from pipeline.importers.from_onnx.moves import emit_moves, emit_reshape, expand, reshape, with_constant
from pipeline.importers.from_onnx.node import Importer, Node, direct
from pipeline.ir.graph import Attr, TensorSpec

Sizes = tuple[int, ...]


def conv(node: Node) -> None:
    node.emit("Conv", node.operands(), conv_attrs(node, 1))


def conv_attrs(node: Node, weight: int) -> dict[str, Attr]:
    """The attributes of a convolution whose weight is input `weight`."""
    kernel = node.spec(weight).sizes[2:]
    node.check_length("the kernel", kernel, node.spec(0).rank - 2)
    node.attributes.settle("kernel_shape")
    strides, dilations = per_axis(node, "strides"), per_axis(node, "dilations")
    return {
        "strides": strides,
        "pads": window_pads(node, kernel, strides, dilations),
        "dilations": dilations,
        "group": node.attributes.integer("group", 1),
    }


def conv_transpose(node: Node) -> None:
    kernel = node.spec(1).sizes[2:]
    node.check_length("the kernel", kernel, node.spec(0).rank - 2)
    node.attributes.settle("kernel_shape")
    strides, dilations = per_axis(node, "strides"), per_axis(node, "dilations")
    extra = node.attributes.integers("output_padding") or (0,) * len(kernel)
    node.check_length("output_padding", extra, len(kernel))
    attrs: dict[str, Attr] = {
        "strides": strides,
        "pads": transposed_pads(node, kernel, strides, dilations, extra),
        "output_padding": extra,
        "dilations": dilations,
        "group": node.attributes.integer("group", 1),
    }
    node.emit("ConvTranspose", node.operands(), attrs)


def max_pool(node: Node) -> None:
    kernel, strides, dilations = pool_kernel(node), per_axis(node, "strides"), per_axis(node, "dilations")
    node.attributes.settle("storage_order")  # only affects the indices, which are not computed
    attrs: dict[str, Attr] = {
        "kernel": kernel,
        "strides": strides,
        "pads": window_pads(node, kernel, strides, dilations),
        "dilations": dilations,
        "ceil_mode": node.attributes.flag("ceil_mode"),
    }
    node.emit_first("MaxPool", node.operands(0), attrs)


def average_pool(node: Node) -> None:
    kernel, strides, dilations = pool_kernel(node), per_axis(node, "strides"), per_axis(node, "dilations")
    pads, include = window_pads(node, kernel, strides, dilations), node.attributes.flag("count_include_pad")
    if set(dilations) - {1}:
        total = sum_windows(node, node.operand(0), kernel, strides, dilations, pads)
        counts = count_elements(node, kernel, strides, dilations, pads if include else (0,) * len(pads), pads)
        node.emit("aten.div.Tensor", [total, node.constant_operand(counts.astype(node.spec(0).dtype))])
        return
    attrs: dict[str, Attr] = {
        "kernel": kernel,
        "strides": strides,
        "pads": pads,
        "ceil_mode": node.attributes.flag("ceil_mode"),
        "count_include_pad": include,
    }
    node.emit("AveragePool", node.operands(0), attrs)


def sum_windows(node: Node, vid: int, kernel: Sizes, strides: Sizes, dilations: Sizes, pads: Sizes) -> int:
    """The sum over each window of `vid`, which is like input 0: a convolution of each channel with ones."""
    spec, out = node.spec(0), node.output()
    if not out.numel:
        raise node.refusal("no window fits")
    rows = zip(spec.sizes[2:], out.sizes[2:], kernel, strides, dilations, pads, strict=False)
    # With ceil_mode a window may hang over the pads.
    ends = tuple(
        max((count - 1) * stride + (window - 1) * dilation + 1 - size - begin, 0)
        for size, count, window, stride, dilation, begin in rows
    )
    ones = node.constant_operand(np.ones((spec.sizes[1], 1, *kernel), spec.dtype))
    attrs: dict[str, Attr] = {
        "strides": strides,
        "pads": pads[: len(kernel)] + ends,
        "dilations": dilations,
        "group": spec.sizes[1],
    }
    return node.step("Conv", [vid, ones], out, attrs)


def count_elements(
    node: Node, kernel: Sizes, strides: Sizes, dilations: Sizes, counted: Sizes, pads: Sizes
) -> np.ndarray:
    """How many elements of input 0, and of the pads that are `counted`, each window has."""
    counts, rank = np.ones(()), len(kernel)
    for axis, (size, windows) in enumerate(zip(node.spec(0).sizes[2:], node.output().sizes[2:], strict=True)):
        places = np.arange(windows)[:, None] * strides[axis] + np.arange(kernel[axis]) * dilations[axis] - pads[axis]
        inside = (places >= -counted[axis]) & (places < size + counted[axis + rank])
        counts = counts[..., None] * inside.sum(1)
    return counts[None, None]


def max_unpool(node: Node) -> None:
    """Each element goes to the place that its index names; indices count through the whole tensor that was pooled."""
    kernel, strides, spec, out = pool_kernel(node), per_axis(node, "strides"), node.spec(0), node.output()
    pads = explicit_pads(node, kernel)
    node.settle_inputs(2)  # the output's shape is known
    rows = zip(spec.sizes[2:], kernel, strides, pads, pads[len(kernel) :], strict=False)
    sizes = tuple((size - 1) * stride + window - begin - end for size, window, stride, begin, end in rows)
    inner = (*spec.sizes[:2], *sizes)
    flat = (math.prod(inner),)
    empty = expand(node, node.constant_operand(np.zeros((), spec.dtype)), flat)
    places, values = (reshape(node, node.operand(at), (spec.numel,)) for at in (1, 0))
    filled = node.step("aten.scatter.src", [empty, places, values], TensorSpec(flat, spec.dtype), {"dim": 0})
    if inner == out.sizes:
        emit_reshape(node, filled)
        return
    more = [new - old for new, old in zip(out.sizes, inner, strict=True)]
    emit_moves(node, reshape(node, filled, inner), [with_constant(inner, [0] * len(inner) + more, 0.0)])


def lp_pool(node: Node) -> None:
    """The p-norm over a window: a sum of powers is the average, pads included, times the size of the window."""
    kernel, strides, dilations = pool_kernel(node), per_axis(node, "strides"), per_axis(node, "dilations")
    power, spec, out = node.attributes.integer("p", 2), node.spec(0), node.output()
    pads = window_pads(node, kernel, strides, dilations)
    exponent, root = (node.constant_operand(np.array(number, spec.dtype)) for number in (power, 1 / power))
    powers = node.step(
        "aten.pow.Tensor_Tensor", [node.step("aten.abs.default", node.operands(0), spec), exponent], spec
    )
    if node.attributes.flag("ceil_mode") or set(dilations) - {1}:
        node.emit("aten.pow.Tensor_Tensor", [sum_windows(node, powers, kernel, strides, dilations, pads), root])
        return
    attrs: dict[str, Attr] = {
        "kernel": kernel,
        "strides": strides,
        "pads": pads,
        "ceil_mode": False,
        "count_include_pad": True,
    }
    mean = node.step("AveragePool", [powers], out, attrs)
    size = node.constant_operand(np.array(math.prod(kernel), spec.dtype))
    node.emit("aten.pow.Tensor_Tensor", [node.step("aten.mul.Tensor", [mean, size], out), root])


def local_response_norm(node: Node) -> None:
    """Divide by a power of the mean square over neighbouring channels."""
    read, spec = node.attributes, node.spec(0)
    size, alpha = read.integer("size"), read.number("alpha", 1e-4)
    beta, bias = read.number("beta", 0.75), read.number("bias", 1.0)
    table = TensorSpec((spec.sizes[0], 1, spec.sizes[1], math.prod(spec.sizes[2:])), spec.dtype)
    squares = node.step("aten.mul.Tensor", node.operands(0, 0), spec)
    squares = reshape(node, squares, table.sizes)
    attrs: dict[str, Attr] = {
        "kernel": (size, 1),
        "strides": (1, 1),
        "pads": ((size - 1) // 2, 0, size // 2, 0),
        "ceil_mode": False,
        "count_include_pad": True,
    }
    mean = reshape(node, node.step("AveragePool", [squares], table, attrs), spec.sizes)
    scale, offset, power = (node.constant_operand(np.array(number, spec.dtype)) for number in (alpha, bias, beta))
    base = node.step("aten.add.Tensor", [node.step("aten.mul.Tensor", [mean, scale], spec), offset], spec)
    node.emit("aten.div.Tensor", [node.operand(0), node.step("aten.pow.Tensor_Tensor", [base, power], spec)])


def per_axis(node: Node, name: str) -> Sizes:
    """A list with an entry of at least 1 for each spatial dimension; 1 by default."""
    count = node.spec(0).rank - 2
    entries = node.attributes.integers(name) or (1,) * count
    node.check_length(name, entries, count)
    if min(entries, default=1) < 1:
        raise node.refusal(f"its {name} are {entries}")
    return entries


def pool_kernel(node: Node) -> Sizes:
    kernel = node.attributes.integers("kernel_shape")
    if kernel is None:
        raise node.refusal("it has no kernel_shape")
    node.check_length("kernel_shape", kernel, node.spec(0).rank - 2)
    return kernel


def explicit_pads(node: Node, kernel: Sizes) -> Sizes:
    pads = node.attributes.integers("pads") or (0,) * (2 * len(kernel))
    node.check_length("pads", pads, 2 * len(kernel))
    return pads


def window_pads(node: Node, kernel: Sizes, strides: Sizes, dilations: Sizes) -> Sizes:
    """The pads of a window over input 0, with `auto_pad` resolved."""
    mode = node.attributes.text("auto_pad", "NOTSET")
    node.attributes.settle("pads")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        if mode not in ("NOTSET", "", "VALID"):
            raise node.refusal(f"found auto_pad {mode!r}, expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
        ceils = node.attributes.flag("ceil_mode")
        if mode != "VALID":
            return explicit_pads(node, kernel)
        if ceils:
            refuse_windows(node, kernel, strides, dilations)
        return (0,) * (2 * len(kernel))
    totals = []
    for size, window, stride, dilation in zip(node.spec(0).sizes[2:], kernel, strides, dilations, strict=True):
        reach = (window - 1) * dilation + 1
        # Where a stride steps over elements, none is left out before the first window: ONNX's inference has no pad
        # below 0, as TensorFlow. Onnxruntime has, and takes no notice of dilations, which the standard's formula has.
        totals.append(max((-(-size // stride) - 1) * stride + reach - size, 0))
    return split_pads(totals, odd_at_end=mode == "SAME_UPPER")


def refuse_windows(node: Node, kernel: Sizes, strides: Sizes, dilations: Sizes) -> None:
    """Refuse windows of ceil_mode that the standard's text and its inference do not count alike."""
    rows = zip(node.spec(0).sizes[2:], kernel, strides, dilations, strict=False)
    for axis, (size, window, stride, dilation) in enumerate(rows, 2):
        room = size - (window - 1) * dilation - 1
        windows, last = room // stride + 1, -(-room // stride)
        if last >= windows and last * stride < size:
            raise node.refusal(
                f"auto_pad VALID with ceil_mode is {plural(windows, 'window')} along axis {axis} by ONNX's text, and "
                f"{last + 1} by its inference and onnxruntime; give pads in place of auto_pad"
            )


def transposed_pads(node: Node, kernel: Sizes, strides: Sizes, dilations: Sizes, extra: Sizes) -> Sizes:
    """The pads that a transposed convolution crops; `output_shape` and `auto_pad` are resolved as ONNX defines."""
    mode, wanted = node.attributes.text("auto_pad", "NOTSET"), node.attributes.integers("output_shape")
    node.attributes.settle("pads")
    if mode == "VALID" and not wanted:
        return (0,) * (2 * len(kernel))
    if mode in ("NOTSET", "") and not wanted:
        return explicit_pads(node, kernel)
    sizes = node.spec(0).sizes[2:]
    wanted = wanted or tuple(size * stride for size, stride in zip(sizes, strides, strict=True))
    node.check_length("output_shape", wanted, len(sizes))
    totals = []
    for size, window, stride, dilation, more, out in zip(sizes, kernel, strides, dilations, extra, wanted, strict=True):
        totals.append(stride * (size - 1) + more + (window - 1) * dilation + 1 - out)
    if min(totals, default=0) < 0:
        raise node.refusal(f"the output {wanted} is larger than the kernel reaches")
    return split_pads(totals, odd_at_end=mode == "SAME_UPPER")


def split_pads(totals: list[int], *, odd_at_end: bool) -> Sizes:
    """Split `totals` into begins and ends; an odd one is larger at the end or at the begin."""
    small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return small + large if odd_at_end else large + small


IMPORTERS: dict[str, Importer] = {
    "AveragePool": average_pool,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "GlobalAveragePool": direct(),
    "GlobalMaxPool": direct(),
    "LRN": local_response_norm,
    "LpPool": lp_pool,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
}
