"""The values that several parts of a run have, which get one format and one range, so one scale.

A part hands values to another: the encoder's states to the decoder, image features to the embedding, a cache to the
next call. Their names say it: `present.0.key` of one part is `past_key_values.0.key` of the other, and any other value
keeps its name. Prefill and decode are one module at different numbers of tokens, so there every result of one operator
over equal weights is shared as well. The scale of a weight follows from its values, and is one by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from passes.weights.detached import DetachedModel
from pipeline.errors import UsageError
from pipeline.parts.slots import PAST_PREFIX, PRESENT_PREFIX
from pipeline.quantsim.chains import PartsChain
from pipeline.quantsim.encodings import Range
from pipeline.quantsim.optimize import Chosen
from pipeline.quantsim.placement import PlacedSite, Placement
from pipeline.quantsim.suggest import Placements

Ranges = Mapping[str, Mapping[str, Range]]
"""Part → group of tensors → the range of the group."""


@dataclass(frozen=True, eq=False)
class SharedValues:
    """The values that parts share.

    places: for each of them, part → its name there; two parts at least.
    handed: those of `places` that the last of the parts reads as an input.
    weights: of parts that are alike, the stored tensors with one name and equal values: name → the parts, in order.
    are_alike: whether all parts are one module at different numbers of tokens.
    """

    places: tuple[Mapping[str, str], ...]
    handed: tuple[Mapping[str, str], ...]
    weights: Mapping[str, tuple[str, ...]]
    are_alike: bool

    @staticmethod
    def of(chain: PartsChain, models: Mapping[str, DetachedModel]) -> SharedValues:
        """Those of the parts of a chain."""
        if not chain.hands_over:
            return SharedValues((), (), {}, are_alike=False)
        values: dict[object, dict[str, str]] = {}
        weights: dict[tuple[str, str], list[str]] = {}
        for part, model in models.items():
            found = dict(_list_handed(model))
            for identity, name in (*(_list_computed(model) if chain.is_alike else ()), *found.items()):
                values.setdefault(identity, {})[part] = name
            for name, tensor in model.index.initializers.items() if chain.is_alike else ():
                weights.setdefault((name, model.digest(tensor)), []).append(part)
        shared = tuple(places for places in values.values() if len(places) > 1)
        inputs = {part: {value.name for value in model.proto.graph.input} for part, model in models.items()}
        handed = tuple(places for places in shared if _last(places)[1] in inputs[_last(places)[0]])
        stored = {identity[0]: tuple(parts) for identity, parts in weights.items() if len(parts) > 1}
        return SharedValues(shared, handed, stored, chain.is_alike)

    def stored_before(self, part: str) -> frozenset[str]:
        """The stored tensors of a part that an earlier one has too."""
        return frozenset(name for name, parts in self.weights.items() if part in parts[1:])

    def keep(self, chosen: Chosen) -> Chosen:
        """What was chosen for the stored tensors that parts share."""
        return Chosen().take(chosen, self.weights)

    def refuse_two_formats(self, placements: Placements) -> None:
        """Refuse rules that give a weight other formats in other parts that are alike.

        Raises:
            UsageError: naming the weight.
        """
        formats = {part: placement.formats() for part, placement in placements.items()}
        for name, (first, *others) in self.weights.items():
            wanted = formats[first].get(name)
            for part in others:
                if formats[part].get(name) != wanted:
                    raise UsageError(
                        f"the weight {name} is {wanted or 'float'} in {first} and "
                        f"{formats[part].get(name) or 'float'} in {part}, which share it; expected one rule for both, "
                        "under quantsim.rules"
                    )

    def unify(self, placements: Placements) -> dict[str, Placement]:
        """The placements, in which a value that a part passes on has the format in which the next part reads it."""
        placed = {
            part: {found.site.tensor: found for found in placement.sites} for part, placement in placements.items()
        }
        changes: dict[str, dict[str, PlacedSite]] = {part: {} for part in placements}
        for places in self.handed:
            last, name = _last(places)
            reader = placed[last].get(name)
            for part, tensor in places.items():
                maker = placed[part].get(tensor)
                if part != last and maker and reader and maker.precision and reader.precision:
                    changes[part][maker.site.group] = reader
        return {part: _with_formats(placement, changes[part]) for part, placement in placements.items()}

    def join(self, ranges: Ranges, placements: Placements) -> dict[str, dict[str, Range]]:
        """The ranges, in which groups that share a value have one that holds all of theirs."""
        groups = {
            part: {placed.site.tensor: placed.site.group for placed in placement.sites}
            for part, placement in placements.items()
        }
        joined = {part: dict(found) for part, found in ranges.items()}
        ties = [
            [(part, group) for part, name in places.items() if (group := groups[part].get(name)) in joined[part]]
            for places in self.places
        ]
        is_changed = True
        while is_changed:  # a group may share one value with a group here, and another one with a group there
            is_changed = False
            for tie in (tie for tie in ties if len(tie) > 1):
                limits = [joined[part][group] for part, group in tie]
                hull = min(low for low, _ in limits), max(high for _, high in limits)
                is_changed |= any(found != hull for found in limits)
                for part, group in tie:
                    joined[part][group] = hull
        return joined


def _last(places: Mapping[str, str]) -> tuple[str, str]:
    return list(places.items())[-1]


def _with_formats(placement: Placement, changes: Mapping[str, PlacedSite]) -> Placement:
    """The placement, in which the groups `changes` have the formats of other sites."""

    def change(placed: PlacedSite) -> PlacedSite:
        other = changes.get(placed.site.group)
        if other is None or placed.precision in (None, other.precision) or placed.site.role == "weight":
            return placed
        return replace(placed, precision=other.precision, rule=other.rule)

    return replace(placement, sites=tuple(map(change, placement.sites)))


def _list_handed(model: DetachedModel) -> Iterator[tuple[object, str]]:
    """The identity and the name of each input, and of each output that is no later form of an input."""
    inputs = {value.name for value in model.proto.graph.input}
    for name in inputs:
        yield name, name
    for value in model.proto.graph.output:
        entered = value.name
        if entered.startswith(PRESENT_PREFIX):
            entered = PAST_PREFIX + entered.removeprefix(PRESENT_PREFIX)
        if entered not in inputs:
            yield entered, value.name


def _list_computed(model: DetachedModel) -> Iterator[tuple[object, str]]:
    """The identity and the name of each result: the operator, the number of its inputs, and its first weights."""
    stored = model.index.initializers
    for node in model.proto.graph.node:
        digests = (model.digest(stored[name]) if name in stored else None for name in node.input)
        weights = tuple(filter(None, tuple(digests)[:2]))
        for place, name in enumerate(node.output):
            yield (name, node.domain, node.op_type, place, len(node.input), *weights), name
