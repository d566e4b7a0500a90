"""Normalisations, softmaxes and reductions against ONNX's reference."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of, ints, rand

X = rand(2, 6, 5)
CHANNELS = rand(6), rand(6, high=1)
SPREAD = rand(6, low=0.2, high=3)


def reduction(kind: str, x: np.ndarray, axes: tuple[int, ...], *, keepdims: bool = False) -> Case:
    return Case(
        kind, [x], {"axes": axes, "keepdims": keepdims}, {"keepdims": int(keepdims)}, extra=[np.array(axes, np.int64)]
    )


def running_sum(x: np.ndarray, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Case:
    return Case(
        "CumSum",
        [x],
        {"axis": axis, "exclusive": exclusive, "reverse": reverse},
        {"exclusive": int(exclusive), "reverse": int(reverse)},
        extra=[np.array(axis, np.int64)],
    )


CASES = [
    *(
        Case("LayerNormalization", weights, {"axis": axis, "epsilon": 1e-3}, {"axis": axis, "epsilon": 1e-3})
        for axis, weights in [(-1, [X, rand(5)]), (-1, [X, rand(5), rand(5, high=1)]), (1, [X, rand(6, 5), rand(6, 5)])]
    ),
    Case("LayerNormalization", [X, rand(5), rand(5)], {"axis": 2, "epsilon": 1e-5}, {"axis": 2}),
    *(
        Case("RMSNormalization", [X, scale], {"axis": axis, "epsilon": 1e-3}, {"axis": axis, "epsilon": 1e-3})
        for axis, scale in [(-1, rand(5)), (1, rand(6, 5))]
    ),
    Case("BatchNormalization", [X, *CHANNELS, rand(6), SPREAD], {"epsilon": 1e-3}, {"epsilon": 1e-3}),
    Case("BatchNormalization", [rand(4, 6), *CHANNELS, rand(6), SPREAD], {"epsilon": 1e-5}),
    Case("InstanceNormalization", [X, *CHANNELS], {"epsilon": 1e-3}, {"epsilon": 1e-3}),
    # The variance of one element is 0, so 1/sqrt(epsilon) multiplies torch's rounding; hence the large epsilon.
    Case("InstanceNormalization", [rand(2, 6, 1, 1), *CHANNELS], {"epsilon": 0.5}, {"epsilon": 0.5}),
    Case("GroupNormalization", [X, *CHANNELS], {"groups": 3, "epsilon": 1e-3}, {"num_groups": 3, "epsilon": 1e-3}),
    *(
        Case(kind, [x], {"axis": axis}, {"axis": axis})
        for kind in ("Softmax", "LogSoftmax")
        for x, axis in [(X, -1), (X, 1), (rand(3, 4, dtype="float64"), 0)]
    ),
    Case("Softmax", [rand(3, 4, dtype="float16")], {"axis": -1}, {"axis": -1}),
    *(
        reduction(kind, X, axes, keepdims=keepdims)
        for kind in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceLogSumExp")
        for axes, keepdims in [((1,), True), ((0, -1), False), ((0, 1, 2), False)]
    ),
    *(reduction(kind, ints(2, 6, 5), (1,)) for kind in ("ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd")),
    reduction("ReduceSum", ints(2, 6, 5, dtype="int32"), (0, 2)),
    *(
        Case(kind, [x], {"axis": axis, "keepdims": keepdims}, {"axis": axis, "keepdims": int(keepdims)})
        for kind in ("ArgMax", "ArgMin")
        for x in (X, ints(4, 40, low=0, high=3))
        for axis, keepdims in [(-1, False), (0, True)]
    ),
    *(
        running_sum(X, 1, exclusive=exclusive, reverse=reverse)
        for exclusive in (False, True)
        for reverse in (False, True)
    ),
    running_sum(ints(3, 4, dtype="int32"), -1),
]


WRITTEN_LAST = ("LayerNormalization", "RMSNormalization", "InstanceNormalization", "GroupNormalization")
"""Their kernels compute in memory of their own, so the result may replace the operand."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_onnx(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(actual["out0"].numpy(), results[0])


@pytest.mark.parametrize("case", [case for case in CASES if case.kind in WRITTEN_LAST], ids=str)
def test_like_onnx_in_place(case: Case) -> None:
    results = expected(case)
    program = compile_graph(graph_of(case, results, through_tmp=[0]))
    assert program.plan.alias
    actual = program.run({f"in{at}": array for at, array in enumerate(case.inputs)})
    assert_close(actual["out0"].numpy(), results[0])
