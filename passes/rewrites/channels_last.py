"""Channels last between convolutions, which some accelerators want, by choice.

ONNX's operators on images have their channels first. The step writes what is between them on channels that come last:
an operator on images then has a Transpose at each end, which a converter to a target with channels last takes away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np
from onnx import NodeProto

from passes.context import PassContext
from passes.graph.op_facts import MATRIX_PRODUCTS, PRODUCTS, attribute_of, input_of
from passes.rewrites.four_axes import REDUCTIONS
from passes.rewrites.merge_layout import BROADCASTING, CURVES
from passes.rewrites.rewriter import Rewriter
from passes.step import Description, PassResult, Step, values
from passes.suggest import plural
from passes.weights.detached import DetachedModel

LAST: Final = (0, 2, 3, 1)
"""The axes of a value with channels first, in the order of its twin with channels last."""

FIRST: Final = (0, 3, 1, 2)

IMAGES: Final = (PRODUCTS - MATRIX_PRODUCTS) | {
    *("MaxPool", "AveragePool", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "LRN", "Resize"),
    *("DepthToSpace", "SpaceToDepth"),
}
"""Operators that take channels from axis 1."""

ALONG_AXIS: Final = frozenset({"Softmax", "LogSoftmax", "Concat", "Split"})


@dataclass(frozen=True, slots=True)
class ToNhwc(Step):
    """Compute sums, curves and their like between convolutions on values whose channels come last.

    What no operator on images leads to stays as it is. A Transpose of the model to channels last goes.
    """

    name: str = field(default="to-nhwc", init=False)
    description: ClassVar[Description] = values("Put channels last for the operators between convolutions")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        rewriter = Rewriter(model, context)
        writer = _ChannelsLast(rewriter)
        written = [node for node in rewriter.nodes if writer.write(node)]
        if not written:
            return PassResult(model, changed=False, why="nothing is computed between operators on images")
        writer.finish(written)
        return rewriter.result(f"{plural(len(written), 'operator')} on channels that come last")


@dataclass(slots=True)
class _ChannelsLast:
    """Writes operators on twins; a twin of an operator on images is made where it is first read."""

    rewriter: Rewriter
    images: set[str] = field(default_factory=set)
    """Results of operators on images."""
    twins: dict[str, str] = field(default_factory=dict)

    def write(self, node: NodeProto) -> bool:
        """Write a node on twins; false where it stays."""
        rewriter, op, name = self.rewriter, node.op_type, node.output[0]
        computed = [read for read in node.input if read and rewriter.constant(read) is None]
        shapes = [rewriter.shape(read) for read in (*computed, name)]
        if node.domain or any(shape is None or len(shape) != 4 for shape in shapes):
            return False
        if op in IMAGES:
            self.images.add(name)
            return False
        if not any(read in self.images or read in self.twins for read in computed):
            return False
        if op == "Transpose":
            return self._write_transpose(node)
        inputs = self._inputs(node)
        if inputs is None:
            return False
        settings = {attribute.name: attribute_of(node, attribute.name) for attribute in node.attribute}
        axes = "axes" if "axes" in settings else "axis"
        if op in ALONG_AXIS:
            settings["axis"] = LAST.index(attribute_of(node, "axis", 0 if op == "Split" else -1) % 4)
        elif axes in settings:
            settings[axes] = [LAST.index(axis % 4) for axis in settings[axes]]
        names = [rewriter.free(f"{output}/last") for output in node.output]
        rewriter.add_many(op, inputs, node, names, **settings)
        for old, new in zip(node.output, names, strict=True):
            shape = rewriter.shape(old) or ()
            rewriter.declare(new, rewriter.dtype(old), [shape[axis] for axis in LAST] if len(shape) == 4 else shape)
            self.twins[old] = new
        return True

    def _inputs(self, node: NodeProto) -> list[str] | None:
        """The operands with channels last; None for an operator that is not known."""
        rewriter, op = self.rewriter, node.op_type
        if op in CURVES or op == "Clip" or (op in ALONG_AXIS and op != "Concat"):
            held = op == "Split" and not rewriter.held.isdisjoint(node.output)
            return None if held else [self._twin(node.input[0]), *node.input[1:]]
        if op in REDUCTIONS and attribute_of(node, "keepdims", 1):
            axes = rewriter.ints(input_of(node, 1)) if input_of(node, 1) else None
            if axes is None:
                return [self._twin(node.input[0])] if attribute_of(node, "axes") else None
            last = rewriter.constant_of(np.array([LAST.index(axis % 4) for axis in axes]), "axes")
            return [self._twin(node.input[0]), last]
        if op not in BROADCASTING | {"Concat"}:
            return None
        return [
            self._constant(name) if rewriter.constant(name) is not None else self._twin(name) for name in node.input
        ]

    def _write_transpose(self, node: NodeProto) -> bool:
        """A Transpose of the model: what it does to the twin, or nothing where it makes the twin."""
        source, perm = node.input[0], attribute_of(node, "perm", range(4)[::-1])
        if tuple(perm) == LAST and source not in self.twins:
            self.twins[source] = node.output[0]
            return False
        if source not in self.twins or self.twins[source] == node.output[0]:
            return False
        order = [LAST.index(axis) for axis in perm]
        twin, result = self.twins[source], node.output[0]
        if order != [0, 1, 2, 3]:
            twin = self.rewriter.add("Transpose", [twin], node, self.rewriter.shape(result), perm=order)
        self.rewriter.replace(result, twin)
        return False

    def _twin(self, name: str) -> str:
        if name not in self.twins:
            shape, like = self.rewriter.shape(name) or (), self.rewriter.producer(name) or NodeProto(output=[name])
            turned = [shape[axis] for axis in LAST]
            dtype = self.rewriter.dtype(name)
            self.twins[name] = self.rewriter.add("Transpose", [name], like, turned, dtype=dtype, perm=list(LAST))
        return self.twins[name]

    def _constant(self, name: str) -> str:
        array = self.rewriter.constant(name)
        assert array is not None
        if array.ndim < 2 and array.size == 1:
            return name
        whole = array.reshape(*[1] * (4 - array.ndim), *array.shape).transpose(LAST)
        return self.rewriter.constant_of(np.ascontiguousarray(whole), f"{name}_last")

    def finish(self, nodes: Sequence[NodeProto]) -> None:
        """Give the consumers that are left, and the outputs, the values with channels first."""
        rewriter = self.rewriter
        for name in (name for node in reversed(nodes) for name in node.output):
            if name in rewriter.held or rewriter.consumers[name]:
                shape, dtype, like = rewriter.shape(name), rewriter.dtype(name), rewriter.producers[name]
                made = rewriter.add("Transpose", [self.twins[name]], like, shape, dtype=dtype, perm=list(FIRST))
                rewriter.replace(name, made)
            else:
                rewriter.drop_unread(name)
