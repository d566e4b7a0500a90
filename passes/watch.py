"""Which structures a run looks at: those that may not be broken, and those that are only observed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnx import ValueInfoProto

from passes.errors import PolicyMistake
from passes.policy import Policy
from passes.structures import Found, Instance, Searches, structure_of
from passes.structures.core_check import lost_cores
from passes.structures.view import GraphView
from passes.weights import DetachedModel

__all__ = ["Lost", "Watched", "find_structures"]

Lost = Mapping[tuple[str, str], str]
"""(kind, instance) → why it is no more in the model."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The structures of the exported model, by kind.

    Kinds in `enforced` may not be broken by any step; those in `pinned` (the kept ones) are also held visible across
    each pass. The others are only observed, so that the report can say who broke them.
    """

    instances: Mapping[str, tuple[Instance, ...]]
    enforced: frozenset[str]
    pinned: frozenset[str]

    def pins(self, made: Container[str]) -> list[ValueInfoProto]:
        """What to hold visible: of each kept value the first of its pins that is still computed and read, which is all
        that is `made`."""
        return [pin if pin.name in made else loose for one in self._kept() for pin, loose in _pairs(one)]

    def loose_pins(self, made: Container[str]) -> list[ValueInfoProto]:
        """The pins to try second: empty where they would not give a pass more room than the first ones.

        A boundary has second pins only for where its first ones are gone.
        """
        loosened = [pair for one in self._kept() if one.boundary is None for pair in _pairs(one)]
        if not any(pin.name in made and loose.name in made and pin.name != loose.name for pin, loose in loosened):
            return []
        firm = [pair for one in self._kept() if one.boundary is not None for pair in _pairs(one)]
        return [loose for _, loose in loosened] + [pin if pin.name in made else loose for pin, loose in firm]

    def _kept(self) -> list[Instance]:
        return [instance for kind in sorted(self.pinned) for instance in self.instances[kind]]

    def must_hold(self) -> list[Instance]:
        """The enforced instances, as the prover needs them: their pins are the values that their own weights make."""
        held = [instance for kind in sorted(self.enforced) for instance in self.instances[kind]]
        names = Counter(one.name for one in held)
        return [_provable(one, one.name if names[one.name] == 1 else f"{one.kind} {one.name}") for one in held]

    def lost(self, model: DetachedModel) -> Lost:
        """What `model` has no more, judged by each structure's own checker."""
        lost: dict[tuple[str, str], str] = {}
        for kind, instances in self.instances.items():
            structure = structure_of(kind)
            others = [one for one in instances if one.core is None]
            if structure is not None and others:
                lost |= {(kind, name): why for name, why in structure.lost(others, model).items()}
        cores = [one for instances in self.instances.values() for one in instances if one.core is not None]
        return {**lost, **(lost_cores(cores, model) if cores else {})}


def _pairs(instance: Instance) -> Iterator[tuple[ValueInfoProto, ValueInfoProto]]:
    return zip(instance.pins, instance.loose_pins or instance.pins, strict=True)


def _provable(instance: Instance, name: str) -> Instance:
    """With weights, a fault in them has to show where the structure ends. Other values are compared and no more."""
    if instance.core is None and instance.boundary is None:
        return replace(instance, name=name)
    ends = [pin for pin in instance.pins if instance.core and instance.weights and pin.name == instance.core.value]
    return replace(instance, name=name, pins=tuple(ends), loose_pins=(*instance.pins, *instance.loose_pins))


def find_structures(model: DetachedModel, policy: Policy, names: Sequence[str]) -> Watched:
    """Find what is kept or watched in the exported model, and what is observed; `names` are all passes that the
    policy's skips may mean.

    Raises:
        PolicyMistake: a `keep` that matches nothing, with what is there instead.
    """
    kept = policy.kept()
    enforced = dict.fromkeys((*kept, *policy.watched(names)))
    view = GraphView(model)
    found = {kind: _find(kind, model, view) for kind in dict.fromkeys((*OBSERVED, *enforced))}
    for kind, required in kept.items():
        if required and not found[kind].instances:
            raise PolicyMistake(
                f"keep: {kind} matches nothing in this model, which has {found[kind].instead}; "
                f"write {kind + '?'!r} to keep it where it is"
            )
    instances = {kind: one.instances for kind, one in found.items()}
    return Watched(instances, frozenset(enforced), frozenset(kept))


def _find(kind: str, model: DetachedModel, view: GraphView) -> Found:
    structure = structure_of(kind)
    if structure is None:
        raise PolicyMistake(f"keep: no structure named {kind!r}")
    return structure.search(view) if isinstance(structure, Searches) else structure.find(model)


OBSERVED: Final = ("qkv",)
"""Kinds that are looked at even if nobody asked: the report says who merged Q, K and V."""
