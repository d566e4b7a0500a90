"""A function for each everyday job that changes one model: it runs the step of its name, proven, and nothing else.

Each takes the model as `passes.optimize` does (a path, a message or a DetachedModel), and its keyword arguments too:
`encodings`, `feeds`, `proof`, `timeout_s`, `context` and so on. Each returns its PassRun, whose `model` has provenance
and whose `encodings` were carried, and raises

    PolicyError   a name that the model does not have, or an option that does not fit
    ModelError    the model cannot be read or does not run
    StepFailed    the step failed, or its result is not what it has to be: the message says where they differ
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from passes.errors import StepFailed
from passes.optimize import optimize
from passes.run.result import PassRun, Status
from passes.weights.detached import DetachedModel

Model = onnx.ModelProto | str | Path | DetachedModel


def extract(model: Model, inputs: Sequence[str] = (), outputs: Sequence[str] = (), **options: Any) -> PassRun:
    """Leave only what computes `outputs` from `inputs`, names of values or nodes; by default those of the model."""
    return run_step(model, "extract", {"inputs": list(inputs), "outputs": list(outputs)}, options)


def change_outputs(model: Model, add: Sequence[str] = (), drop: Sequence[str] = (), **options: Any) -> PassRun:
    """Make outputs of the values `add`, and drop the outputs `drop` with all that only they need."""
    return run_step(model, "outputs", {"add": list(add), "drop": list(drop)}, options)


def rename(model: Model, values: Mapping[str, str], **options: Any) -> PassRun:
    """Give values (inputs, outputs, weights, what nodes make) other names: old → new."""
    return run_step(model, "rename", {"values": dict(values)}, options)


def fix_shapes(model: Model, shapes: Mapping[str, Sequence[int]], **options: Any) -> PassRun:
    """Give inputs fixed shapes: input → sizes. A named dim that is fixed in one input is fixed in all."""
    return run_step(model, "fix-shapes", {"shapes": {name: list(shape) for name, shape in shapes.items()}}, options)


def change_batch(model: Model, size: int | str = "batch", **options: Any) -> PassRun:
    """Let the model take `size` rows at once: a number, or the name of an open dim for any number."""
    return run_step(model, "change-batch", {"size": size}, options)


def convert_opset(model: Model, to: int, **options: Any) -> PassRun:
    """Convert the model to opset `to`, up or down."""
    return run_step(model, "convert-opset", {"to": to}, options)


def to_fp16(model: Model, keep: Sequence[str] = (), measured: bool = True, **options: Any) -> PassRun:
    """Compute in float16 except where range or error ask for float32; inputs and outputs keep their types.

    `keep` are nodes, operators or globs that stay. Without `measured` no draw decides what else stays.
    """
    return run_step(model, "to-fp16", {"keep": list(keep), "measured": measured}, options)


def to_bf16(model: Model, keep: Sequence[str] = (), measured: bool = True, **options: Any) -> PassRun:
    """`to_fp16` for bfloat16."""
    return run_step(model, "to-bf16", {"keep": list(keep), "measured": measured}, options)


def run_step(model: Model, name: str, step: Mapping[str, Any], options: Mapping[str, Any]) -> PassRun:
    """Run the step `name` with its options `step`, and refuse a result that is not proven."""
    run = optimize(model, [{name: dict(step)}], **options)
    row = run.rows[-1]
    if row.status is not Status.RAN:
        raise StepFailed(f"{name} {row.status}: {row.reason}")
    return run
