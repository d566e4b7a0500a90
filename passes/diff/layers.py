"""How far two models are apart where a layer ends: at the outputs of the torch modules, or behind each weight."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from passes.context import PassContext
from passes.diff.distances import Pair
from passes.diff.labels import label_of
from passes.diff.matched import Matched
from passes.diff.numbers import DrawnInputs, measure_pairs
from passes.model.weights import DetachedModel
from passes.proof.numbers import Errors
from passes.provenance.places import Place, place_of
from passes.provenance.wiring import ABSENT

__all__ = ["LayerErrors", "compare_layers"]


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """A value at which a layer ends, by its name in each model, and how far the second model is off there.

    `layer` is the outermost torch module that the value leaves, or the outermost numbered one (`encoder.layer.0`)
    if it leaves any; the node itself where the model knows of no modules.
    """

    layer: str
    op: str
    before: str
    after: str
    dtype: str
    errors: Errors


@dataclass(frozen=True, slots=True)
class _Boundary:
    layer: str
    op: str
    depth: int
    """How many modules it lies in: the outermost layers have the lowest."""
    pair: Pair


def compare_layers(
    matched: Matched, draws: Sequence[DrawnInputs], bench: PassContext, *, most: int | None = None
) -> tuple[LayerErrors, ...]:
    """Run both models on `draws` and compare the floating values at which a layer of the first one ends.

    A layer of which the second model has no such value is left out, and so is a value that has another shape there.

    Args:
        most: compare at most so many values, those of the outermost layers.

    Raises:
        StepFailed: onnxruntime refuses one of the models, or stops.
    """
    boundaries = list(_boundaries(matched))
    if most is not None and len(boundaries) > most:
        chosen = sorted(range(len(boundaries)), key=lambda place: (boundaries[place].depth, place))[:most]
        boundaries = [boundaries[place] for place in sorted(chosen)]
    found, _ = measure_pairs(matched, [one.pair for one in boundaries], draws, bench, may_collapse=True)
    return tuple(
        LayerErrors(one.layer, one.op, *one.pair, *found[one.pair])
        for one in boundaries
        if one.pair in found and "float" in found[one.pair][0] and not found[one.pair][1].why.startswith(UNLIKE)
    )


def _boundaries(matched: Matched) -> Iterator[_Boundary]:
    """In the order of the first model."""
    same = matched.same
    inner = [_main_values(model) for model in (matched.before, matched.after)]
    counterparts = {
        same.before.outputs[name]: new for name, new in same.after.outputs.items() if name in same.before.outputs
    }
    for new, old in enumerate(same.value_of):
        if old >= 0 and same.after.names[new] in inner[1]:
            counterparts.setdefault(old, new)
    places = [place_of(item.node) for item in same.before.items]
    by_module = any(place is not None and len(place.paths) > 1 for place in places)
    for item, place in zip(same.before.items, places, strict=True):
        for value in item.makes:
            new = counterparts.get(value, ABSENT)
            if value in same.before.constants or new == ABSENT or same.before.names[value] not in inner[0]:
                continue
            pair = (same.before.names[value], same.after.names[new])
            if not by_module:
                if not same.before.weights.isdisjoint(item.needs):
                    yield _Boundary(str(label_of(item.node)), item.node.op_type, 0, pair)
            elif place is not None and (depth := _depth_left(matched, value, place, places)):
                yield _Boundary(place.paths[depth], item.node.op_type, depth, pair)


def _depth_left(matched: Matched, value: int, place: Place, places: Sequence[Place | None]) -> int:
    """Which of the modules around a node, counted from the root, is the layer that `value` leaves; 0 for none."""
    before = matched.same.before
    if value in before.outputs.values():
        left = list(range(1, len(place.paths)))
    else:
        readers = [reader.paths for user, _ in before.users[value] if (reader := places[user]) is not None]
        left = [
            depth
            for depth, path in enumerate(place.paths[1:], start=1)
            if any(path not in reader for reader in readers)
        ]
    numbered = (depth for depth in left if place.paths[depth].rpartition(".")[2].isdecimal())
    return next(numbered, left[0] if left else 0)


def _main_values(model: DetachedModel) -> set[str]:
    return {name for node in model.proto.graph.node for name in node.output}


UNLIKE: Final = ("shape ", "dtype ")
"""How a complaint begins about values that do not correspond."""
