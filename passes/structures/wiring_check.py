"""Check that attention still reads the products with the kept matrices, and no others in their place.

A product that is computed but has no effect keeps its matrix in the model, so its presence does not prove that
attention reads it. So this check starts from each *join*, a product of two computed values or an attention operator,
and finds the matrices that its operands were multiplied with last. In the exported model the check counts the
other matrices that each kept matrix meets at a join, nearly always none. A merged product next to the old product adds
to this count; a join that reads only a merged product adds an operand without any kept matrix.

It shares no code with the finders, and knows only that attention multiplies two computed values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from onnx import NodeProto, ValueInfoProto

from passes.graph.index import GraphIndex, initializers_of
from passes.graph.inference import dims_of, types_of
from passes.graph.op_facts import (
    ARRANGING,
    CONVOLUTIONS,
    FACTORS,
    MATRIX_PRODUCTS,
    MULTIPLIED,
    ONNX_DOMAINS,
    RECURRENT,
    SIZES,
    addend_of,
    has_body,
    input_of,
    is_opaque,
    op_of,
)
from passes.graph.traversal import bodies_in, every_node, reads_of
from passes.model.canonical import value_digests
from passes.structures.projection_check import computed_digest, packing_suffix
from passes.structures.types import Instance, Wiring
from passes.weights.detached import DetachedModel


def with_wiring(instances: Sequence[Instance], model: DetachedModel) -> tuple[Instance, ...]:
    """`instances` of the exported `model`, each with how its matrices reach the joins there."""
    if not instances:
        return ()
    joins = _Joins(model, _digests(instances))
    unreached = len(joins.unreached_operands())
    return tuple(
        replace(
            instance,
            wiring=Wiring(tuple(joins.other_weights_of(weight.digests) for weight in instance.weights), unreached),
        )
        for instance in instances
    )


def find_bypassed_projections(
    instances: Sequence[Instance], model: DetachedModel, lost: Mapping[str, str]
) -> dict[str, str]:
    """Instance name → why attention does not read its projections, of the instances that are not `lost` anyway."""
    wired = [(instance, instance.wiring) for instance in instances if instance.wiring is not None]
    standing = [(instance, wiring) for instance, wiring in wired if instance.name not in lost]
    if not standing:
        return {}
    joins = _Joins(model, _digests(instances))
    needed = Counter(weight.digests for instance, _ in standing for weight in instance.weights)
    reasons: dict[str, str] = {}
    for instance, wiring in standing:
        missing = []
        for weight, before in zip(instance.weights, wiring.other_weights, strict=True):
            least = min(before, default=0)
            wanted = min(needed[weight.digests], before.count(least))
            if sum(others <= least for others in joins.other_weights_of(weight.digests)) < wanted:
                missing.append(f"{weight.role} ({weight.name})")
        if missing:
            reasons[instance.name] = (
                f"attention does not read the product with the matrix of {', '.join(missing)} by itself"
            )
    gone = sum(
        len(before)
        for instance, wiring in wired
        if instance.name in {*lost, *reasons}
        for before in wiring.other_weights
    )
    unreached = joins.unreached_operands()
    if len(unreached) > standing[0][1].unreached_operands + gone:
        fed = {name for mask in unreached for name in joins.sources_of(mask)}
        sharing = [instance for instance, _ in standing if fed & joins.sources_of(joins.mask_of(_digests([instance])))]
        for instance in sharing or [instance for instance, _ in standing]:
            reasons.setdefault(instance.name, "attention reads products with more matrices than those of Q, K and V")
    return reasons


def _digests(instances: Iterable[Instance]) -> Iterator[str]:
    return (digest for instance in instances for weight in instance.weights for digest in weight.digests)


class _Joins:
    """The operands of all joins, each as a bit mask of the matrices that its values were last multiplied with.

    Args:
        digests: the digests of all kept matrices.
    """

    def __init__(self, model: DetachedModel, digests: Iterable[str]) -> None:
        self._model = model.without_functions()
        proto = self._model.proto
        self._wanted = set(digests)
        self._index = index = GraphIndex(proto.graph, self._model.index.live[::-1])
        nodes, self._producers, self._stored = index.nodes, index.producers, index.initializers
        self._constants = {"", *self._stored}
        self._bits: dict[str, int] = {}
        self._sources: dict[int, set[str]] = {}
        self._near: defaultdict[str, int] = defaultdict(int)
        self._operands: list[int] = []
        for node in nodes:
            near = self._visit(node)
            if near is None:
                self._constants.update(node.output)
            else:
                self._near.update(dict.fromkeys(filter(None, node.output), near))  # outputs left out share the name ''
        self._kept = self.mask_of(self._wanted)
        self._other_weights = self._count_other_weights()

    def mask_of(self, digests: Iterable[str]) -> int:
        """The bits of the matrices with these digests; a matrix that no product reads has none."""
        mask = 0
        for digest in digests:
            mask |= self._bits.get(digest, 0)
        return mask

    def other_weights_of(self, digests: Iterable[str]) -> tuple[int, ...]:
        """For each operand that the matrix with one of `digests` reaches, how many matrices that are not kept reach it
        too."""
        bits = {self._bits[digest] for digest in digests if digest in self._bits}
        return tuple(others for bit in bits for others in self._other_weights.get(bit, ()))

    def _count_other_weights(self) -> dict[int, list[int]]:
        """Bit of a kept matrix → for each operand that it reaches, how many unkept matrices reach that operand."""
        other_weights: dict[int, list[int]] = defaultdict(list)
        for operand in self._operands:
            own = operand & self._kept
            while own:
                bit = own & -own
                other_weights[bit].append((operand & ~self._kept).bit_count())
                own ^= bit
        return other_weights

    def unreached_operands(self) -> list[int]:
        """The operands that no kept matrix reaches."""
        return [operand for operand in self._operands if not operand & self._kept]

    def sources_of(self, mask: int) -> set[str]:
        """The values that the matrices in `mask` are multiplied with."""
        return {name for bit, names in self._sources.items() if bit & mask for name in names}

    def _visit(self, node: NodeProto) -> int | None:
        """The mask of the outputs of `node`; None for a constant."""
        read = reads_of(node)
        if self._constants.issuperset(read) and not is_opaque(node):
            return None
        if node.op_type in SIZES:
            return 0
        near = 0
        for name in read:
            near |= self._near[name]
        if has_body(node):
            return near | self._multiplied_inside(node)
        product = self._product_at(node)
        if product is None:
            return near
        matrix = self._matrix_of(product)
        computed = [name for name in _factors(product) if name not in self._constants]
        addend = self._near[addend_of(product)]
        if "Attention" in node.op_type or (product.op_type in JOINS and len(computed) > 1):
            operands = [self._near[name] for name in computed] + [matrix]
            self._operands += [operand for operand in operands if operand]
            return addend
        if not matrix:
            return near
        self._sources.setdefault(matrix, set()).update(self._index.origin_of(name, ARRANGING) for name in computed)
        return matrix | addend

    def _product_at(self, node: NodeProto) -> NodeProto | None:
        """The node that multiplies matrices: `node` itself, or the Mul of a product written as a sum of products.

        A square, as in norms, is none.
        """
        if node.op_type in MATRIX_OPS or node.domain not in ONNX_DOMAINS or "Attention" in node.op_type:
            return node
        if node.op_type not in SUMS:
            return None
        producer = self._producers.get(self._index.origin_of(node.input[0], ARRANGING))
        return producer if producer and producer.op_type == "Mul" and len(set(producer.input)) > 1 else None

    def _matrix_of(self, node: NodeProto) -> int:
        """The bit of the constant matrix that `node` multiplies with; 0 if there is none."""
        for name in _factors(node):
            digest = self._digest_of_matrix(node, name) if name in self._constants else ""
            if digest:
                return self._bit_of(digest)
        return 0

    def _bit_of(self, digest: str) -> int:
        return self._bits.setdefault(digest, 1 << len(self._bits))

    def _digest_of_matrix(self, node: NodeProto, name: str) -> str:
        """Empty for a vector, and for a filter of each channel by itself, which mix no features."""
        source = self._index.origin_of(name, ARRANGING)
        producer = self._producers.get(source)
        if producer is not None and producer.op_type == "DequantizeLinear":
            return self._digest_of_quantized(name)
        tensor = self._index.tensor_at(source)
        if tensor is None:
            return f"computed {source}"
        if not _mixes(node, tensor.dims) and (source == name or not _mixes(node, self._dims_of(name))):
            return ""
        return self._model.digest(tensor) + packing_suffix(node, self._stored, self._model)

    def _dims_of(self, name: str) -> Sequence[int]:
        """The dims of a constant, of which inference knows all; those of a matrix where it does not."""
        dims = dims_of(self._types[name]) if name in self._types else None
        return [dim for dim in dims if isinstance(dim, int)] if dims is not None else UNKNOWN

    @cached_property
    def _types(self) -> Mapping[str, ValueInfoProto]:
        return types_of(self._model.proto)

    def _digest_of_quantized(self, name: str) -> str:
        """The digest of how a matrix is dequantized; the digest of its values if a kept matrix is computed in another
        way.

        A scale counts: bits are compared, since integers times a scale leave no choice of rounding.
        """
        computed = self._value_digests.get(name, "")
        if computed in self._wanted:
            return computed
        digest = computed_digest(self._model, name, self._index) or ""
        return digest if digest in self._wanted else f"dequantized {computed or name}"

    @cached_property
    def _value_digests(self) -> Mapping[str, str]:
        return value_digests(self._model).values

    def _multiplied_inside(self, node: NodeProto) -> int:
        """The bits of the constants that products in the bodies of `node` read."""
        digests: list[str] = []
        for body in bodies_in(node):
            constants = {*self._constants, *initializers_of(body)} - {""}
            for inner in every_node(body):
                if inner.op_type in MATRIX_OPS and constants.intersection(inner.input):
                    name = min(constants.intersection(inner.input))
                    tensor = self._stored.get(self._index.origin_of(name, ARRANGING))
                    digests.append(self._model.digest(tensor) if tensor is not None else f"inside {name}")
        for digest in digests:
            self._bit_of(digest)
        return self.mask_of(digests)


def _mixes(node: NodeProto, dims: Sequence[int]) -> bool:
    """Whether a product with a constant of these dims sums over several features for each of several results."""
    if node.op_type in CONVOLUTIONS:
        return len(dims) > 1 and dims[1] > 1
    if node.op_type in ("Einsum", "Mul"):
        return sum(dim > 1 for dim in dims) > 1
    return len(dims) > 1 and min(dims[-2:]) > 1


def _factors(node: NodeProto) -> list[str]:
    """The inputs that are multiplied with each other, without biases, masks, scales and zero points."""
    places = FACTOR_PLACES.get(op_of(node), range(len(node.input)))
    return [name for place in places if (name := input_of(node, place))]


MATRIX_OPS: Final = CONVOLUTIONS | RECURRENT | {*FACTORS, "FusedMatMul"}
"""All ops of ONNX that multiply with a matrix; every op of another domain is taken to do so."""

FACTOR_PLACES: Final[Mapping[str, Sequence[int]]] = {
    **{op: FACTORS.get(op, (0, 1)) for op in MATRIX_OPS if op != "Einsum"},
    **MULTIPLIED,
}
"""Op → the positions of its factors among its inputs. An Einsum, and an op that is not here, may multiply all."""

UNKNOWN: Final = (2, 2)
"""Dims of a matrix."""

JOINS: Final = MATRIX_PRODUCTS | {"Einsum", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "Mul"}
"""Ops that join two computed values, including a Mul whose result is summed; so does any Attention."""

SUMS: Final = frozenset({"ReduceSum", "ReduceMean", "CumSum", "AveragePool", "GlobalAveragePool", "LpPool", "ReduceL1"})
