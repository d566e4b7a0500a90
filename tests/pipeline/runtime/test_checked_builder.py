"""onnxline.Builder refuses a wrong op where it is emitted, and has what seed document 004 names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import library

from pipeline.errors import DataError, UsageError
from pipeline.ir import Graph, InputRef, TensorSpec, TorchConst, from_text, to_text
from pipeline.runtime import CheckedBuilder, compile_graph, compile_open_graph
from pipeline.runtime.call_check import find_mismatch
from pipeline.runtime.call_schema import _arguments, find_wrong_type
from pipeline.runtime.operators import find_operator

F23, F44, I23 = TensorSpec((2, 3), "float32"), TensorSpec((4, 4), "float32"), TensorSpec((2, 3), "int64")
ROW = TensorSpec((3,), "float32")
F122 = TensorSpec((1, 2, 2), "float32")


def test_states_are_updated_and_values_are_declared_first() -> None:
    builder = CheckedBuilder("counter")
    x, total = builder.input("x", F23), builder.state("total", F23)
    after = builder.value("after", F23)
    assert builder.emit("aten.add.Tensor", [total, x], [after], hints={"lane": 2}, saved=(0, 2)) == (after,)
    builder.update(total, after)
    graph = builder.build([after])
    assert from_text(to_text(graph)) == graph
    op = graph.ops[0]
    assert (dict(op.hints), op.saved, graph.updates) == ({"lane": 2}, (0, 2), {total: after})
    program = compile_graph(graph, {"total": torch.zeros(2, 3)})
    program.run({"x": torch.ones(2, 3)})
    assert program.run({"x": torch.ones(2, 3)})["after"].unique().tolist() == [2.0]


Emit = Callable[[Any, int], Any]

WRONG_CALLS: dict[str, tuple[Emit, str]] = {
    "a shape": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", F44)], name="act"),
        "op aten.relu.default 'act': found float32[4, 4] for what it makes, expected float32[2, 3]",
    ),
    "a dtype": (
        lambda b, x: b.emit("aten.eq.Scalar", [x], [("y", F23)], {"other": 1}),
        "op aten.eq.Scalar: found float32[2, 3] for what it makes, expected bool[2, 3]",
    ),
    "operands": (
        lambda b, x: b.emit("aten.mm.default", [x, x], [("y", F23)]),
        "op aten.mm.default: torch refuses it on float32[2, 3], float32[2, 3] (",
    ),
    "more operands than it takes": (
        lambda b, x: b.emit("aten.relu.default", [x, x], [("y", F23)]),
        "op aten.relu.default: found 2 operands, expected at most 1: self",
    ),
    "an operand of an operator that takes none": (
        lambda b, x: b.emit("prims._make_token.default", [x], [("y", F23)]),
        "op prims._make_token.default: found 1 operand, expected at most 0: none",
    ),
    "an integer of 65 bits": (
        lambda b, x: b.emit("aten.amin.default", [x], [("y", F23)], {"dim": 2**64}),
        "op aten.amin.default: the argument 'dim' is 18446744073709551616; expected List[int], integers of 64 bits",
    ),
    "fewer": (
        lambda b, x: b.emit("aten.mm.default", [x], [("y", F23)]),
        "op aten.mm.default: it lacks 1 argument: mat2",
    ),
    "results": (
        lambda b, x: b.emit("aten.relu.default", [x], []),
        "op aten.relu.default: found nothing for what it makes, expected float32[2, 3]",
    ),
    "an argument that it lacks": (
        lambda b, x: b.emit("aten.softmax.int", [x], [("y", F23)], {"dims": 1}),
        "op aten.softmax.int: it has no argument 'dims'; did you mean 'dim'?; its arguments: self, dim, dtype",
    ),
    "an axis": (
        lambda b, x: b.emit("aten.transpose.int", [x], [("y", F23)], {"dim0": 0, "dim1": 5}),
        "op aten.transpose.int: torch refuses it on float32[2, 3] (Dimension out of range (expected to be in range of "
        "[-2, 1], but got 5))",
    ),
    "an axis that the device meta takes": (
        lambda b, x: b.emit("aten.softmax.int", [x], [("y", F23)], {"dim": 7}),
        "op aten.softmax.int: found axis 7 of float32[2, 3], expected -2 to 1",
    ),
    "a word that the device meta takes": (
        lambda b, x: b.emit("aten.pad.default", [x], [("y", F44)], {"pad": (0, 1, 1, 1), "mode": "bogus"}),
        "op aten.pad.default: torch refuses it on float32[2, 3] (Unrecognised padding mode bogus)",
    ),
    "a dtype that only kernels refuse": (
        lambda b, x: b.emit("aten.softmax.int", [b.input("n", I23)], [("y", I23)], {"dim": 0}),
        "op aten.softmax.int: torch refuses it on int64[2, 3] (",
    ),
    "True for an axis": (
        lambda b, x: b.emit("aten.amin.default", [x], [("y", TensorSpec((2,), "float32"))], {"dim": True}),
        "op aten.amin.default: the argument 'dim' is True; expected List[int]",
    ),
    "a dtype that torch lacks": (
        lambda b, x: b.emit(
            "aten.sum.dim_IntList", [x], [("y", F23)], {"dim": None, "dtype": TorchConst("dtype", "f4")}
        ),
        "op aten.sum.dim_IntList: the argument 'dtype' is TorchConst(kind='dtype', name='f4'); expected Optional",
    ),
    "a size that data decide": (
        lambda b, x: b.emit("aten.nonzero.default", [x], [("y", I23)]),
        "op aten.nonzero.default: found int64[2, 3] for what it makes, expected int64[?, 2]",
    ),
    "a float8 that is none": (
        lambda b, x: b.emit("onnxline.cast_float8.default", [x], [("y", F23)], {"to": "bogus"}),
        "op onnxline.cast_float8.default: torch refuses it on float32[2, 3] (there is no dtype 'bogus'; expected",
    ),
    "floats as unsigned integers": (
        lambda b, x: b.emit("onnxline.unsigned.default", [x, x], [("y", F23)], {"function": "add"}),
        "op onnxline.unsigned.default: torch refuses it on float32[2, 3], float32[2, 3] (found torch.float32 and",
    ),
    "strides that only the device meta takes": (
        lambda b, x: b.emit("aten.conv1d.default", [x, b.input("w", F122)], [("y", F44)], {"stride": (1, 2)}),
        "op aten.conv1d.default: found float32[4, 4] for what it makes, expected",
    ),
    "no such operator": (
        lambda b, x: b.emit("aten.no_such.default", [x], [("y", F23)]),
        "op aten.no_such.default: torch has no operator aten.no_such.default; import the module",
    ),
    "no such kind": (
        lambda b, x: b.emit("Relu", [x], [("y", F23)]),
        "op Relu: there is no operator of this name; expected one of torch, such as aten.relu.default",
    ),
    "one that writes": (
        lambda b, x: b.emit("aten.relu_.default", [x], [("y", F23)]),
        "op aten.relu_.default: aten.relu_.default writes to its arguments, and no op changes a value of a graph: take "
        "aten.relu.default, which makes a new value",
    ),
    "one with bodies": (
        lambda b, x: b.emit("higher_order.cond", [x], [("y", F23)]),
        "op higher_order.cond: it runs bodies, which a Builder does not have",
    ),
}
"""What an operator does not take."""

WRONG_ARGUMENTS: dict[str, tuple[Emit, str]] = {
    "a vid that is not there": (
        lambda b, x: b.emit("aten.relu.default", [x + 7], [("y", F23)]),
        "op aten.relu.default: inputs: found the vid 7, but the graph has 1 value",
    ),
    "a name for a vid": (
        lambda b, x: b.emit("aten.relu.default", ["x"], [("y", F23)]),
        "op aten.relu.default: inputs: found 'x'; expected a vid, as input and emit return",
    ),
    "a vid for a list": (
        lambda b, x: b.emit("aten.relu.default", x, [("y", F23)]),
        "op aten.relu.default: inputs: found 0; expected a list or a tuple",
    ),
    "an output that is not there": (
        lambda b, x: b.emit("aten.relu.default", [x], [-1]),
        "op aten.relu.default: outputs: found the vid -1, but the graph has 1 value",
    ),
    "an output that is far away": (
        lambda b, x: b.emit("aten.relu.default", [x], [99]),
        "op aten.relu.default: outputs: found the vid 99, but the graph has 1 value",
    ),
    "an output that is an input": (
        lambda b, x: b.emit("aten.relu.default", [x], [x]),
        "op aten.relu.default: it makes 'x', which has the role input; expected a new value",
    ),
    "an output that is made": (
        lambda b, x: b.emit("aten.relu.default", [x], b.emit("aten.neg.default", [x], [("y", F23)])),
        "op aten.relu.default: it makes 'y', which an earlier op makes",
    ),
    "an operand that nothing made": (
        lambda b, x: b.emit("aten.relu.default", [b.value("y", F23)], [("z", F23)]),
        "op aten.relu.default: inputs: 'y' is declared, and no op makes it before this one",
    ),
    "an output without a spec": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", (2, 3))]),
        "op aten.relu.default: outputs: 'y' has a tuple; expected a TensorSpec",
    ),
    "a name that is taken": (
        lambda b, x: b.emit("aten.relu.default", [x], [("x", F23)]),
        "op aten.relu.default: outputs: two values are called 'x'; names are unique",
    ),
    "a place that is not there": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", F23)], saved=[9]),
        "op aten.relu.default: it saves the place 9; it has 2 inputs and outputs",
    ),
    "a constraint that no planner knows": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", F23)], constraints={"view": 0}),
        "op aten.relu.default: it has the constraint 'view'; expected inplace alone, the inputs that its result may",
    ),
    "an operand that is not overwritten": (
        lambda b, x: b.emit("aten.softmax.int", [x], [("y", F23)], {"dim": 1}, constraints={"inplace": 0}),
        "op aten.softmax.int: it asks for inplace=(0,); its kernel allows ()",
    ),
    "a list for a tuple": (
        lambda b, x: b.emit("aten.sum.dim_IntList", [x], [("y", F23)], {"dim": [0]}),
        "op aten.sum.dim_IntList: attrs: 'dim' has a list; expected bool, int, float, str, complex,",
    ),
    "an operand that is not there": (
        lambda b, x: b.emit("aten.relu.default", [x], [("y", F23)], {"self": InputRef(5)}),
        "op aten.relu.default: it has 1 operand, and its attributes use the places [5]",
    ),
    "an update of what is not there": (lambda b, x: b.update(77, x), "update(77, 0): found the vid 77, but the graph"),
    "an update of another shape": (
        lambda b, x: b.update(b.state("s", F44), x),
        "update(1, 0): 's' is float32[4, 4], and 'x' is float32[2, 3]; expected one spec",
    ),
    "an update of a constant": (
        lambda b, x: b.update(b.const("c", F23), x),
        "update(1, 0): 'c' has the role const; expected a param, a state or an input",
    ),
    "the spec of what is not there": (lambda b, x: b.spec(99), "spec: found the vid 99, but the graph has 1 value"),
    "outputs that are no list": (
        lambda b, x: b.build(x),
        "graph 'wrong': outputs: found 0; expected a list or a tuple",
    ),
    "an output that nothing makes": (
        lambda b, x: b.build([b.value("y", F23)]),
        "graph 'wrong': no op makes 'y'; emit an op with the vid among its outputs",
    ),
    "a name twice": (lambda b, x: b.input("x", F23), "input: two values are called 'x'; names are unique"),
    "a payload of another shape": (
        lambda b, x: b.param("w", F23, numpy.zeros((3, 2), "float32")),
        "param 'w' is float32[2, 3], and its payload float32[3, 2]",
    ),
    "a payload of another dtype": (
        lambda b, x: b.state("s", F23, torch.zeros(2, 3, dtype=torch.int64)),
        "state 's' is float32[2, 3], and its payload int64[2, 3]",
    ),
    "a payload without values": (
        lambda b, x: b.param("w", F23, torch.ones(2, 3, device="meta")),
        "param 'w': its payload is on the device meta, which has no values",
    ),
    "a list as a payload": (
        lambda b, x: b.const("c", F23, [1, 2]),
        "const 'c': its payload is a list; expected a torch tensor or a numpy array",
    ),
    "a size that is no int": (
        lambda b, x: b.input("y", TensorSpec((2.5,), "float32")),  # type: ignore[arg-type]
        "a size is an int, or the name of a dim: found 2.5 at axis 0",
    ),
}
"""What no graph holds."""

MISTAKES = {**WRONG_CALLS, **WRONG_ARGUMENTS}


@pytest.mark.parametrize("emit, said", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_the_callers_where_it_is_made(emit: Emit, said: str) -> None:
    builder = CheckedBuilder("wrong")
    x = builder.input("x", F23)
    with pytest.raises(UsageError) as refused:
        emit(builder, x)
    assert str(refused.value).startswith(said)


@pytest.mark.parametrize(
    "kernel", ["flash", *(f"scaled_dot_product_{name}" for name in ("flash", "efficient", "cudnn"))]
)
def test_gradients_of_attention_for_cuda_take_what_torch_leaves_out(kernel: str) -> None:
    """A step that is recorded on a card calls them without a bias, and without lengths of sequences."""
    operator = f"aten._{kernel}_attention_backward.default"
    names = [argument.name for argument in find_operator(operator)._schema.arguments]
    undefined = [name for name in names if name in ("attn_bias", "cum_seq_q", "cum_seq_k")]
    assert undefined
    known = _arguments(operator)
    assert find_wrong_type(known, dict.fromkeys(undefined)) == ""
    assert find_wrong_type(known, {"query": None}) == "the argument 'query' is None; expected Tensor"


def test_an_operator_of_the_caller_lacks_no_bias_that_it_declares() -> None:
    with library._scoped_library("caller", "FRAGMENT") as own:
        own.define("attend(Tensor query, Tensor attn_bias) -> Tensor")
        known = _arguments("caller.attend.default")
    assert find_wrong_type(known, {"attn_bias": None}) == "the argument 'attn_bias' is None; expected Tensor"


def test_what_the_data_decide_is_said_of_the_feed() -> None:
    builder = CheckedBuilder("data")
    x, n = builder.input("x", TensorSpec((2, 2), "float32")), builder.input("n", TensorSpec((2,), "int64"))
    (y,) = builder.emit("aten.linalg_inv.default", [x], [("y", builder.spec(x))])
    (z,) = builder.emit("aten.fmod.Tensor", [n, n], [("z", builder.spec(n))])
    program = compile_graph(builder.build([y, z]))
    one = {"x": torch.eye(2), "n": torch.ones(2, dtype=torch.int64)}
    program.run(one)
    with pytest.raises(DataError, match=r"linalg_inv.default\) failed: .* singular.; look at the matrices in the feed"):
        program.run({**one, "x": torch.ones(2, 2)})
    with pytest.raises(DataError, match=r"fmod.Tensor\) failed: it divides integers by 0"):
        program.run({**one, "n": torch.zeros(2, dtype=torch.int64)})


def test_statistics_of_a_norm_have_the_form_of_the_cpu() -> None:
    """On the device meta they are float32, and float32[3] in place of float32[0]."""
    builder, half, rows = CheckedBuilder("norms"), TensorSpec((2, 3), "bfloat16"), TensorSpec((2, 1), "bfloat16")
    x, c = builder.input("x", half), builder.const("c", TensorSpec((3,), "float32"), torch.ones(3))
    outs = [("y", half), ("mean", rows), ("rstd", rows)]
    builder.emit("aten.native_layer_norm.default", [x], outs, {"normalized_shape": (3,), "eps": 1e-5})
    none = TensorSpec((0,), "float32")
    builder.emit(
        "aten._native_batch_norm_legit_no_training.default",
        [builder.input("z", F23), c, c, c, c],
        [("w", F23), ("saved mean", none), ("saved invstd", none)],
        {"momentum": 0.1, "eps": 1e-5},
    )


def test_a_refused_op_leaves_the_builder_as_it_was() -> None:
    builder = CheckedBuilder("again")
    x = builder.input("x", F23)
    with pytest.raises(UsageError):
        builder.emit("aten.relu.default", [x], [("y", F44)])
    (y,) = builder.emit("aten.relu.default", [x], [("y", F23)])
    assert to_text(builder.build([y])).count("aten.") == 1


def test_a_graph_does_not_change_after_it_was_built() -> None:
    builder = CheckedBuilder("frozen")
    x, s = builder.input("x", F23), builder.state("s", F23)
    graph = builder.build([x])
    builder.update(s, x)
    assert (graph.updates, builder.build([x]).updates) == ({}, {s: x})


def test_weights_are_tensors_or_arrays_and_none_is_copied() -> None:
    builder, array, tensor = CheckedBuilder("sum"), numpy.ones((2, 3), "float32"), torch.ones(2, 3)
    a, b = builder.param("a", F23, array), builder.const("b", F23, tensor)
    program = compile_graph(builder.build(builder.emit("aten.add.Tensor", [a, b], [("y", F23)])))
    array[0, 0] = 8
    assert program.run({})["y"].tolist() == [[9, 2, 2], [2, 2, 2]]


def test_operands_come_in_the_order_of_the_operators_arguments() -> None:
    """Also where the operator has no row of its own, and where an argument is a list of tensors."""
    builder = CheckedBuilder("operands")
    x, y, z = (builder.input(name, F23) for name in "xyz")
    (a,) = builder.emit("aten.addcmul.default", [x, y, z], [("a", F23)], {"value": 2})
    (b,) = builder.emit("aten.cat.default", [a, x], [("b", TensorSpec((4, 3), "float32"))], {"dim": 0})
    fed = {name: torch.full((2, 3), float(at)) for at, name in enumerate("xyz", 3)}
    assert compile_graph(builder.build([b])).run(fed)["b"][:, 0].tolist() == [43, 43, 3, 3]


def test_an_op_of_named_dims_has_its_kernel_when_they_have_sizes() -> None:
    builder, rows = CheckedBuilder("open"), TensorSpec(("n", 3), "float32")
    x = builder.input("x", rows)
    (y,) = builder.emit("aten.transpose.int", [x], [("y", TensorSpec((3, "n"), "float32"))], {"dim0": 0, "dim1": 1})
    (z,) = builder.emit("aten.relu.default", [y], [("z", rows)])  # which is right for n = 3 alone
    with pytest.raises(UsageError, match="it has no argument 'dim'"):
        builder.emit("aten.relu.default", [y], [("w", rows)], {"dim": 0})
    program = compile_open_graph(builder.build([z]))
    assert program.run({"x": torch.ones(3, 3)})["z"].shape == (3, 3)
    with pytest.raises(
        UsageError, match=r"relu.default\): found float32\[5, 3\] for what it makes, expected float32\[3, 5"
    ):
        program.run({"x": torch.ones(5, 3)})


def test_a_plan_has_fixed_sizes() -> None:
    """Of constants they are known: the op is computed when the graph is compiled."""

    def places(role: str) -> Graph:
        builder, mask = CheckedBuilder("places"), torch.eye(2)
        spec = TensorSpec((2, 2), "float32")
        x = builder.const("x", spec, mask) if role == "const" else builder.param("x", spec, mask)
        return builder.build(builder.emit("aten.nonzero.default", [x], [("y", TensorSpec((2, 2), "int64"))]))

    assert compile_graph(places("const")).run({})["y"].tolist() == [[0, 0], [1, 1]]
    with pytest.raises(UsageError, match=r"fixed sizes, and the data decide .*:\n  - op 0 \(aten.nonzero"):
        compile_graph(places("param"))


@pytest.mark.parametrize("outs", [[F23, ROW], [F23, ROW, ROW]], ids=["without it", "with it"])
def test_a_result_that_a_mask_leaves_out_may_be_in_the_graph_or_not(outs: list[TensorSpec]) -> None:
    column = TensorSpec((2, 1), "float32")
    operands = ("grad_out", "input", "mean", "rstd", "weight", "bias")
    attrs = {name: InputRef(place) for place, name in enumerate(operands)}
    given = attrs | {"normalized_shape": (3,), "output_mask": (True, False, True)}
    kind = "aten.native_layer_norm_backward.default"
    assert not find_mismatch(kind, given, [F23, F23, column, column, ROW, ROW], outs)
