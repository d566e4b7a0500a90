"""Programs with kernels in C++: what they take, where operands move or share memory, replays, threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pipeline.ir.graph import Graph, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import CompiledProgram, compile_graph, compile_graphs, compile_open_graph
from tests.support.native import native_library

ATOL, RTOL = 2e-5, 1e-4
"""float32: sums of 64 products of numbers near 1, normalised."""


@pytest.fixture(autouse=True)
def library() -> None:
    native_library()


def layer(rows: int | str, width: int = 64, dtype: str = "float32") -> Graph:
    """Norm, product with GELU, product and sum, softmax of the rows: every call has a kernel in C++."""
    builder = GraphBuilder("layer")
    spec, wide = TensorSpec((rows, width), dtype), TensorSpec((rows, 2 * width), dtype)

    def param(name: str, *sizes: int) -> int:
        return builder.param(name, TensorSpec(sizes, dtype))

    x = builder.input("x", spec)
    (n,) = builder.emit(
        "aten.layer_norm.default", [x, param("scale", width), param("shift", width)], [("n", spec)],
        {"normalized_shape": (width,), "eps": 1e-5},
    )  # fmt: skip
    attrs = {"trans": True, "add": False, "bias": True, "activation": "gelu", "numbers": ()}
    ins = [n, param("first", 2 * width, width), param("b", 2 * width)]
    (h,) = builder.emit("LinearPointwise", ins, [("h", wide)], attrs)
    attrs = {"trans": True, "add": True, "bias": False, "activation": "none", "numbers": ()}
    (y,) = builder.emit("LinearPointwise", [h, param("second", width, 2 * width), x], [("y", spec)], attrs)
    (weights,) = builder.emit("aten.softmax.int", [y], [("weights", spec)], {"dim": 1})
    return builder.build([y, weights])


def weights_of(graph: Graph) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    values = [graph.values[vid] for vid in graph.weight_names()]
    return {one.name: torch.randn(one.spec.sizes, dtype=getattr(torch, one.spec.dtype)) / 4 for one in values}


def both(graph: Graph) -> tuple[CompiledProgram, CompiledProgram]:
    """With kernels in C++, and by torch."""
    weights = weights_of(graph)
    return compile_graph(graph, weights, native=True), compile_graph(graph, weights)


def assert_like_torch(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=ATOL, rtol=RTOL)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_every_call_of_a_layer_has_a_kernel(rows: int) -> None:
    program, plain = both(layer(rows))
    assert (program.native_calls, plain.native_calls) == (4, 0)
    for seed in range(2):
        feed = {"x": torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))}
        assert_like_torch(program.run(feed), plain.run(feed))


def test_large_inputs_and_outputs_that_each_run_has_elsewhere() -> None:
    """From 64 KiB on a slot is pointed at the memory of the caller, and of each result."""
    program, plain = both(layer(512))
    assert program.native_calls == 4
    feeds = [{"x": torch.randn(512, 64)} for _ in range(3)]
    found = [program.run(feed) for feed in feeds]
    for feed, outputs in zip(feeds, found, strict=True):
        assert_like_torch(outputs, plain.run(feed))
    assert len({outputs["y"].data_ptr() for outputs in found}) == 3


def test_a_replay_has_the_same_bits_and_calls_no_python() -> None:
    program, _ = both(layer(33))
    feeds = [{"x": torch.randn(33, 64)} for _ in range(2)]
    report = str(program.capture(feeds[0]).report)
    assert "4 calls" in report
    assert "by Python" not in report
    for feed in (*feeds, *feeds):
        run, replayed = program.run(feed), program.replay(feed)
        assert all(torch.equal(replayed[name], run[name]) for name in run)


def test_a_result_in_the_memory_of_its_operand() -> None:
    builder, spec = GraphBuilder("chain"), TensorSpec((7, 33), "float32")
    last = builder.input("x", spec)
    scale = builder.param("scale", TensorSpec((33,), "float32"))
    (last,) = builder.emit("aten.neg.default", [last], [("negated", spec)])
    (last,) = builder.emit(
        "aten.rms_norm.default", [last, scale], [("normed", spec)], {"normalized_shape": spec.sizes[1:], "eps": 1e-6}
    )
    (last,) = builder.emit("aten.softmax.int", [last], [("weights", spec)], {"dim": 1})
    (last,) = builder.emit("aten.gelu.default", [last], [("bent", spec)], {"approximate": "none"})
    (last,) = builder.emit("aten.neg.default", [last], [("y", spec)])
    program, plain = both(builder.build([last]))
    assert program.native_calls == 3
    in_place = {program.plan.slots[vid].name for vid in program.plan.alias}
    assert {"normed", "bent"} <= in_place
    feed = {"x": torch.randn(7, 33)}
    assert_like_torch(program.run(feed), plain.run(feed))


@pytest.mark.parametrize(("rows", "dtype"), [(0, "float32"), (4, "float64")])
def test_nothing_to_compute_and_other_dtypes_are_by_torch(rows: int, dtype: str) -> None:
    program, plain = both(layer(rows, dtype=dtype))
    assert program.native_calls == 0
    feed = {"x": torch.randn(rows, 64, dtype=getattr(torch, dtype))}
    assert_like_torch(program.run(feed), plain.run(feed))


def test_with_two_threads_large_products_are_by_torch() -> None:
    torch.set_num_threads(2)
    large, _ = both(layer(512))  # 2^22 multiplications a product, 2^15 numbers a row kernel
    small, _ = both(layer(33))
    assert (large.native_calls, small.native_calls) == (0, 4)


def test_a_context_that_is_made_later_has_the_kernels_of_its_program() -> None:
    """Whatever the number of torch's threads is then: kernels of torch would sum in another order."""
    program, _ = both(layer(512))
    feed = {"x": torch.randn(512, 64)}
    wanted = program.run(feed)
    torch.set_num_threads(2)
    later = program.new_context()
    found = later.run(feed)
    assert later.native_calls == program.native_calls == 4
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_eight_threads_at_once() -> None:
    """Each has a context, and rows in panels, of its own."""
    program, plain = both(layer(33))
    feeds = [{"x": torch.randn(33, 64)} for _ in range(8)]
    wanted = [plain.run(feed)["y"] for feed in feeds]

    def run_often(at: int) -> list[torch.Tensor]:
        return [program.run(feeds[at])["y"] for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        for results, expected in zip(pool.map(run_often, range(8)), wanted, strict=True):
            torch.testing.assert_close(results[0], expected, atol=ATOL, rtol=RTOL)
            assert all(torch.equal(results[0], result) for result in results)


def test_several_entries_and_open_sizes_have_them_too() -> None:
    graph, weights = layer(5), weights_of(layer(5))
    feed = {"x": torch.randn(5, 64)}
    wanted = compile_graph(graph, weights, native=True).run(feed)
    entries = compile_graphs({"main": graph}, weights, native=True)
    sized = compile_open_graph(layer("n"), weights, native=True)
    for found in (entries.run("main", feed), sized.run(feed)):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
