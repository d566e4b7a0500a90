"""Every operator that reads indices has them checked on a device, where a wrong one would end the context of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as f
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.errors import DataError
from pipeline.ir.graph import InputRef, TensorSpec
from pipeline.ops import GraphBuilder
from pipeline.runtime import RecordingDevice, compile_graph, compile_open_graph
from pipeline.runtime.kernels.aten.indices import INDEXED, LISTS, IndexFlags
from pipeline.runtime.tensors import torch_dtype
from tests.support.torch_programs import Calls, feed_of, graph_of

X = torch.linspace(-1, 1, 20).view(4, 5)
IMAGE, TARGETS = X.view(1, 4, 5, 1), torch.tensor([[[2], [0], [1], [3], [3]]])
ROWS, TABLE = torch.tensor([0, 3, 1]), torch.tensor([[0, 1, 3, 0, 1]])
CLASSES = torch.tensor([4, 0, 1, 2])
aten = torch.ops.aten


def unpool(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return f.max_unpool2d(x[:, :, :1], indices, [2, 2])


CASES: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor, torch.Tensor, int]] = {
    "aten.embedding.default": (lambda x, i: f.embedding(i, x), X, ROWS, 4),
    "aten.embedding_bag.padding_idx": (lambda x, i: f.embedding_bag(i, x), X, ROWS[None], 4),
    "aten.embedding_dense_backward.default": (
        lambda x, i: aten.embedding_dense_backward(x[:3], i, 4, -1, False), X, ROWS, 4,
    ),
    "aten.take_along_dim.default": (lambda x, i: torch.take_along_dim(x, i, 0), X, TABLE, 4),
    "aten.take.default": (torch.take, X, torch.tensor([0, -20, 19]), -21),
    "aten.put.default": (lambda x, i: x.put(i, x[0, :3]), X, torch.tensor([0, -20, 19]), 20),
    "aten.max_unpool2d.default": (unpool, IMAGE, TARGETS[:, :4, :1, None], 4),
    "aten.multi_margin_loss.default": (f.multi_margin_loss, X, CLASSES, 5),
    "aten.multilabel_margin_loss.default": (f.multilabel_margin_loss, X, torch.tensor([[1, 0, -1, -1, -1]] * 4), 5),
    "aten.index_select.default": (lambda x, i: x.index_select(0, i), X, ROWS, -1),
    "aten.gather.default": (lambda x, i: x.gather(0, i), X, TABLE, 4),
    "aten.index_copy.default": (lambda x, i: x.index_copy(0, i, x[:3]), X, ROWS, 4),
    "aten.index_add.default": (lambda x, i: x.index_add(0, i, x[:3]), X, ROWS, 4),
    "aten.index_fill.int_Scalar": (lambda x, i: x.index_fill(0, i, 2.0), X, torch.tensor([0, -4, 3]), 4),
    "aten.index_fill.int_Tensor": (lambda x, i: x.index_fill(0, i, x[0, 0]), X, torch.tensor([0, -4, 3]), -5),
    "aten.index_reduce.default": (lambda x, i: x.index_reduce(0, i, x[:3], "amax"), X, ROWS, 4),
    "aten.scatter.src": (lambda x, i: x.scatter(0, i, x), X, TABLE, 4),
    "aten.scatter.value": (lambda x, i: x.scatter(0, i, 2.0), X, TABLE, 4),
    "aten.scatter.reduce": (lambda x, i: x.scatter(0, i, x, reduce="add"), X, TABLE, 4),
    "aten.scatter.value_reduce": (lambda x, i: x.scatter(0, i, 2.0, reduce="multiply"), X, TABLE, 4),
    "aten.scatter_add.default": (lambda x, i: x.scatter_add(0, i, x), X, TABLE, 4),
    "aten.scatter_reduce.two": (lambda x, i: x.scatter_reduce(0, i, x, "amin"), X, TABLE, 4),
    "aten.cross_entropy_loss.default": (f.cross_entropy, X, CLASSES, 5),
    "aten.nll_loss_nd.default": (lambda x, i: f.nll_loss(x, i, ignore_index=-7), IMAGE, TARGETS, 4),
    "aten.index.Tensor": (lambda x, i: x[i], X, ROWS, 4),
    "aten.index_put.default": (lambda x, i: x.index_put((i,), x[:3], accumulate=True), X, ROWS, -5),
    "aten._unsafe_index.Tensor": (lambda x, i: aten._unsafe_index(x, [i]), X, ROWS, 4),
    "aten._unsafe_index_put.default": (lambda x, i: aten._unsafe_index_put(x, [i], x[:3]), X, ROWS, 4),
}  # fmt: skip
"""Operator → a call of it on a tensor and indices that are right, and a number that is no index there."""


@pytest.mark.parametrize("operator", CASES)
def test_a_wrong_index_is_found_late_and_reads_nothing_else(operator: str) -> None:
    """Right indices give what torch gives: those that count from the end and those that say "ignored" are right too."""
    function, x, indices, wrong = CASES[operator]
    graph = graph_of(Calls([function]), [x, indices])
    assert operator in {op.operator for op in graph.ops}
    program = compile_graph(graph, device=RecordingDevice(2**20))
    feed = feed_of(graph, [x, indices])
    for run in (program.run, program.replay):
        (found,) = run(feed).values()
        program.synchronize()
        torch.testing.assert_close(found, function(x, indices))
        broken = indices.clone()
        broken.view(-1)[0] = wrong
        run({**feed, list(feed)[1]: broken})
        with pytest.raises(DataError, match="an index is out of range"):
            program.synchronize()


@pytest.mark.parametrize(
    ("function", "indices"),
    [
        (lambda x, i: f.nll_loss(x, i, ignore_index=-7), [4, -7, 1, -7]),
        (lambda x, i: f.cross_entropy(x, i, reduction="none"), [4, -100, 1, 2]),
        (lambda x, i: torch.take_along_dim(x, i), [0, 19, 7, 3]),
        (lambda x, i: f.embedding_bag(x.long().flatten().abs(), x, i), [0, 3, 20, 20]),
        (lambda x, i: f.cross_entropy(x, f.one_hot(i, 5).float()), [4, 0, 1, 2]),
    ],
)
def test_what_looks_wrong_and_is_right(function: Callable[..., torch.Tensor], indices: list[int]) -> None:
    numbers = torch.tensor(indices)
    graph = graph_of(Calls([function]), [X, numbers])
    program = compile_graph(graph, device=RecordingDevice(2**20))
    (found,) = program.run(feed_of(graph, [X, numbers])).values()
    program.synchronize()
    torch.testing.assert_close(found, function(X, numbers))


MADE_BY_OPERATORS = """
_cummax_helper _cummin_helper adaptive_max_pool2d_backward adaptive_max_pool3d_backward cummaxmin_backward
fractional_max_pool2d_backward fractional_max_pool3d_backward kthvalue max_pool2d_with_indices_backward
max_pool3d_with_indices_backward median mode nanmedian sort topk value_selecting_reduction_backward
_embedding_bag_backward _embedding_bag_dense_backward _embedding_bag_per_sample_weights_backward
_embedding_bag_sparse_backward gather_backward index_select_backward embedding_backward embedding_sparse_backward
"""
"""Indices that another operator of the same graph made, or checked."""
NO_INDICES = """
binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits cosine_embedding_loss
hinge_embedding_loss huber_loss huber_loss_backward kl_div l1_loss margin_ranking_loss mse_loss mse_loss_backward
poisson_nll_loss smooth_l1_loss smooth_l1_loss_backward soft_margin_loss soft_margin_loss_backward
_unsafe_masked_index _unsafe_masked_index_put_accumulate
"""
"""Targets that are values, and indices of which a mask leaves out the wrong ones."""
NOT_IN_A_PLAN = """
_ctc_loss _ctc_loss_backward _cudnn_ctc_loss ctc_loss _use_cudnn_ctc_loss segment_reduce _segment_reduce_backward
multi_margin_loss_backward multilabel_margin_loss_forward multilabel_margin_loss_backward _index_put_impl
"""
"""Operators that read lengths on the host, or whose shape depends on them, and backward passes that a step lacks."""


SPARSE = ("_sparse", "sparse", "_spdiags", "_validate", "_nested", "_gather_sparse", "miopen", "_use_miopen")
"""Operators on tensors that no graph has, or on other hardware."""


def test_no_operator_of_torch_reads_indices_that_nobody_checks() -> None:
    """By the names of arguments in torch's schemas, so that an operator which torch adds is looked at."""
    known = {name.split(".")[1] for name in (*INDEXED, *LISTS)}
    known |= {*MADE_BY_OPERATORS.split(), *NO_INDICES.split(), *NOT_IN_A_PLAN.split()}
    found = set()
    for schema in torch._C._jit_get_all_schemas():
        name = schema.name.removeprefix("aten::")
        if schema.is_mutable or not schema.name.startswith("aten::") or name in known:
            continue
        operands = [item.name for item in schema.arguments if "Tensor" in str(item.type)]
        found |= {name} if {"index", "indices", "target", "targets"} & set(operands) else set()
    assert not {name for name in found if not name.startswith(SPARSE)}


