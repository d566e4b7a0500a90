"""The structures that a run tracks: structures that no step may break, and structures that are only observed.

Kept structures are pinned: held visible across a pass, since a graph output cannot be fused over, whatever the pass is
called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Final, Self

import onnx
from onnx import ValueInfoProto

from passes.errors import PolicyError
from passes.graph.index import GraphIndex, computed_values, copy_of, delete_named
from passes.graph.traversal import live_nodes, reads_of
from passes.model.signature import hide_defaults
from passes.policy.policy import Policy
from passes.structures import Instance, SearchResult, structure_of
from passes.structures.core_check import find_lost_cores
from passes.structures.types import PinSite
from passes.structures.view import GraphView
from passes.visible import visible_line
from passes.weights.detached import DetachedModel

Lost = Mapping[tuple[str, str], str]
"""(kind, instance) → why the model no longer has it."""


@dataclass(frozen=True, slots=True)
class TrackedStructures:
    """The structures of the exported model, by kind.

    Kinds in `enforced` may not be broken by any step; kinds in `pinned` (the kept kinds) are also held visible across
    each pass. The others are only observed, so that the report can say who broke them.
    """

    instances: Mapping[str, tuple[Instance, ...]]
    enforced: frozenset[str]
    pinned: frozenset[str]
    partly: Mapping[str, str] = field(default_factory=dict)
    """Kept kind that the source has only in part → what it has in place of the rest, with advice."""

    def with_new(self, kinds: Sequence[str], model: DetachedModel, gone: Collection[tuple[str, str]]) -> Self:
        """These structures, with those that a step has made, such as Q, K and V that were one matrix in the source.

        Args:
            kinds: the kinds that the step makes.
            model: its result, in which they are measured.
            gone: (kind, instance) of structures that were lost before.

        Returns:
            The structures; of a kind of which `model` has more than were known, those in `model`.
        """
        instances, view = dict(self.instances), GraphView(model)
        for kind in kinds:
            if kind not in instances:
                continue
            seen = _find(kind, view).instances
            lost = [instance for instance in instances[kind] if (kind, instance.name) in gone]
            if len(seen) > len(instances[kind]) - len(lost):
                back = {instance.name for instance in seen}
                instances[kind] = (*(instance for instance in lost if instance.name not in back), *seen)
        return replace(self, instances=instances)

    def tight_pins(self, computed: Set[str]) -> list[ValueInfoProto]:
        """The values to hold visible so that no pass can merge the kept ones: for each kept value the first of its pins
        that is still computed and read.

        Args:
            computed: the names of all values of the model that are computed and read.

        Returns:
            The values, with their types.
        """
        return [_first(site, computed) for instance in self._kept_instances() for site in instance.pins]

    def wide_pins(self, computed: Set[str]) -> list[ValueInfoProto]:
        """The last pin of each kept value. It leaves a pass the most room, including room to break the structure. A
        boundary has tight pins alone, while they are there.

        Args:
            computed: the names of all values of the model that are computed and read.

        Returns:
            The values, with their types; empty where they give no more room than the tight ones.
        """
        kept = self._kept_instances()
        movable = [site for instance in kept if instance.boundary is None for site in instance.pins]
        if not any(_gives_room(site, computed) for site in movable):
            return []
        firm = [site for instance in kept if instance.boundary is not None for site in instance.pins]
        return [_first(pins, computed) for pins in (*(site[::-1] for site in movable), *firm)]

    def _kept_instances(self) -> list[Instance]:
        return [instance for kind in sorted(self.pinned) for instance in self.instances[kind]]

    def must_hold(self) -> list[Instance]:
        """The enforced instances, each under a name of its own."""
        held = [instance for kind in sorted(self.enforced) for instance in self.instances[kind]]
        names = Counter(instance.name for instance in held)
        return [
            instance if names[instance.name] == 1 else replace(instance, name=f"{instance.kind} {instance.name}")
            for instance in held
        ]

    def find_lost(self, model: DetachedModel) -> Lost:
        """The structures that a model no longer has, judged by each structure's own checker.

        Args:
            model: a later model.

        Returns:
            (kind, instance) → the reason.
        """
        lost: dict[tuple[str, str], str] = {}
        for kind, instances in self.instances.items():
            structure = structure_of(kind)
            others = [instance for instance in instances if instance.core is None]
            if structure is not None and others:
                lost |= {(kind, name): why for name, why in structure.find_lost(others, model).items()}
        cores = [
            instance for instances in self.instances.values() for instance in instances if instance.core is not None
        ]
        return {**lost, **(find_lost_cores(cores, model) if cores else {})}


def _first(pins: Sequence[ValueInfoProto], computed: Set[str]) -> ValueInfoProto:
    return next((pin for pin in pins if pin.name in computed), pins[-1])


def _gives_room(site: PinSite, computed: Set[str]) -> bool:
    """Whether the last pin frees any node that the first one would hold."""
    return site[0].name != site[-1].name and {site[0].name, site[-1].name} <= computed


def find_structures(
    model: DetachedModel, policy: Policy, names: Sequence[str], later: Collection[str] = (), *, observes: bool = True
) -> TrackedStructures:
    """Find what is kept or watched in the exported model, and what is observed.

    Args:
        model: the exported model.
        policy: what is kept, and what is skipped.
        names: all passes that the policy's skips may mean.
        later: kinds that a step of the recipe makes, so that the exported model need not have them.
        observes: whether to look for `OBSERVED` too.

    Raises:
        PolicyError: a `keep` that matches nothing; the message says what was found instead.
    """
    kept = policy.kept_kinds()
    enforced = dict.fromkeys((*kept, *policy.watched_kinds(names)))
    view = GraphView(model)
    results = {kind: _find(kind, view) for kind in dict.fromkeys((*(OBSERVED if observes else ()), *enforced))}
    for kind, required in kept.items():
        if required and not results[kind].instances and kind not in later:
            raise PolicyError(_nothing_to_keep(kind, results[kind]))
    instances = {kind: result.instances for kind, result in results.items()}
    partly = {
        kind: "; ".join(filter(None, (results[kind].instead, "" if kind in later else results[kind].remedy)))
        for kind in kept
        if results[kind].instances and results[kind].instead
    }
    return TrackedStructures(instances, frozenset(enforced), frozenset(kept), partly)


def refuse_unmatched(
    tracked: TrackedStructures, policy: Policy, model: DetachedModel, tried: Mapping[str, str]
) -> None:
    """Refuse a required `keep` that matches nothing after the steps that could have made it.

    Args:
        tracked: the structures that were found.
        policy: what is to be kept.
        model: the last model.
        tried: kind → what the steps that make it say of what they left.

    Raises:
        PolicyError: the message says what was found instead.
    """
    for kind, required in policy.kept_kinds().items():
        if required and not tracked.instances[kind]:
            found = _find(kind, GraphView(model))
            raise PolicyError(_nothing_to_keep(kind, replace(found, remedy=tried.get(kind, found.remedy))))


def _nothing_to_keep(kind: str, found: SearchResult) -> str:
    remedy = f"{found.remedy}, or " if found.remedy else ""
    return visible_line(
        f"keep: {kind} matches nothing in this model, which has {found.instead}; "
        f"{remedy}write {kind + '?'!r} to keep it where it is"
    )


def _find(kind: str, view: GraphView) -> SearchResult:
    structure = structure_of(kind)
    if structure is None:
        raise PolicyError(f"keep: no structure named {kind!r}")
    return structure.search(view)


OBSERVED: Final = ("qkv",)
"""Kinds that are always observed: the report names the pass that merged Q, K and V."""


def pin(model: DetachedModel, pins: Iterable[ValueInfoProto]) -> DetachedModel:
    """A copy of a model in which values are graph outputs, so that no pass can fuse over them, and no input has a
    default.

    Args:
        model: the model.
        pins: the values to hold, with types, since onnxsim refuses an output whose shape field is missing. A value that
            the model does not have is left out.

    Returns:
        The copy.
    """
    proto = model.copy_proto()
    graph = proto.graph
    hide_defaults(graph)
    index = GraphIndex(graph)
    taken = {*index.outputs}
    for info in pins:
        if info.name in index.producers and info.name not in taken:
            taken.add(info.name)
            graph.output.append(info)
    # A value is a graph output or in value_info; a pass would change a model in which it is both.
    delete_named(graph.value_info, taken)
    return model.with_proto(proto)


def unpin(model: DetachedModel, outputs: Iterable[str]) -> DetachedModel:
    """Take the pins back. Nodes that lived for nothing but a pin go with it; what was dead before stays: to remove it
    is a pass's work.

    Args:
        model: the result of a pass on a pinned model; its proto is changed.
        outputs: the names of the model's own outputs, which stay.

    Returns:
        `model`.
    """
    own = set(outputs)
    graph = model.proto.graph
    pinned = [copy_of(output) for output in graph.output if output.name not in own]
    names = {output.name for output in pinned}
    if not pinned:
        return model
    delete_named(graph.output, names)
    freed = _nodes_only_for(graph, names)
    for index in sorted(freed, reverse=True):
        del graph.node[index]
    computed = computed_values(graph.node) if freed else {}
    known = {info.name for info in graph.value_info}
    graph.value_info.extend(info for info in pinned if info.name not in known and (not freed or info.name in computed))
    return model


def _nodes_only_for(graph: onnx.GraphProto, pinned: set[str]) -> list[int]:
    """The indices of the nodes that lived for `pinned` alone, which are no outputs any more."""
    live = live_nodes(graph)
    known = {id(node) for node in live}
    dead = [(index, node) for index, node in enumerate(graph.node) if id(node) not in known]
    freed = []
    for index, node in reversed(dead):
        if pinned.intersection(node.output):
            freed.append(index)
            pinned.update(reads_of(node))
    return freed
