"""Each rule of the IR, broken on purpose: `check` names what is wrong, and lists everything at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.errors import InternalError
from pipeline.ir import BodyRef, DimRange, Graph, InputRef, Role, TensorSpec, check
from pipeline.ir.builder import Builder

F32 = TensorSpec((2, 3), "float32")


class Held:
    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def numpy(self) -> np.ndarray:
        return self._array


def small_graph() -> Graph:
    """%0 x · %1 w → %2 h → %3 y"""
    b = Builder("small")
    x = b.input("x", F32)
    w = b.param("w", F32, Held(np.zeros((2, 3), np.float32)))
    (h,) = b.emit("Add", [x, w], [("h", F32)])
    (y,) = b.emit("Relu", [h], [("y", F32)])
    return b.build([y])


def with_value(graph: Graph, at: int, /, **changes: object) -> Graph:
    values = list(graph.values)
    values[at] = replace(values[at], **changes)
    return replace(graph, values=tuple(values))


def with_op(graph: Graph, at: int, /, **changes: object) -> Graph:
    ops = list(graph.ops)
    ops[at] = replace(ops[at], **changes)
    return replace(graph, ops=tuple(ops))


def raw_spec(shape: object, dtype: str) -> TensorSpec:
    """A spec that never went through its own validation."""
    spec = object.__new__(TensorSpec)
    for name, item in (("shape", shape), ("dtype", dtype), ("device", "cpu")):
        object.__setattr__(spec, name, item)
    return spec


BROKEN = {
    "vid": (lambda g: with_value(g, 1, vid=7), "values[1] 'w' has vid 7; expected 1"),
    "empty name": (lambda g: with_value(g, 2, name=""), "%2 has an empty name"),
    "same name": (lambda g: with_value(g, 2, name="x"), "2 values are called 'x'"),
    "producer": (lambda g: with_value(g, 2, producer=1), "%2 'h' names the producer 1; its producer is 0"),
    "users": (lambda g: with_value(g, 2, users=()), "%2 'h' names the users (); its users are (1,)"),
    "role": (lambda g: with_value(g, 3, role=Role.TMP), "%3 'y' has the role tmp; expected output"),
    "role of input": (lambda g: with_value(g, 0, role=Role.PARAM), "%0 'x' has the role param; expected input"),
    "role of stored": (lambda g: with_value(g, 1, role=Role.INPUT), "%1 'w' has the role input; expected const or"),
    "input twice": (lambda g: replace(g, inputs=(0, 0)), "%0 is 2 times a graph input"),
    "output unknown": (lambda g: replace(g, outputs=(3, 9)), "graph outputs name %9, which does not exist"),
    "oid": (lambda g: with_op(g, 1, oid=5), "ops[1] Relu has oid 5; expected 1"),
    "kind": (lambda g: with_op(g, 1, kind=""), "ops[1] has an empty kind"),
    "read early": (lambda g: with_op(g, 0, inputs=(0, 3)), "op 0 Add reads %3 'y' before it is made"),
    "read unknown": (lambda g: with_op(g, 0, inputs=(0, 9)), "op 0 Add reads %9, which does not exist"),
    "made twice": (lambda g: with_op(g, 1, outputs=(2,)), "op 1 Relu makes %2 'h', which exists already"),
    "made over": (lambda g: with_op(g, 1, outputs=(1,)), "%1 'w' names the producer None; its producer is 1"),
    "attribute": (lambda g: with_op(g, 1, attrs={"a": [1]}), "op 1 Relu has the attribute 'a' = [1]"),
    "attribute in a tuple": (lambda g: with_op(g, 1, attrs={"a": (1, (b"",))}), "op 1 Relu has the attribute 'a'"),
    "call skips an input": (
        lambda g: with_op(g, 0, attrs={"a": InputRef(1)}),
        "op 0 Add has 2 inputs, and its attributes",
    ),
    "call without a body": (lambda g: with_op(g, 0, attrs={"f": BodyRef(0)}), "op 0 Add has 0 bodies, and its attrib"),
    "body": (
        lambda g: with_op(g, 1, attrs={"x": InputRef(0), "f": BodyRef(0)}, bodies=(replace(g, inputs=(0, 0)),)),
        "in op 1 Relu, body 'small': %0 is 2 times a graph input",
    ),
    "update of a result": (lambda g: replace(g, updates={2: 2}), "%2 'h' has the role tmp and an update"),
    "update of another size": (
        lambda g: replace(with_value(g, 2, spec=TensorSpec((2,), "float32")), updates={0: 2}),
        "%0 'x' is float32[2, 3], and its update",
    ),
    "update by nothing": (lambda g: replace(g, updates={0: 9}), "an update of %0 by %9 names a value that does not"),
    "source of a tmp": (lambda g: replace(g, sources={2: ("h",)}), "checkpoint names for %2, which is not stored"),
    "empty dim": (lambda g: replace(g, dims={"n": DimRange(4, 2)}), "dim 'n' has the range 4 .. 2"),
    "constraint": (lambda g: with_op(g, 1, constraints={"c": None}), "op 1 Relu has the constraint 'c' = None"),
    "payload shape": (
        lambda g: replace(g, payloads={1: Held(np.zeros((3, 2), np.float32))}),
        "%1 'w' is float32[2, 3], its payload float32[3, 2]",
    ),
    "payload dtype": (
        lambda g: replace(g, payloads={1: Held(np.zeros((2, 3), np.float64))}),
        "%1 'w' is float32[2, 3], its payload float64[2, 3]",
    ),
    "payload of tmp": (lambda g: replace(g, payloads={2: g.payloads[1]}), "%2 'h' has the role tmp and a payload"),
    "payload of nothing": (lambda g: replace(g, payloads={9: g.payloads[1]}), "a payload for %9, which does not"),
    "dtype": (lambda g: with_value(g, 0, spec=raw_spec((2,), "float12")), "%0 'x' has the unknown dtype 'float12'"),
    "size": (lambda g: with_value(g, 0, spec=raw_spec((-1,), "bool")), "%0 'x' has the size -1"),
    "size of bool": (lambda g: with_value(g, 0, spec=raw_spec((True,), "bool")), "%0 'x' has the size True"),
    "nameless dim": (lambda g: with_value(g, 0, spec=raw_spec(("",), "bool")), "%0 'x' has the size ''"),
    "shape list": (lambda g: with_value(g, 0, spec=raw_spec([2], "bool")), "%0 'x' has a shape of type list"),
}


def test_a_graph_of_the_builder_passes() -> None:
    check(small_graph())


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_rule_is_named(case: str) -> None:
    damage, expected = BROKEN[case]
    with pytest.raises(InternalError) as caught:
        check(damage(small_graph()))
    assert expected in str(caught.value)


def test_one_violation_is_one_rule() -> None:
    with pytest.raises(InternalError, match="breaks 1 rule of the IR"):
        check(with_value(small_graph(), 2, name=""))


def test_every_violation_is_listed() -> None:
    graph = with_value(with_op(small_graph(), 1, kind=""), 2, name="")
    with pytest.raises(InternalError, match="breaks 2 rules of the IR") as caught:
        check(graph)
    assert "%2 has an empty name" in str(caught.value)
    assert "ops[1] has an empty kind" in str(caught.value)
