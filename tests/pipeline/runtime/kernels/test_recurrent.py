"""Recurrent kernels against onnxruntime."""

from __future__ import annotations

import pytest

from pipeline.runtime import compile_graph
from tests.pipeline.runtime.kernels.kernel_reference import Case, assert_close, expected, graph_of, rand


def lstm(direction: str, steps: int = 5, batch: int = 3, dtype: str = "float32") -> Case:
    directions, features, hidden = (2 if direction == "bidirectional" else 1), 4, 6
    inputs = [
        rand(steps, batch, features, dtype=dtype),
        rand(directions, 4 * hidden, features, dtype=dtype, high=1),
        rand(directions, 4 * hidden, hidden, dtype=dtype, high=1),
        rand(directions, 8 * hidden, dtype=dtype, high=1),
        rand(directions, batch, hidden, dtype=dtype, high=1),
        rand(directions, batch, hidden, dtype=dtype, high=3),
    ]
    node = {"direction": direction, "hidden_size": hidden}
    # ONNX has the lengths of the sequences before the states.
    return Case("LSTM", inputs, {"direction": direction}, node, outputs=3, gap=4, by_ort=True, opset=21)


CASES = [
    *(lstm(direction) for direction in ("forward", "reverse", "bidirectional")),
    lstm("forward", steps=1, batch=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_reference(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    for at, wanted in enumerate(results):
        assert_close(actual[f"out{at}"].numpy(), wanted)
