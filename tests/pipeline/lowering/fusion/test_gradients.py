"""What autograd writes with many operators is written with few; what is not quite the same stays."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from pipeline.ir import Graph, from_text
from pipeline.lowering import lower, with_kernels
from pipeline.lowering.fusion import fuse_train_step
from pipeline.lowering.fusion.gradients import (
    add_biases_in_products,
    compute_activations_again,
    join_parts,
    scale_before_spreading,
    sum_rows_by_product,
    write_class_gradients,
)
from pipeline.planning import make_plan
from pipeline.runtime.recording import RecordingDevice
from pipeline.training import TrainProgram, record_step
from pipeline.training.batch import LossFunction
from tests.pipeline.lowering.fusion.fusion_pictures import assert_becomes, assert_stays

PARTS = """
graph "parts" (%0 "a": float32[2, 4], %1 "b": float32[2, 4], %2 "c": float32[2, 4]) {
  %3 "c whole": float32[2, 3, 4] = aten.select_backward.default(%2) {
    grad_output: $0, input_sizes: [2, 3, 4], dim: 1, index: -1
  }
  %4 "b whole": float32[2, 3, 4] = aten.select_backward.default(%1) {
    grad_output: $0, input_sizes: [2, 3, 4], dim: -2, index: 1
  }
  %5 "sum": float32[2, 3, 4] = aten.add.Tensor(%3, %4) {self: $0, other: $1}
  %6 "a whole": float32[2, 3, 4] = aten.select_backward.default(%0) {
    grad_output: $0, input_sizes: [2, 3, 4], dim: 1, index: 0
  }
  %7 "y": float32[2, 3, 4] = aten.add.Tensor(%5, %6) {self: $0, other: $1}

  return %7
}
"""


def test_the_gradients_of_all_parts_are_put_together() -> None:
    assert_becomes(
        join_parts,
        PARTS,
        """
        %4 "a in place": float32[2, 1, 4] = aten.unsqueeze.default(%0) {self: $0, dim: 1}
        %5 "b in place": float32[2, 1, 4] = aten.unsqueeze.default(%1) {self: $0, dim: 1}
        %6 "c in place": float32[2, 1, 4] = aten.unsqueeze.default(%2) {self: $0, dim: 1}
        %3 "y": float32[2, 3, 4] = aten.cat.default(%4, %5, %6) {tensors: [$0, $1, $2], dim: 1}
        return %3
        """,
    )


def test_so_are_those_of_slices() -> None:
    assert_becomes(
        join_parts,
        """
        graph "slices" (%0 "a": float32[2, 4], %1 "b": float32[1, 4]) {
          %2 "a whole": float32[3, 4] = aten.slice_backward.default(%0) {
            grad_output: $0, input_sizes: [3, 4], dim: 0, start: 1, end: 9223372036854775807, step: 1
          }
          %3 "b whole": float32[3, 4] = aten.slice_backward.default(%1) {
            grad_output: $0, input_sizes: [3, 4], dim: 0, start: 0, end: 1, step: 1
          }
          %4 "y": float32[3, 4] = aten.add.Tensor(%2, %3) {self: $0, other: $1}

          return %4
        }
        """,
        """
        %2 "y": float32[3, 4] = aten.cat.default(%1, %0) {tensors: [$0, $1], dim: 0}
        return %2
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("index: -1", "index: 1"),  # one part twice, one never
        ("return %7", "return %7, %3"),  # a term that is read elsewhere
        ("return %7", "return %7, %5"),
        ("aten.add.Tensor(%5, %6) {self: $0, other: $1}", "aten.add.Tensor(%5, %6) {self: $0, other: $1, alpha: 2}"),
        ("aten.add.Tensor(%3, %4)", "aten.mul.Tensor(%3, %4)"),
    ],
)
def test_other_sums_stay(old: str, new: str) -> None:
    assert old in PARTS
    assert_stays(join_parts, PARTS.replace(old, new))


SPREAD = """
graph "mean" (%0 "x": float32[2, 1], %1 "y": float32[2, 8]) {
  %2 "wide": float32[2, 8] = aten.expand.default(%0) {self: $0, size: [2, 8]}
  %3 "part": float32[2, 8] = aten.div.Scalar(%2) {self: $0, other: 8}
  %4 "z": float32[2, 8] = aten.threshold_backward.default(%3, %1) {grad_output: $0, self: $1, threshold: 0}

  return %4
}
"""


def test_the_gradient_of_a_mean_is_divided_before_it_is_spread() -> None:
    assert_becomes(
        scale_before_spreading,
        SPREAD,
        """
        %4 "part before it is spread": float32[2, 1] = aten.div.Scalar(%0) {self: $0, other: 8}
        %2 "part": float32[2, 8] = aten.expand.default(%4) {self: $0, size: [2, 8]}
        %3 "z": float32[2, 8] = aten.threshold_backward.default(%2, %1) {grad_output: $0, self: $1, threshold: 0}
        return %3
        """,
    )


