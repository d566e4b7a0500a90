"""Which windows a pool has, judged by the formulas of ONNX's text: `auto_pad`, `dilations` and `ceil_mode`.

Onnxruntime is no judge here: it takes no notice of dilations with `auto_pad`, and crops where a stride steps over
elements. Nor is ONNX's evaluator, which knows no dilations with `auto_pad`.
"""

from __future__ import annotations

import math
from itertools import product
from textwrap import dedent

import numpy as np
import onnx
import pytest
import torch

from pipeline.errors import Unsupported
from pipeline.importers.from_onnx.conv import count_windows
from pipeline.runtime import compile_graph
from tests.pipeline.importers.from_onnx.import_text import graph_from, ops

Pads = tuple[int, int]


def line(op: str, size: int, attributes: str) -> str:
    return f"g (float[1, 1, {size}] x) => (float[1, 1, n] y) {{ y = {op} <{attributes}> (x) }}"


def pooled(op: str, x: np.ndarray, attributes: str) -> list[float]:
    graph = graph_from(line(op, x.shape[2], attributes), 22)
    (y,) = compile_graph(graph).run({"x": torch.from_numpy(x)}).values()
    assert y.shape[:2] == (1, 1)
    return [round(number, 4) for number in y[0, 0].tolist()]


def by_the_text(op: str, x: np.ndarray, places: list[list[int]], pads: Pads) -> list[float]:
    """The pool over windows at `places`; `pads` are those that count as elements of an average."""
    found, size = [], x.shape[2]
    for window in places:
        held = [float(x[0, 0, at]) for at in window if 0 <= at < size]
        count = sum(-pads[0] <= at < size + pads[1] for at in window)
        found.append(max(held) if op == "MaxPool" else sum(held) / count if op == "AveragePool" else math.hypot(*held))
    return [round(number, 4) for number in found]


def windows(count: int, begin: int, kernel: int, stride: int, dilation: int) -> list[list[int]]:
    return [[at * stride - begin + step * dilation for step in range(kernel)] for at in range(count)]


GRID = list(product((4, 5, 7), (1, 2, 3), (1, 2, 3, 4), (1, 2)))
POOLS = [("MaxPool", False), ("AveragePool", False), ("AveragePool", True), ("LpPool", False)]


