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


def test_keys_and_values_in_groups_of_two_sizes_are_repeated() -> None:
    """One kernel call has one number of heads to repeat."""
    ins = [tensor(1, 4, 3, 4), tensor(1, 1, 3, 4), tensor(1, 2, 3, 4)]
    assert attention_of(lambda q, k, v: plain(q, repeated(k, 4), repeated(v, 2)), ins) == 1
