"""Matrix products, convolutions and pooling against a reference.

Pooling is judged by onnxruntime: ONNX's evaluator counts the last window of ceil_mode differently, and its
GlobalMaxPool returns two dimensions too many for a 3-D input.
"""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of, ints, rand

IMAGE, LINE, SOLID = rand(2, 4, 7, 6), rand(2, 4, 9), rand(1, 2, 5, 4, 6)
BYTES = ints(1, 2, 6, 6, dtype="int8", low=-100, high=100)


def gemm(*inputs: np.ndarray, alpha: float = 1.0, beta: float = 1.0, a: bool = False, b: bool = False) -> Case:
    return Case(
        "Gemm",
        inputs,
        {"alpha": alpha, "beta": beta, "trans_a": a, "trans_b": b},
        {"alpha": alpha, "beta": beta, "transA": int(a), "transB": int(b)},
    )


def conv(x: np.ndarray, w: np.ndarray, *bias: np.ndarray, group: int = 1, **given: tuple[int, ...]) -> Case:
    dims = x.ndim - 2
    lists = {"strides": (1,) * dims, "pads": (0,) * 2 * dims, "dilations": (1,) * dims} | given
    return Case("Conv", [x, w, *bias], {**lists, "group": group}, {**lists, "group": group})


def conv_transpose(x: np.ndarray, w: np.ndarray, *bias: np.ndarray, group: int = 1, **given: tuple[int, ...]) -> Case:
    dims = x.ndim - 2
    lists = {
        "strides": (1,) * dims,
        "pads": (0,) * 2 * dims,
        "output_padding": (0,) * dims,
        "dilations": (1,) * dims,
    } | given
    return Case("ConvTranspose", [x, w, *bias], {**lists, "group": group}, {**lists, "group": group}, by_ort=True)


def pool(kind: str, x: np.ndarray, *, ceil_mode: bool = False, include: bool | None = None, **given) -> Case:
    dims = x.ndim - 2
    lists = {"kernel": (2,) * dims, "strides": (1,) * dims, "pads": (0,) * 2 * dims} | given
    attrs = {**lists, "ceil_mode": ceil_mode}
    if kind == "MaxPool":
        attrs["dilations"] = given.get("dilations", (1,) * dims)
    node = {("kernel_shape" if key == "kernel" else key): value for key, value in attrs.items()}
    node["ceil_mode"] = int(ceil_mode)
    if kind == "AveragePool":
        attrs["count_include_pad"] = node["count_include_pad"] = bool(include)
        node["count_include_pad"] = int(bool(include))
    return Case(kind, [x], attrs, node, by_ort=True, opset=21)


def resize(
    x: np.ndarray,
    scales: tuple[float, ...],
    *,
    mode: str = "nearest",
    coordinates: str = "half_pixel",
    nearest: str = "round_prefer_floor",
) -> Case:
    return Case(
        "Resize",
        [x],
        {"mode": mode, "scales": scales, "coordinates": coordinates, "nearest": nearest},
        {"mode": mode, "coordinate_transformation_mode": coordinates, "nearest_mode": nearest},
        extra=[None, np.array(scales, np.float32)],
        by_ort=True,
        opset=19,
    )


