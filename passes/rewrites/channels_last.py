"""Channels last between convolutions, which some accelerators want, by choice.

ONNX's operators on images have their channels first. The step writes what is between them on channels that come last:
an operator on images then has a Transpose at each end, which a converter to a target with channels last takes away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from onnx import NodeProto

from passes.graph.op_facts import CURVES, MATRIX_PRODUCTS, PRODUCTS, attribute_of, broadcasts, input_of
from passes.rewrites.four_axes import REDUCTIONS
from passes.rewrites.rewriter import Rewriter, RewriteStep
from passes.step import PassResult
from passes.suggest import plural

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
class ToNhwc(RewriteStep, name="to-nhwc", reads="values"):
    """Put channels last for the operators between convolutions. The operators are sums, curves and their like.

    What no operator on images leads to stays as it is. A Transpose of the model to channels last goes.
    """

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        writer = _ChannelsLast(rewriter)
        written = [node for node in rewriter.nodes if writer.write(node)]
        if not written:
            return rewriter.result("nothing is computed between operators on images")
        rewriter.replace_made(
            written, lambda name: rewriter.transpose(writer.twins[name], FIRST, rewriter.producers[name])
        )
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
        changed: dict[str, int | list[int]] = {}
        if op in ALONG_AXIS:
            changed["axis"] = LAST.index(attribute_of(node, "axis", 0 if op == "Split" else -1) % 4)
        elif axes := attribute_of(node, "axes"):
            changed["axes"] = [LAST.index(axis % 4) for axis in axes]
        shapes = [rewriter.shape(output) or () for output in node.output]
        turned = [[shape[axis] for axis in LAST] if len(shape) == 4 else shape for shape in shapes]
        self.twins.update(zip(node.output, rewriter.add_copies(node, inputs, turned, **changed), strict=True))
        return True

    def _inputs(self, node: NodeProto) -> list[str] | None:
        """The operands with channels last; None for an operator that is not known."""
        rewriter, op = self.rewriter, node.op_type
        if op in CURVES or op == "Clip" or (op in ALONG_AXIS and op != "Concat"):
            held = op == "Split" and not rewriter.held.keys().isdisjoint(node.output)
            return None if held else [self._twin(node.input[0]), *node.input[1:]]
        if op in REDUCTIONS and attribute_of(node, "keepdims", 1):
            axes = rewriter.ints(input_of(node, 1)) if input_of(node, 1) else None
            if axes is None:
                return [self._twin(node.input[0])] if attribute_of(node, "axes") else None
            last = rewriter.constant_of(np.array([LAST.index(axis % 4) for axis in axes]), "axes")
            return [self._twin(node.input[0]), last]
        if op != "Concat" and not broadcasts(node):
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
            twin = self.rewriter.transpose(twin, order, node)
        self.rewriter.replace(result, twin)
        return False

    def _twin(self, name: str) -> str:
        if name not in self.twins:
            like = self.rewriter.producer(name) or NodeProto(output=[name])
            self.twins[name] = self.rewriter.transpose(name, LAST, like)
        return self.twins[name]

    def _constant(self, name: str) -> str:
        array = self.rewriter.constant(name)
        assert array is not None
        if array.ndim < 2 and array.size == 1:
            return name
        whole = array.reshape(*[1] * (4 - array.ndim), *array.shape).transpose(LAST)
        return self.rewriter.constant_of(np.ascontiguousarray(whole), f"{name}_last")
