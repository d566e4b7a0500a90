"""A function for each everyday job that changes one model: it runs the step of its name, proven, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from passes.errors import StepFailed
from passes.optimize import optimize
from passes.run.result import PassRun, Status
from passes.weights.detached import DetachedModel

Model = onnx.ModelProto | str | Path | DetachedModel


def extract(model: Model, inputs: Sequence[str] = (), outputs: Sequence[str] = (), **options: Any) -> PassRun:
    """Leave only what computes `outputs` from `inputs`.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        inputs: names of values or nodes at which the part begins; by default the inputs of the model.
        outputs: names of values or nodes with which it ends; by default the outputs of the model.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: a name that the model does not have, or inputs from which the outputs do not follow.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.extract("model.onnx", outputs=["scores"])
        >>> [info.name for info in run.to_proto().graph.output]
        ['scores']
    """
    return run_step(model, "extract", {"inputs": _as_list(inputs), "outputs": _as_list(outputs)}, options)


def change_outputs(model: Model, add: Sequence[str] = (), drop: Sequence[str] = (), **options: Any) -> PassRun:
    """Make outputs of inner values, or drop outputs with all that only they need.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        add: names of values that become outputs.
        drop: names of outputs to leave out.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: a name that the model does not have, or no output would be left.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.change_outputs("model.onnx", add=["scores"])
        >>> [info.name for info in run.to_proto().graph.output]
        ['y', 'scores']
    """
    return run_step(model, "outputs", {"add": _as_list(add), "drop": _as_list(drop)}, options)


def rename(model: Model, values: Mapping[str, str], **options: Any) -> PassRun:
    """Give values other names: inputs, outputs, weights, and what nodes make.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        values: old name → new name.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: an old name that the model does not have, or a new one that it has.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.rename("model.onnx", {"x": "images"})
        >>> [info.name for info in run.to_proto().graph.input]
        ['images']
    """
    return run_step(model, "rename", {"values": values}, options)


def fix_shapes(model: Model, shapes: Mapping[str, Sequence[int]], **options: Any) -> PassRun:
    """Give inputs fixed shapes. A named dim that is fixed in one input is fixed in all.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        shapes: name of an input → its sizes, one for each axis.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: a name that is no input, or a shape that does not fit the declared one.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.fix_shapes("model.onnx", {"x": [2, 8, 32]})
        >>> [dim.dim_value for dim in run.to_proto().graph.input[0].type.tensor_type.shape.dim]
        [2, 8, 32]
    """
    if isinstance(shapes, Mapping):
        shapes = {name: _as_list(shape) for name, shape in shapes.items()}
    return run_step(model, "fix-shapes", {"shapes": shapes}, options)


def change_batch(model: Model, size: int | str = "batch", **options: Any) -> PassRun:
    """Let the model take another number of rows at once.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        size: the number of rows, or the name of an open dim, for any number.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: the size is no number of 1 or more and no name, or the inputs have no batch in common.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.change_batch("model.onnx")
        >>> run.to_proto().graph.input[0].type.tensor_type.shape.dim[0].dim_param
        'batch'
    """
    return run_step(model, "change-batch", {"size": size}, options)


def convert_opset(model: Model, to: int, **options: Any) -> PassRun:
    """Convert the model to another opset of ai.onnx, up or down.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        to: the number of the opset.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: an opset that this release of onnx does not have.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.convert_opset("model.onnx", 18)
        >>> run.to_proto().opset_import[0].version
        18
    """
    return run_step(model, "convert-opset", {"to": to}, options)


def to_fp16(model: Model, keep: Sequence[str] = (), measured: bool = True, **options: Any) -> PassRun:
    """Compute in float16 except where range or error ask for float32; inputs and outputs keep their dtypes.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        keep: nodes, operators or globs that stay in float32.
        measured: whether the values of a draw decide what else stays; without it only operators without float16 do.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: an entry of `keep` that matches nothing.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.to_fp16("model.onnx", keep=["Softmax"])
        >>> run.rows[-1].changed
        True
    """
    return run_step(model, "to-fp16", {"keep": _as_list(keep), "measured": measured}, options)


def to_bf16(model: Model, keep: Sequence[str] = (), measured: bool = True, **options: Any) -> PassRun:
    """Compute in bfloat16 except where the error asks for float32; inputs and outputs keep their dtypes.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel.
        keep: nodes, operators or globs that stay in float32.
        measured: whether the values of a draw decide what else stays; without it only operators without bfloat16 do.
        options: further arguments of `passes.optimize`, such as `encodings`, `feeds`, `proof` or `timeout_s`.

    Returns:
        the PassRun: `model` is the result, with provenance, and `encodings` are those that were carried.

    Raises:
        PolicyError: an entry of `keep` that matches nothing.
        ModelError: the model cannot be read or does not run.
        StepFailed: the step failed, or its result is not what it has to be; the message says where they differ.

    Example:
        >>> import onnxline
        >>> run = onnxline.to_bf16("model.onnx")
        >>> run.rows[-1].changed
        True
    """
    return run_step(model, "to-bf16", {"keep": _as_list(keep), "measured": measured}, options)


def _as_list(values: Any) -> Any:
    """An iterable as a list; text, which would become letters, and what is no iterable are left to the step's check."""
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else values


def run_step(model: Model, name: str, step: Mapping[str, Any], options: Mapping[str, Any]) -> PassRun:
    """Run the step `name` with its options `step`, and refuse a result that is not proven."""
    run = optimize(model, [{name: dict(step)}], **options)
    row = run.rows[-1]
    if row.status is not Status.RAN:
        raise StepFailed(f"{name} {row.status}: {row.reason}")
    return run
