"""SmoothQuant as preparation: outlier channels of activations move into the weights after them, by onnxsim's factors.

A product stays the same if a channel of its data is multiplied by a factor and the row of its weight divided by it. The
norm before the product takes the factors, so that the value a quantizer sees between norm and product has no outliers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
from onnx import NodeProto, numpy_helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import initializers_of
from passes.graph.op_facts import op_of
from passes.rewrites.graph_edit import GraphEdit, outside_readers
from passes.step import Description, PassResult, Step, values
from passes.structures.view import GraphView
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable

Array = np.ndarray[Any, np.dtype[Any]]

Factors = dict[str, Array]
"""Output of a product → the factor for each channel of its data."""


@dataclass(frozen=True, slots=True)
class SmoothQuant(Step):
    """Smooth the data of MatMuls with a stored matrix, by onnxsim's `quark_smoothquant` on the draws of the run.

    Args:
        alpha: how much of the outliers goes into the weights, from 0 to 1.
        add_nodes: whether a product that does not follow a norm gets a Mul of its own before it.
    """

    alpha: int | float = 0.5
    add_nodes: bool = False
    name: str = field(default="smooth-quant", init=False)
    source: str = field(default="onnxsim", init=False)
    description: ClassVar[Description] = values(
        "Move outlier channels of activations into the weights after them (SmoothQuant)"
    )

    def check(self, context: PassContext) -> None:
        if not 0 <= self.alpha <= 1:
            raise PolicyError(f"pass {self.name!r}: alpha is {self.alpha!r}; expected a number from 0 to 1")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        draws = [dict(feeds) for feeds in context.draws()]
        if not draws:
            why = "no draw shows the range of the activations, so nothing is smoothed"
            return PassResult(model, changed=False, why=why)
        if model.unread():
            return PassResult(model, changed=False, why="weights stay unread, so nothing is smoothed")
        source = portable(model, context.spill)
        factors = context.worker.call(find_factors, model=source, feeds=draws, alpha=float(self.alpha))
        smoother = _Smoother(GraphEdit.of(GraphView(model)), self.add_nodes)
        smoother.smooth(factors)
        why = "; ".join(smoother.describe()) or None
        return PassResult(smoother.edit.model() if smoother.smoothed else model, smoother.smoothed > 0, why)


def find_factors(model: MappedModel, feeds: Sequence[Mapping[str, np.ndarray]], alpha: float) -> Factors:
    """In the worker: let onnxsim smooth the model, and read its factors from the smoothed model."""
    from onnxsim.quark_smoothquant import smooth_quant

    proto, weights = model.model(), model.map_weights()
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].array(), tensor.name))
    data = {node.output[0]: node.input[0] for node in proto.graph.node if op_of(node) == "MatMul"}
    smoothed = smooth_quant(proto, [dict(feed) for feed in feeds], alpha=alpha).graph
    stored = initializers_of(smoothed)
    made = {node.output[0]: node for node in smoothed.node if node.op_type == "Mul"}
    products = [node for node in smoothed.node if op_of(node) == "MatMul" and node.input[0] != data[node.output[0]]]
    return {node.output[0]: numpy_helper.to_array(stored[made[node.input[0]].input[1]]) for node in products}


UNSEEN: Final = 1e8
"""A channel that is zero on all draws has a factor of 1e9 in onnxsim, and its weights become zero. Here it stays."""


@dataclass(slots=True)
class _Smoother:
    """Writes the factors into norms and weights."""

    edit: GraphEdit
    adds_nodes: bool
    smoothed: int = 0
    left: int = 0

    def smooth(self, factors: Factors) -> None:
        view = self.edit.view
        by_data: dict[str, list[NodeProto]] = defaultdict(list)
        for node in view.own:
            if node.output and node.output[0] in factors:
                by_data[node.input[0]].append(node)
        fixed = outside_readers(view)
        for data, products in by_data.items():
            common = _common_factor([factors[node.output[0]] for node in products])
            if common is None:
                self.left += len(products)
                continue
            alone = data not in fixed and len(view.consumers[data]) == len(products)
            before = self.edit.state()
            name = data
            if not (alone and self._scale_norm(data, common, fixed)):
                self.edit.restore(before)
                if not self.adds_nodes:
                    self.left += len(products)
                    continue
                name = self._add_mul(data, common, products[0])
            for node in products:
                self._divide_weight(node, name, common)
            self.smoothed += len(products)

    def describe(self) -> Iterator[str]:
        """What the step did, and what it left."""
        if self.smoothed:
            yield f"smoothed {plural(self.smoothed, 'product')}"
        if self.left:
            hint = "" if self.adds_nodes else "; add_nodes: true puts a Mul before it"
            yield f"left {plural(self.left, 'product')} without a norm that feeds no other node{hint}"
        view = self.edit.view
        gemms = [node for node in view.by_op.get("Gemm", ()) if node.input[1] in view.folded]
        if gemms:
            yield f"onnxsim smooths no Gemm ({len(gemms)} here): put smooth-quant before the step that makes them"

    def _scale_norm(self, value: str, factor: Array, fixed: Mapping[str, str]) -> bool:
        """Multiply the channels of `value`, which a norm makes, by `factor`; False if none does."""
        view = self.edit.view
        node = view.producers.get(value)
        if node is None:
            return False
        operator = op_of(node)
        if operator in NORMS and node.output[0] == value:
            names = [name for name in node.input[1:3] if name]
        elif operator in ("Mul", "Add"):
            constants = [name for name in node.input if name in view.folded]
            names = constants if len(constants) == 1 and len(node.input) == 2 else []
        else:
            names = []
        renewed = {name: self._scale_vector(name, factor) for name in names}
        if not renewed or None in renewed.values():
            return False
        if operator == "Add":  # a bias: what it is added to is scaled as well
            (data,) = (name for name in node.input if name not in renewed)
            if data in fixed or len(view.consumers[data]) > 1 or not self._scale_norm(data, factor, fixed):
                return False
        inputs = [renewed.get(name) or name for name in node.input]
        if inputs != list(node.input):
            self.edit.replace_node(node, node.op_type, inputs, value)
        return True

    def _scale_vector(self, name: str, factor: Array) -> str | None:
        """The stored vector `name` times `factor`; None if it is no vector of one number per channel."""
        view = self.edit.view
        tensor = view.initializers.get(name)
        if tensor is None or name in view.inputs:
            return None
        array = view.model.array(tensor)
        if array.ndim == 0 or array.size != array.shape[-1] or array.size != factor.size or array.dtype != np.float32:
            return None
        return self.edit.renew_tensor(name, (array.astype(np.float64) * factor).astype(array.dtype))

    def _add_mul(self, data: str, factor: Array, consumer: NodeProto) -> str:
        self.edit.position = self.edit.view.positions[consumer.output[0]]
        name = self.edit.store(factor.astype(np.float32), f"{data}.smooth")
        return self.edit.add_node("Mul", [data, name], self.edit.free(f"{data}.smoothed"), consumer, "smooth")

    def _divide_weight(self, node: NodeProto, data: str, factor: Array) -> None:
        view = self.edit.view
        array = view.model.array(view.initializers[node.input[1]])
        divided = (array.astype(np.float64) / factor[:, None]).astype(array.dtype)
        name = self.edit.renew_tensor(node.input[1], divided)
        if [data, name] != list(node.input):
            self.edit.replace_node(node, node.op_type, [data, name], node.output[0])


def _common_factor(factors: Sequence[Array]) -> Array | None:
    """One factor for all products of one value: the largest, which is that of a matrix of all their columns.

    None where a factor is no number, or none is left to be applied.
    """
    wide = np.max([array.astype(np.float64) for array in factors], axis=0)
    found = np.where(wide >= UNSEEN, 1.0, wide)
    return found if np.isfinite(found).all() and (found > 0).all() and not np.allclose(found, 1.0) else None


NORMS: Final = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
"""Norms over the last axis, with a scale and perhaps a bias."""
