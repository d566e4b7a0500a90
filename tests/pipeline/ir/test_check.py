"""Each rule of the IR, broken on purpose: `check` names what is wrong, and lists everything at once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from pipeline.errors import InternalError, SourceError, UsageError
from pipeline.ir import (
    BodyRef,
    DimRange,
    Graph,
    InputRef,
    Role,
    TensorSpec,
    check,
    dims_of,
    fix_dims,
    from_text,
    to_text,
)
from pipeline.ir.builder import Builder
from pipeline.ir.dims import evaluate, names_in
from pipeline.ir.graph import devices_of, to_device
from pipeline.lowering import lower, with_kernels
from pipeline.planning import PlanFile, decode_plans, encode_plans, from_json, make_plan, to_json
from tests.support.torch_programs import Calls, graph_of

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


# Named dims: bound to numbers, solved from shapes, refused where the graph does not hold.

TEXT = """
graph "pairs" (%0 "x": float32[n, 3] strides [1, n], %1 "y": float32["2*n"]) {
  %2 "s": float32["((n//2)) + 1", 3] = aten.slice.Tensor(%0) {self: $0, end: size("n"), sizes: [1, size("n + 1")]}

  dim n: 2 .. 64
  guard "Eq(Mod(n, 2), 0)"
  guard "Ne(Mod(n, n - 2), 1)"
  return %2
}
"""


@pytest.fixture
def graph() -> Graph:
    return from_text(TEXT)


def test_every_name_becomes_a_number(graph: Graph) -> None:
    bound = fix_dims(graph, {"n": 4})
    check(bound)
    assert (
        to_text(bound)
        == """graph "pairs" (%0 "x": float32[4, 3] strides [1, 4], %1 "y": float32[8]) {
  %2 "s": float32[3, 3] = aten.slice.Tensor(%0) {self: $0, end: 4, sizes: [1, 5]}

  return %2
}
"""
    )


def test_every_violation_is_named(graph: Graph) -> None:
    with pytest.raises(UsageError) as error:
        fix_dims(graph, {"n": 65})
    assert "n = 65; expected 2 .. 64" in str(error.value)
    assert "the trace relies on Eq(Mod(n, 2), 0)" in str(error.value)
    with pytest.raises(UsageError, match="n = 1; expected 2 or more"):
        fix_dims(replace(graph, dims={"n": DimRange(2)}), {"n": 1})
    with pytest.raises(UsageError, match=r"relies on Ne\(Mod\(n, n - 2\), 1\)"):
        fix_dims(graph, {"n": 2})  # it cannot even be worked out there
    with pytest.raises(UsageError, match=r"no dim 'N'; did you mean 'n'\?\n  - the dim 'n' has no size"):
        fix_dims(graph, {"N": 4})


def test_dims_follow_from_shapes(graph: Graph) -> None:
    assert dims_of(graph, {"x": (6, 3), "y": (12,)}) == {"n": 6}
    assert dims_of(graph, {"y": (12,)}) == {"n": 6}
    with pytest.raises(UsageError, match=r"'y' is \[11\]; the graph has \['2\*n'\]"):
        dims_of(graph, {"x": (6, 3), "y": (11,)})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2*n + m", 17),
        ("(n//2)", 3),
        ("Max(1, n) - Min(n, m)", 4),
        ("FloorDiv(n, 2) + CeilToInt(IntTrueDiv(n, 2))", 7),
        ("n**2", 49),
        ("FloatPow(ToFloat(n), 0.5)", 7**0.5),
        ("Eq(Mod(n, m), 1)", True),
        ("Ne(n, 7) | (n <= m)", False),
        ("And(n > m, Not(Eq(n, 0)))", True),
        ("-n", -7),
    ],
)
def test_expressions(expression: str, value: float) -> None:
    actual = evaluate(expression, {"n": 7, "m": 3})
    assert (actual, type(actual)) == (value, type(value))


def test_only_expressions() -> None:
    assert names_in("Max(1, n) + m") == {"n", "m"}
    for text in ("__import__('os')", "n.real", "n +", "[n]"):
        with pytest.raises(SourceError, match="is no expression of named dims"):
            evaluate(text, {"n": 1})


# A graph moves to another device by one pass.

X = torch.ones(3, 4)


def test_values_bodies_and_what_names_a_device_move() -> None:
    graph = graph_of(
        Calls(
            [lambda x: torch.cond(x.sum() > 0, lambda x: x.to("cpu", torch.float64), lambda x: x.double() - 1, (x,))]
        ),
        [X],
    )
    moved = to_device(graph, "cuda:0")
    assert devices_of(moved) == devices_of(*[body for op in moved.ops for body in op.bodies][:1]) == ("cuda:0",)
    assert "cpu" not in to_text(moved).replace('"cuda:0"', "")
    assert to_text(to_device(moved, "cpu")) == to_text(graph)
    assert to_device(moved, "cuda:0") is moved


def test_a_graph_on_two_devices_moves_and_kernels_are_those_of_the_new_device() -> None:
    graph = graph_of(Calls([lambda x: x + torch.arange(4, device="cpu")]), [X])
    moved = with_kernels(to_device(graph, "cuda:1"))
    assert with_kernels(to_device(with_kernels(graph), "cuda:1")) == moved
    assert b"cuda:1" in b"".join(op.kernel.attr_blob for op in moved.ops if op.kernel is not None)
    values = (replace(graph.values[0], spec=replace(graph.values[0].spec, device="cuda:1")), *graph.values[1:])
    assert devices_of(mixed := replace(graph, values=values)) == ("cuda:1", "cpu")
    assert with_kernels(to_device(mixed, "cuda:1")) == moved


def test_a_region_of_autocast_names_the_kind_of_its_device() -> None:
    class Region(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return x @ x.t()

    graph = graph_of(Region(), [X])
    assert [op.attrs["device_type"] for op in graph.ops] == ["cpu"]
    assert [op.attrs["device_type"] for op in to_device(graph, "cuda:1").ops] == ["cuda"]


def test_plan_files_name_the_device() -> None:
    graph = with_kernels(to_device(graph_of(Calls([lambda x: x.tanh() + x]), [X]), "cuda:1"))
    plan = make_plan(graph, lower(graph), 256)
    assert {slot.spec.device for slot in plan.slots} == {"cuda:1"}
    assert from_json(to_json(plan)) == plan
    assert decode_plans(encode_plans(PlanFile({"main": plan}, {}))).entries["main"] == plan
