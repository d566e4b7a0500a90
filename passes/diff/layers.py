"""Measure how far two models are apart where a layer of the first model ends."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from passes.context import PassContext
from passes.diff.model_matching import ModelMatching
from passes.diff.numbers import DrawnInputs, Pair, measure_pairs, pair_values
from passes.diff.types import label_of
from passes.matching.flat_graph import NodeMatching
from passes.matching.replacements import PRODUCTS
from passes.proof.numbers import Errors
from passes.provenance.annotations import ModulePath, module_path_of


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """A value at which a layer ends, by its name in each model, with the errors of the second model there.

    `layer` is the outermost numbered torch module that the value leaves (`encoder.layer.0`), else the outermost
    one; the node itself where the model has no module paths.
    """

    layer: str
    op: str
    before: str
    after: str
    dtype: str
    errors: Errors


@dataclass(frozen=True, slots=True)
class _LayerBoundary:
    layer: str
    op: str
    depth: int
    """The number of modules around it: the outermost layers have the lowest."""
    value: str
    """The name of the value in the first model."""
    pairs: Mapping[Pair, bool]
    """What may be one value in both models here, the likeliest first, and whether that is certain."""


def compare_layers(
    matched: ModelMatching, draws: Sequence[DrawnInputs], context: PassContext, *, most: int | None = None
) -> tuple[LayerErrors, ...]:
    """Run both models on `draws` and compare the floating-point values at which a layer of the first model ends.

    A Conv that took in a BatchNormalization computes the output of the BatchNormalization: the layer of the Conv is
    compared there. A layer is left out if the second model does not have its value (a scale was moved into the next
    product), or has the value in another shape.

    Args:
        matched: the matched nodes and values of the two models.
        draws: inputs for the first model.
        context: whose proof worker runs the models.
        most: the most values to compare, taken from the outermost layers.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops.
    """
    boundaries = list(_boundaries(matched))
    if most is not None and len(boundaries) > most:
        chosen = sorted(range(len(boundaries)), key=lambda index: (boundaries[index].depth, index))[:most]
        boundaries = [boundaries[index] for index in sorted(chosen)]
    outputs = [(old, new) for new, old in matched.outputs.items()]
    pairs = dict.fromkeys([*outputs, *(pair for boundary in boundaries for pair in boundary.pairs)])
    measured, _ = measure_pairs(matched, list(pairs), draws, context, may_collapse=True)
    distances = {
        pair: (dtype, errors)
        for pair, (dtype, errors) in measured.items()
        if "float" in dtype and not errors.why.startswith(UNLIKE)
    }
    ratios = {pair: _ratio_of(errors) for pair, (_, errors) in distances.items()}
    rows: dict[Pair, LayerErrors] = {}
    for boundary, pair in _choose_pairs(boundaries, ratios, outputs):
        if pair not in rows or pair[0] == boundary.value:  # prefer the layer that ends there to a layer taken in
            rows.pop(pair, None)
            rows[pair] = LayerErrors(boundary.layer, boundary.op, *pair, *distances[pair])
    return tuple(rows.values())


def _ratio_of(errors: Errors) -> float:
    """SQNR in dB; -inf in place of NaN."""
    return -math.inf if math.isnan(errors.sqnr_db) else errors.sqnr_db


def _choose_pairs(
    boundaries: Sequence[_LayerBoundary], ratios: Mapping[Pair, float], outputs: Sequence[Pair]
) -> Iterator[tuple[_LayerBoundary, Pair]]:
    """Each boundary with the pair that is one value in both models, judged by `ratios`, the SQNR of each pair. A
    boundary without such a pair is left out."""
    best: dict[str, float] = {}
    for (_, new), ratio in ratios.items():
        best[new] = max(ratio, best.get(new, ratio))
    least = min((ratios[pair] for pair in outputs if pair in ratios), default=-math.inf) - FAR
    for boundary in boundaries:
        known = [
            pair for pair, certain in boundary.pairs.items() if pair in ratios and (certain or ratios[pair] >= least)
        ]
        nearest = max((ratios[pair] for pair in known), default=-math.inf)
        chosen = next((pair for pair in known if ratios[pair] >= max(nearest, best[pair[1]]) - CLOSE), None)
        if chosen is not None:
            yield boundary, chosen


CLOSE: Final = 10.0
"""dB. A candidate whose SQNR is this close to the best SQNR counts as the same value: a BatchNormalization changes
values by more, and a weight of 4 bits by less."""

FAR: Final = 20.0
"""dB. A value between changed weights whose SQNR is this far below that of the outputs was scaled, and the weights
after it undo the scale: that is no error."""


def _boundaries(matched: ModelMatching) -> Iterator[_LayerBoundary]:
    """The values at which layers end, in the order of the first model."""
    matching = matched.nodes
    values = pair_values(matched)
    inner = [model.index.producers for model in (matched.before, matched.after)]
    modules = [module_path_of(item.node) for item in matching.before.items]
    by_module = any(module is not None and len(module.paths) > 1 for module in modules)
    for item, module in zip(matching.before.items, modules, strict=True):
        for value in item.outputs:
            name = matching.before.names[value]
            if value in matching.before.constants or name not in inner[0]:
                continue
            names = matching.before.names, matching.after.names
            pairs = {
                (names[0][old], names[1][new]): matching.representative(old) in values.certain.get(new, ())
                for old in _chain(matching, value)
                for new in values.news.get(matching.representative(old), ())
                if names[1][new] in inner[1]
            }
            if not pairs:
                continue
            if not by_module:
                if not matching.before.weights.isdisjoint(item.inputs):
                    yield _LayerBoundary(str(label_of(item.node)), item.node.op_type, 0, name, pairs)
            elif module is not None and (depth := _depth_left(matched, value, module, modules)):
                yield _LayerBoundary(module.paths[depth], item.node.op_type, depth, name, pairs)


def _chain(matching: NodeMatching, value: int) -> Iterator[int]:
    """`value`, then what lost nodes compute from it and constants alone: a product may have taken these nodes in."""
    before = matching.before
    while True:
        yield value
        consumers = {consumer for consumer, _ in before.uses[value]}
        if len(consumers) != 1 or value in before.outputs.values():
            return
        consumer = consumers.pop()
        item = before.items[consumer]
        others = {*item.inputs} - {value}
        if not matching.is_lost(consumer) or item.op[1] in PRODUCTS or not before.constants.issuperset(others):
            return
        value = item.outputs[0]


def _depth_left(matched: ModelMatching, value: int, module: ModulePath, modules: Sequence[ModulePath | None]) -> int:
    """The depth of the module around a node that is the layer which `value` leaves; 0 for none."""
    before = matched.nodes.before
    if value in before.outputs.values():
        left = list(range(1, len(module.paths)))
    else:
        paths = [reader.paths for consumer, _ in before.uses[value] if (reader := modules[consumer]) is not None]
        left = [
            depth for depth, path in enumerate(module.paths[1:], start=1) if any(path not in entry for entry in paths)
        ]
    numbered = (depth for depth in left if module.paths[depth].rpartition(".")[2].isdecimal())
    return next(numbered, left[0] if left else 0)


UNLIKE: Final = ("shape ", "dtype ")
"""Prefixes of `why` for values that do not correspond."""
