"""The table says truly which operators read the host: with fake tensors, which have no values, such reads fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pipeline.errors import Unsupported
from pipeline.ir import InputRef, TensorSpec
from pipeline.ops import KINDS, GraphBuilder
from pipeline.ops.aten import READS_HOST
from pipeline.ops.rows import HOST_SYNC
from pipeline.runtime import compile_graph, operators, own_layers
from pipeline.runtime.operators import dequantize, quantize
from tests.support.host_reads import reads_host

Make = Callable[..., torch.Tensor]


def recurrent(make: Make, **options: Any) -> Any:
    x, state = make(3, 2, 4), make(1, 2, 5)
    lengths = make(2).long() if options.pop("lengths", False) else None
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[options["kind"]] * 5
    weights = make(1, gates, 4), make(1, gates, 5), make(1, 2 * gates)
    cell = state if options["kind"] == "LSTM" else None
    return own_layers.recurrent(x, *weights, state, cell, lengths, **options)


CALLS: dict[str, tuple[str, Callable[[Make], Any]]] = {
    "LSTM": ("Recurrent", lambda make: recurrent(make, kind="LSTM")),
    "LSTM of rows of several lengths": ("Recurrent", lambda make: recurrent(make, kind="LSTM", lengths=True)),
    "GRU": ("Recurrent", lambda make: recurrent(make, kind="GRU", clip=0.5, reset_after=True)),
    "RNN against time": ("Recurrent", lambda make: recurrent(make, kind="RNN", direction="reverse")),
    "power": ("Pow", lambda make: torch.pow(make(3), make(1))),
    "quantize": ("Quantize", lambda make: quantize(make(2, 4), make(()), to="int8")),
    "quantize, 4 bits": ("Quantize", lambda make: quantize(make(2, 4), make(4), to="int8", low=-8, high=7)),
    "dequantize": ("Dequantize", lambda make: dequantize(make(2, 4).char(), make(()), to="float32")),
    "cast": ("CastFloat8", lambda make: operators.cast_float8._init_fn(make(4), "float8_e4m3fn")),
    "cast, not saturated": (
        "CastFloat8",
        lambda make: operators.cast_float8._init_fn(make(4), "float8_e5m2", saturate=False),
    ),
    "boxes": ("RoiAlign", lambda make: own_layers.roi_align(make(1, 2, 4, 4), make(2, 4), make(2).long(), [2, 2])),
    "unsigned": (
        "Unsigned",
        lambda make: operators.unsigned(make(2).to(torch.uint32), make(2).to(torch.uint32), "remainder"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_reads_the_host_has_a_row_and_nothing_else(name: str) -> None:
    """`.item()`, `.tolist()` and `.numpy()` of a fake tensor raise."""
    kind, call = CALLS[name]
    with FakeTensorMode():
        try:
            call(lambda *sizes: torch.ones(*sizes))
            reads_host = False
        except Exception as error:
            reads_host = True
            assert isinstance(error, Unsupported) or "numpy" in str(error), error
    assert reads_host is ("cuda" in KINDS[kind].obstacles)


MATRIX = torch.eye(4) + 0.1
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(READS_HOST, (MATRIX,)),
    **dict.fromkeys(("linalg_lstsq", "linalg_solve"), (MATRIX, MATRIX)),
    **dict.fromkeys(("linalg_matrix_rank", "linalg_pinv"), (MATRIX, 1e-5)),
    "_linalg_check_errors": (torch.zeros(1, dtype=torch.int32), "solve"),
    "linalg_tensorinv": (MATRIX, 1),
    "linalg_tensorsolve": (MATRIX, torch.ones(4)),
    "multinomial": (MATRIX, 1),
}


@pytest.mark.parametrize("name", sorted(READS_HOST))
def test_an_operator_that_looks_for_mistakes_reads_the_host(name: str) -> None:
    options = {"is_matrix": True} if name == "_linalg_check_errors" else {}
    assert reads_host(lambda: getattr(torch.ops.aten, name).default(*ARGUMENTS[name], **options))


@pytest.mark.parametrize("count", [1, 3])
def test_draws_from_a_distribution_read_no_host(count: int) -> None:
    assert not reads_host(operators.multinomial, torch.zeros(2, 5), count, "int64", 0)


@pytest.mark.parametrize("kind", ["aten.linalg_inv.default", "aten.linalg_cholesky.default"])
def test_a_capture_is_split_where_torch_looks_for_mistakes(kind: str) -> None:
    builder, square = GraphBuilder("g"), TensorSpec((4, 4), "float32")
    x = builder.input("x", square)
    (y,) = builder.emit(kind, [x], [("y", square)], {} if "inv" in kind else {"self": InputRef(0)})
    (z,) = builder.emit("aten.relu.default", [y], [("z", square)])
    report = compile_graph(builder.build([z])).capture({"x": MATRIX}).report
    assert [segment.is_captured for segment in report.segments] == [False, True]
    assert report.segments[0].reason == HOST_SYNC


def test_a_trace_of_boxes_is_refused_in_a_sentence() -> None:
    with FakeTensorMode(), pytest.raises(Unsupported, match="RoiAlign takes as many samples as its boxes have pixels"):
        own_layers.roi_align(torch.ones(1, 2, 4, 4), torch.ones(2, 4), torch.zeros(2).long(), [2, 2])


def test_the_rest_of_a_sorted_axis_is_not_in_the_arena() -> None:
    builder = GraphBuilder("top")
    x, few = builder.input("x", TensorSpec((1000,), "float32")), (3,)
    outputs = [("values", TensorSpec(few, "float32")), ("places", TensorSpec(few, "int64"))]
    program = compile_graph(builder.build(builder.emit("onnxline.top_k.default", [x], outputs, {"k": 3, "dim": 0})))
    assert program.plan.arena_bytes == 128
    found = program.run({"x": torch.arange(1000.0) // 2})
    assert (found["values"].tolist(), found["places"].tolist()) == ([499, 499, 498], [998, 999, 996])
