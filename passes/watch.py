"""Which structures a run looks at: all that are found are observed, some of them may not be broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onnx import ValueInfoProto

from passes.errors import PolicyMistake
from passes.policy import Policy
from passes.reads import live_nodes
from passes.structures import STRUCTURES, Instance
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

    def pins(self, model: DetachedModel) -> list[ValueInfoProto]:
        """What to hold visible in `model`: of each kept value the first of its pins that is still computed and read."""
        made = _live_values(model)
        return [pin if pin.name in made else loose for pin, loose in self._pairs()]

    def loose_pins(self, model: DetachedModel) -> list[ValueInfoProto]:
        """The pins to try second on `model`: empty where they would not give a pass more room than the first ones."""
        made = _live_values(model)
        if any(pin.name in made and loose.name in made and pin.name != loose.name for pin, loose in self._pairs()):
            return [loose for _, loose in self._pairs()]
        return []

    def _pairs(self) -> list[tuple[ValueInfoProto, ValueInfoProto]]:
        kept = [instance for kind in sorted(self.pinned) for instance in self.instances[kind]]
        return [pair for one in kept for pair in zip(one.pins, one.loose_pins or one.pins, strict=True)]

    def must_hold(self) -> list[Instance]:
        return [instance for kind in sorted(self.enforced) for instance in self.instances[kind]]

    def lost(self, model: DetachedModel) -> Lost:
        """What `model` has no more, judged by each structure's own checker."""
        return {
            (kind, name): why
            for kind, instances in self.instances.items()
            for name, why in STRUCTURES[kind].lost(instances, model).items()
        }


def _live_values(model: DetachedModel) -> set[str]:
    return {name for node in live_nodes(model.proto.graph) for name in node.output}


def find_structures(model: DetachedModel, policy: Policy, names: Sequence[str]) -> Watched:
    """Find every kind in the exported model; `names` are all passes that the policy's skips may mean.

    Raises:
        PolicyMistake: a `keep` that matches nothing, with what is there instead.
    """
    found = {kind: structure.find(model) for kind, structure in STRUCTURES.items()}
    kept = policy.kept()
    for kind, required in kept.items():
        if required and not found[kind].instances:
            raise PolicyMistake(
                f"keep: {kind} matches nothing in this model, which has {found[kind].instead}; "
                f"write {kind + '?'!r} to keep it where it is"
            )
    instances = {kind: one.instances for kind, one in found.items()}
    return Watched(instances, frozenset((*kept, *policy.watched(names))), frozenset(kept))
