"""Convolutions and pools as calls of torch, which has one pad for both sides of an axis: others are padded first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from passes.suggest import plural
from pipeline.importers.from_onnx.definitions import aten, compute, give, term
from pipeline.importers.from_onnx.node import CONVERSION, Importer, Node, range_of
from pipeline.importers.from_onnx.shape import emit_moves, emit_reshape, expand, reshape, with_constant
from pipeline.ir.graph import Attr, TensorSpec, TorchConst

Sizes = tuple[int, ...]

Call = tuple[str, list[int], dict[str, Attr]]
"""An operator, its operands, and its other arguments."""


@dataclass(frozen=True, slots=True)
class Window:
    """What moves over the spatial axes. A negative pad crops."""

    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    begins: Sizes
    ends: Sizes

    @property
    def reaches(self) -> Sizes:
        """How many places of each axis the window covers."""
        return tuple((size - 1) * dilation + 1 for size, dilation in zip(self.kernel, self.dilations, strict=True))

    @property
    def without_pads(self) -> Window:
        return replace(self, begins=(0,) * len(self.kernel), ends=(0,) * len(self.kernel))

    def to_fit(self, sizes: Sizes, windows: Sizes) -> Window:
        """The window with the end pads, which may be negative, for `windows` windows over axes of `sizes`."""
        rows = zip(sizes, windows, self.strides, self.reaches, self.begins, strict=True)
        ends = tuple((count - 1) * stride + reach - size - begin for size, count, stride, reach, begin in rows)
        return replace(self, ends=ends)


def conv(node: Node) -> None:
    node.emit(*convolution(node, node.operands(), read_window(node, kernel_of(node, 1))))


def convolution(node: Node, operands: Sequence[int], window: Window, groups: int | None = None) -> Call:
    """The convolution of the first operand with the second one; the third one is a bias for each channel."""
    x, *weights = operands
    if window.begins != window.ends:
        x, window = pad_sides(node, x, window, 0.0), window.without_pads
    attrs = unusual(
        stride=window.strides,
        padding=window.begins,
        dilation=window.dilations,
        groups=node.attributes.integer("group", 1) if groups is None else groups,
    )
    return f"aten.conv{count_axes(node, len(window.kernel))}d.default", [x, *weights], attrs


def conv_transpose(node: Node) -> None:
    """A pad takes rows away from the result. Where it differs between the sides, the whole result is cut."""
    kernel = kernel_of(node, 1)
    dims, strides, dilations = count_axes(node, len(kernel)), per_axis(node, "strides"), per_axis(node, "dilations")
    extra = node.attributes.integers("output_padding") or (0,) * dims
    node.check_length("output_padding", extra, dims)
    window = transposed_window(node, Window(kernel, strides, dilations, (), ()), extra)
    is_even = window.begins == window.ends
    attrs = unusual(
        stride=strides,
        padding=window.begins if is_even else (0,) * dims,
        output_padding=extra,
        groups=node.attributes.integer("group", 1),
        dilation=dilations,
    )
    operator = f"aten.conv_transpose{dims}d.{'default' if dims == 1 else 'input'}"
    if is_even:
        node.emit(operator, node.operands(), attrs)
        return
    out = node.output()
    rows = zip(out.sizes[2:], window.begins, window.ends, strict=True)
    whole = TensorSpec((*out.sizes[:2], *(size + begin + end for size, begin, end in rows)), out.dtype)
    cut_axes(node, node.step(operator, node.operands(), whole, attrs), window.begins)


def cut_axes(node: Node, vid: int, begins: Sizes) -> None:
    """Output 0 is the part of `vid` that starts at `begins` of its spatial axes."""
    spec, out = node.vid_spec(vid), node.output()
    *axes, last = [axis for axis in range(2, spec.rank) if spec.sizes[axis] != out.sizes[axis]]
    for axis in axes:
        attrs: dict[str, Attr] = {"dim": axis, "start": begins[axis - 2], "end": begins[axis - 2] + out.sizes[axis]}
        sizes = node.vid_spec(vid).sizes
        vid = node.step(
            SLICE, [vid], TensorSpec((*sizes[:axis], out.sizes[axis], *sizes[axis + 1 :]), out.dtype), attrs
        )
    start = begins[last - 2]
    node.emit(SLICE, [vid], {"dim": last, "start": start, "end": start + out.sizes[last]})


def max_pool(node: Node) -> None:
    window, x, spec, out = read_window(node, pool_kernel(node)), node.operand(0), node.spec(0), node.output()
    node.attributes.settle("storage_order", "ceil_mode")  # of the indices, which are not made; the shape says it
    if not out.numel:  # no window fits into the image, which torch refuses
        node.alias(node.constant_operand(np.zeros(out.sizes, out.dtype)))
        return
    dims = count_axes(node, len(window.kernel))
    if dims == 1 and "int" in spec.dtype:  # torch pools integers over more axes only
        x, spec = node.convert(x, "float32"), replace(spec, dtype="float32")
    ceil_mode = find_ceil_mode(window, spec, out)
    if ceil_mode is None:
        least = range_of(spec.dtype)[0] if "int" in spec.dtype else -math.inf
        x, window = pad_sides(node, x, window.to_fit(spec.sizes[2:], out.sizes[2:]), least), window.without_pads
    attrs = {**pool_attrs(window, ceil_mode=bool(ceil_mode)), **unusual(dilation=window.dilations)}
    operator = f"aten.max_pool{dims}d.default"
    if spec.dtype == out.dtype:
        node.emit_first(operator, [x], attrs)
    else:
        largest = node.step(operator, [x], replace(out, dtype=spec.dtype), attrs)
        node.emit_first(CONVERSION, [largest], {"dtype": TorchConst("dtype", out.dtype)})


def pool_attrs(window: Window, *, ceil_mode: bool) -> dict[str, Attr]:
    return {
        "kernel_size": window.kernel,
        "stride": window.strides,
        **unusual(padding=window.begins),
        **({"ceil_mode": True} if ceil_mode else {}),
    }


def find_ceil_mode(window: Window, spec: TensorSpec, out: TensorSpec) -> bool | None:
    """The ceil_mode with which torch lays as many windows over `spec` as `out` has places; None where it cannot.

    torch pads both sides by as much as the begin, which changes no maximum, nor the mean of what is no pad.
    """
    if any(not 0 <= 2 * begin <= size for begin, size in zip(window.begins, window.kernel, strict=True)):
        return None
    axes = list(zip(spec.sizes[2:], window.reaches, window.strides, window.begins, strict=True))
    for ceil_mode in (False, True):
        counts = [count_windows(*axis, ceil_mode=ceil_mode) for axis in axes]
        if counts == list(out.sizes[2:]):
            return ceil_mode
    return None


def count_windows(size: int, reach: int, stride: int, pad: int, *, ceil_mode: bool) -> int:
    """As torch counts them: with `ceil_mode` the last one may hang over the end, but not start there."""
    room = size + 2 * pad - reach
    count = (-(-room // stride) if ceil_mode else room // stride) + 1
    return count - 1 if ceil_mode and (count - 1) * stride >= size + pad else count


def average_pool(node: Node, *, count_include_pad: bool = False) -> None:
    """Pads count with `count_include_pad`, and what hangs over them because of ceil_mode never does."""
    window, include = read_window(node, pool_kernel(node)), count_include_pad
    node.attributes.settle("ceil_mode")  # the shape says it
    spec, out = node.spec(0), node.output()
    if not out.numel:
        node.alias(node.constant_operand(np.zeros(out.sizes, out.dtype)))
    elif set(window.dilations) == {1}:
        node.emit(*average(node, node.operand(0), out, window, include))
    else:
        total = sum_windows(node, node.operand(0), window)
        counts = count_elements(spec, out, window, window if include else window.without_pads)
        node.emit("aten.div.Tensor", [total, node.constant_operand(counts.astype(spec.dtype))])


def average(node: Node, vid: int, out: TensorSpec, window: Window, include: bool) -> Call:
    """The means of windows over `vid`, of which the pads count where `include` says so."""
    spec = node.vid_spec(vid)
    operator = f"aten.avg_pool{count_axes(node, len(window.kernel))}d.default"
    if include and window.begins != window.ends:
        vid, counted = pad_sides(node, vid, window, 0.0), window.without_pads
        return average(node, vid, out, counted, include)
    ceil_mode = find_ceil_mode(window, spec, out)
    if ceil_mode is not None:
        excludes: dict[str, Attr] = {} if include or not any(window.begins) else {"count_include_pad": False}
        return operator, [vid], {**pool_attrs(window, ceil_mode=ceil_mode), **excludes}
    counts = count_elements(spec, out, window, window if include else window.without_pads)
    padded = pad_sides(node, vid, window.to_fit(spec.sizes[2:], out.sizes[2:]), 0.0)
    means = node.step(operator, [padded], out, pool_attrs(window.without_pads, ceil_mode=False))
    with np.errstate(divide="ignore"):  # a window over pads alone has no mean
        share = (math.prod(window.kernel) / counts).astype(spec.dtype)
    return "aten.mul.Tensor", [means, node.constant_operand(share)], {}


def sum_windows(node: Node, vid: int, window: Window) -> int:
    """The sum over each window of `vid`, which is like input 0: a convolution of each channel with ones."""
    spec, out = node.spec(0), node.output()
    if not out.numel:
        raise node.refusal("no window fits")
    ones = node.constant_operand(np.ones((spec.sizes[1], 1, *window.kernel), spec.dtype))
    operator, operands, attrs = convolution(
        node, [vid, ones], window.to_fit(spec.sizes[2:], out.sizes[2:]), groups=spec.sizes[1]
    )
    return node.step(operator, operands, out, attrs)


def count_elements(spec: TensorSpec, out: TensorSpec, window: Window, counted: Window) -> np.ndarray:
    """How many elements of `spec`, and of the pads of `counted`, each window has."""
    counts = np.ones(())
    for axis, (size, windows) in enumerate(zip(spec.sizes[2:], out.sizes[2:], strict=True)):
        starts = np.arange(windows) * window.strides[axis] - window.begins[axis]
        places = starts[:, None] + np.arange(window.kernel[axis]) * window.dilations[axis]
        inside = (places >= -counted.begins[axis]) & (places < size + counted.ends[axis])
        counts = counts[..., None] * inside.sum(1)
    return counts[None, None]


def pad_sides(node: Node, vid: int, window: Window, value: float) -> int:
    """`vid` with the pads of the window; torch takes them from the last axis to the first."""
    spec = node.vid_spec(vid)
    pairs = list(zip(window.begins, window.ends, strict=True))
    if not any(map(any, pairs)):
        return vid
    sizes = (size + sum(pair) for size, pair in zip(spec.sizes[2:], pairs, strict=True))
    attrs: dict[str, Attr] = {"pad": tuple(side for pair in reversed(pairs) for side in pair), "value": value}
    return node.step("aten.constant_pad_nd.default", [vid], TensorSpec((*spec.sizes[:2], *sizes), spec.dtype), attrs)


def over_images(operator: str) -> Importer:
    """An importer for an operator of torch over all spatial axes, which stay with the size 1."""

    def importer(node: Node) -> None:
        axes = tuple(range(2, node.spec(0).rank))
        if axes:
            node.emit(operator, node.operands(), {"dim": axes, "keepdim": True})
        else:
            node.alias(node.operand(0))

    return importer


def max_unpool(node: Node) -> None:
    """Each element goes to the place that its index names; indices count through the whole tensor that was pooled."""
    kernel, strides, spec, out = pool_kernel(node), per_axis(node, "strides"), node.spec(0), node.output()
    begins, ends = explicit_pads(node, kernel)
    node.settle_inputs(2)  # the output's shape is known
    rows = zip(spec.sizes[2:], kernel, strides, begins, ends, strict=True)
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


def lp_pool(node: Node, *, p: int = 2, ceil_mode: bool = False) -> None:
    """The p-norm over a window: a sum of powers is the average, pads included, times the size of the window."""
    window, out = read_window(node, pool_kernel(node)), node.output()
    sizes = aten("abs", term(node, node.operand(0)))
    powers = compute(node, aten("pow.Tensor_Scalar", sizes, exponent=p))
    if ceil_mode or set(window.dilations) - {1}:
        total = sum_windows(node, powers, window)
    else:
        operator, operands, attrs = average(node, powers, out, window, True)
        mean = node.step(operator, operands, out, attrs)
        total = node.step("aten.mul.Tensor", [mean], out, {"other": math.prod(window.kernel)})
    node.emit("aten.pow.Tensor_Scalar", [total], {"exponent": 1 / p})


def local_response_norm(
    node: Node, *, size: int = 0, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
) -> None:
    """Divide by a power of the mean square over neighbouring channels."""
    spec = node.spec(0)
    table = TensorSpec((spec.sizes[0], 1, spec.sizes[1], math.prod(spec.sizes[2:])), spec.dtype)
    x = term(node, node.operand(0))
    squares = reshape(node, compute(node, x * x), table.sizes)
    window = Window((size, 1), (1, 1), (1, 1), ((size - 1) // 2, 0), (size // 2, 0))
    operator, operands, attrs = average(node, squares, table, window, True)
    mean = term(node, reshape(node, node.step(operator, operands, table, attrs), spec.sizes))
    give(node, x / aten("pow.Tensor_Scalar", mean * alpha + bias, exponent=beta))


def unusual(**arguments: Sizes | int) -> dict[str, Attr]:
    """The arguments that are not torch's defaults: no pads, and 1 for everything else."""
    return {
        name: item
        for name, item in arguments.items()
        if set(item if isinstance(item, tuple) else (item,)) - {int("padding" not in name)}
    }


