"""Kernels that move or pick elements: equal to the reference, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from pipeline.errors import Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of, ints, rand

X = rand(3, 4, 5)
WHOLE = (-(2**31), 2**31 - 1)
TIED = np.array([[1, 3, 3, 2, 3], [0, 0, 0, 0, 0]], np.float32)


def i64(*items: Any) -> np.ndarray:
    return np.array(items, np.int64)


def slicing(starts: tuple[int, ...], ends: tuple[int, ...], axes: tuple[int, ...], steps: tuple[int, ...]) -> Case:
    attrs = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    return Case("Slice", [X], attrs, extra=[np.array(items, np.int64) for items in attrs.values()])


def padding(x: np.ndarray, mode: str, *pads: int, value: float = 0.0) -> Case:
    """By onnxruntime: ONNX's evaluator has no negative pads."""
    attrs = {"pads": pads, "mode": mode, "value": value}
    return Case("Pad", [x], attrs, {"mode": mode}, extra=[i64(*pads), np.array(value, x.dtype)], by_ort=True, opset=21)


def scatter(reduction: str, data: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> Case:
    return Case("ScatterND", [data, indices, updates], {"reduction": reduction}, {"reduction": reduction})


def scatter_elements(reduction: str, axis: int, data: np.ndarray, indices: np.ndarray) -> Case:
    attrs = {"axis": axis, "reduction": reduction}
    return Case("ScatterElements", [data, indices, rand(*indices.shape, high=9)], attrs, attrs)


def grid_sample(mode: str, padding: str, corners: bool, *shape: int) -> Case:
    """Positions go beyond the borders. By onnxruntime, whose name for linear is that of opset 20."""
    attrs = {"mode": mode, "padding": padding, "align_corners": corners}
    node = {"mode": mode, "padding_mode": padding, "align_corners": int(corners)}
    grid = rand(2, *(3 for _ in shape[2:]), len(shape) - 2, low=-1.5, high=1.5)
    return Case("GridSample", [rand(*shape), grid], attrs, node, by_ort=True, opset=20)


def top(x: np.ndarray, k: int, axis: int, *, largest: bool) -> Case:
    attrs = {"axis": axis, "largest": largest, "k": k}
    return Case("TopK", [x], attrs, {"axis": axis, "largest": int(largest)}, extra=[i64(k)], outputs=2)


CASES = [
    Case("Reshape", [X], {"shape": (2, 30)}, extra=[i64(2, 30)]),
    *(Case("Transpose", [X], {"perm": perm}, {"perm": perm}) for perm in [(2, 0, 1), (0, 2, 1)]),
    Case("Concat", [X, rand(3, 2, 5), rand(3, 1, 5)], {"axis": 1}, {"axis": 1}),
    Case("Concat", [ints(2, 3), ints(2, 3, high=4)], {"axis": -1}, {"axis": -1}),
    Case("Split", [X], {"axis": -1, "sizes": (1, 3, 1)}, {"axis": -1}, extra=[i64(1, 3, 1)], outputs=3),
    slicing((1, 0), (3, 100), (0, 2), (1, 2)),
    slicing((-2,), (WHOLE[1],), (1,), (1,)),
    slicing((-1,), (WHOLE[0],), (1,), (-1,)),
    slicing((100, 3), (0, -100), (2, 1), (-2, -3)),
    slicing((2,), (2,), (0,), (1,)),
    Case("Expand", [rand(4, 1)], {"shape": (3, 4, 5)}, extra=[i64(3, 4, 5)]),
    Case("Expand", [rand(3, 4)], {"shape": (3, 1)}, extra=[i64(3, 1)], note="both_ways"),
    Case("Tile", [rand(2, 3)], {"repeats": (2, 3)}, extra=[i64(2, 3)]),
    padding(rand(2, 3), "constant", 1, 0, 0, 2, value=7.0),
    padding(X, "constant", -1, 2, 0, 1, -2, 0, value=-1.0),
    padding(ints(2, 3), "constant", 1, 1, 1, 1, value=4),
    padding(rand(4, 5), "reflect", 2, 3, 1, 4),
    padding(rand(3, 4), "edge", 2, 0, 0, 5),
    *(
        Case("Gather", [X, indices], {"axis": axis}, {"axis": axis})
        for axis, indices in [
            (0, i64(2, -1, 0)),
            (1, i64([0, 3], [-4, 1])),
            (-1, np.array(2)),
            (1, np.array([1, -1], np.int32)),
        ]
    ),
    Case("GatherElements", [X, ints(3, 2, 5, low=-4, high=4)], {"axis": 1}, {"axis": 1}),
    Case("GatherND", [X, i64([0, 1], [2, -1])], {"batch_dims": 0}),
    Case("GatherND", [X, i64([0, 1, 4], [-1, 0, 0])], {"batch_dims": 0}, by_ort=True),
    Case("GatherND", [X, i64([0], [3], [2])], {"batch_dims": 1}, {"batch_dims": 1}),
    scatter("none", X, i64([2], [0]), rand(2, 4, 5, high=9)),
    scatter("none", X, i64([2, 1], [0, 3]), rand(2, 5)),
    scatter_elements("none", 1, X, i64([[0, -1], [2, 1]])),
    *(
        scatter_elements(reduction, axis, X, i64([[0, -1, 0, 0, 2]]))
        for reduction, axis in [("add", 0), ("mul", 0), ("max", -1), ("min", 1)]
    ),
    *(
        grid_sample(mode, padding, corners, 2, 3, 5, 4)
        for mode in ("linear", "nearest", "cubic")
        for padding in ("zeros", "border", "reflection")
        for corners in (True, False)
    ),
    grid_sample("linear", "zeros", False, 2, 3, 4, 5, 3),
    *(scatter(reduction, X, i64([2], [0], [2]), rand(3, 4, 5, high=9)) for reduction in ("add", "mul", "max", "min")),
    *(top(TIED, 3, 1, largest=largest) for largest in (True, False)),
    top(X, 2, 0, largest=True),
    top(ints(3, 6), 4, -1, largest=False),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_reference(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    for at, result in enumerate(results):
        assert_close(actual[f"out{at}"].numpy(), result)


@pytest.mark.parametrize(
    "bounds", [(-1, -100, -1), (4, -100, -2), (3, -6, -2), (3, 0, -1), (-99, -100, -1), (1, 3, -1)]
)
@pytest.mark.parametrize("folded", [False, True])
def test_a_slice_of_an_onnx_model_is_onnxruntimes(bounds: tuple[int, int, int], folded: bool) -> None:
    """From the file to the numbers: importer, kernel and folding have to mean the same by a bound."""
    start, end, step = bounds
    sliced = "c" if folded else "x"
    text = f"""<ir_version: 8, opset_import: ["": 18]> g (int64[5] x) => (int64[n] y)
    <int64[1] s = {{{start}}}, int64[1] e = {{{end}}}, int64[1] a = {{0}}, int64[1] t = {{{step}}},
     int64[5] c = {{9, 8, 7, 6, 5}}, int64[1] zero = {{0}}>
    {{ z = Slice (x, zero, zero) r = Slice ({sliced}, s, e, a, t) y = Concat <axis = 0> (r, z) }}"""
    proto, x = onnx.parser.parse_model(text), np.arange(5)
    wanted = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x})[0]
    del proto.graph.output[0].type.tensor_type.shape.dim[:]
    proto.graph.output[0].type.tensor_type.shape.dim.add(dim_value=len(wanted))
    actual = compile_graph(from_onnx(proto)).run({"x": x})["y"].numpy()
    assert actual.tolist() == wanted.tolist()


@pytest.mark.parametrize("case", [case for case in CASES if case.kind == "ScatterND"], ids=str)
def test_scatter_in_place(case: Case) -> None:
    results = expected(case)
    program = compile_graph(graph_of(case, results, through_tmp=[0]))
    assert program.plan.alias
    actual = program.run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(actual["out0"].numpy(), results[0])


@pytest.mark.parametrize(
    ("kind", "attrs", "indices", "shape"),
    [
        ("Gather", {"axis": 0}, i64(3), (1, 4, 5)),
        ("GatherElements", {"axis": 0}, i64([[3]]), (1, 1, 1)),
        ("GatherND", {"batch_dims": 0}, i64([0, 4]), (1, 5)),
    ],
)
def test_an_index_out_of_range_is_the_feeds(kind: str, attrs: dict[str, int], indices: np.ndarray, shape) -> None:
    case = Case(kind, [X, indices], attrs)
    program = compile_graph(graph_of(case, [np.zeros(shape, np.float32)]))
    with pytest.raises(UsageError, match=f"{kind}.*out of range in the feed; the op reads it from in1"):
        program.run({"in0": X, "in1": indices})


MIRRORS = """
<ir_version: 9, opset_import: ["": 20]>
g (float[4] x) => (float[6] y) { pads = Constant <value_ints = [1, 1]> () y = Pad <mode = "mirror"> (x, pads) }
"""
SHORT_NUMBERS = """
<ir_version: 9, opset_import: ["": 20]>
g (uint16[2, 4] x, uint16[1, 4] u) => (uint16[2, 4] y) {
    at = Constant <value = int64[1, 1] {1}> () y = ScatterND (x, at, u)
}
"""


def test_what_the_model_may_say_and_we_lack_is_unsupported() -> None:
    """And no mistake in the model, or in the feed."""
    with pytest.raises(Unsupported, match="pads in the mode 'mirror'"):
        from_onnx(onnx.parser.parse_model(MIRRORS))
    program = compile_graph(from_onnx(onnx.parser.parse_model(SHORT_NUMBERS)))
    with pytest.raises(Unsupported, match="has no such operator for these dtypes"):
        program.run({"x": np.zeros((2, 4), np.uint16), "u": np.ones((1, 4), np.uint16)})