def test_a_constant_that_says_ignored_needs_no_check() -> None:
    target = torch.tensor([4, -100, 1, 2])
    graph = graph_of(Calls([lambda x: f.cross_entropy(x, target)]), [X])
    assert compile_graph(graph, device=RecordingDevice(2**20)).context._flags is None


def test_probabilities_of_classes_are_no_indices() -> None:
    """A loss takes both as its target, and a clamp of these would change them."""

    def loss(x: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return f.cross_entropy(f.embedding(rows, x), target)

    given = [X, torch.linspace(-2, 9, 20).view(4, 5), torch.arange(4)]
    graph = graph_of(Calls([loss]), given)
    (found,) = compile_graph(graph, device=RecordingDevice(2**20)).run(feed_of(graph, given)).values()
    torch.testing.assert_close(found, loss(*given))


def test_a_wait_looks_anew_where_a_look_began_before_the_last_launches() -> None:
    device = RecordingDevice(2**20)
    flags = IndexFlags(device, 1)
    flag = flags.flag_of(7, 1)
    flags.start()
    flag.fill_(True)
    flags.wait()
    assert flags.poll() == 7
    flags.wait()
    assert flags.poll() is None


def test_a_look_loses_no_wrong_index() -> None:
    """Two calls had one before the look, and one has another after it began: each is given once, in the plan's order.
    What the host reads needs no order of streams, and what clears the flags has it."""
    device = RecordingDevice(2**20)
    flags = IndexFlags(device, 2)
    first, second = flags.flag_of(7, 1), flags.flag_of(9, 1)
    with device.scope(), device.on_stream(1):
        flags.memory.fill_(True)
        flags.start()
        second.fill_(True)
    with device.scope(), device.on_stream(2):
        assert [flags.poll(), flags.poll(), flags.poll()] == [7, 9, None]
        with pytest.raises(RuntimeError, match="streams race"):
            flags.start()
    with device.scope(), device.on_stream(1):
        flags.start()
        assert [flags.poll(), flags.poll()] == [9, None]
        first.fill_(True)
        flags.start()
        second.fill_(True)
        flags.wait()
    assert [flags.poll(), flags.poll(), flags.poll()] == [7, 9, None]


def choose(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x, i: f.embedding(i, x), lambda x, i: f.embedding(i, x) * 2, (x, rows))


def test_a_wait_hears_of_a_wrong_index_in_a_body() -> None:
    rows = torch.tensor([0, 3, 1])
    graph, device = graph_of(Calls([choose]), [X + 2, rows]), RecordingDevice(2**20)
    program = compile_graph(graph, device=device)
    for x in (X + 2, X - 2):
        for run in (program.run, program.replay):
            (found,) = run(feed_of(graph, [x, rows])).values()
            waited = device.synchronizations
            program.synchronize()
            assert device.synchronizations > waited
            torch.testing.assert_close(found, choose(x, rows))
            run(feed_of(graph, [x, torch.tensor([0, 9, 1])]))
            with pytest.raises(DataError, match="an index is out of range"):
                program.synchronize()
            program.synchronize()


@pytest.mark.filterwarnings("ignore:the feed has had more than 1 signatures")
def test_a_wrong_index_outlives_the_capture_and_the_context_that_saw_it() -> None:
    """Whoever makes room raises what the last run of the dropped one saw; nobody else would look."""
    rows = torch.tensor([0, 3, 1])
    graph = graph_of(Calls([lambda x, i: f.embedding(i, x)]), [X, rows])
    program = compile_graph(graph, device=RecordingDevice(2**20))
    right = feed_of(graph, [X, rows])
    wrong = {**right, list(right)[1]: torch.tensor([0, 4, 1])}
    program.replay(wrong)
    program.drop_captures()
    with pytest.raises(DataError, match="an index is out of range"):
        program.run(right)
    assert program.capture(right).flags is program.context._flags

    sized = graph_of(
        Calls([lambda x, i: f.embedding(i, x)]), [X, rows], dynamic_shapes=(({}, {0: torch.export.Dim("n")}),)
    )
    for name in ("run", "replay"):
        program = compile_open_graph(sized, limit=1, device=RecordingDevice(2**20))
        run, other = getattr(program, name), {**right, list(right)[1]: torch.tensor([2, 3])}
        run(wrong)
        with pytest.raises(DataError, match="an index is out of range"):
            run(other)
        run(other)
        run({**other, list(right)[1]: torch.tensor([2, 4])})
        with pytest.raises(DataError, match="an index is out of range"):
            program.synchronize()
        program.synchronize()


def choose_within(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, choose, lambda x, i: f.embedding(i, x) - 1, (x, rows))


@pytest.mark.parametrize("function", [choose, choose_within])
def test_a_wrong_index_in_a_body_outlives_the_capture_that_saw_it(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Each capture has runners of its own for bodies, and for bodies within bodies."""
    rows = torch.tensor([0, 3, 1])
    graph = graph_of(Calls([function]), [X + 2, rows])
    program = compile_graph(graph, device=RecordingDevice(2**20))
    right, wrong = (feed_of(graph, [X + 2, given]) for given in (rows, torch.tensor([0, 9, 1])))
    for look in (program.synchronize, lambda: program.run(right), lambda: program.replay(right)):
        program.capture(right)
        program.replay(wrong)
        program.drop_captures()
        with pytest.raises(DataError, match="an index is out of range"):
            look()
        program.synchronize()


@pytest.mark.filterwarnings("ignore:the feed has had more than 2 signatures")
def test_a_wrong_index_of_a_capture_whose_context_is_gone_is_raised_before_the_capture_goes() -> None:
    """Runs at other sizes made room, in which the capture was kept: nothing else has its flags."""
    lookup = Calls([lambda x, i: f.embedding(i, x)])
    graph = graph_of(lookup, [X, torch.tensor([0, 3, 1])], dynamic_shapes=(({}, {0: torch.export.Dim("n", min=2)}),))
    program = compile_open_graph(graph, limit=2, device=RecordingDevice(2**20))

    def feed(*indices: int) -> dict[str, torch.Tensor]:
        return feed_of(graph, [X, torch.tensor(indices)])

    for look in (lambda: [program.replay(feed(*range(size))) for size in (2, 4)], program.synchronize):
        program.capture(feed(0, 3, 1))
        for size in (2, 4):
            program.run(feed(*range(size)))
        assert [size for sizes in program.sizes for size in sizes.values()] == [2, 4]
        program.replay(feed(0, 4, 1))
        with pytest.raises(DataError, match="an index is out of range"):
            look()
        program.drop_captures()
        program.synchronize()


class OperatorLog(TorchDispatchMode):
    """The names of the operators that are called inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


WHOLE = ["aten::embedding_dense_backward.out"]


@pytest.mark.parametrize(
    ("dtype", "padding", "by_count", "operators"),
    [
        ("float32", -1, False, ["aten::zero_", "aten::index_put_"]),
        ("float32", 5, False, WHOLE),  # a word without a gradient
        ("float32", -1, True, WHOLE),  # divided by how often a word is there
        ("bfloat16", -1, False, WHOLE),
        ("float16", -1, False, WHOLE),
    ],
)
def test_the_gradient_of_a_large_table_is_added_where_it_is(
    dtype: str, padding: int, by_count: bool, operators: list[str]
) -> None:
    """torch's kernel makes a whole table, which is copied; rows of one word are added up. The kernel that adds them
    where they are rounds after each row, so that many small ones would be lost in half precision."""
    builder, words, width, device = GraphBuilder("table"), 2**13, 1024, RecordingDevice(2**28)
    rows = builder.input("rows", TensorSpec((2, 3, width), dtype))
    ids = builder.input("ids", TensorSpec((2, 3), "int64"))
    tensors = {"grad_output": InputRef(0), "indices": InputRef(1)}
    attrs = {**tensors, "num_weights": words, "padding_idx": padding, "scale_grad_by_freq": by_count}
    operator = "aten.embedding_dense_backward.default"
    made = builder.emit(operator, [rows, ids], [("table", TensorSpec((words, width), dtype))], attrs)
    program = compile_graph(builder.build(made), device=device)
    feed = {"rows": torch.randn(2, 3, width, dtype=torch_dtype(dtype)), "ids": torch.tensor([[5, 8191, 5], [0, 1, 5]])}
    expected = torch.ops.aten.embedding_dense_backward(feed["rows"], feed["ids"], words, padding, by_count)
    for call in (program.run, program.replay, program.replay):
        torch.testing.assert_close(call(feed)["table"], expected)
    with device.scope(), OperatorLog() as log:
        program.context._launches[0]()
    assert log.names[-len(operators) :] == operators
