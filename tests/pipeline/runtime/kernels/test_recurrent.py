"""Recurrent kernels against onnxruntime."""

from __future__ import annotations

import numpy as np
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
    return Case("LSTM", inputs, {"direction": direction}, node, outputs=3, gap=4, by_ort=True, opset=21, note="plain")


def cell(
    kind: str,
    direction: str = "forward",
    activations: str = "",
    clip: float = 0.0,
    *,
    flag: bool = False,
    note: str = "",
) -> Case:
    """A cell over three sequences of 5, 2 and 4 steps; `flag` is linear_before_reset or input_forget."""
    directions, features, hidden, steps, batch = (2 if direction == "bidirectional" else 1), 4, 6, 5, 3
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    default = {"LSTM": "Sigmoid,Tanh,Tanh", "GRU": "Sigmoid,Tanh", "RNN": "Tanh"}[kind]
    names = ",".join([activations or default] * directions)
    inputs = [
        rand(steps, batch, features),
        rand(directions, gates * hidden, features, high=1),
        rand(directions, gates * hidden, hidden, high=1),
        rand(directions, 2 * gates * hidden, high=1),
        np.array([5, 2, 4], np.int32),
        rand(directions, batch, hidden, high=1),
    ]
    if kind == "LSTM":
        inputs += [rand(directions, batch, hidden, high=1), rand(directions, 3 * hidden, high=1)]
    node = {"direction": direction, "hidden_size": hidden, "activations": names.split(",")}
    node |= {"clip": clip} if clip else {}
    node |= {{"LSTM": "input_forget", "GRU": "linear_before_reset"}[kind]: 1} if flag else {}
    outputs = 3 if kind == "LSTM" else 2
    return Case(kind, inputs, {"direction": direction}, node, outputs=outputs, by_ort=True, opset=21, note=note)


CASES = [
    *(
        cell(kind, direction)
        for kind in ("LSTM", "GRU", "RNN")
        for direction in ("forward", "reverse", "bidirectional")
    ),
    cell("GRU", flag=True, note="reset_after"),
    cell("LSTM", flag=True, note="input_forget"),
    cell("LSTM", clip=0.3, note="clip"),
    cell("GRU", activations="Sigmoid,Relu"),
    cell("RNN", activations="Relu", direction="bidirectional"),
    *(lstm(direction) for direction in ("forward", "reverse", "bidirectional")),
    lstm("forward", steps=1, batch=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_like_reference(case: Case) -> None:
    results = expected(case)
    actual = compile_graph(graph_of(case, results)).run({f"in{at}": array for at, array in enumerate(case.inputs)})
    for at, wanted in enumerate(results):
        assert_close(actual[f"out{at}"].numpy(), wanted)
