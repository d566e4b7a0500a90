"""What the pass `attention` leaves as it is, and that its numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeline.ir import check
from pipeline.lowering.fusion import fuse_attention
from pipeline.lowering.fusion.attention import keep_scores
from pipeline.runtime import RecordingDevice, compile_graph
from pipeline.runtime.kernels.attention import write_attention_backends
from tests.support.torch_programs import Calls, feed_of, graph_of

Function = Callable[..., torch.Tensor]

TWO, NOTHING, ENDLESS = torch.tensor(2.0), torch.tensor(0.0), torch.tensor(float("inf"))
COLUMNS, MASK = torch.tensor([[0.5, -1.0, 2.0]]), torch.linspace(-1, 1, 9).view(1, 1, 3, 3)


def tensor(*sizes: int) -> torch.Tensor:
    return torch.linspace(-1, 2, torch.Size(sizes).numel()).view(sizes).sin()


def attention_of(function: Function, ins: list[torch.Tensor]) -> int:
    """How many attentions `function` has after the pass; it computes the same."""
    graph = graph_of(Calls([function]), ins)
    after = fuse_attention(graph)
    check(after)
    (found,) = compile_graph(after).run(feed_of(graph, ins)).values()
    torch.testing.assert_close(found, function(*ins), atol=1e-5, rtol=1e-5, equal_nan=True)
    return sum(op.kind == "ScaledDotProductAttention" for op in after.ops)


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.transpose(2, 3) * 0.5).softmax(-1) @ v


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    batch, groups, tokens, width = x.shape
    return x[:, :, None].expand(batch, groups, times, tokens, width).reshape(batch, groups * times, tokens, width)


HEADS = [tensor(1, 2, 3, 4), tensor(1, 2, 3, 4) + 0.1, tensor(1, 2, 3, 4) - 0.2]


def test_attention_is_one_call() -> None:
    assert attention_of(plain, HEADS) == 1
    assert attention_of(lambda q, k, v: (q @ k.transpose(2, 3)).softmax(-1, dtype=torch.float32) @ v, HEADS) == 1
    assert attention_of(lambda q, k, v: (q @ k.transpose(2, 3) / TWO + MASK).softmax(3) @ v, HEADS) == 1
    grouped = [tensor(1, 4, 3, 4), tensor(1, 2, 3, 4), tensor(1, 2, 3, 4)]
    assert attention_of(lambda q, k, v: plain(q, repeated(k, 2), repeated(v, 2)), grouped) == 1


STAYS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "float64": (plain, [operand.double() for operand in HEADS]),
    "a product from the left": (
        lambda q, k, v: v @ (q @ k.transpose(2, 3)).softmax(-1),
        [tensor(1, 2, 4, 4), tensor(1, 2, 4, 4), tensor(1, 2, 4, 4)],
    ),
    "values of another width": (plain, [*HEADS[:2], tensor(1, 2, 3, 6)]),
    "heads that are spread": (plain, [HEADS[0], tensor(1, 1, 3, 4), tensor(1, 1, 3, 4)]),
    "a mask of fewer axes": (
        lambda q, k, v: (q @ k.transpose(2, 3) + COLUMNS).softmax(-1) @ v,
        [tensor(1, 3, 3, 4), tensor(1, 3, 3, 4), tensor(1, 3, 3, 4)],
    ),
    "no number as the scale": (lambda q, k, v: (q @ k.transpose(2, 3) * ENDLESS).softmax(-1) @ v, HEADS),
    "a quotient by 0": (lambda q, k, v: (q @ k.transpose(2, 3) / NOTHING).softmax(-1) @ v, HEADS),
    "a quotient by the scores": (lambda q, k, v: (TWO / (q @ k.transpose(2, 3) + 9)).softmax(-1) @ v, HEADS),
    "a quotient by scores alone": (lambda q, k, v: (TWO / (q @ k.transpose(2, 3))).softmax(-1) @ v, HEADS),
    "scores that are read twice": (
        lambda q, k, v: (scores := q @ k.transpose(2, 3)).softmax(-1) @ v + scores.sum(),
        HEADS,
    ),
}


@pytest.mark.parametrize("case", STAYS)
def test_what_is_no_attention_stays(case: str) -> None:
    assert attention_of(*STAYS[case]) == 0


@pytest.mark.parametrize("options", [{"dropout_p": 0.5}, {"enable_gqa": True}])
def test_attention_with_dropout_or_groups_of_torch_s_own_stays_with_torch(options: dict[str, object]) -> None:
    ins = HEADS if "dropout_p" in options else [tensor(1, 4, 3, 4), *HEADS[1:]]
    graph = graph_of(Calls([lambda *heads: torch.nn.functional.scaled_dot_product_attention(*heads, **options)]), ins)
    assert keep_scores(graph) is graph
    assert write_attention_backends(graph, RecordingDevice(2**20)) is graph


def operands_of(function: Function, ins: list[torch.Tensor]) -> list[tuple[int | str, ...]]:
    """The shapes of query, key and value of the one attention of `function`, which computes the same after the pass."""
    assert attention_of(function, ins) == 1
    fused = fuse_attention(graph_of(Calls([function]), ins))
    (call,) = (op for op in fused.ops if op.kind == "ScaledDotProductAttention")
    return [fused.values[vid].spec.shape for vid in call.inputs[:3]]


MASKS = torch.linspace(-1, 1, 36).view(1, 4, 3, 3)

FOUR, TWO_HEADS = tensor(1, 4, 3, 4), [tensor(1, 2, 3, 4), tensor(1, 2, 3, 4) - 0.3]


@pytest.mark.parametrize("swap", [lambda k: k.transpose(-1, -2), lambda k: k.permute(0, 1, 3, 2)])
def test_a_group_of_heads_reads_each_key_and_value_once(swap: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """As modules of torch repeat them: by an axis in between that is spread."""
    ins = [FOUR, *TWO_HEADS]
    found = operands_of(lambda q, k, v: (q @ swap(repeated(k, 2))).softmax(-1) @ repeated(v, 2), ins)
    assert found == [(1, 2, 6, 4), (1, 2, 3, 4), (1, 2, 3, 4)]


def tile_heads(x: torch.Tensor) -> torch.Tensor:
    """Two heads as (0, 1, 0, 1), where a group would have (0, 0, 1, 1)."""
    return x[:, None].expand(1, 2, 2, 3, 4).reshape(1, 4, 3, 4)


def interleave_heads(x: torch.Tensor) -> torch.Tensor:
    """As `tile_heads`, by swapped axes; the second swap moves no element, and two of the last axes would be none."""
    return x[:, :, None].expand(1, 2, 2, 3, 4).transpose(1, 2).reshape(1, 4, 3, 4).transpose(0, 1).reshape(1, 4, 3, 4)


def of_batches(x: torch.Tensor) -> torch.Tensor:
    """Heads of two batches as those of one."""
    return x[:, :, None].expand(2, 2, 2, 3, 4).reshape(1, 8, 3, 4)


OTHER_GROUPS: dict[str, tuple[Function, list[torch.Tensor]]] = {
    "of two sizes": (
        lambda q, k, v: plain(q, repeated(k, 4), repeated(v, 2)),
        [FOUR, tensor(1, 1, 3, 4), tensor(1, 2, 3, 4)],
    ),
    "in another order": (lambda q, k, v: plain(q, tile_heads(k), tile_heads(v)), [FOUR, *TWO_HEADS]),
    "in another order by swapped axes": (
        lambda q, k, v: plain(q, interleave_heads(k), interleave_heads(v)),
        [FOUR, *TWO_HEADS],
    ),
    "of several batches": (
        lambda q, k, v: plain(q, of_batches(k), of_batches(v)),
        [tensor(1, 8, 3, 4), tensor(2, 2, 3, 4), tensor(2, 2, 3, 4) - 0.3],
    ),
    "of one key for all tokens": (
        lambda q, k, v: plain(q, k[:, :, None].expand(1, 2, 2, 3, 4).reshape(1, 4, 3, 4), repeated(v, 2)),
        [FOUR, tensor(1, 2, 1, 4), TWO_HEADS[1]],
    ),
    "of five axes": (
        lambda q, k, v: plain(q, k[:, :, None].expand(1, 2, 2, 1, 3, 4).reshape(1, 4, 3, 4), repeated(v, 2)),
        [FOUR, tensor(1, 2, 1, 3, 4), TWO_HEADS[1]],
    ),
    "of rows that are cut anew": (
        lambda q, k, v: plain(q, repeated(k, 2), repeated(v, 2).reshape(1, 4, 3, 4)),
        [FOUR, TWO_HEADS[0], tensor(1, 2, 2, 6)],
    ),
    "of keys that lie transposed": (
        lambda q, k, v: (q @ repeated(k, 2)).softmax(-1) @ repeated(v, 2),
        [tensor(1, 4, 4, 4), tensor(1, 2, 4, 4), tensor(1, 2, 4, 4)],
    ),
    "of values whose tokens are heads": (
        lambda q, k, v: plain(q, repeated(k, 2), repeated(v, 2).transpose(1, 2).transpose(2, 3)),
        [tensor(1, 4, 4, 4), tensor(1, 2, 4, 4), tensor(1, 2, 4, 4) - 0.3],
    ),
    "of a mask for each head": (
        lambda q, k, v: (q @ repeated(k, 2).transpose(2, 3) + MASKS).softmax(-1) @ repeated(v, 2),
        [FOUR, *TWO_HEADS],
    ),
    "of which the key has none": (lambda q, k, v: plain(q, k, repeated(v, 2)), [FOUR, FOUR + 0.2, TWO_HEADS[1]]),
}


@pytest.mark.parametrize("case", OTHER_GROUPS)
def test_heads_that_no_group_reads_together_are_repeated(case: str) -> None:
    """The kernel call has one number of heads, and each of the query has a key and a value of its own."""
    function, ins = OTHER_GROUPS[case]
    query, key, value = operands_of(function, ins)
    assert query == tuple(ins[0].shape)
    assert query[:2] == key[:2] == value[:2]
