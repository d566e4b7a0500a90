"""compile_graph and run: what the caller sees."""

from __future__ import annotations

import re
import tracemalloc
import weakref
from dataclasses import replace
from subprocess import CalledProcessError
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InternalError, SourceError, Unsupported, UsageError
from pipeline.ir.graph import Attr, Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, RecordingDevice, compile_graph
from pipeline.runtime.context import Context
from pipeline.runtime.devices import Device
from pipeline.runtime.program import BoundProgram
from tests.support.planning_graphs import Stored, graphs

F32 = TensorSpec((2, 3), "float32")
X = torch.arange(6.0).reshape(2, 3)


def one(kind: str, spec: TensorSpec = F32, **attrs) -> CompiledProgram:
    builder = GraphBuilder("one")
    x = builder.input("x", spec)
    return compile_graph(builder.build(builder.emit(kind, [x], [("y", spec)], attrs)))


def test_what_is_kept_in_the_arena_cannot_grow() -> None:
    """Some operators resize their result, and would write over what stands beside it."""
    program = one("aten.neg.default")
    ((vid, _),) = program.plan.offsets.items()
    with pytest.raises(RuntimeError, match="not resizable"):
        program.context._slots[vid].resize_(7)


def naive(graph: Graph, feed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The graph by plain torch, a fresh tensor for every value."""
    values = {vid: feed[graph.values[vid].name] for vid in graph.inputs}
    values |= {vid: torch.tensor(payload.numpy()) for vid, payload in graph.payloads.items()}
    for op in graph.ops:
        attrs: dict[str, Any] = dict(op.attrs)
        ins = [values[vid] for vid in op.inputs]
        kinds: dict[str, Any] = {
            "aten.relu.default": lambda x: [x.relu()],
            "aten.neg.default": lambda x: [-x],
            "aten.tanh.default": lambda x: [x.tanh()],
            "aten.add.Tensor": lambda a, b: [a + b],
            "aten.sub.Tensor": lambda a, b: [a - b],
            "aten.mul.Tensor": lambda a, b: [a * b],
            "aten.clone.default": lambda x: [x],
            "aten.repeat.default": lambda x: [x],
            "aten.reshape.default": lambda x, attrs=attrs: [x.reshape(attrs["shape"])],
            "aten.permute.default": lambda x, attrs=attrs: [x.permute(attrs["dims"])],
            "aten.flip.default": lambda x, attrs=attrs: [x.flip(attrs["dims"])],
            "aten.slice.Tensor": lambda x, attrs=attrs: [_cut(x, attrs)],
            "aten.expand.default": lambda x, attrs=attrs: [x.expand(attrs["size"])],
            "aten.matmul.default": lambda a, b: [a @ b],
            "aten.softmax.int": lambda x: [x.softmax(-1)],
            "aten.split_with_sizes.default": lambda x, attrs=attrs: x.split(list(attrs["split_sizes"]), 0),
            "aten.cat.default": lambda a, b: [torch.cat([a, b], 0)],
        }
        values |= dict(zip(op.outputs, kinds[op.kind](*ins), strict=True))
    return {graph.values[vid].name: values[vid] for vid in graph.outputs}


def _cut(x: torch.Tensor, attrs: dict[str, Any]) -> torch.Tensor:
    axis = attrs.get("dim", 0)
    taken = range(x.shape[axis])[attrs.get("start", 0) : attrs["end"] : attrs.get("step", 1)]
    return x.index_select(axis, torch.tensor(taken, dtype=torch.int64))


@given(graphs(), st.integers(0, 99))
def test_any_graph_computes_what_plain_torch_computes(graph: Graph, seed: int) -> None:
    """Twice, with other numbers: nothing of the first run may be left over, and its outputs may not change."""
    program = compile_graph(graph)
    torch.manual_seed(seed)
    kept = []
    for _ in range(2):
        feed = {entry.name: torch.randn(entry.spec.sizes) for entry in program.feed_signature}
        before = {name: tensor.clone() for name, tensor in feed.items()}
        kept.append((program.run(feed), naive(graph, before)))
        torch.testing.assert_close(feed, before, rtol=0, atol=0)
    for actual, wanted in kept:
        # Chains of products and MatMuls grow the numbers, so the bound is relative: some hundred ulps of float32.
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


def test_outputs_are_the_callers_unless_views_are_asked_for() -> None:
    program = one("aten.neg.default")
    kept, view = program.run({"x": X})["y"], program.run({"x": X}, copy=False)["y"]
    program.run({"x": X + 1})
    assert torch.equal(kept, -X)
    assert torch.equal(view, -X - 1)


def test_numpy_and_strided_feeds() -> None:
    program = one("aten.neg.default")
    strided = torch.arange(6.0).reshape(3, 2).T
    assert torch.equal(program.run({"x": strided})["y"], -strided)
    assert torch.equal(program.run({"x": X.numpy()})["y"], -X)
    assert torch.equal(program.run({"x": X.clone().requires_grad_()})["y"], -X)


def test_an_input_may_be_an_output_and_is_copied() -> None:
    builder = GraphBuilder("through")
    x = builder.input("x", F32)
    actual = compile_graph(builder.build([x])).run({"x": X})["x"]
    assert torch.equal(actual, X)
    assert actual.data_ptr() != X.data_ptr()


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ({}, "the feed lacks 'x'; inputs: x"),
        ({"x": X, "mask": X}, "the feed has 'mask', which is no input; inputs: x"),
        ({"X": X}, "'X', which is no input"),
        ({"x": X[:1]}, r"input 'x' is float32\[1, 3\] on cpu; expected float32\[2, 3\] on cpu"),
        ({"x": X.double()}, r"input 'x' is float64\[2, 3\] on cpu; expected float32"),
        ({"x": X.to("meta")}, r"on meta; expected float32\[2, 3\] on cpu"),
        ({"x": [1.0]}, "input 'x' is a list; expected a torch tensor or a numpy array"),
        ({"x": np.array(["a"])}, "numpy dtype <U1 has no torch dtype"),
    ],
)
def test_a_feed_that_does_not_fit(feed, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        one("aten.neg.default").run(feed)


def test_a_near_miss_is_named() -> None:
    builder = GraphBuilder("bert")
    x = builder.input("input_ids", F32)
    with pytest.raises(UsageError, match="did you mean 'input_ids'"):
        compile_graph(builder.build([x])).run({"inputs_ids": X})


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [
        ("float32", np.float32),
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8_e4m3fn", ml_dtypes.float8_e4m3fn),
        ("float8_e5m2", ml_dtypes.float8_e5m2),
        ("int64", np.int64),
        ("bool", np.bool_),
    ],
)
def test_weights_are_bound_without_a_copy(dtype: str, numpy_dtype: type) -> None:
    """Read-only, as a mapped file is; torch would warn, and warnings are errors here."""
    array = np.array([0, 1, 1], numpy_dtype)
    array.flags.writeable = False
    builder = GraphBuilder("weight")
    weight = builder.const("weight", TensorSpec((3,), dtype), Stored(array))
    actual = compile_graph(builder.build([weight])).run({}, copy=False)["weight"]
    assert actual.data_ptr() == array.ctypes.data
    assert actual.float().tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "array", [np.arange(6, dtype=">f4"), np.arange(12, dtype="f4")[::2], np.arange(6, dtype="f4")[::-1]]
)
def test_odd_layouts_are_copied(array: np.ndarray) -> None:
    builder = GraphBuilder("weight")
    weight = builder.const("weight", TensorSpec((6,), "float32"), Stored(array))
    assert compile_graph(builder.build([weight])).run({})["weight"].tolist() == array.tolist()


def test_a_weight_outlives_its_file_object() -> None:
    builder = GraphBuilder("weight")
    weight = builder.const("weight", TensorSpec((1 << 18,), "float32"), Stored(np.full(1 << 18, 7, np.float32)))
    program = compile_graph(builder.build([weight]))
    del builder
    np.zeros(1 << 18, np.float32)  # would take the freed bytes
    assert program.run({})["weight"].unique().tolist() == [7]


def test_a_scalar_and_an_empty_weight() -> None:
    builder = GraphBuilder("weights")
    scalar = builder.const("scalar", TensorSpec((), "float32"), Stored(np.array(3, np.float32)))
    empty = builder.const("empty", TensorSpec((0, 2), "int64"), Stored(np.empty((0, 2), np.int64)))
    actual = compile_graph(builder.build([scalar, empty])).run({})
    assert (actual["scalar"].item(), tuple(actual["empty"].shape)) == (3, (0, 2))


def test_a_weight_of_another_shape_is_refused() -> None:
    builder = GraphBuilder("weight")
    weight = builder.param("weight", TensorSpec((3,), "float32"), Stored(np.zeros(4, np.float32)))
    with pytest.raises(SourceError, match=r"param 'weight' holds float32\[4\].*declares float32\[3\]"):
        compile_graph(builder.build([weight]))


def test_a_weight_without_bytes_comes_with_the_feed() -> None:
    builder = GraphBuilder("weightless")
    x, w = builder.input("x", F32), builder.param("w", F32)
    program = compile_graph(builder.build(builder.emit("aten.add.Tensor", [x, w], [("y", F32)])))
    assert [entry.name for entry in program.feed_signature] == ["x", "w"]
    assert torch.equal(program.run({"x": X, "w": X})["y"], 2 * X)


def test_another_device_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="device 'mps': this release has kernels for cpu and cuda"):
        one("aten.neg.default", TensorSpec((2,), "float32", "mps"))


def test_a_graph_that_its_operators_do_not_take_is_refused_when_it_is_compiled() -> None:
    builder = GraphBuilder("wrong")
    x, w = builder.input("x", F32), builder.input("w", F32)
    (y,) = builder.emit("aten.matmul.default", [x, w], [("y", F32)], name="product")
    (z,) = builder.emit("aten.neg.default", [y], [("z", TensorSpec((6,), "float32"))])
    with pytest.raises(UsageError) as refused:
        compile_graph(builder.build([z]))
    assert str(refused.value) == (
        "graph 'wrong': 2 ops cannot be called as declared:\n"
        "  - op 'product' (aten.matmul.default): torch refuses it on float32[2, 3], float32[2, 3] (a and b must have "
        "same reduction dim, but got [2, 3] X [2, 3].)\n"
        "  - op 1 (aten.neg.default): found float32[6] for what it makes, expected float32[2, 3]"
    )


def test_a_kernel_that_fails_is_named_with_its_neighbours() -> None:
    """The plan is changed after it was checked, as only a bug of ours does."""
    builder = GraphBuilder("wrong")
    x, w = builder.input("x", F32), builder.input("w", TensorSpec((3, 2), "float32"))
    graph = builder.build(builder.emit("aten.matmul.default", [x, w], [("y", TensorSpec((2, 2), "float32"))]))
    plan = compile_graph(graph).plan
    slots = (plan.slots[0], plan.slots[1], replace(plan.slots[2], spec=TensorSpec((1, 4), "float32")))
    with pytest.raises(InternalError, match=r"call 0 MatMul\(x: .*\) → y: .*failed"):
        Context(BoundProgram.bind(replace(plan, slots=slots), graph))


def test_an_error_of_triton_names_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a kernel asks for more shared memory than a card has, or the compiler of C refuses the code that
    launches the kernel: exceptions that are no RuntimeError."""
    errors = pytest.importorskip("triton.runtime.errors")
    failures: list[Exception] = [errors.OutOfResources(300_000, 232_448, "memory"), CalledProcessError(1, ["gcc"])]

    def fail() -> None:
        raise failures.pop()

    monkeypatch.setattr("pipeline.runtime.program.prepare_kernel", lambda kind, attrs: lambda ins, outs: fail)
    for said in ("Command '['gcc']' returned", "out of resource: memory"):
        with pytest.raises(InternalError, match=rf"call 0 Relu\(x: .*\) → y: .*failed: {re.escape(said)}"):
            one("aten.relu.default").run({"x": X})


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_wrong_output_shape_is_caught_by_the_first_run() -> None:
    builder = GraphBuilder("wrong")
    x = builder.input("x", F32)
    graph = builder.build(builder.emit("aten.neg.default", [x], [("y", F32)]))
    plan = compile_graph(graph).plan
    slots = (plan.slots[0], replace(plan.slots[1], spec=TensorSpec((6,), "float32")))
    context = Context(BoundProgram.bind(replace(plan, slots=slots), graph))
    with pytest.raises(InternalError, match=r"Neg.*made \[2, 3\] for y: float32\[6\]"):
        context.run({"x": X})


def test_an_unknown_kernel_is_refused() -> None:
    builder = GraphBuilder("one")
    graph = builder.build(builder.emit("aten.neg.default", [builder.input("x", F32)], [("y", F32)]))
    plan = compile_graph(graph).plan
    calls = (replace(plan.calls[0], kind_id=9999),)
    with pytest.raises(InternalError, match="kind_id 9999, for which this runtime has no kernel"):
        BoundProgram.bind(replace(plan, calls=calls), graph)


def test_the_feed_is_not_kept_alive() -> None:
    program = one("aten.neg.default")
    given = np.zeros((2, 3), np.float32)
    alive = weakref.ref(given)
    program.run({"x": given})
    del given
    assert alive() is None


def test_runs_allocate_no_outputs() -> None:
    """A thousand runs of a thousand elements, without views kept: Python's own heap stays flat."""
    program = one("aten.neg.default", TensorSpec((1000,), "float32"))
    feed = {"x": torch.zeros(1000)}
    first = program.run(feed, copy=False)["y"].data_ptr()
    tracemalloc.start()
    for _ in range(1000):
        assert program.run(feed, copy=False)["y"].data_ptr() == first
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize(
    ("kind", "shape", "attrs"),
    [
        ("aten.reshape.default", (1 << 14, 2), {"shape": (1 << 14, 2)}),
        ("aten.permute.default", (1 << 14, 2), {"dims": (1, 0)}),
        ("aten.permute.default", (2, 1 << 14), {"dims": (0, 1)}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", RecordingDevice(2**20)], ids=str)
def test_a_large_output_may_be_a_view_of_what_is_computed(
    kind: str, shape: tuple[int, ...], attrs: dict[str, Attr], device: Device | str
) -> None:
    spec, seen = TensorSpec((2, 1 << 14), "float32"), TensorSpec(shape, "float32")
    builder = GraphBuilder("view")
    (y,) = builder.emit("aten.neg.default", [builder.input("x", spec)], [("y", spec)])
    program = compile_graph(builder.build(builder.emit(kind, [y], [("z", seen)], attrs)), device=device)
    xs = torch.randn(2, *spec.sizes)
    found = [program.run({"x": x})["z"] for x in xs]
    for x, z in zip(xs, found, strict=True):
        assert torch.equal(z, -x.reshape(shape) if "reshape" in kind else -x.permute(attrs["dims"]))  # type: ignore[arg-type]


def test_a_large_output_is_made_where_the_caller_has_it() -> None:
    """Run by run in a tensor of its own, without a copy; and in the arena where the caller asks for views."""
    spec = TensorSpec((2, 1 << 14), "float32")
    builder = GraphBuilder("large")
    x, w = builder.input("x", spec), builder.param("w", spec)
    (t,) = builder.emit("aten.neg.default", [w], [("t", spec)])
    (y,) = builder.emit("aten.add.Tensor", [t, x], [("y", spec)])
    (z,) = builder.emit("aten.mul.Tensor", [w, w], [("z", spec)])
    (s,) = builder.emit(
        "aten.sum.dim_IntList", [y], [("s", TensorSpec((2, 1), "float32"))], {"dim": (1,), "keepdim": True}
    )
    program = compile_graph(builder.build([y, z, s]))
    feeds = [{"x": torch.full(spec.sizes, float(at)), "w": torch.full(spec.sizes, at + 1.0)} for at in range(4)]
    feeds[2]["w"] = feeds[1]["w"]
    kept = [program.run(feed, copy=at != 1) for at, feed in enumerate(feeds)]
    for at, feed in enumerate(feeds):
        wanted = {"y": feed["x"] - feed["w"], "z": feed["w"] ** 2, "s": (feed["x"] - feed["w"]).sum(1, keepdim=True)}
        if at != 1:  # views, changed by now or not
            torch.testing.assert_close(kept[at], wanted, rtol=0, atol=0)
        torch.testing.assert_close(program.run(feed, copy=False), wanted, rtol=0, atol=0)
    first, second = (program.run(feeds[0], copy=False)["y"].data_ptr() for _ in range(2))
    assert first == second
    assert len({outputs["z"].data_ptr() for at, outputs in enumerate(kept) if at != 1}) == 3
