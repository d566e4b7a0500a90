"""Check that Q, K and V are still separate products, by the bytes of their matrices: names may change, matrices may
not.

It shares no code with the finder (`qkv.py`) and does not look at the attention. For each kept matrix it counts the
product nodes with an operand that is exactly this matrix: layers that share a matrix need a product each. The operand
may be the stored tensor, directly or after layout operators and casts, or be computed from constants.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from passes.graph.index import GraphIndex, extract
from passes.graph.inference import compute, evaluate, evaluate_with
from passes.graph.op_facts import CONTRIB_FACTORS, FACTORS, attribute_of
from passes.graph.traversal import bodies_of, live_nodes
from passes.model.canonical import value_digests
from passes.structures.types import PACKED, Instance, KeptWeight, sums_of
from passes.weights.detached import DetachedModel
from passes.weights.stand_ins import digest_of


def find_lost_projections(instances: Sequence[Instance], model: DetachedModel) -> dict[str, str]:
    """Instance name → why the instance is lost. An instance is kept when each of its matrices has its own product node.

    If a matrix has fewer products than instances that need it, an instance is kept only where the value at its pin, the
    result of its product before the pass, is still the result of such a product.
    """
    products = ProductOperands(model)
    needed = Counter(weight.digests for instance in instances for weight in instance.weights)
    reasons: dict[str, str] = {}
    for instance in instances:
        pinned = {weight.role: site.tight.name for weight, site in zip(instance.weights, instance.pins, strict=False)}
        missing = []
        for weight in instance.weights:
            products_of_weight = products.results_with(weight)
            if len(products_of_weight) < needed[weight.digests] and pinned.get(weight.role) not in products_of_weight:
                missing.append(f"{weight.role} ({weight.name})")
        if missing:
            reasons[instance.name] = f"no separate product with the matrix of {', '.join(missing)}"
    return reasons


@dataclass(frozen=True, slots=True)
class _GraphScope:
    """A graph and its `index`, which also knows the values of all graphs around it. `path` is empty for the main graph.

    `live`: the nodes whose elements some output depends on.
    """

    path: str
    live: list[NodeProto]
    index: GraphIndex


@dataclass(frozen=True, slots=True)
class _ProductOperand:
    """The operand `name` of the product that makes `value`.

    `suffix` is what the product adds to the digest of its matrix: the packing of a MatMulNBits, and the factor `alpha`.
    """

    scope: _GraphScope
    value: str
    name: str
    suffix: str


class ProductOperands:
    """The operands of all products that some output depends on, also inside of If, Loop, Scan and of functions."""

    def __init__(self, model: DetachedModel) -> None:
        self._model = model.without_functions()
        scopes = _scopes(self._model.proto.graph, "", None, self._model)
        self._operands = [operand for scope in scopes for operand in _operands(scope, self._model)]

    def results_with(self, weight: KeptWeight) -> set[str]:
        """The results of products that have the matrix of `weight` as an operand.

        A matrix is looked for as a stored tensor, then by how it is computed, then by its elements.
        """
        values = {value for digest in weight.digests for value in self._stored[digest]}
        if not values:
            values = {value for digest in weight.digests for value in self._computed[digest]}
        return values or set(self._rounded_products(weight))

    @cached_property
    def _stored(self) -> dict[str, set[str]]:
        """Digest of a stored tensor → the results of products that read it, directly or after layout operators and
        casts."""
        values: dict[str, set[str]] = defaultdict(set)
        for operand in self._operands:
            tensor = operand.scope.index.tensor_at(operand.name)
            if tensor is not None and len(tensor.dims) >= 2:
                values[self._model.digest(tensor) + operand.suffix].add(operand.value)
        return values

    @cached_property
    def _computed(self) -> dict[str, set[str]]:
        """Digest of how a matrix is computed from constants → the results of products that read it, in the main
        graph."""
        digests = value_digests(self._model).values
        values: dict[str, set[str]] = defaultdict(set)
        for operand in self._operands:
            if (
                not operand.scope.path
                and operand.name in digests
                and operand.scope.index.tensor_at(operand.name) is None
            ):
                values[digests[operand.name] + operand.suffix].add(operand.value)
        return values

    @cached_property
    def _elements(self) -> list[np.ndarray | None]:
        """The elements of each constant operand, and None for other operands."""
        return [self._elements_of(operand) for operand in self._operands]

    def _rounded_products(self, weight: KeptWeight) -> Iterator[str]:
        """The results of products whose constant operand has the elements of `weight`.

        For a matrix that the exported model computes: folding may have rounded it otherwise, unless `weight.is_exact`.
        """
        if weight.rounded is None:
            return
        for operand, elements in zip(self._operands, self._elements, strict=True):
            if elements is None or elements.size != weight.rounded.size:
                continue
            is_same = digest_of(elements) + operand.suffix in weight.digests
            if is_same or (not weight.is_exact and weight.rounded.is_close(sums_of(elements))):
                yield operand.value

    def _elements_of(self, operand: _ProductOperand) -> np.ndarray | None:
        if operand.name not in operand.scope.index.folded:
            return None
        return computed_constant(self._model, operand.name, operand.scope.index)


def computed_constant(model: DetachedModel, name: str, index: GraphIndex) -> np.ndarray | None:
    """The elements of a value computed from stored tensors alone; None if they cannot be computed."""
    part = _computation(model, name, index)  # None beyond the limits: then only `_computed` can identify the matrix
    return evaluate(part) if isinstance(part, ModelProto) else part


def computed_digest(model: DetachedModel, name: str, index: GraphIndex) -> str | None:
    """`digest_of` the elements of such a value. A cache of zeros has 100 MiB, so they are not handed over for it."""
    part = _computation(model, name, index)
    if isinstance(part, ModelProto):
        return evaluate_with(compute_digest, part)
    return None if part is None else digest_of(part)


def compute_digest(content: bytes) -> str | None:
    """`computed_digest`, in the process that computes the elements."""
    values = compute(content)
    return None if values is None else digest_of(values)


def _computation(model: DetachedModel, name: str, index: GraphIndex) -> ModelProto | np.ndarray | None:
    """The model that computes a value from stored tensors, or the elements where it is one; None where those of a
    tensor are not to be read."""
    nodes = index.ancestors([name])
    names = dict.fromkeys((name, *(read for node in nodes for read in node.input)))
    tensors = [index.initializers[read] for read in names if read in index.initializers]
    if any(model.is_unread(tensor) for tensor in tensors):
        return None
    if not nodes:
        return model.array(tensors[0])
    whole = [numpy_helper.from_array(model.array(tensor), tensor.name) for tensor in tensors]
    return extract(model.proto, nodes, outputs=[name], initializers=whole)


def _scopes(graph: GraphProto, path: str, outer: GraphIndex | None, model: DetachedModel) -> Iterator[_GraphScope]:
    # A product that no output depends on does not count, nor one of which only the shape matters.
    live = live_nodes(graph, by_values=True)
    index = GraphIndex(graph, outer=outer)
    scope = _GraphScope(path, live, index)
    yield scope
    for node in live:
        runs_then = _condition(scope, node, model)
        for attribute in node.attribute:
            if runs_then is not None and not attribute.name.startswith(BRANCHES[runs_then]):
                continue
            for body in bodies_of(attribute):
                yield from _scopes(body, f"{path}{node.output[0]}.{attribute.name}/", index, model)


def _condition(scope: _GraphScope, node: NodeProto, model: DetachedModel) -> bool | None:
    """The condition of an If where it is constant, so that one branch never runs; None for another node or
    condition."""
    if node.op_type != "If" or node.input[0] not in scope.index.folded:
        return None
    values = computed_constant(model, node.input[0], scope.index)
    return None if values is None else bool(values.reshape(-1)[0])


def _operands(scope: _GraphScope, model: DetachedModel) -> Iterator[_ProductOperand]:
    for node in scope.live:
        scale = attribute_of(node, "alpha", 1.0)
        for position in MATRIX_INPUTS.get(node.op_type, ()):
            if position < len(node.input):
                suffix = packing_suffix(node, scope.index.initializers, model) + ("" if scale == 1.0 else f"*{scale}")
                yield _ProductOperand(scope, scope.path + node.output[0], node.input[position], suffix)


def packing_suffix(node: NodeProto, stored: Mapping[str, TensorProto], model: DetachedModel) -> str:
    """The end of the digest of a MatMulNBits matrix: its scales, zero points, bits and block size; else empty."""
    if node.op_type != "MatMulNBits":
        return ""
    quantizers = [model.digest(stored[name]) if name in stored else "" for name in node.input[2:5]]
    return PACKED + "/".join(
        (*quantizers, str(attribute_of(node, "bits", 4)), str(attribute_of(node, "block_size", 0)))
    )


MATRIX_INPUTS: Final[Mapping[str, tuple[int, ...]]] = {
    **FACTORS,
    **CONTRIB_FACTORS,
    "Einsum": (0, 1, 2),
    "MatMulNBits": (1,),
}
"""Op → the positions of the inputs that may be the matrix."""

BRANCHES: Final = ("else", "then")
"""The names of If's branch attributes begin so: `else_branch` runs for False (0), `then_branch` for True (1)."""