CASES = [
    *(
        Case("MatMul", [rand(*a), rand(*b)])
        for a, b in [
            ((3, 4), (4, 5)),
            ((2, 3, 4), (4, 5)),
            ((2, 1, 3, 4), (5, 4, 6)),
            ((4,), (4, 5)),
            ((2, 3, 4), (4,)),
            ((4,), (2, 4, 3)),
        ]
    ),
    Case("MatMul", [rand(4), rand(4)]),
    Case("MatMul", [rand(2, 3, 4, dtype="float16"), rand(4, 5, dtype="float16")]),
    Case("MatMul", [ints(3, 4), ints(4, 5)]),
    gemm(rand(3, 4), rand(4, 5)),
    gemm(rand(3, 4), rand(4, 5), rand(5)),
    gemm(rand(4, 3), rand(5, 4), rand(3, 1), alpha=0.5, beta=2.0, a=True, b=True),
    gemm(rand(3, 4), rand(5, 4), alpha=0.5, b=True),
    gemm(rand(3, 4, dtype="float64"), rand(4, 5, dtype="float64"), rand(3, 5, dtype="float64")),
    gemm(ints(3, 4), ints(4, 5), ints(5), beta=2.0),
    Case("Einsum", [rand(2, 3, 4), rand(2, 4, 5)], {"equation": "bij,bjk->bik"}, {"equation": "bij,bjk->bik"}),
    Case("Einsum", [rand(3, 3)], {"equation": "ii->i"}, {"equation": "ii->i"}),
    Case("Einsum", [rand(2), rand(3), rand(4)], {"equation": "a,b,c->cab"}, {"equation": "a,b,c->cab"}),
    conv(LINE, rand(3, 4, 3)),
    conv(IMAGE, rand(6, 4, 3, 3), rand(6), pads=(1, 1, 1, 1), strides=(2, 2)),
    conv(IMAGE, rand(6, 4, 3, 2), pads=(0, 1, 2, 0)),
    conv(IMAGE, rand(8, 1, 3, 3), rand(8), group=4, dilations=(2, 1)),
    conv(SOLID, rand(3, 2, 2, 3, 2), rand(3), pads=(1, 0, 1, 0, 1, 1)),
    conv(IMAGE.astype("float64"), rand(6, 4, 3, 3, dtype="float64")),
    conv_transpose(LINE, rand(4, 3, 3), rand(3), strides=(2,), output_padding=(1,)),
    conv_transpose(IMAGE, rand(4, 3, 3, 3), rand(6), group=2, strides=(2, 3), pads=(1, 0, 1, 1)),
    conv_transpose(IMAGE, rand(4, 3, 3, 3), strides=(2, 2), pads=(0, 1, 2, 0), output_padding=(1, 1)),
    conv_transpose(SOLID, rand(2, 3, 2, 2, 2), dilations=(1, 2, 1)),
    *(
        pool(kind, IMAGE, include=include, ceil_mode=ceil, kernel=(3, 3), strides=(2, 2), pads=pads)
        for kind, include in [("MaxPool", None), ("AveragePool", False), ("AveragePool", True)]
        for ceil in (False, True)
        for pads in [(0, 0, 0, 0), (1, 1, 1, 1), (0, 1, 2, 0)]
    ),
    pool("MaxPool", LINE, kernel=(3,), dilations=(2,)),
    pool("MaxPool", SOLID),
    pool("MaxPool", BYTES, kernel=(3, 3), pads=(1, 1, 1, 1)),
    *(pool("MaxPool", IMAGE, kernel=(7, 5), pads=pads) for pads in [(3, 2, 3, 2), (0, 1, 2, 0)]),
    pool("MaxPool", BYTES, kernel=(7, 5), pads=(3, 2, 3, 2)),
    pool("AveragePool", LINE, kernel=(4,), strides=(3,), ceil_mode=True),
    pool("AveragePool", SOLID, pads=(1, 0, 1, 0, 1, 0), include=True),
    pool("AveragePool", IMAGE, kernel=(2, 3), pads=(0, 2, 0, 2)),
    *(
        Case(kind, [x], by_ort=True, opset=21)
        for kind in ("GlobalAveragePool", "GlobalMaxPool")
        for x in (LINE, IMAGE, SOLID)
    ),
    *(
        resize(IMAGE, scales, mode=mode, coordinates=coordinates)
        for mode in ("nearest", "linear")
        for coordinates in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
        # With a length that is no whole number onnxruntime has other corners than ONNX's cases.
        for scales in [(1.0, 1.0, 2.0, 2.0), (1.0, 1.0, 3.0 if coordinates == "align_corners" else 0.5, 1.5)]
    ),
    *(
        resize(IMAGE, (1.0, 1.0, 2.0, 0.75), nearest=nearest)
        for nearest in ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
    ),
    resize(IMAGE, (1.0, 1.0, 1.6, 0.6), mode="linear", coordinates="half_pixel_symmetric"),
    resize(LINE, (1.0, 1.0, 0.12), mode="linear", coordinates="pytorch_half_pixel"),
    resize(SOLID, (1.0, 1.0, 2.0, 1.0, 0.5)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_reference(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(actual["out0"].numpy(), results[0])
