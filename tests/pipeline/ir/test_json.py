"""The JSON form: what it looks like, that it survives strict JSON, and what its reader says of mistakes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pipeline.errors import SourceError
from pipeline.ir import Graph, KernelSpec, TensorSpec, from_json, to_json
from pipeline.ir.builder import Builder
from tests.pipeline.ir.random_graphs import graphs

PICTURE = {
    "format_version": 2,
    "name": "act",
    "inputs": ["x"],
    "outputs": ["y"],
    "tensors": [
        {"name": "x", "shape": ["batch", 4], "dtype": "float32", "device": "cpu", "role": "input"},
        {"name": "w", "shape": [4], "dtype": "float32", "device": "cuda:0", "role": "param"},
        {"name": "y", "shape": [2, 4], "dtype": "float32", "device": "cpu", "role": "output"},
    ],
    "ops": [
        {
            "kind": "Leaky",
            "inputs": ["x", "w"],
            "outputs": ["y"],
            "attrs": {
                "alpha": {"float": 1.0},
                "top": {"float": "inf"},
                "sizes": {"ints": [1, 2]},
                "on": {"bool": True},
            },
            "constraints": {"inplace": {"ints": [0]}},
            "name": "node_1",
            "origin": "layers.0",
            "kernel": {"kind_id": 12, "attr_schema": "f", "attr_blob": "0ad7"},
        }
    ],
}


def picture() -> Graph:
    b = Builder("act", {"Leaky": lambda attrs, inputs, outputs: KernelSpec(12, "f", b"\x0a\xd7")}.get)
    x = b.input("x", TensorSpec(("batch", 4), "float32"))
    w = b.param("w", TensorSpec((4,), "float32", "cuda:0"))
    attrs = {"alpha": 1.0, "top": math.inf, "sizes": (1, 2), "on": True}
    outputs = [("y", TensorSpec((2, 4), "float32"))]
    (y,) = b.emit("Leaky", [x, w], outputs, attrs, constraints={"inplace": (0,)}, name="node_1", origin="layers.0")
    return b.build([y])


def test_a_graph_as_json() -> None:
    assert to_json(picture()) == PICTURE


def test_json_as_a_graph() -> None:
    payload: Any = object()
    graph = from_json(PICTURE, {"w": payload})
    assert graph.payloads == {1: payload}
    assert from_json(PICTURE) == picture()


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_every_graph_survives_strict_json(graph: Graph) -> None:
    text = json.dumps(to_json(graph), allow_nan=False)
    assert from_json(json.loads(text)) == graph


def test_an_int_stays_an_int_and_a_float_a_float() -> None:
    b = Builder("types")
    b.emit("K", [], [], {"int": 1, "float": 1.0, "floats": (1.0,), "bool": True, "nan": math.nan})
    attrs = from_json(json.loads(json.dumps(to_json(b.build([]))))).ops[0].attrs
    assert [type(item) for item in attrs.values()] == [int, float, tuple, bool, float]
    assert repr(attrs["floats"]) == "(1.0,)"


def damaged(**changes: object) -> dict[str, Any]:
    return {**PICTURE, **changes}


OP = PICTURE["ops"][0]

MISTAKES = {
    "version": (damaged(format_version=1), "found format_version 1, expected 2"),
    "no version": ({}, "found format_version None, expected 2"),
    "unknown value": (damaged(outputs=["z"]), "outputs[0] cannot be read: no tensor is called 'z'"),
    "unknown operand": (
        damaged(ops=[{**OP, "inputs": ["z"]}]),
        "ops[0].inputs[0] cannot be read: no tensor is called 'z'",
    ),
    "no kind": (damaged(ops=[{}]), "ops[0] cannot be read: needs 'kind', which is not there"),
    "role": (
        damaged(tensors=[{**PICTURE["tensors"][0], "role": "king"}]),
        "tensors[0].role cannot be read: 'king' is not",
    ),
    "dtype": (damaged(tensors=[{**PICTURE["tensors"][0], "dtype": "f12"}]), "unknown dtype 'f12'"),
    "shape": (damaged(tensors=[{**PICTURE["tensors"][0], "shape": "24"}]), "found '24', expected a list"),
    "operands": (damaged(ops=[{**OP, "inputs": "x"}]), "found 'x', expected a list"),
    "half an int": (damaged(ops=[{**OP, "attrs": {"a": {"int": 1.5}}}]), "found 1.5, expected an integer"),
    "no int": (damaged(ops=[{**OP, "attrs": {"a": {"ints": [1, math.inf]}}}]), "found inf, expected an integer"),
    "true as an int": (damaged(ops=[{**OP, "attrs": {"a": {"int": True}}}]), "found True, expected an integer"),
    "int as a bool": (damaged(ops=[{**OP, "attrs": {"a": {"bool": 2}}}]), "found 2, expected true or false"),
    "huge float": (damaged(ops=[{**OP, "attrs": {"a": {"float": 10**400}}}]), "expected a number of float64"),
    "number as a text": (damaged(ops=[{**OP, "attrs": {"a": {"string": 3}}}]), "found 3, expected a text"),
    "attribute": (
        damaged(ops=[{**OP, "attrs": {"a": 1}}]),
        "ops[0].attrs.a cannot be read: found 1, expected an object whose one key is the type",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_has_a_place(case: str) -> None:
    data, expected = MISTAKES[case]
    with pytest.raises(SourceError) as caught:
        from_json(data)
    assert expected in str(caught.value)
