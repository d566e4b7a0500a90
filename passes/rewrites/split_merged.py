"""The passes `split-qkv` and `split-gate-up`: merged projections become one product for each part again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar, Final

from passes.context import PassContext
from passes.graph.op_facts import op_of
from passes.graph.traversal import walk
from passes.rewrites.merged_product import SPLIT_OPS
from passes.rewrites.packed_attention import unpack_attentions
from passes.rewrites.split_product import Roles, SplitModel, split_products
from passes.step import PassResult, Step
from passes.structures.activations import BETWEEN, GELU_OPS
from passes.structures.attention import attention_operands
from passes.structures.axes import is_join, product_of
from passes.structures.projection import CURVE_OPS, HEAD_OPS, ProjectionSearch
from passes.structures.view import GraphView, carried_inputs
from passes.weights.detached import DetachedModel

NOTHING_MERGED: Final = "no merged projection"


@dataclass(frozen=True, slots=True)
class SplitQkv(Step, name="split-qkv", reads="values"):
    """Take merged projections of Q, K and V apart. Their weights stay bit for bit."""

    makes_structures: ClassVar[tuple[str, ...]] = ("qkv",)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _result(model, split_qkv(model))


def _result(model: DetachedModel, split: SplitModel) -> PassResult:
    changed = split.model is not model
    return PassResult(split.model, changed, "; ".join(split.notes) or (None if changed else NOTHING_MERGED))


@dataclass(frozen=True, slots=True)
class SplitGateUp(Step, name="split-gate-up", reads="values"):
    """Take merged projections of the gate and the value of a gated MLP apart. Their weights stay bit for bit."""

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        return _result(model, split_gate_up(model))


def split_qkv(model: DetachedModel) -> SplitModel:
    """Take apart each product that makes several of Q, K and V of one attention; `model` itself does not change."""
    unpacked = unpack_attentions(model)
    result = _split_attentions(unpacked.model)
    left = _find_unsplit(result.model, unpacked.unpacked)
    notes = (*unpacked.notes, *result.notes)
    if left:  # a packed operator stays packed where the product that it reads cannot be split
        unpacked = unpack_attentions(model, left)
        result = _split_attentions(unpacked.model)
    return replace(result, model=result.model if result.split else model, notes=notes)


def _split_attentions(model: DetachedModel) -> SplitModel:
    view = GraphView(model)
    return split_products(view, find_merged_qkv(view))


def _find_unsplit(model: DetachedModel, unpacked: Mapping[str, str]) -> tuple[str, ...]:
    """The outputs of the unpacked operators whose Q, K and V are still cut out of one product.

    Args:
        model: the model after its products were split.
        unpacked: output of an unpacked operator → the value that a Split or Gather cuts out for it.
    """
    made = model.index.producers
    return tuple(
        output for output, marker in unpacked.items() if marker in made and made[marker].op_type in ("Split", "Gather")
    )


def find_merged_qkv(view: GraphView) -> dict[str, Roles]:
    """Each product that makes two or three of Q, K and V of one attention → role → the values on the way to it."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    search = ProjectionSearch(view)
    for reading in chain.from_iterable(attention_operands(search)):
        queries, keys = search.before_shared_matrix(reading.query, reading.key)
        projections = {"q": queries, "k": keys, "v": search.projections_of(reading.value)}
        products = {role: {projection.value for projection in of_role} for role, of_role in projections.items()}
        roles_of = Counter(chain.from_iterable(products.values()))
        operands = {"q": reading.query, "k": reading.key, "v": reading.value}
        for role, values_of_role in products.items():
            for value in values_of_role:
                if roles_of[value] > 1:
                    found[value][role].add(operands[role].name)
    return {
        value: {role: _values_upstream(view, roles[role], HEAD_OPS) for role in "qkv" if role in roles}
        for value, roles in found.items()
    }


def split_gate_up(model: DetachedModel) -> SplitModel:
    """Take apart each product that makes both factors of a gated MLP; `model` itself does not change."""
    view = GraphView(model)
    return split_products(view, find_merged_gates(view))


def find_merged_gates(view: GraphView) -> dict[str, Roles]:
    """Each product with one part that goes through an activation and is then multiplied with the other part."""
    found: dict[str, dict[str, frozenset[str]]] = {}
    for node in view.by_op.get("Mul", ()):
        if not view.folded.isdisjoint(node.input):
            continue
        first, second = node.input
        for gate, up in ((first, second), (second, first)):
            plain, curved = _values_upstream(view, [gate], BETWEEN), _values_upstream(view, [gate], GATING)
            ups = _values_upstream(view, [up], BETWEEN)
            if not ups - curved:
                continue  # x · sigmoid(x), or a GELU in several ops: one activation of one value
            for value in sorted((curved & ups) - plain):
                if _is_projection(view, value):
                    roles = found.setdefault(value, {"gate": frozenset(), "up": frozenset()})
                    roles["gate"] |= curved
                    roles["up"] |= ups
    return dict(found)


def _is_projection(view: GraphView, value: str) -> bool:
    node = view.producers.get(value)
    product = product_of(view, node) if node is not None and op_of(node) in SPLIT_OPS else None
    return product is not None and not is_join(view, product)


def _values_upstream(view: GraphView, names: Iterable[str], through: frozenset[str]) -> frozenset[str]:
    """`names`, the values that they are computed from through ops in `through`, and those where the walk ends."""

    def before(value: str) -> list[str]:
        node = view.producers.get(value)
        passes_on = node is not None and (node.op_type in through or op_of(node) in through)
        return [name for name in carried_inputs(node) if name not in view.folded] if node and passes_on else []

    return frozenset(walk([name for name in names if name not in view.folded], before))


GATING: Final = (CURVE_OPS - {"Softmax", "Max", "Min", "Exp"}) | BETWEEN | {*GELU_OPS, "Mul", "Div", "Pow"}
"""Ops that may be between a projection and the product with its gate."""