def count_axes(node: Node, count: int) -> int:
    """`count`, if torch has operators over `count` spatial axes."""
    if not 1 <= count <= 3:
        raise node.refusal(f"it has {plural(count, 'spatial axis', 'spatial axes')}, expected 1 to 3")
    return count


def kernel_of(node: Node, weight: int) -> Sizes:
    """The kernel of a convolution whose weight is input `weight`."""
    kernel = node.spec(weight).sizes[2:]
    node.check_length("the kernel", kernel, node.spec(0).rank - 2)
    node.attributes.settle("kernel_shape")
    return kernel


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


def explicit_pads(node: Node, kernel: Sizes) -> tuple[Sizes, Sizes]:
    """Begins and ends."""
    pads = node.attributes.integers("pads") or (0,) * (2 * len(kernel))
    node.check_length("pads", pads, 2 * len(kernel))
    return pads[: len(kernel)], pads[len(kernel) :]


def read_window(node: Node, kernel: Sizes) -> Window:
    """A window over input 0, with `auto_pad` resolved."""
    strides, dilations = per_axis(node, "strides"), per_axis(node, "dilations")
    window = Window(kernel, strides, dilations, (), ()).without_pads
    mode = node.attributes.text("auto_pad", "NOTSET")
    node.attributes.settle("pads")
    if mode not in ("SAME_UPPER", "SAME_LOWER"):
        if mode not in ("NOTSET", "", "VALID"):
            raise node.refusal(f"found auto_pad {mode!r}, expected NOTSET, VALID, SAME_UPPER or SAME_LOWER")
        if mode != "VALID":
            begins, ends = explicit_pads(node, kernel)
            return replace(window, begins=begins, ends=ends)
        if node.attributes.flag("ceil_mode"):
            refuse_windows(node, window)
        return window
    # Where a stride steps over elements, none is left out before the first window: ONNX's inference has no pad
    # below 0, as TensorFlow. Onnxruntime has, and takes no notice of dilations, which the standard's formula has.
    totals = [
        max((-(-size // stride) - 1) * stride + reach - size, 0)
        for size, stride, reach in zip(node.spec(0).sizes[2:], strides, window.reaches, strict=True)
    ]
    return split_pads(window, totals, odd_at_end=mode == "SAME_UPPER")


def refuse_windows(node: Node, window: Window) -> None:
    """Refuse windows of ceil_mode that the standard's text and its inference do not count alike."""
    for axis, (size, reach, stride) in enumerate(
        zip(node.spec(0).sizes[2:], window.reaches, window.strides, strict=True), 2
    ):
        room = size - reach
        windows, last = room // stride + 1, -(-room // stride)
        if last >= windows and last * stride < size:
            raise node.refusal(
                f"auto_pad VALID with ceil_mode is {plural(windows, 'window')} along axis {axis} by ONNX's text, and "
                f"{last + 1} by its inference and onnxruntime; give pads in place of auto_pad"
            )


def transposed_window(node: Node, window: Window, extra: Sizes) -> Window:
    """With the pads that a transposed convolution crops; `output_shape` and `auto_pad` are resolved as ONNX defines."""
    mode, wanted = node.attributes.text("auto_pad", "NOTSET"), node.attributes.integers("output_shape")
    node.attributes.settle("pads")
    kernel, strides = window.kernel, window.strides
    if mode == "VALID" and not wanted:
        return window.without_pads
    if mode in ("NOTSET", "") and not wanted:
        begins, ends = explicit_pads(node, kernel)
        return replace(window, begins=begins, ends=ends)
    sizes = node.spec(0).sizes[2:]
    wanted = wanted or tuple(size * stride for size, stride in zip(sizes, strides, strict=True))
    node.check_length("output_shape", wanted, len(sizes))
    rows = zip(sizes, window.reaches, strides, extra, wanted, strict=True)
    totals = [stride * (size - 1) + more + reach - out for size, reach, stride, more, out in rows]
    if min(totals, default=0) < 0:
        raise node.refusal(f"the output {wanted} is larger than the kernel reaches")
    return split_pads(window, totals, odd_at_end=mode == "SAME_UPPER")


def split_pads(window: Window, totals: list[int], *, odd_at_end: bool) -> Window:
    """Split `totals` into begins and ends; an odd one is larger at the end or at the begin."""
    small, large = tuple(total // 2 for total in totals), tuple(total - total // 2 for total in totals)
    return replace(window, begins=small if odd_at_end else large, ends=large if odd_at_end else small)


SLICE = "aten.slice.Tensor"

IMPORTERS: dict[str, Importer] = {
    "AveragePool": average_pool,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "GlobalAveragePool": over_images("aten.mean.dim"),
    "GlobalMaxPool": over_images("aten.amax.default"),
    "LRN": local_response_norm,
    "LpPool": lp_pool,
    "MaxPool": max_pool,
    "MaxUnpool": max_unpool,
}
