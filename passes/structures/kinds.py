"""The kinds of structure that a policy can keep: for each its finder and the checker of its instances.

Finders and checkers share only data types (`types.py`); only this file knows both. Each checker measures for itself
what it needs to know of the exported model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from passes.graph.op_facts import MATRIX_PRODUCTS, op_of
from passes.structures.activations import find_geglus, find_gelus, find_swiglus
from passes.structures.adapters import find_loras
from passes.structures.attention import find_attentions
from passes.structures.candidates import PROJECTION_OPS, Candidate, find_by_shape
from passes.structures.core_check import find_lost_boundaries, find_lost_cores, with_copies, with_sources
from passes.structures.norms import find_batch_norms, find_group_norms, find_layer_norms, find_rms_norms
from passes.structures.projection_check import find_lost_projections
from passes.structures.qkv import find_separate_qkv, inner_views
from passes.structures.rotary import find_rotary_embeddings
from passes.structures.selectors import find_modules, find_nodes, name_of
from passes.structures.short_patterns import find_embeddings, find_pairs, find_residuals
from passes.structures.types import Instance, SearchResult
from passes.structures.view import DEQUANTIZE, QUANTIZE, GraphView
from passes.structures.wiring_check import find_bypassed_projections, with_wiring
from passes.suggest import ELLIPSIS, join_first, plural
from passes.weights.detached import DetachedModel

Instances = Sequence[Instance]


@dataclass(frozen=True, slots=True)
class Checker:
    """`measure` notes on instances what holds in the exported model; `find_lost` returns name → why it is gone."""

    measure: Callable[[Instances, DetachedModel], tuple[Instance, ...]]
    find_lost: Callable[[Instances, DetachedModel], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Structure:
    """A kind of structure that can be kept or watched."""

    finder: Callable[[GraphView], SearchResult]
    checker: Checker

    def find(self, model: DetachedModel) -> SearchResult:
        """Every instance in a model.

        Args:
            model: the exported model.

        Returns:
            The instances; where there are none, what the model has instead.
        """
        return self.search(GraphView(model))

    def search(self, view: GraphView) -> SearchResult:
        """`find` in a model that is indexed already. What no output depends on is left out: nothing has to keep it.

        Args:
            view: the index of the exported model.

        Returns:
            As `find`.
        """
        result = self.finder(view)
        dead = [
            instance for instance in result.instances if instance.results and view.dead.issuperset(instance.results)
        ]
        lasting = [instance for instance in result.instances if instance not in dead]
        if dead and not lasting:
            count = plural(len(dead), "instance")
            return SearchResult((), result.instead or f"{count} in nodes that no output depends on")
        if not lasting and self.checker is CORES and any(self.finder(body).instances for body in inner_views(view)):
            text = "and one inside of an If, a Loop or a Scan, where a kept kind does not reach"
            remedy = "fold an If whose condition is constant in a run without this keep, and keep it in the result"
            return replace(result, instead=f"{result.instead}, {text}", remedy=result.remedy or remedy)
        return replace(result, instances=self.checker.measure(lasting, view.model))

    def find_lost(self, instances: Instances, model: DetachedModel) -> dict[str, str]:
        """The instances that a later model has lost.

        Args:
            instances: what `find` has found in the exported model.
            model: the later model.

        Returns:
            Name of the instance → the reason.
        """
        return self.checker.find_lost(instances, model)


def structure_of(entry: str) -> Structure | None:
    """The structure that an entry of `keep` names.

    Args:
        entry: a kind such as `qkv`, or a selector such as `op:Softmax`, without the question mark.

    Returns:
        The structure; None if the entry names none.
    """
    prefix, colon, pattern = entry.partition(":")
    if colon:
        return SELECTORS[prefix](entry, pattern) if prefix in SELECTORS and pattern else None
    return STRUCTURES.get(entry)


def _lost_cores(instances: Instances, model: DetachedModel) -> dict[str, str]:
    return {name: why for (_, name), why in find_lost_cores(instances, model).items()}


def _lost_qkv(instances: Instances, model: DetachedModel) -> dict[str, str]:
    lost = find_lost_projections(instances, model)
    return lost | find_bypassed_projections(instances, model, lost)


CORES: Final = Checker(with_copies, _lost_cores)


def _by_shape(
    kind: str, what: str, candidates: Callable[[GraphView], Iterable[Candidate]], *related: str
) -> tuple[str, Structure]:
    """A row of the table; where a model has none, the message counts the `related` ops."""
    return kind, Structure(lambda view: find_by_shape(view, kind, what, candidates(view), related), CORES)


def _row_of_gate(kind: str, what: str, candidates: Callable[[GraphView], Iterable[Candidate]]) -> tuple[str, Structure]:
    """A row for a kind with two products, which may be one: then what is found says so too."""

    def find(view: GraphView) -> SearchResult:
        result = find_by_shape(view, kind, what, candidates(view), _CURVES)
        products = [
            [weight for weight in instance.weights if weight.role in PROJECTION_OPS] for instance in result.instances
        ]
        merged = [weights[0].name for weights in products if len(weights) == 1]
        if not merged:
            return result
        text = f"{plural(len(merged), f'{kind} block')} whose gate and value are one matrix in the source already"
        remedy = f"it is held as one; without keep: {kind}, the step split-gate-up takes it apart"
        return replace(result, instead=f"{text}: {join_first(merged, 3, ELLIPSIS)}", remedy=remedy)

    return kind, Structure(find, CORES)


_NORMS: Final = tuple(f"{name}Normalization" for name in ("Batch", "Layer", "RMS", "Instance", "Group"))
_CURVES: Final = ("Gelu", "Erf", "Tanh", "Sigmoid", "Relu", "LeakyRelu", "HardSwish", "Mish", "Clip")

STRUCTURES: Final[Mapping[str, Structure]] = {
    "qkv": Structure(find_separate_qkv, Checker(with_wiring, _lost_qkv)),
    **dict(
        (
            _by_shape(
                "attention", "softmax between two products of computed values", find_attentions, "Softmax", "MatMul"
            ),
            _by_shape("batchnorm", "BatchNormalization", find_batch_norms, *_NORMS),
            _by_shape("layernorm", "layer norm", find_layer_norms, *_NORMS, "ReduceMean", "Sqrt"),
            _by_shape("rmsnorm", "RMS norm", find_rms_norms, *_NORMS, "ReduceMean", "Sqrt"),
            _by_shape("groupnorm", "group norm", find_group_norms, *_NORMS, "ReduceMean", "Sqrt"),
            _by_shape("gelu", "GELU", find_gelus, *_CURVES),
            _row_of_gate("geglu", "product of gelu(x·W) and x·V", find_geglus),
            _row_of_gate("swiglu", "product of silu(x·W) and x·V", find_swiglus),
            _by_shape(
                "lora", "product with matrices of low rank next to that of a matrix", find_loras, "MatMul", "Gemm"
            ),
            _by_shape("embedding", "lookup of rows in a table of weights", find_embeddings, "Gather", "GatherND"),
            _by_shape("rope", "rotary embedding", find_rotary_embeddings, "Cos", "Sin", "Neg", "Softmax"),
            _by_shape(
                *("qdq", "quantized tensor", find_pairs, QUANTIZE, DEQUANTIZE),
                *(*sorted(MATRIX_PRODUCTS, reverse=True), "Conv"),
            ),
            _by_shape(
                "residual", "sum of a value and of what a sublayer makes of it", find_residuals, "Add", "Sum", "Concat"
            ),
        )
    ),
}

SELECTORS: Final[Mapping[str, Callable[[str, str], Structure]]] = {
    "op": lambda entry, pattern: Structure(lambda view: find_nodes(view, entry, pattern, op_of), CORES),
    "node": lambda entry, pattern: Structure(lambda view: find_nodes(view, entry, pattern, name_of), CORES),
    "module": lambda entry, pattern: Structure(
        lambda view: find_modules(view, entry, pattern), Checker(with_sources, find_lost_boundaries)
    ),
}
"""Prefix → factory of the structure of an entry such as `op:Softmax`."""
