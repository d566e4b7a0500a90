"""Convolution, pooling and resizing. Pads are explicit: all begins, then all ends, one for each spatial dimension."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node, direct
from pipeline.ir.graph import Attr

__all__ = ["IMPORTERS"]

Sizes = tuple[int, ...]


def conv(node: Node) -> None:
    kernel = node.spec(1).sizes[2:]
    node.check_length("the kernel", kernel, node.spec(0).rank - 2)
    node.attributes.settle("kernel_shape")
    strides, dilations = per_axis(node, "strides"), per_axis(node, "dilations")
    attrs: dict[str, Attr] = {
        "strides": strides,
        "pads": window_pads(node, kernel, strides, dilations),
        "dilations": dilations,
        "group": node.attributes.integer("group", 1),
    }
    node.emit("Conv", node.operands(), attrs)


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
    if set(dilations) - {1}:
        raise node.refusal(f"found dilations {dilations}, expected 1 in each dimension")
    attrs: dict[str, Attr] = {
        "kernel": kernel,
        "strides": strides,
        "pads": window_pads(node, kernel, strides, dilations),
        "ceil_mode": node.attributes.flag("ceil_mode"),
        "count_include_pad": node.attributes.flag("count_include_pad"),
    }
    node.emit("AveragePool", node.operands(0), attrs)


def resize(node: Node) -> None:
    """The simple cases: nearest and linear, from the sizes alone or from constant scales for all dimensions."""
    read = node.attributes
    mode = read.text("mode", "nearest")
    coordinates = read.text("coordinate_transformation_mode", "half_pixel")
    policy = read.text("keep_aspect_ratio_policy", "stretch")
    odd = mode == "cubic" or coordinates == "tf_crop_and_resize" or read.flag("antialias") or policy != "stretch"
    if odd or node.opset < 11:
        raise node.refusal(f"{mode}, {coordinates}, {policy} at opset {node.opset} is not one of the simple cases")
    # roi and the extrapolation value are for tf_crop_and_resize, the coefficient for cubic.
    read.settle("extrapolation_value", "cubic_coeff_a", "axes")
    node.settle_inputs(1, 3)
    before, after = node.spec(0).sizes, node.output().sizes
    if 0 in before:
        raise node.refusal(f"its input has the shape {list(before)}, without an element")
    scales = tuple(new / old for new, old in zip(after, before, strict=True))
    if node.has(2) and (given := node.need_constant(2, "scales")).size:
        axes = read.integers("axes") or tuple(range(len(before)))
        node.check_length("scales", given, len(axes))
        chosen = {axis % len(before): float(scale) for axis, scale in zip(axes, given, strict=True)}
        scales = tuple(chosen.get(axis, 1.0) for axis in range(len(before)))
    attrs: dict[str, Attr] = {
        "mode": mode,
        "scales": scales,
        "coordinates": coordinates,
        "nearest": read.text("nearest_mode", "round_prefer_floor"),
    }
    node.emit("Resize", [node.operand(0)], attrs)


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
    if mode in ("NOTSET", ""):
        return explicit_pads(node, kernel)
    if mode == "VALID":
        return (0,) * (2 * len(kernel))
    totals = []
    for size, window, stride, dilation in zip(node.spec(0).sizes[2:], kernel, strides, dilations, strict=True):
        reach = (window - 1) * dilation + 1
        totals.append(max((-(-size // stride) - 1) * stride + reach - size, 0))
    return split_pads(totals, odd_at_end=mode == "SAME_UPPER")


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
    "MaxPool": max_pool,
    "Resize": resize,
}
