"""Prepare the steps of a recipe (names, skips, input shapes), and run one step, whose result is a readable model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto

from passes.context import PassContext
from passes.errors import ModelError, PolicyError, StepFailed
from passes.graph.index import copy_of
from passes.graph.inference import declare_rank
from passes.graph.traversal import every_graph
from passes.policy.policy import Policy
from passes.recipe.recipe import known_names, pass_names
from passes.step import PassResult, Repeat, Step
from passes.suggest import nearest
from passes.weights.detached import DetachedModel


def check_names(steps: Sequence[Step], policy: Policy, context: PassContext) -> None:
    """Refuse every unknown name and option, before a model is opened.

    A library is asked only for what onnxline does not know itself, since its import takes a second.

    Raises:
        PolicyError: an unknown pass, structure or option, with the nearest; or a value of the wrong type.
    """
    used = [step.name for step in steps]
    Policy(keep=policy.keep).check((), ())
    for step in steps:
        step.check(context)
    try:
        policy.check((*known_names(), *used), used)
    except PolicyError:
        policy.check(pass_names(steps, context), used)


def with_skips(step: Step, policy: Policy, context: PassContext) -> Step:
    """The step without the inner passes that the policy skips.

    Raises:
        PolicyError: options that the installed release does not take.
    """
    step.check(context)
    refused = step.writes_contrib if policy.contrib == "refuse" else ()
    if not policy.skip and not refused:  # then nobody asks the library for the names of its passes
        return step
    names = step.inner(context)
    return step.without([name for name in names if name in refused or policy.skips(f"{step.name}/{name}")])


def fix_input_shapes(steps: Sequence[Step], model: onnx.ModelProto) -> onnx.ModelProto | None:
    """`model` with the input shapes that a step's options ask for, so that fitting inputs are drawn; None if none asks.

    A named dim that is fixed in one input is fixed in all.

    Raises:
        PolicyError: there is no such input, or its declared shape contradicts the requested shape.
    """
    asked = {name: (step.name, shape) for step in steps for name, shape in step.input_shapes.items()}
    return with_input_shapes(asked, model) if asked else None


def fitting_feeds(
    feeds: Sequence[Mapping[str, np.ndarray]], model: onnx.ModelProto
) -> Sequence[Mapping[str, np.ndarray]]:
    """The feeds whose arrays have the sizes that the inputs of `model` declare."""
    dims = {info.name: info.type.tensor_type.shape.dim for info in model.graph.input}
    return [
        feed
        for feed in feeds
        if all(
            not dim.HasField("dim_value") or dim.dim_value == size
            for name, array in feed.items()
            for dim, size in zip(dims[name], array.shape, strict=False)
        )
    ]


def with_input_shapes(asked: Mapping[str, tuple[str, Sequence[int]]], model: onnx.ModelProto) -> onnx.ModelProto:
    """`model` with other input shapes.

    Args:
        asked: input → the step or command that asks for a shape, which a refusal names, and the shape.
        model: stays as it is.

    Raises:
        PolicyError: there is no such input, or its declared shape contradicts the requested shape.
    """
    fixed = copy_of(model)
    for info in fixed.graph.input:
        if info.name in asked:
            declare_rank(info, len(asked[info.name][1]))
    inputs = {info.name: info.type.tensor_type.shape.dim for info in fixed.graph.input}
    sizes: dict[str, int] = {}
    for name, (asker, shape) in asked.items():
        if name not in inputs:
            hint = nearest(name, inputs) or f"; it has: {', '.join(inputs) or 'none'}"
            raise PolicyError(f"{asker}: the model has no input {name!r}{hint}")
        dims = inputs[name]
        if len(dims) != len(shape) or any(
            dim.HasField("dim_value") and dim.dim_value != size for dim, size in zip(dims, shape, strict=False)
        ):
            declared = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
            raise PolicyError(f"{asker}: {name} is to be {list(shape)}, and the model declares {declared}")
        for dim, size in zip(dims, shape, strict=True):
            sizes |= {dim.dim_param: size} if dim.dim_param else {}
            dim.dim_value = size
    for dims in inputs.values():
        for dim in dims:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return fixed


def without_weight_readers(recipe: Sequence[Step | Repeat]) -> list[Step | Repeat]:
    """`recipe` without the inner passes that join weights, for a model whose weights have to stay unread; each report
    row says what was left out."""
    return [
        Repeat(tuple(step.without(step.joins_weights) for step in item.steps), item.limit)
        if isinstance(item, Repeat)
        else item.without(item.joins_weights)
        for item in recipe
    ]


def apply_step(step: Step, model: DetachedModel, context: PassContext) -> PassResult:
    """Run `step` on `model`.

    Raises:
        StepFailed: the step failed, or what it made cannot be read.
    """
    try:
        result = step.apply(model, context)
    except (ModelError, DecodeError) as error:  # not the user's model is broken: this step's result is
        raise StepFailed(f"made a model that cannot be read: {error}") from error
    except StepFailed as failure:
        failure.args = (_explain_assertion(str(failure), step.source),)
        raise
    if result.changed:
        _refuse_unreadable(result.model)
    return result


def _explain_assertion(message: str, source: str) -> str:
    """`message`, or one sentence if it is an assertion in the native code of the library `source`."""
    found = ASSERTION.search(message)
    if found is None:
        return message
    line, condition = found.groups()
    return (
        f"{source} does not handle a form that this model has, so the step changes nothing; "
        f"{source} said: Assertion {condition} failed ({line})"
    )


ASSERTION: Final = re.compile(r"([\w.-]+:\d+): [^\n]*?Assertion [`'\"]?(.*?)[`'\"]? failed", re.DOTALL)


def _refuse_unreadable(model: DetachedModel) -> None:
    for text in _texts(model.proto.graph):
        if isinstance(text, bytes):  # so protobuf reads a name that is not UTF-8
            raise StepFailed(f"made a model that cannot be read: the name {text!r} is not UTF-8")


def _texts(graph: GraphProto) -> Iterator[str | bytes]:
    """The names in a graph and in the graphs inside of it."""
    for inner in every_graph(graph):
        for node in inner.node:
            yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
            yield from (attribute.name for attribute in node.attribute)
        for named in (inner.input, inner.output, inner.value_info, inner.initializer):
            yield from (entry.name for entry in named)


def keep_ir_version(before: DetachedModel, after: DetachedModel) -> None:
    """Give `after` the IR version of `before`, which changes it, unless its operators came with a later one.

    A tool that rebuilds the model writes the IR version of the installed onnx into it. The content does not need that,
    and an onnxruntime that is older than onnx refuses to load the file.
    """
    proto, needed = after.proto, before.proto.ir_version
    if list(proto.opset_import) != list(before.proto.opset_import):
        try:
            needed = max(needed, onnx.helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True))
        except ValueError:  # an operator set that the installed onnx does not know
            return
    if needed and proto.ir_version != needed:
        proto.ir_version = needed if not proto.ir_version else min(needed, proto.ir_version)