def test_a_reader_that_wants_rows_gets_a_copy() -> None:
    assert_becomes(
        scale_before_spreading,
        SPREAD.replace(
            "aten.threshold_backward.default(%3, %1) {grad_output: $0, self: $1, threshold: 0}",
            "aten.repeat.default(%3) {self: $0, repeats: [1, 1]}",
        ),
        """
        %4 "part before it is spread": float32[2, 1] = aten.div.Scalar(%0) {self: $0, other: 8}
        %5 "part spread": float32[2, 8] = aten.expand.default(%4) {self: $0, size: [2, 8]}
        %2 "part": float32[2, 8] = aten.clone.default(%5) {
          self: $0, memory_format: word("memory_format", "contiguous_format")
        }
        %3 "z": float32[2, 8] = aten.repeat.default(%2) {self: $0, repeats: [1, 1]}
        return %3
        """,
    )


def test_what_others_read_too_is_spread_as_before() -> None:
    assert_stays(scale_before_spreading, SPREAD.replace("return %4", "return %4, %2"))


BIAS = """
graph "linear" (%0 "x": float32[6, 4], %1 "w": float32[4, 5], %2 "b": float32[5]) {
  %3 "product": float32[6, 5] = aten.mm.default(%0, %1) {self: $0, mat2: $1}
  %4 "rows": float32[2, 3, 5] = aten._unsafe_view.default(%3) {self: $0, size: [2, 3, 5]}
  %5 "y": float32[2, 3, 5] = aten.add.Tensor(%4, %2) {self: $0, other: $1}

  return %5
}
"""


def test_a_bias_is_added_by_the_product() -> None:
    assert_becomes(
        add_biases_in_products,
        BIAS,
        """
        %4 "product with bias": float32[6, 5] = aten.addmm.default(%2, %0, %1) {self: $0, mat1: $1, mat2: $2}
        %3 "y": float32[2, 3, 5] = aten.view.default(%4) {self: $0, size: [2, 3, 5]}
        return %3
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return %5", "return %5, %3"),
        ('%2 "b": float32[5]', '%2 "b": float32[2, 3, 5]'),
        ("other: $1}", "other: $1, alpha: 3}"),
    ],
)
def test_other_products_stay(old: str, new: str) -> None:
    assert_stays(add_biases_in_products, BIAS.replace(old, new))


SUMS = """
graph "bias" (%0 "rows": float32[8, 5]) {
  %1 "sum": float32[1, 5] = aten.sum.dim_IntList(%0) {self: $0, dim: [0], keepdim: true}
  %2 "y": float32[5] = aten.view.default(%1) {self: $0, size: [5]}

  return %2
}
"""


def test_the_gradient_of_a_bias_is_a_product_with_ones() -> None:
    assert_becomes(
        sum_rows_by_product,
        SUMS,
        """
        %3 "8 ones": float32[8] = aten.ones.default() {
          size: [8], dtype: word("dtype", "float32"), device: word("device", "cpu")
        }
        %4 "sum transposed": float32[5, 8] = aten.t.default(%0) {self: $0}
        %5 "sum in one axis": float32[5] = aten.mv.default(%4, %3) {self: $0, vec: $1}
        %1 "sum": float32[1, 5] = aten.view.default(%5) {self: $0, size: [1, 5]}
        %2 "y": float32[5] = aten.view.default(%1) {self: $0, size: [5]}
        return %2
        """,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[8, 5]", "[65, 5]"),
        ("float32", "float16"),
        ("keepdim: true", 'keepdim: true, dtype: word("dtype", "float64")'),
    ],
)
def test_other_sums_are_no_products(old: str, new: str) -> None:
    assert_stays(sum_rows_by_product, SUMS.replace(old, new))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_gradient_of_classes_is_written_over_their_logarithms(reduction: str) -> None:
    """One matrix of logits is there, where autograd has three; rows without a class have no gradient."""
    torch.manual_seed(0)
    module, x, classes = nn.Linear(8, 3001), torch.randn(128, 8), torch.arange(128) * 23
    classes[3] = classes[7] = -100
    step = _compare_steps(module, partial(nn.functional.cross_entropy, reduction=reduction), (x, classes))
    assert _arena_of(step.graph) < 1.1 * 128 * 3001 * 4 < _arena_of(step.graph, rows=False)


def test_the_gradient_of_classes_of_other_weights_stays() -> None:
    torch.manual_seed(0)
    module, batch = nn.Linear(8, 3001), (torch.randn(128, 8), torch.arange(128) * 23)
    step = _compare_steps(module, partial(nn.functional.cross_entropy, weight=torch.rand(3001) + 0.1), batch)
    assert write_class_gradients(step.graph) is step.graph


CLASSES = """
graph "classes" (%0 "gradient": float32[], %1 "logs": float32[512, 512], %2 "classes": int64[512],
                 %3 "count": float32[]) {
  %4 "of logs": float32[512, 512] = aten.nll_loss_backward.default(%0, %1, %2, %3) {
    grad_output: $0, self: $1, target: $2, weight: none, reduction: 1, ignore_index: -100, total_weight: $3
  }
  %5 "of logits": float32[512, 512] = aten._log_softmax_backward_data.default(%4, %1) {
    grad_output: $0, output: $1, dim: -1, input_dtype: word("dtype", "float32")
  }

  return %5
}
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dim: -1", "dim: 0"),  # shares of each column
        ('%5 "of logits": float32', '%5 "of logits": float16'),  # as of logits in half precision on a GPU
        ("return %5", "return %5, %4"),
        ("512]", "511]"),  # less than a MiB
    ],
)
def test_other_gradients_of_classes_stay(old: str, new: str) -> None:
    assert write_class_gradients(from_text(CLASSES.replace("dim: -1", "dim: 1"))).ops[-1].kind != LAST_OF_CLASSES
    assert old in CLASSES
    assert_stays(write_class_gradients, CLASSES.replace(old, new))


