"""Run the model and the IR on the same inputs, and compare all results and writes.

Shares no code with extraction or the planned runtime. Where results differ, a walk over the IR finds the first node
whose result is not the model's.

For that the model is exported again, with the test inputs, and torch's interpreter of fx graphs runs that program and
keeps the results of each call. Then the IR runs op by op, and the third call of `linear` is compared with the third one
there, calls in the bodies of branches and loops included. The first that differs, in the order of the run, is at fault:
everything it reads agreed.

This needs torch.export to take the model. Where the IR was extracted by another torch, or edited, some nodes have no
counterpart: they are skipped, and named in the result, since one of them may be the first.

Names do not identify nodes: torch names a region after the last call inside of it, and both sides number separately.
So a call is identified by its Place: the operator's plain name, and how many calls of this name ran before. The body
of a branch or loop counts each time it runs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.export.graph_signature import InputKind
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from passes.visible import Table, TableResult
from pipeline.errors import OnnxlineError, Unsupported, message_with_notes
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.importers.from_torch.operators import describe_operator
from pipeline.ir import Op
from pipeline.runtime.devices import Device
from pipeline.runtime.kernels.aten.regions import WHOLE_BODIES
from pipeline.runtime.tensors import dtype_name
from pipeline.torch_ir.arguments import Arguments
from pipeline.torch_ir.comparison import (
    Difference,
    Pair,
    answer_of,
    compare,
    copied_model,
    copy_arguments,
    pair_writes,
    pairs,
    same_randomness,
)
from pipeline.torch_ir.errors import ExecutionError, a_module, a_number, arguments, by_name
from pipeline.torch_ir.executor import IRExecutor
from pipeline.torch_ir.ir import IR, an_ir
from pipeline.torch_ir.weights import load_weights


@dataclass
class VerificationReport(TableResult):
    """`max_diff` and `mean_diff` are the largest of all outputs; infinite where there is nothing to subtract.

    `output_details` has a dict for each tensor of the result, and for each buffer that the model writes to: `index`,
    `path` (such as `past_key_values.layers.0.keys`, or `buffer cache`), `shape`, `dtype`, `is_close`, `max_diff`,
    `mean_diff`, `reason`. `first_divergence` says where intermediates part, if it was asked for.
    """

    is_valid: bool
    """Whether all outputs and written buffers are close."""
    max_diff: float = 0.0
    mean_diff: float = 0.0
    num_outputs: int = 0
    """The number of compared tensors; 0 where nothing could be compared."""
    output_details: list[dict[str, Any]] = field(default_factory=list)
    error_message: str | None = None
    """What is wrong, one line for each output that is not close; None if nothing is."""
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

    def tables(self) -> Iterator[Table]:
        head, *lines = str(self).splitlines()
        yield Table(head, [(line.strip(),) for line in lines])
        rows = [[str(detail.get(key, "")) for key in DETAILS] for detail in self.output_details]
        yield Table("outputs", rows[:MOST], DETAILS)


def _figure(difference: float) -> str:
    return f"{difference:.2e}" if math.isfinite(difference) else "none can be given"


def _entry(title: str, text: str) -> str:
    """A titled entry; further lines are indented, and beyond MOST they are only counted."""
    lines = text.splitlines()
    if len(lines) > MOST:
        lines[MOST - 1 :] = [f"and {len(lines) - MOST + 1} more; output_details has all"]
    indent = "\n" + " " * (len(title) + 4)
    return f"  {title}: {indent.join(lines)}"


DETAILS = ("path", "shape", "dtype", "is_close", "max_diff", "reason")
"""What a notebook shows of an output."""

MOST = 12
"""Lines of one entry: a cache of 60 layers has 120 tensors."""


Tensors = Mapping[str, torch.Tensor]
Verdict = tuple[bool, VerificationReport]


def verify_ir(
    ir: IR,
    weights_path: str | Path,
    original_model: nn.Module,
    test_inputs: Arguments,
    rtol: float | None = None,
    atol: float | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    localize: bool = False,
    device: Device | torch.device | str | None = None,
) -> Verdict:
    """`verify_ir_with_state_dict`, with weights from a file.

    Args:
        ir: the IR.
        weights_path: a file or folder that `load_weights` takes.
        original_model: as in `verify_ir_with_state_dict`, like all arguments after it.
        test_inputs: positional arguments of the model.
        rtol: relative tolerance.
        atol: absolute tolerance.
        constants: tensors by name.
        kwargs: arguments of the model by name.
        localize: whether the report names the first node that differs.
        device: where the IR runs.

    Raises:
        WeightLoadError: the file cannot be read.
        ExecutionError: see there.
    """
    verifier = IRVerifier(rtol, atol, localize, device=device)
    return verifier.verify(ir, load_weights(weights_path), original_model, test_inputs, constants, kwargs)


def verify_ir_with_state_dict(
    ir: IR,
    state_dict: Tensors,
    original_model: nn.Module,
    test_inputs: Arguments,
    rtol: float | None = None,
    atol: float | None = None,
    constants: Tensors | None = None,
    kwargs: Mapping[str, Any] | None = None,
    localize: bool = False,
    device: Device | torch.device | str | None = None,
) -> Verdict:
    """(whether `ir` computes what `original_model` computes, a report).

    Compared are all tensors of the result, the structure that they are in, and the inputs, buffers and parameters that
    either side writes to. A deep copy of the model is run, in the mode that the model is in, on copies of the inputs:
    nothing of the caller's changes.

    Args:
        ir: the IR.
        state_dict: name in the checkpoint → tensor of the weight's shape and dtype.
        original_model: the model, which runs where it is.
        test_inputs: positional arguments of the model.
        rtol: relative tolerance; by default that of each tensor's dtype (1e-5 for float32). Integers and bools have to
            be equal.
        atol: absolute tolerance; by default that of each tensor's dtype.
        constants: tensors by name that go before `state_dict` and before what the IR holds.
        kwargs: arguments of the model by name.
        localize: whether the report names the first node that differs.
        device: where the IR runs, as in `execute_ir`.

    Raises:
        ExecutionError: something is of another type than is asked for here, a tolerance is negative, NaN or infinite,
            or the model itself does not run on the inputs.
    """
    verifier = IRVerifier(rtol, atol, localize, device=device)
    return verifier.verify(ir, state_dict, original_model, test_inputs, constants, kwargs)


@dataclass(frozen=True, slots=True)
class IRVerifier:
    """Verifies IRs with these settings. `executor` makes the executor from (ir, weights, constants)."""

    rtol: float | None = None
    """Relative tolerance, 0 or more; None for that of each tensor's dtype."""
    atol: float | None = None
    """Absolute tolerance, 0 or more; None for that of each tensor's dtype."""
    localize: bool = False
    """Whether the first intermediate tensor that differs is looked for, if the outputs differ."""
    executor: Callable[[IR, Tensors, Tensors | None], IRExecutor] = IRExecutor
    device: Device | torch.device | str | None = None
    """Where the IR runs by a plan, as in `execute_ir`; the model runs where it is."""

    def __post_init__(self) -> None:
        for name, given in (("rtol", self.rtol), ("atol", self.atol)):
            if given is not None:  # each bound that is NaN or infinite lets everything pass
                a_number(name, given, "a finite number of 0 or more, or None for that of the dtype", ExecutionError)

    def verify(
        self,
        ir: IR,
        weights: Tensors,
        model: nn.Module,
        inputs: Arguments,
        constants: Tensors | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Verify an IR as `verify_ir_with_state_dict` does.

        Args:
            ir: the IR.
            weights: name in the checkpoint → tensor of the weight's shape and dtype.
            model: the model, which runs where it is.
            inputs: positional arguments of the model.
            constants: tensors by name that go before `weights` and before what the IR holds.
            kwargs: arguments of the model by name.
        """
        ir, model = an_ir(ir, ExecutionError), a_module(model, ExecutionError)
        inputs = arguments("test_inputs", inputs, ExecutionError)
        kwargs = {} if kwargs is None else dict(by_name("kwargs", kwargs, ExecutionError))
        weights = by_name("weights", weights, ExecutionError)
        answer = answer_of(model, inputs, kwargs)
        make = self.executor if self.device is None else partial(IRExecutor, device=self.device)
        executor = make(ir, weights, constants)
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


CallKey = tuple[str, int]
"""The name of an operator, and how many of its calls came before."""

Results = dict[CallKey, list[torch.Tensor]]


class CallKeys:
    """Numbers the calls of each operator, in the order of the run."""

    def __init__(self) -> None:
        self._seen: Counter[str] = Counter()

    def of(self, name: str) -> CallKey:
        base = re.sub(r"_\d+$", "", name)
        self._seen[base] += 1
        return base, self._seen[base] - 1


def run_traced_model(
    model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any], *, functionalized: bool
) -> Results:
    """Export a copy of `model` and run the program, all on copies.

    Raises:
        Exception: whatever torch.export or the model raises.
    """
    own = copied_model(model)
    args, named = copy_arguments(tuple(inputs)), copy_arguments(dict(kwargs))
    program = torch.export.export(own, args, named, strict=False)
    program = functionalize_program(program) if functionalized else program
    given = iter(pytree.tree_leaves((args, named)))
    flat = []
    for spec in program.graph_signature.input_specs:
        held = program.state_dict if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) else program.constants
        name = spec.target or ""
        flat.append(next(given) if spec.kind is InputKind.USER_INPUT else held.get(name, program.constants.get(name)))
    results: Results = {}
    with torch.no_grad(), same_randomness():
        _TraceRecorder(program.graph_module, results, CallKeys()).run(*flat)
    return results


class _TraceRecorder(Interpreter):
    """Keeps copies of the results of every call, since a later call may write into them."""

    def __init__(self, module: GraphModule, results: Results, keys: CallKeys) -> None:
        super().__init__(module)
        self._results = results
        self._keys = keys

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        name = _name(n.target) if n.op == "call_function" else ""
        if name:
            tensors = [leaf.clone() for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            self._results[self._keys.of(name)] = tensors
        return result

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if isinstance(target, HigherOrderOperator) and target.name() in WHOLE_BODIES:
            args = pytree.tree_map_only(GraphModule, self._record_body, args)
        return super().call_function(target, args, kwargs)

    def _record_body(self, body: GraphModule) -> Callable[..., Any]:
        return lambda *operands: _TraceRecorder(body, self._results, self._keys).run(*operands)


def _name(target: Any) -> str:
    """The base name of the IR's nodes of this operator; "" if the IR has no node for it."""
    try:
        operator = describe_operator(target)
    except Unsupported:  # `getitem`, and operators on Python numbers
        return ""
    return "" if operator.nothing or operator.same else operator.base


def first_divergence(
    executor: IRExecutor,
    model: nn.Module,
    inputs: Sequence[Any],
    kwargs: Mapping[str, Any],
    rtol: float | None = None,
    atol: float | None = None,
) -> str | None:
    """A sentence: which node differs from the model first, by how much, and where it is called; or that none does.

    None if no node ran, because the inputs or the weights are refused.
    """
    try:
        expected = run_traced_model(model, inputs, kwargs, functionalized=not executor.writes)
    except Exception as error:  # torch.export, and whatever the user's module raises in it
        return f"unknown: the model cannot be traced with these inputs ({type(error).__name__}: {error})"
    keys, last = CallKeys(), ""
    unmatched: dict[str, None] = {}  # in order, and once each: those of a loop come as often as it runs
    try:
        with same_randomness():
            for op, results in executor.walk(copy_arguments(tuple(inputs)), copy_arguments(dict(kwargs))):
                last = op.name
                wanted = expected.get(keys.of(op.name))
                if wanted is None or len(wanted) != len(results):
                    unmatched[op.name] = None
                    continue
                for left, right in zip(wanted, results, strict=True):
                    if not (difference := compare(left, right, rtol, atol)).is_close:
                        return _describe(op, difference, list(unmatched))
    except Exception as error:  # an operator of torch's: the node is the one after the last that was seen
        return f"after node {last!r} the IR does not run: {error}" if last else None
    if unmatched:
        return f"not found: {_describe_unmatched(list(unmatched))}, and all others agree"
    return "not found: every node agrees with a trace of the model"


def _describe(op: Op, difference: Difference, unmatched: Sequence[str]) -> str:
    origin = ", ".join(filter(None, (op.origin and f"module {op.origin}", op.line)))
    largest = f", max difference {difference.max_diff:.2e}" if math.isfinite(difference.max_diff) else ""
    before = f"; before it, {_describe_unmatched(unmatched)}" if unmatched else ""
    return f"node {op.name!r} ({op.kind}{'; ' if origin else ''}{origin}): {difference.why}{largest}{before}"


def _describe_unmatched(names: Sequence[str]) -> str:
    """The nodes that were compared with nothing."""
    others = [f"and {len(names) - NAMED} more"] if len(names) > NAMED else []
    has = "1 node has" if len(names) == 1 else f"{len(names)} nodes have"
    return f"{has} no counterpart in a trace of the model ({', '.join([*names[:NAMED], *others])})"


NAMED = 4
"""Nodes without a counterpart that are named."""
