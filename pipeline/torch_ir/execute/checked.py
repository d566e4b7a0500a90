"""All that a run needs, held against the IR before anything runs: what is absent or wrong is in one message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from pipeline.ir import Value
from pipeline.torch_ir.errors import ExecutionError
from pipeline.torch_ir.execute.feed import Inputs, feed
from pipeline.torch_ir.execute.shared import shared_and_written
from pipeline.torch_ir.execute.sizes import wrong_sizes
from pipeline.torch_ir.execute.strided import laid_otherwise
from pipeline.torch_ir.ir import IR
from pipeline.torch_ir.weights.stored import Bound, absent, misfit

__all__ = ["checked"]


def checked(
    ir: IR,
    bound: Bound,
    inputs: Inputs,
    kwargs: Mapping[str, Any] | None,
    *,
    strict_sizes: bool,
    dynamic: bool,
    counted: Sequence[Value] = (),
) -> dict[str, torch.Tensor]:
    """The inputs by name; `bound` is what is stored. Sizes may be others than the declared ones if not `strict_sizes`;
    `dynamic`: some have names, and are held to their ranges and guards. `counted` are the values whose order in memory
    the results depend on.

    Raises:
        ExecutionError: something is missing or does not fit.
    """
    fed = feed(ir, inputs, kwargs)
    missing, wrong = list(bound.missing), list(bound.wrong)
    for vid in ir.graph.inputs:
        value = ir.graph.values[vid]
        if value.name in fed.tensors:
            shape = value.spec.shape if strict_sizes else ("any",) * fed.tensors[value.name].dim()
            wrong.extend(misfit(f"input {value.name!r}", fed.tensors[value.name], value, shape))
        elif value.name not in fed.explained:
            missing.append(absent(ir.graph, value))
    if dynamic:
        wrong.extend(wrong_sizes(ir.graph, fed.tensors))
    if not missing and not wrong and not fed.problems:
        wrong.extend(shared_and_written(ir.graph, fed.tensors))
        wrong.extend(laid_otherwise(ir.graph, counted, {**bound.tensors, **fed.tensors}))
    if missing and not wrong and (fed.only_absent or not fed.problems):
        raise _noted(ExecutionError("\n".join(missing)), [*fed.problems, *bound.hints])
    if missing or wrong or fed.problems:
        raise ExecutionError("\n".join([*missing, *fed.problems, *wrong, *bound.hints]))
    return fed.tensors


def _noted(error: ExecutionError, notes: Sequence[str]) -> ExecutionError:
    """The message stays the sentences of pytorch-ir, which its users know; what helps with them stands below."""
    for note in notes:
        error.add_note(note)
    return error
