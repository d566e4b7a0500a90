"""SmoothQuant and AWQ's scaling as preparation: factors of onnxsim's move between channels and rows of weights.

SmoothQuant makes outlier channels of activations smaller, AWQ makes the rows of a weight larger that meet large ones. A
product stays the same if a channel of its data is multiplied by a factor and the row of its weight divided by it. The
norm before the product takes the factors, so that the value a quantizer sees between norm and product has no outliers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper
from onnx.shape_inference import infer_shapes

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.index import initializers_of
from passes.graph.op_facts import op_of
from passes.provenance.annotations import annotations_of
from passes.rewrites.rewriter import Rewriter
from passes.step import PassResult, Step
from passes.structures.view import GraphView
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sharing import MappedModel, portable
from passes.weights.stand_ins import Array

Factors = dict[str, Array]
"""Output of a product → the factor for each channel of its data."""


@dataclass(frozen=True, slots=True)
class SmoothQuant(Step, name="smooth-quant", reads="values", source="onnxsim"):
    """Move outlier channels of activations into the weights after them (SmoothQuant). onnxsim's `quark_smoothquant`
    finds the factors for MatMuls with a stored matrix, on the draws of the run.

    Args:
        alpha: how much of the outliers goes into the weights, from 0 to 1.
        add_nodes: whether a product that does not follow a norm gets a Mul of its own before it.
    """

    alpha: int | float = 0.5
    add_nodes: bool = False

    def check(self, context: PassContext) -> None:
        if not 0 <= self.alpha <= 1:
            raise PolicyError(f"pass {self.name!r}: alpha is {self.alpha!r}; expected a number from 0 to 1")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        smoother = _Smoother(Rewriter(GraphView(model)), self.add_nodes, common_of=_widest)
        return _scale(model, context, smoother, find_factors, {"alpha": float(self.alpha)})


@dataclass(frozen=True, slots=True)
class Awq(Step, name="awq", reads="values", source="onnxsim"):
    """Scale rows of weights that meet large activations, and these by the inverse (AWQ). onnxsim's `apply_awq` finds
    the factors on the draws of the run: rows that meet large activations get more of the numbers of int4 in blocks of
    32.

    Args:
        alphas: exponents that are tried between 0 and 1; each costs a product of all rows of the data.
        add_nodes: whether a product that does not follow a norm gets a Mul of its own before it.
    """

    alphas: int = 20
    add_nodes: bool = False

    def check(self, context: PassContext) -> None:
        if self.alphas < 2:
            raise PolicyError(f"pass {self.name!r}: alphas is {self.alphas!r}; expected an integer of 2 or more")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        smoother = _Smoother(Rewriter(GraphView(model)), self.add_nodes, common_of=_middle)
        return _scale(model, context, smoother, find_awq_factors, {"alphas": self.alphas})


def _scale(
    model: DetachedModel,
    context: PassContext,
    smoother: _Smoother,
    find: Callable[..., Factors],
    options: Mapping[str, Any],
) -> PassResult:
    """The model with the factors that `find` gives in the worker."""
    draws = [dict(feeds) for feeds in context.draws()]
    if not draws:
        why = "no draw shows the range of the activations, so nothing is smoothed"
        return PassResult(model, changed=False, why=why)
    if model.unread():
        return PassResult(model, changed=False, why="weights stay unread, so nothing is smoothed")
    factors = context.worker.call(find, model=portable(model, context.spill), feeds=draws, **options)
    smoother.smooth(factors)
    smoother.passed = _products_without_factor(model, factors)
    why = "; ".join(smoother.describe()) or None
    return PassResult(smoother.graph.to_model() if smoother.smoothed else model, smoother.smoothed > 0, why)


def _products_without_factor(model: DetachedModel, factors: Factors) -> list[str]:
    matrices = {name for name, tensor in model.index.initializers.items() if len(tensor.dims) == 2}
    products = (node for node in model.proto.graph.node if op_of(node) == "MatMul" and node.input[1] in matrices)
    return [node.output[0] for node in products if node.output[0] not in factors]


def find_factors(model: MappedModel, feeds: Sequence[Mapping[str, np.ndarray]], alpha: float) -> Factors:
    """In the worker: let onnxsim smooth the model, and read its factors from the smoothed model."""
    from onnxsim.quark_smoothquant import smooth_quant

    proto = _attach_weights(model)
    return _read_factors(proto, smooth_quant(proto, [dict(feed) for feed in feeds], alpha=alpha))


def find_awq_factors(model: MappedModel, feeds: Sequence[Mapping[str, np.ndarray]], alphas: int) -> Factors:
    """In the worker: let onnxsim scale the model for int4, and read its factors from the scaled model."""
    from onnxsim import apply_awq, quantize_weight_only_int4

    proto = _attach_weights(model)
    copy = ModelProto.FromString(proto.SerializeToString())
    for entry in copy.opset_import:  # it quantizes nothing below 21; of this copy only names and numbers are read
        entry.version = max(entry.version, 21) if not entry.domain else entry.version
    quantized = quantize_weight_only_int4(infer_shapes(copy))  # it passes over a product whose data has no type
    return _read_factors(proto, apply_awq(proto, quantized, [dict(feed) for feed in feeds], num_alpha_steps=alphas))


def _attach_weights(model: MappedModel) -> ModelProto:
    proto, weights = model.model(), model.map_weights()
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name].array(), tensor.name))
    return proto


def _read_factors(proto: ModelProto, smoothed: ModelProto) -> Factors:
    """The constants of the Mul operators that a library has put before products."""
    data = {node.output[0]: node.input[0] for node in proto.graph.node if op_of(node) == "MatMul"}
    stored = initializers_of(smoothed.graph)
    nodes = smoothed.graph.node
    made = {node.output[0]: node for node in nodes if node.op_type == "Mul"}
    products = [node for node in nodes if op_of(node) == "MatMul" and node.input[0] != data[node.output[0]]]
    return {node.output[0]: numpy_helper.to_array(stored[made[node.input[0]].input[1]]) for node in products}


UNSEEN: Final = 1e8
"""A channel that is zero on all draws has a factor of 1e9 in onnxsim, and its weights become zero. Here it stays."""


@dataclass(slots=True)
class _Smoother:
    """Writes the factors into norms and weights."""

    graph: Rewriter
    adds_nodes: bool
    common_of: Callable[[Array], Array]
    """One factor for all products of one value, of their factors in rows."""
    smoothed: int = 0
    left: int = 0
    passed: Sequence[str] = ()
    """Products with a stored matrix for which the library has no factor."""

    def smooth(self, factors: Factors) -> None:
        view = self.graph.view
        by_data: dict[str, list[NodeProto]] = defaultdict(list)
        for node in view.own:
            if node.output and node.output[0] in factors:
                by_data[node.input[0]].append(node)
        for data, products in by_data.items():
            rows = np.stack([factors[node.output[0]].astype(np.float64).ravel() for node in products])
            common = _usable(self.common_of(rows))
            if common is None:
                self.left += len(products)
                continue
            alone = data not in self.graph.held and len(view.consumers[data]) == len(products)
            before = self.graph.state()
            name = data
            if not (alone and self._scale_norm(data, common)):
                self.graph.restore(before)
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
        if self.passed:
            more = " …" if len(self.passed) > 1 else ""
            yield f"onnxsim gives no factor for {plural(len(self.passed), 'product')} ({self.passed[0]}{more})"
        view = self.graph.view
        gemms = [node for node in view.by_op.get("Gemm", ()) if node.input[1] in view.folded]
        if gemms:
            writers = dict.fromkeys(author for node in gemms if (author := annotations_of(node).author))
            advice = f"put smooth-quant before {' and '.join(writers)}, or skip that"
            advice = advice if writers else "the source has them"
            yield f"onnxsim smooths no Gemm ({len(gemms)} here): {advice}"

    def _scale_norm(self, value: str, factor: Array) -> bool:
        """Multiply the channels of `value`, which a norm makes, by `factor`; False if none does."""
        view = self.graph.view
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
            if data in self.graph.held or len(view.consumers[data]) > 1 or not self._scale_norm(data, factor):
                return False
        inputs = [renewed.get(name) or name for name in node.input]
        if inputs != list(node.input):
            self.graph.replace_node(node, node.op_type, inputs, value)
        return True

    def _scale_vector(self, name: str, factor: Array) -> str | None:
        """The stored vector `name` times `factor`; None if it is no vector of one number per channel."""
        view = self.graph.view
        tensor = view.initializers.get(name)
        if tensor is None or name in view.inputs:
            return None
        array = view.model.array(tensor)
        if array.ndim == 0 or array.size != array.shape[-1] or array.size != factor.size or array.dtype != np.float32:
            return None
        return self.graph.renew_tensor(name, (array.astype(np.float64) * factor).astype(array.dtype))

    def _add_mul(self, data: str, factor: Array, consumer: NodeProto) -> str:
        self.graph.place = self.graph.view.positions[consumer.output[0]]
        name = self.graph.store(factor.astype(np.float32), f"{data}.smooth")
        return self.graph.add_node("Mul", [data, name], self.graph.free(f"{data}.smoothed"), consumer, "smooth")

    def _divide_weight(self, node: NodeProto, data: str, factor: Array) -> None:
        view = self.graph.view
        array = view.model.array(view.initializers[node.input[1]])
        divided = (array.astype(np.float64) / factor[:, None]).astype(array.dtype)
        name = self.graph.renew_tensor(node.input[1], divided)
        if [data, name] != list(node.input):
            self.graph.replace_node(node, node.op_type, [data, name], node.output[0])


def _widest(factors: Array) -> Array:
    """SmoothQuant's factor of a matrix of all their columns."""
    return factors.max(axis=0)


def _middle(factors: Array) -> Array:
    """AWQ's factor by the mean of the exponents, as each factor is a power of the same sizes."""
    return np.exp(np.log(factors).mean(axis=0))


def _usable(wide: Array) -> Array | None:
    """The factor without channels that no draw shows; None where it is no number, or nothing is left to be applied."""
    found = np.where(wide >= UNSEEN, 1.0, wide)
    return found if np.isfinite(found).all() and (found > 0).all() and not np.allclose(found, 1.0) else None


NORMS: Final = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
"""Norms over the last axis, with a scale and perhaps a bias."""
