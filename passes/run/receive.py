"""Run a step and check its result: it can be read, and it loads if the model before the step loads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto

from passes.context import PassContext
from passes.errors import ModelError, StepFailed
from passes.graph.traversal import bodies_of
from passes.step import PassResult, Step
from passes.weights.detached import DetachedModel


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
    place, condition = found.groups()
    return (
        f"{source} does not handle a form that this model has, so the step changes nothing; "
        f"{source} said: Assertion {condition} failed ({place})"
    )


ASSERTION: Final = re.compile(r"([\w.-]+:\d+): [^\n]*?Assertion [`'\"]?(.*?)[`'\"]? failed", re.DOTALL)


def _refuse_unreadable(model: DetachedModel) -> None:
    for text in _texts(model.proto.graph):
        if isinstance(text, bytes):  # so protobuf reads a name that is not UTF-8
            raise StepFailed(f"made a model that cannot be read: the name {text!r} is not UTF-8")


def _texts(graph: GraphProto) -> Iterator[str | bytes]:
    """The names in a graph and in the graphs inside of it."""
    for node in graph.node:
        yield from (node.op_type, node.domain, node.name, *node.input, *node.output)
        for attribute in node.attribute:
            yield attribute.name
            for inner in bodies_of(attribute):
                yield from _texts(inner)
    for named in (graph.input, graph.output, graph.value_info, graph.initializer):
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