LAST_OF_CLASSES = "aten._log_softmax_backward_data.default"


class Deep(nn.Module):
    """Layers whose activations are large; a tail lies between those of the forward pass and their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 4096), nn.GELU(), nn.Linear(4096, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        for _ in range(20):
            x = x.sin()
        return x


def test_a_large_activation_is_computed_again_for_its_gradient() -> None:
    """Its operand is kept for that too, so of two values of a layer one is there."""
    torch.manual_seed(0)
    step = _compare_steps(Deep(), nn.functional.mse_loss, (torch.randn(64, 8), torch.randn(64, 8)))
    fused = fuse_train_step(step.graph, rows=True)
    assert sum(op.kind == "aten.gelu.default" for op in fused.ops) == 8
    assert _arena_of(step.graph) <= _arena_of(step.graph, rows=False) - 3 * 64 * 4096 * 4


def test_a_small_activation_and_one_that_is_read_at_once_stay() -> None:
    for module in (nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), Deep().layers[0]):
        batch = (torch.randn(64, 8), torch.randn(64, 8))
        sgd = torch.optim.SGD(module.parameters(), lr=0.1)
        graph = record_step(module, nn.functional.mse_loss, sgd, batch).graph
        assert compute_activations_again(graph) is graph


@pytest.mark.parametrize(
    ("between", "reads", "last"),
    [
        (32, "aten.gelu_backward.default(%0, %2)", ["gelu", "gelu_backward"]),
        (31, "aten.gelu_backward.default(%0, %2)", ["sin", "gelu_backward"]),  # near
        (32, "aten.neg.default(%2)", ["sin", "neg"]),  # nothing else keeps the operand until then
    ],
)
def test_an_activation_is_computed_again_far_from_it_and_where_its_operand_is_kept(
    between: int, reads: str, last: list[str]
) -> None:
    """Each value has 1 MiB. The last op reads the activation, which the first one makes."""
    ops = ["aten.gelu.default(%0)", *["aten.sin.default(%1)"] * between, reads]
    lines = [f'%{at} "v{at}": float32[512, 512] = {op} {{self: $0}}' for at, op in enumerate(ops, 2)]
    head = 'graph "again" (%0 "x": float32[512, 512], %1 "y": float32[512, 512]) {'
    graph = from_text("\n".join([head, *lines, f"return %{len(ops) + 1}", "}"]))
    found = [op.kind.split(".")[1] for op in compute_activations_again(graph).ops]
    assert found[-2:] == last


def _compare_steps(module: nn.Module, loss: LossFunction, batch: tuple[torch.Tensor, torch.Tensor]) -> TrainProgram:
    """Three recorded steps, with the passes for a GPU, next to those of torch."""
    twin, sgd = copy.deepcopy(module), partial(torch.optim.SGD, lr=0.1)
    step = record_step(module, loss, sgd(module.parameters()), batch, device=RecordingDevice(2**28))
    optimizer = sgd(twin.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        expected = loss(twin(batch[0]), batch[1])
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step.step(batch), expected.detach())
    step.write_back()
    for found, parameter in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(found, parameter)
    return step


def _arena_of(graph: Graph, *, rows: bool = True) -> int:
    """Bytes of the arena of a train step with the passes for a GPU, or with the passes of the CPU."""
    fused = with_kernels(fuse_train_step(graph, rows=rows))
    return make_plan(fused, lower(fused)).arena_bytes


def test_logarithms_of_classes_may_be_written_over_what_they_are_of() -> None:
    """torch's kernels of the CPU: each element is read for the last time just before it is written."""
    torch.manual_seed(0)
    log_softmax = torch.ops.aten._log_softmax
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((5,), (7, 3), (128, 3001), (3, 5, 7), (2, 1000, 33), (33, 17, 65)):
            for dim in range(len(shape)):
                for odd in (0, -math.inf, math.nan):
                    x = (torch.randn(shape) * 5).to(dtype)
                    x.view(-1)[: x.numel() // 3] = odd
                    expected = log_softmax.default(x, dim, False)
                    log_softmax.out(x, dim, False, out=x)
                    torch.testing.assert_close(x, expected, atol=0, rtol=0, equal_nan=True)
