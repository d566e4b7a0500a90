"""What a model computes in float64, and whether a difference in float32 is rounding of both results.

E[x²] − E[x]² loses as many digits as the two have in common, and another order of the same sums loses others. So two
right results may differ by more than any tolerance that knows the dtype alone. A computation in float64 decides: where
its distance from a result is at most about its distance from the reference, the two differ by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from passes.proof.numbers import Errors
from pipeline.verify.backends import Feeds, RunnableModel, operators_of, shapes_of

if TYPE_CHECKING:
    import torch

    from pipeline.ir import Op

SHARE: Final = 2.0
"""A right result may be this many times as far from float64 as the reference: both round, in different orders."""

MOST: Final = 64.0
"""Times the tolerance that the reference may be away from float64; what is farther away is more than rounding."""

SINGLE: Final = ("float32",)


def excuse_rounding(
    model: RunnableModel,
    feeds: Feeds,
    expected: Mapping[str, np.ndarray],
    found: Mapping[str, np.ndarray],
    errors: Mapping[str, Errors],
) -> tuple[dict[str, Errors], list[str]]:
    """`errors` without those that float64 shows to be rounding of both, and a sentence for each of these.

    Args:
        expected, found: outputs of the reference and of a backend on `feeds`, by name; those of float32 are looked at.
    """
    wrong = [name for name, error in errors.items() if not error.ok and str(expected[name].dtype) in SINGLE]
    if not wrong:
        return dict(errors), []
    try:
        exact = compute_in_double(model, feeds)
    except Exception:  # torch has no such operator in float64, or the model has no graph as a whole
        return dict(errors), []
    result, sentences = dict(errors), []
    for name in wrong:
        error = errors[name]
        if exact[name].shape != expected[name].shape or expected[name].shape != found[name].shape:
            continue
        own, other = (
            float(np.abs(array.astype(np.float64) - exact[name]).max()) for array in (found[name], expected[name])
        )
        if own <= SHARE * other and other <= MOST * error.limit:
            result[name] = replace(error, why="")
            sentences.append(
                f"{name}: {error.max_abs:.2g} away from the reference, which is rounding: a computation in float64 is "
                f"{own:.2g} away from this result, and {other:.2g} from the reference"
            )
    return result, sentences


def compute_in_double(model: RunnableModel, feeds: Feeds) -> dict[str, np.ndarray]:
    """The outputs of `model`, op by op with torch's operators, with float64 in the place of float32.

    Raises:
        Exception: of whatever kind, where torch does not compute an operator of the model in float64.
    """
    import torch

    from pipeline.runtime.eager import apply, run_eager
    from pipeline.runtime.tensors import as_tensor

    graph = model.graph_for(shapes_of(feeds))
    own = operators_of(graph)

    def compute(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [_widen(result) for result in apply(op, [_widen(operand) for operand in ins], own)]

    tensors = {name: as_tensor(array) for name, array in feeds.items()}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = run_eager(graph, tensors, own=dict.fromkeys((op.kind for op in graph.ops), compute)).outputs
    return {name: tensor.detach().double().numpy() for name, tensor in outputs.items()}


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if str(tensor.dtype) == "torch.float32" else tensor