@pytest.mark.parametrize(("op", "include"), POOLS)
@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
def test_same_pads_by_the_formula_with_dilations_and_never_below_zero(op: str, include: bool, mode: str) -> None:
    for size, kernel, stride, dilation in GRID:
        x = np.arange(1, size + 1, dtype=np.float32).reshape(1, 1, size)
        count = -(-size // stride)
        total = max((count - 1) * stride + (kernel - 1) * dilation + 1 - size, 0)
        begin = total // 2 if mode == "SAME_UPPER" else total - total // 2
        pads = (begin, total - begin) if include else (0, 0)
        wanted = by_the_text(op, x, windows(count, begin, kernel, stride, dilation), pads)
        given = f'kernel_shape = [{kernel}], strides = [{stride}], dilations = [{dilation}], auto_pad = "{mode}"'
        found = pooled(op, x, given + (", count_include_pad = 1" if include else ""))
        assert found == pytest.approx(wanted, abs=2e-4), given


@pytest.mark.parametrize(("op", "include"), POOLS)
def test_a_window_of_ceil_mode_starts_in_the_input_or_the_pads_before_it(op: str, include: bool) -> None:
    """One that hangs over counts the elements that it has, also where it is larger than the whole input."""
    for size, kernel, stride, dilation in [*GRID, (2, 5, 4, 1), (1, 2, 2, 2), (1, 5, 2, 1)]:
        for begin, end in product(range(min(kernel, 2)), repeat=2):
            x = np.arange(1, size + 1, dtype=np.float32).reshape(1, 1, size)
            reach = (kernel - 1) * dilation + 1
            count = math.ceil((size + begin + end - reach) / stride + 1)
            count -= (count - 1) * stride >= size + begin
            if count < 0 or (count == 0 and (dilation > 1 or op == "LpPool") and op != "MaxPool"):
                continue
            pads = (begin, end) if include else (0, 0)
            places = windows(count, begin, kernel, stride, dilation)
            given = (
                f"kernel_shape = [{kernel}], strides = [{stride}], dilations = [{dilation}], ceil_mode = 1, "
                f"pads = [{begin}, {end}]"
            )
            if all(any(0 <= at < size for at in window) for window in places):
                found = pooled(op, x, given + (", count_include_pad = 1" if include else ""))
                assert found == pytest.approx(by_the_text(op, x, places, pads), abs=2e-4), (size, given)


def test_windows_are_counted_as_torch_counts_them() -> None:
    for size, kernel, stride, ceil_mode in product(range(1, 9), range(1, 5), range(1, 5), (False, True)):
        for pad in range(kernel // 2 + 1):
            if size + 2 * pad >= kernel:
                counted = torch.nn.functional.max_pool1d(torch.zeros(1, 1, size), kernel, stride, pad, 1, ceil_mode)
                given = (size, kernel, stride, pad)
                assert count_windows(*given, ceil_mode=ceil_mode) == counted.shape[-1], (given, ceil_mode)


def test_averages_and_norms_over_dilated_windows_are_convolutions_with_ones() -> None:
    x = "g (float[1, 3, 5] x) => (float[1, 3, 2] y)"
    assert (
        ops(f"{x} {{ y = AveragePool <kernel_shape = [2], strides = [2], dilations = [2]> (x) }}", 19)
        == (
            """
        const %1 "y.value": float32[3, 1, 2]
        const %3 "y.value.0": float32[1, 1, 2]
        %2 "y.conv1d": float32[1, 3, 2] = aten.conv1d.default(%0, %1) {stride: [2], dilation: [2], groups: 3}
        %4 "y": float32[1, 3, 2] = aten.div.Tensor(%2, %3)
        """
        )
        .replace("\n        ", "\n")
        .strip()
    )
    assert (
        ops(f"{x} {{ y = LpPool <kernel_shape = [4], strides = [3], ceil_mode = 1> (x) }}", 19)
        == (
            """
        const %3 "y.value": float32[3, 1, 4]
        %1 "y.abs": float32[1, 3, 5] = aten.abs.default(%0)
        %2 "y.pow": float32[1, 3, 5] = aten.pow.Tensor_Scalar(%1) {exponent: 2}
        %4 "y.constant_pad_nd": float32[1, 3, 7] = aten.constant_pad_nd.default(%2) {pad: [0, 2], value: 0.0}
        %5 "y.conv1d": float32[1, 3, 2] = aten.conv1d.default(%4, %3) {stride: [3], groups: 3}
        %6 "y": float32[1, 3, 2] = aten.pow.Tensor_Scalar(%5) {exponent: 0.5}
        """
        )
        .replace("\n        ", "\n")
        .strip()
    )


SQUARE = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)


def test_windows_of_two_dimensions_have_pads_of_their_own() -> None:
    text = """g (float[1, 1, 5, 5] x) => (float[1, 1, a, b] y) {
        y = AveragePool <kernel_shape = [1, 2], strides = [4, 2], dilations = [1, 3], auto_pad = "SAME_UPPER"> (x) }"""
    (y,) = compile_graph(graph_from(text, 22)).run({"x": torch.from_numpy(SQUARE)}).values()
    # Along the second axis the pads are 1 and 2: windows at -1 and 2, at 1 and 4, at 3 and 6.
    assert y[0, 0].tolist() == [[3, 3.5, 4], [23, 23.5, 24]]


PADDED = {
    ('y = Conv <auto_pad = "SAME_UPPER", strides = [2, 2]> (x, w, b)', "2, 5, 4, 4"): """
        %4 "y.constant_pad_nd": float32[2, 3, 9, 9] = aten.constant_pad_nd.default(%0) {pad: [0, 1, 0, 1], value: 0.0}
        %5 "y": float32[2, 5, 4, 4] = aten.conv2d.default(%4, %1, %2) {stride: [2, 2]}
    """,
    ('y = Conv <auto_pad = "SAME_LOWER", strides = [2, 2]> (x, w)', "2, 5, 4, 4"): """
        %4 "y.constant_pad_nd": float32[2, 3, 9, 9] = aten.constant_pad_nd.default(%0) {pad: [1, 0, 1, 0], value: 0.0}
        %5 "y": float32[2, 5, 4, 4] = aten.conv2d.default(%4, %1) {stride: [2, 2]}
    """,
    ('y = ConvTranspose <strides = [2, 2], auto_pad = "SAME_UPPER"> (x, v)', "2, 5, 16, 16"): """
        %4 "y.conv_transpose2d": float32[2, 5, 17, 17] = aten.conv_transpose2d.input(%0, %3) {stride: [2, 2]}
        %5 "y.slice": float32[2, 5, 16, 17] = aten.slice.Tensor(%4) {dim: 2, start: 0, end: 16}
        %6 "y": float32[2, 5, 16, 16] = aten.slice.Tensor(%5) {dim: 3, start: 0, end: 16}
    """,
    ("y = ConvTranspose <strides = [2, 2], pads = [0, 1, 0, 0]> (x, v)", "2, 5, 17, 16"): """
        %4 "y.conv_transpose2d": float32[2, 5, 17, 17] = aten.conv_transpose2d.input(%0, %3) {stride: [2, 2]}
        %5 "y": float32[2, 5, 17, 16] = aten.slice.Tensor(%4) {dim: 3, start: 1, end: 17}
    """,
    ("y = MaxPool <kernel_shape = [2, 2], pads = [0, 0, 2, 0]> (x)", "2, 3, 9, 7"): """
        %4 "y.constant_pad_nd": float32[2, 3, 10, 8] = aten.constant_pad_nd.default(%0) {pad: [0, 0, 0, 2], value: -inf}
        %5 "y": float32[2, 3, 9, 7] = aten.max_pool2d.default(%4) {kernel_size: [2, 2], stride: [1, 1]}
    """,
    ("y = AveragePool <kernel_shape = [2, 2], pads = [1, 1, 0, 0], count_include_pad = 1> (x)", "2, 3, 8, 8"): """
        %4 "y.constant_pad_nd": float32[2, 3, 9, 9] = aten.constant_pad_nd.default(%0) {pad: [1, 0, 1, 0], value: 0.0}
        %5 "y": float32[2, 3, 8, 8] = aten.avg_pool2d.default(%4) {kernel_size: [2, 2], stride: [1, 1]}
    """,
    ("y = AveragePool <kernel_shape = [2, 2], pads = [1, 1, 0, 0]> (x)", "2, 3, 8, 8"): """
        const %6 "y.value": float32[1, 1, 8, 8]
        %4 "y.constant_pad_nd": float32[2, 3, 9, 9] = aten.constant_pad_nd.default(%0) {pad: [1, 0, 1, 0], value: 0.0}
        %5 "y.avg_pool2d": float32[2, 3, 8, 8] = aten.avg_pool2d.default(%4) {kernel_size: [2, 2], stride: [1, 1]}
        %7 "y": float32[2, 3, 8, 8] = aten.mul.Tensor(%5, %6)
    """,
}
"""Pads that torch's operators do not take: of one side alone, and of more than half a window."""


@pytest.mark.parametrize("case", PADDED, ids=lambda case: case[0])
def test_pads_that_differ_between_the_sides(case: tuple[str, str]) -> None:
    node, shape = case
    inputs = "float[2, 3, 8, 8] x, float[5, 3, 3, 3] w, float[5] b, float[3, 5, 3, 3] v"
    assert ops(f"g ({inputs}) => (float[{shape}] y) {{ {node} }}") == dedent(PADDED[case]).strip()


REFUSED = {
    "its window reaches over 3 elements of axis 2, which has 2 with its pads": [
        line(op, 2, attributes)
        for op in ("MaxPool", "AveragePool", "LpPool")
        for attributes in (
            "kernel_shape = [3], strides = [2]",
            "kernel_shape = [3]",
            "kernel_shape = [2], dilations = [2]",
            'kernel_shape = [3], auto_pad = "VALID"',
        )
    ],
    "its window reaches over 5 elements of axis 2, which has 3 with its pads": [
        line("MaxPool", 2, "kernel_shape = [5], pads = [1, 0], ceil_mode = 1"),
        "g (float[1, 1, 2] x) => (float[1, 1, n] y) <float[1, 1, 3] w = {1, 1, 1}> "
        "{ y = Conv <dilations = [2], pads = [0, 1], strides = [3]> (x, w) }",
    ],
    "auto_pad VALID with ceil_mode is 1 window along axis 2 by ONNX's text, and 2 by its inference and onnxruntime; "
    "give pads in place of auto_pad": [
        line(op, 4, 'kernel_shape = [3], strides = [2], ceil_mode = 1, auto_pad = "VALID"')
        for op in ("MaxPool", "AveragePool", "LpPool")
    ],
    "found auto_pad 'SAME', expected NOTSET, VALID, SAME_UPPER or SAME_LOWER": [
        line("MaxPool", 4, 'kernel_shape = [3], auto_pad = "SAME"')
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_windows_that_nobody_agrees_on_are_refused(message: str) -> None:
    """By the text there is none where ONNX's inference and onnxruntime have one, or the number is below 0."""
    for text in REFUSED[message]:
        with pytest.raises(Unsupported) as error:
            graph_from(text, 22)
        assert f": {message}; rewrite the node" in str(error.value), text


def test_the_text_the_evaluator_and_onnxruntime_have_no_window_where_onnx_infers_one() -> None:
    text = line("MaxPool", 1, "kernel_shape = [2], strides = [2], dilations = [2], ceil_mode = 1")
    proto = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": 22]> {text}')
    (inferred,) = onnx.shape_inference.infer_shapes(proto).graph.output
    assert [dim.dim_value for dim in inferred.type.tensor_type.shape.dim] == [1, 1, 1]
    assert pooled("MaxPool", np.ones((1, 1, 1), np.float32), text[text.index("<") + 1 : text.index(">", 70)]) == []
