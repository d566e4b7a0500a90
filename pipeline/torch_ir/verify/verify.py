"""Run the model and the IR on the same inputs, and compare all results and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeline.errors import OnnxlineError, message_with_notes
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.errors import ExecutionError, a_module, a_number, arguments, by_name
from pipeline.torch_ir.execute import IRExecutor
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.verify.comparison import Difference, Pair, compare, pairs
from pipeline.torch_ir.verify.localize import first_divergence
from pipeline.torch_ir.verify.original import answer_of, copy_arguments, pair_writes, same_randomness
from pipeline.torch_ir.weights import load_weights


@dataclass
class VerificationReport:
    """`max_diff` and `mean_diff` are the largest of all outputs; infinite where there is nothing to subtract.

    `output_details` has a dict for each tensor of the result, and for each buffer that the model writes to: `index`,
    `path` (such as `past_key_values.layers.0.keys`, or `buffer cache`), `shape`, `dtype`, `is_close`, `max_diff`,
    `mean_diff`, `reason`. `first_divergence` says where intermediates part, if it was asked for.
    """

    is_valid: bool
    max_diff: float = 0.0
    mean_diff: float = 0.0
    num_outputs: int = 0
    output_details: list[dict[str, Any]] = field(default_factory=list)
    error_message: str | None = None
    first_divergence: str | None = None

    def __str__(self) -> str:
        lines = [f"Verification {'PASSED' if self.is_valid else 'FAILED'}"]
        lines.append(f"  Outputs compared: {self.num_outputs or 'none'}")
        if self.num_outputs:
            lines.append(f"  Max difference: {_figure(self.max_diff)}")
            lines.append(f"  Mean difference: {_figure(self.mean_diff)}")
        if self.error_message:
            lines.append(_entry("Error", self.error_message))
        if self.first_divergence:
            lines.append(_entry("First divergence", self.first_divergence))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def _figure(difference: float) -> str:
    return f"{difference:.2e}" if math.isfinite(difference) else "none can be given"


def _entry(title: str, text: str) -> str:
    """A titled entry; further lines are indented, and beyond MOST they are only counted."""
    lines = text.splitlines()
    if len(lines) > MOST:
        lines[MOST - 1 :] = [f"and {len(lines) - MOST + 1} more; output_details has all"]
    indent = "\n" + " " * (len(title) + 4)
    return f"  {title}: {indent.join(lines)}"


MOST = 12
"""Lines of one entry: a cache of 60 layers has 120 tensors."""


Tensors = Mapping[str, torch.Tensor]
Verdict = tuple[bool, VerificationReport]


def verify_ir(
    ir: IR,
    weights_path: str | Path,
    original_model: nn.Module,
    test_inputs: Sequence[Any],
    rtol: float | None = None,
    atol: float | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    localize: bool = False,
) -> Verdict:
    """`verify_ir_with_state_dict`, with weights from a file.

    Raises:
        WeightLoadError: the file cannot be read.
        ExecutionError: see there.
    """
    verifier = IRVerifier(rtol, atol, localize)
    return verifier.verify(ir, load_weights(weights_path), original_model, test_inputs, constants, kwargs)


def verify_ir_with_state_dict(
    ir: IR,
    state_dict: Tensors,
    original_model: nn.Module,
    test_inputs: Sequence[Any],
    rtol: float | None = None,
    atol: float | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    localize: bool = False,
) -> Verdict:
    """(whether `ir` computes what `original_model` computes, a report).

    Compared are all tensors of the result, the structure that they are in, and the inputs, buffers and parameters that
    either side writes to.
    The model is run as it is, in train or eval mode, but on a deep copy, and the inputs are copied: nothing of the
    caller's changes. Tolerances are those of each tensor's dtype (1e-5 for float32) unless they are given; integers and
    bools have to be equal. `localize` names the first node that differs, where something differs.

    Raises:
        ExecutionError: something is of another type than is asked for here, a tolerance is negative, NaN or infinite,
            or the model itself does not run on the inputs.
    """
    return IRVerifier(rtol, atol, localize).verify(ir, state_dict, original_model, test_inputs, constants, kwargs)


@dataclass(frozen=True, slots=True)
class IRVerifier:
    """Verifies IRs with these settings. `executor` makes the executor from (ir, weights, constants)."""

    rtol: float | None = None
    atol: float | None = None
    localize: bool = False
    executor: Callable[[IR, Tensors, Tensors | None], IRExecutor] = IRExecutor

    def __post_init__(self) -> None:
        for name, given in (("rtol", self.rtol), ("atol", self.atol)):
            if given is not None:  # each bound that is NaN or infinite lets everything pass
                a_number(name, given, "a finite number of 0 or more, or None for that of the dtype", ExecutionError)

    def verify(
        self,
        ir: IR,
        weights: Tensors,
        model: nn.Module,
        inputs: Sequence[Any],
        constants: Tensors | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """See `verify_ir_with_state_dict`."""
        ir, model = an_ir(ir, ExecutionError), a_module(model, ExecutionError)
        inputs = arguments("test_inputs", inputs, ExecutionError)
        kwargs = {} if kwargs is None else dict(by_name("kwargs", kwargs, ExecutionError))
        weights = by_name("weights", weights, ExecutionError)
        answer = answer_of(model, inputs, kwargs)
        executor = self.executor(ir, weights, constants)
        try:
            with same_randomness():
                outputs = executor.execute(copy_arguments(inputs), copy_arguments(kwargs))
        except Exception as error:  # refused beforehand, or an operator of torch's on an IR that was edited
            said = message_with_notes(error) if isinstance(error, OnnxlineError) else f"the IR does not run: {error}"
            report = VerificationReport(False, math.inf, math.inf, error_message=said)
        else:
            report = self._judge(
                [
                    *pairs(answer.result, ir.signature.outputs, outputs),
                    *pair_writes(ir, model, inputs, kwargs, answer, executor),
                ]
            )
        if self.localize and not report.is_valid:
            report.first_divergence = first_divergence(
                self.executor(ir, weights, constants), model, inputs, kwargs, self.rtol, self.atol
            )
        return report.is_valid, report

    def _judge(self, found: Sequence[Pair]) -> VerificationReport:
        details = [detail for index, pair in enumerate(found) if (detail := self._detail(index, pair)) is not None]
        wrong = [f"{row['path'] or 'the result'}: {row['reason']}" for row in details if not row["is_close"]]
        both = [
            pair for pair in found if isinstance(pair.expected, torch.Tensor) and isinstance(pair.found, torch.Tensor)
        ]
        return VerificationReport(
            is_valid=not wrong,
            max_diff=max((row["max_diff"] for row in details), default=0.0),
            mean_diff=max((row["mean_diff"] for row in details), default=0.0),
            num_outputs=len(both),
            output_details=details,
            error_message="\n".join(wrong) or None,
        )

    def _detail(self, index: int, pair: Pair) -> dict[str, Any] | None:
        """The entry of one pair in `output_details`; None for a constant that is the same on both sides."""
        if not isinstance(pair.expected, torch.Tensor) or not isinstance(pair.found, torch.Tensor):
            if not pair.why:
                return None
            found, shape, dtype = Difference(False, float("inf"), float("inf"), pair.why), [], ""
        else:
            found = compare(pair.expected, pair.found, self.rtol, self.atol)
            shape, dtype = list(pair.expected.shape), dtype_name(pair.expected.dtype)
        return {
            "index": index,
            "path": pair.path,
            "shape": shape,
            "dtype": dtype,
            "is_close": found.is_close,
            "max_diff": found.max_diff,
            "mean_diff": found.mean_diff,
            "reason": found.why,
        }
