"""The text form: what it looks like, that it reads back, and what its reader says of mistakes."""

from __future__ import annotations

import math
import struct

import pytest
from hypothesis import HealthCheck, given, settings

from pipeline.ir import Graph, IRSyntaxError, KernelSpec, TensorSpec, check, from_text, to_text
from pipeline.ir.builder import Builder
from tests.pipeline.ir.random_graphs import graphs

F32 = TensorSpec((2, 4), "float32")

PICTURE = r"""graph "mlp" (%0 "x": float32[batch, 4], %1 "mask": bool["2*s0"]) {
  param %2 "fc.weight": float32[4, 8]
  state %4 "odd \"name\"\n": int64[] on "cuda:0"

  %3 "h": float32[2, 4] = MatMul(%0, %2) @"layers.0.fc" node "node_MatMul_0" of "Gemm"
  %5 "a": float32[2, 4], %6 "b": float32[2, 4] = Split(%3) {axis: -1, sizes: [2, 2]}
  () = "odd kind"() {none: []}
  %7 "y": float32[2, 4] = Leaky(%5) {alpha: 0.01, top: inf, on: true, to: "x"} where {inplace: [0]} kernel 12 "f" 0x0ad7

  return %7, %3
}
"""


def picture() -> Graph:
    b = Builder("mlp", {"Leaky": lambda attrs, inputs, outputs: KernelSpec(12, "f", b"\x0a\xd7")}.get)
    x = b.input("x", TensorSpec(("batch", 4), "float32"))
    b.input("mask", TensorSpec(("2*s0",), "bool"))
    w = b.param("fc.weight", TensorSpec((4, 8), "float32"))
    (h,) = b.emit("MatMul", [x, w], [("h", F32)], name="node_MatMul_0", node_type="Gemm", origin="layers.0.fc")
    b.state('odd "name"\n', TensorSpec((), "int64", "cuda:0"))
    left, _ = b.emit("Split", [h], [("a", F32), ("b", F32)], {"axis": -1, "sizes": (2, 2)})
    b.emit("odd kind", [], [], {"none": ()})
    attrs = {"alpha": 0.01, "top": math.inf, "on": True, "to": "x"}
    (y,) = b.emit("Leaky", [left], [("y", F32)], attrs, constraints={"inplace": (0,)})
    return b.build([y, h])


def test_a_graph_as_text() -> None:
    assert to_text(picture()) == PICTURE


def test_text_as_a_graph() -> None:
    graph = from_text(PICTURE)
    check(graph)
    assert graph == picture()


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_every_graph_reads_back(graph: Graph) -> None:
    check(graph)
    assert from_text(to_text(graph)) == graph


@pytest.mark.parametrize("number", [0.1, -0.0, 1e-45, 1.7976931348623157e308, 1e16, math.inf, -math.inf, math.nan, 5.0])
def test_floats_are_exact(number: float) -> None:
    b = Builder("floats")
    b.emit("K", [], [], {"one": number, "many": (number,)})
    op = from_text(to_text(b.build([]))).ops[0]
    for read in (op.attrs["one"], op.attrs["many"][0]):  # pyright: ignore[reportIndexIssue]
        assert struct.pack("d", read) == struct.pack("d", number)


def test_payloads_are_given_by_name() -> None:
    payload = object()
    graph = from_text(PICTURE, {"fc.weight": payload, "elsewhere": payload})  # pyright: ignore[reportArgumentType]
    assert graph.payloads == {2: payload}


def test_layout_and_comments_mean_nothing() -> None:
    text = 'graph"g"(%0"x":bool[]){%1"y":bool[]=Not(%0) # a comment\n return%1}'
    assert to_text(from_text(text)) == ('graph "g" (%0 "x": bool[]) {\n  %1 "y": bool[] = Not(%0)\n\n  return %1\n}\n')


MISTAKES = {
    "graph g () { return }": (1, 7, "'g'", "the graph's name in double quotes"),
    'graph "g" (x) { return }': (1, 12, "'x'", "a value such as %3"),
    'graph "g" () {\n  param 3\n': (2, 9, "'3'", "a value such as %3"),
    'graph "g" () { ': (1, 16, "the end of the text", "'param', 'state', 'const', an op, 'update'"),
    'graph "g" () { return %0 }': (1, 23, "'%0'", "a value that was declared above, such as %3"),
    'graph "g" (%0 "x": float12[]) { return }': (1, 20, "'float12'", "a valid tensor (unknown dtype 'float12'"),
    'graph "g" (%0 "x": bool[-1]) { return }': (1, 25, "'-1'", "a size of at least 0"),
    'graph "g" (%0 "x": bool[], %0 "y": bool[]) { return }': (1, 28, "'%0'", "a vid that was not declared before"),
    'graph "g" (%0 "x": bool[], %1 "x": bool[]) { return }': (1, 31, "'\"x\"'", "a name that no other value has"),
    'graph "g" (%1 "x": bool[]) { return }': (1, 37, "'}'", "a declaration of %0"),
    'graph "g" () { () = K() {a: 1, a: 2} return }': (1, 32, "'a'", "each attribute once"),
    'graph "g" () { () = K() {a: size(2)} return }': (1, 29, "'size'", "size(str)"),
    'graph "g" () { () = K() with 3 return }': (1, 30, "'3'", "'['"),
    'graph "g" () { dim n: -1 .. 2 return }': (1, 23, "'-1'", "a size of at least 0"),
    'graph "g" (%0 "x": bool[]) { update %0 = %1 return }': (1, 42, "'%1'", "a value that was declared above"),
    'graph "g" () { () = K() {a: ?} return }': (1, 29, "'?'", "true, false, none, a number"),
    'graph "g" () { () = K() kernel 1 "s" 0x0 return }': (1, 38, "'0x0'", "whole bytes"),
    'graph "g" () { () = K() kernel 1.5 "s" 0x return }': (1, 32, "'1.5'", "the number of a kernel"),
    'graph "g\\q" () { return }': (1, 7, "'\"g\\\\q\"'", "a string with JSON's escapes"),
    'graph "g" () { return } more': (1, 25, "'more'", "the end of the text"),
    'graph "g" () { %0 "x": bool[] = Not(%0) return }': (1, 37, "'%0'", "a value that was declared above"),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_mistake_has_a_place(text: str) -> None:
    line, column, found, expected = MISTAKES[text]
    with pytest.raises(IRSyntaxError) as caught:
        from_text(text)
    mistake = caught.value
    assert (mistake.line, mistake.column, mistake.found) == (line, column, found)
    assert mistake.expected.startswith(expected) or expected in mistake.expected
    assert mistake.exit_code == 2
