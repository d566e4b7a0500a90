"""The tensors of a model that can be quantized, what each is to the model, and which of them share an encoding."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from onnx import GraphProto, NodeProto, TensorProto, helper

from passes.graph.inference import EVERY_FLOAT, find_floats
from passes.graph.op_facts import (
    BIAS,
    BIASED,
    LAYOUT_OPS,
    ONNX_DOMAINS,
    MovedConstant,
    find_moved_constants,
    moved_inputs,
    weight_axes,
)
from passes.graph.traversal import bodies_in, every_graph, every_node, reads_of
from passes.provenance.annotations import known_as, module_path_of
from passes.weights.detached import DetachedModel
from pipeline.config import KEYS, OptionNames

Role = Literal["input", "activation", "constant", "weight", "bias"]


@dataclass(frozen=True, slots=True)
class Site:
    """One float tensor of the model.

    `group` names the tensors that share one encoding: a Reshape moves elements and leaves them as they are, and a
    Concat puts them side by side. It is the name of the tensor that is computed first.
    """

    tensor: str
    role: Role
    group: str
    op: str
    """The operator that computes the tensor; for a constant or an input, the first operator that reads it."""
    node: str
    """The name of that node."""
    modules: tuple[str, ...] = ()
    """The torch modules around that node, from the root inwards."""
    channel_axis: int | None = None
    """Of a weight: the axis of output channels."""
    summed_axis: int | None = None
    """Of a weight: the axis that products sum over, which blocks divide."""
    summed_size: int = 0
    """Of a weight: how many values lie along that axis."""
    shares: tuple[str, ...] = ()
    """The tensors whose elements that node moves to this tensor, so that one encoding can serve all of them."""
    moves: bool = False
    """Whether that node only moves the elements that it reads, and shares their encoding."""
    bias_of: tuple[str, str] | None = None
    """Of a bias: the data and the weight whose products it is added to."""
    bias_rank: int = 1
    """Of a bias: how many dims it has. A product takes a row, [1, channels], too."""
    parameter: str = ""
    """What a constant is to its operator in AIMET's words: weight, bias, running_mean …; empty for other constants."""
    moved_to: tuple[str, ...] = ()
    """Of a weight: the values that layout operators make of it, which are no sites, since it is quantized as stored."""
    lent_to: tuple[str, ...] = ()
    """Of a weight: the results of nodes that read it as anything else, such as the Gather of a tied embedding."""
    stored_as: str = ""
    """Of a constant that the model holds in integers already: their dtype."""
    body_of: str = ""
    """Of a constant that only bodies read, and of a value of a body: the operator of the body, such as If."""
    disagreement: str = ""
    """Of a weight or a bias that several products read: why no scale for each channel, or none at all, suits them."""
    dtype: str = "float32"


def find_sites(model: DetachedModel, names: OptionNames = KEYS) -> tuple[Site, ...]:
    """Every float tensor, in graph order: inputs, then constants and results as nodes read and make them, with the
    constants that only bodies read, and the values of bodies. Constants that nothing reads or that have no elements are
    left out, and so are weights in another layout: there the stored tensor is the site. `names` are the words of what
    keeps a scale from a tensor."""
    search = _SiteSearch(model, names)
    for node in model.proto.graph.node:
        search.add(node)
    return search.sites_in_groups()


class _SiteSearch:
    """The sites of the nodes that were added, which come in graph order."""

    def __init__(self, model: DetachedModel, names: OptionNames) -> None:
        self._graph = graph = model.proto.graph
        self._untie = advise_untie(names)
        known = find_floats(model.proto, EVERY_FLOAT, in_bodies=True)
        tensors = {tensor.name: tensor for owner in every_graph(graph) for tensor in owner.initializer}
        tensors |= _constants_in_bodies(graph)
        self._types = {name: kind for name, (kind, _) in known.items()}
        self._types |= {name: tensor.data_type for name, tensor in tensors.items()}
        self._floats = {name: shape for name, (_, shape) in known.items()}
        self._stored = {
            name: tuple(tensor.dims)
            for name, tensor in tensors.items()
            if tensor.data_type in EVERY_FLOAT and 0 not in tensor.dims
        }
        self._integers = _stored_as_integers(graph)
        held = {name: shape for name in self._integers if (shape := self._floats.get(name)) is not None}
        self._constants = self._stored | held
        self._moved = find_moved_constants(graph, self._constants, self._floats)
        self._moved_weights = _find_moved_weights(graph, self._moved)
        self._read_outside = {name for node in graph.node for name in node.input}
        self._products: dict[str, list[Site]] = {}
        """Bias → its site at each product that it is added to."""
        self._lent: dict[str, list[str]] = {}
        """Constant → the results of operators that read it, not as a weight or a bias."""
        inputs = (info.name for info in graph.input if info.name in self._floats and info.name not in self._constants)
        self._sites = {name: Site(name, "input", "", "", "") for name in inputs}

    def add(self, node: NodeProto) -> None:
        """Add what `node` and its bodies read and make."""
        sites, modules = self._sites, _modules_of(node)
        for index, name in enumerate(node.input):
            if name in self._moved:
                self._add_constant(node, index, modules)
            elif name in sites and not sites[name].op:
                sites[name] = replace(sites[name], op=node.op_type, node=known_as(node), modules=modules)
        self._add_bodies(node, modules)
        for name in node.output:
            value = self._moved.get(name)
            is_weight = value is not None and (name in self._integers or value.source in self._moved_weights)
            if name in self._floats and not is_weight:
                shared = tuple(self._sources_of(node))
                sites[name] = Site(name, "activation", "", node.op_type, known_as(node), modules, shares=shared)

    def _add_constant(self, node: NodeProto, index: int, modules: tuple[str, ...]) -> None:
        if index in SETTINGS.get(node.op_type, ()):
            return
        found = replace(_constant_site(node, index, self._moved, self._constants), modules=modules)
        found = replace(found, stored_as=self._integers.get(found.tensor, ""))
        before = self._sites.get(found.tensor)
        if before is None or (before.role == "constant" and found.role != "constant"):
            self._sites[found.tensor] = replace(found, moved_to=self._moved_weights.get(found.tensor, ()))
        elif before.role == found.role == "weight":
            self._sites[found.tensor] = _agree_on_axes(before, found, self._untie)
        if found.role == "constant" and node.op_type not in LAYOUT_OPS:
            self._lent.setdefault(found.tensor, []).append(node.output[0])
        if found.bias_of is not None:
            self._products.setdefault(found.tensor, []).append(found)

    def _add_bodies(self, node: NodeProto, modules: tuple[str, ...]) -> None:
        for inner, index in _reads_in_bodies(node):
            name = inner.input[index]
            if name in self._stored and name not in self._read_outside:
                found = _constant_site(inner, index, self._moved, self._constants)
                self._sites.setdefault(name, replace(found, modules=modules, body_of=node.op_type))
        for name, producer in _values_in_bodies(node):
            if name in self._floats or name in self._stored:
                role: Role = "constant" if name in self._stored else "activation"
                self._sites.setdefault(name, replace(producer, role=role, modules=modules))

    def _sources_of(self, node: NodeProto) -> Iterator[str]:
        """The tensors whose encoding the results of `node` share."""
        for name in _shared_inputs(node):
            source = self._moved[name].source if name in self._moved else name
            if source in self._sites and not self._sites[source].stored_as:
                yield source

    def sites_in_groups(self) -> tuple[Site, ...]:
        """The sites with their groups and dtypes, without settings and what the model quantizes itself."""
        left_out = _find_settings(self._graph) | find_quantized(self._graph).difference(self._integers)
        kept = {name: site for name, site in self._sites.items() if name not in left_out}
        shared = share_encodings(replace(site, dtype=_dtype_of(self._types[name])) for name, site in kept.items())
        groups = {site.tensor: site.group for site in shared}
        differences = {name: _compare_products(found, groups, self._untie) for name, found in self._products.items()}
        return tuple(
            replace(
                site,
                disagreement=differences.get(site.tensor) or site.disagreement,
                lent_to=tuple(self._lent.get(site.tensor, ())) if site.role == "weight" else (),
            )
            for site in shared
        )


def share_encodings(
    sites: Iterable[Site], apart: Collection[str] = (), limits: Mapping[str, tuple[float, float]] = MappingProxyType({})
) -> tuple[Site, ...]:
    """`sites` in groups that share one encoding: a tensor joins the tensors whose elements it has.

    Args:
        apart: tensors that share no encoding with what they read, such as the result of a Concat in float.
        limits: the ranges of tensors that are known whatever the model reads. Where elements of several tensors come
            together, as boxes and scores do in a Concat, those with such a range keep an encoding of their own, unless
            all have the same; as in AIMET (aimet_onnx 2.42, `QuantizationSimModel._propagate_output_encodings`).
    """
    found = {site.tensor: site for site in sites}
    groups = _SharedEncodings({name: place for place, name in enumerate(found)})
    known = dict(limits)
    for name, site in found.items():
        sources = [source for source in site.shares if source in found]
        ranges = {known.get(source) for source in sources}
        joined = [source for source in sources if len(ranges) == 1 or source not in known]
        if name in apart:
            joined = []
        elif sources and len(ranges) == 1 and (shared := ranges.pop()) is not None:
            known[name] = shared
        for source in joined:
            groups.join(source, name)
        found[name] = replace(site, moves=bool(joined) and joined == sources)
    return tuple(replace(site, group=groups.first(name)) for name, site in found.items())


def _find_settings(graph: GraphProto) -> set[str]:
    """The values that nothing but `SETTINGS` of operators depends on, such as sizes that are computed for a Resize."""
    read, numbers = set[str](), {info.name for info in graph.output}
    for node in reversed(graph.node):
        settings = SETTINGS.get(node.op_type, ()) if node.domain in ONNX_DOMAINS else ()
        if numbers.isdisjoint(node.output) and not read.isdisjoint(node.output):
            settings = range(len(node.input))
        numbers.update(name for index, name in enumerate(node.input) if index not in settings)
        numbers.update(set(reads_of(node)).difference(node.input))  # in bodies
        read.update(node.input)
    return read - numbers


def find_quantized(graph: GraphProto) -> set[str]:
    """The values that the model quantizes itself: what a QuantizeLinear reads, and what a DequantizeLinear makes."""
    nodes = [node for node in graph.node if node.domain in ONNX_DOMAINS]
    read = {node.input[0] for node in nodes if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear")}
    return read | {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}


def _dtype_of(data_type: int) -> str:
    return helper.tensor_dtype_to_np_dtype(data_type).name


def _reads_in_bodies(node: NodeProto) -> Iterator[tuple[NodeProto, int]]:
    """The nodes in the bodies of `node`, with the place of each input."""
    for body in bodies_in(node):
        for inner in every_node(body):
            yield from ((inner, index) for index in range(len(inner.input)))


def _values_in_bodies(node: NodeProto) -> Iterator[tuple[str, Site]]:
    """The values that the bodies of `node` are given, make and give, by name."""
    for owner in (node, *(inner for body in bodies_in(node) for inner in every_node(body))):
        for body in bodies_in(owner):
            made = [(name, inner) for inner in body.node for name in inner.output]
            at_ends = [[(info.name, owner) for info in infos] for infos in (body.input, body.output)]
            for name, producer in (*at_ends[0], *made, *at_ends[1]):
                yield name, Site(name, "activation", "", producer.op_type, known_as(producer), body_of=node.op_type)


def _constants_in_bodies(graph: GraphProto) -> dict[str, TensorProto]:
    """The tensors that Constant nodes hold in bodies, by the name of their result."""
    inner = (node for outer in graph.node for body in bodies_in(outer) for node in every_node(body))
    return {
        node.output[0]: entry.t
        for node in inner
        if node.op_type == "Constant" and node.domain in ONNX_DOMAINS
        for entry in node.attribute
        if entry.name == "value"
    }


def _agree_on_axes(known: Site, found: Site, advice: str) -> Site:
    """The site of a weight that is read once more: along axes on which its consumers differ it has no scales."""
    if (known.channel_axis, known.summed_axis) == (found.channel_axis, found.summed_axis):
        return known
    why = f"{known.node} and {found.node} have their channels along different axes of it; {advice}"
    return replace(known, channel_axis=None, summed_axis=None, disagreement=known.disagreement or why)


def _compare_products(consumers: Sequence[Site], groups: Mapping[str, str], advice: str) -> str:
    """Why no scale suits a bias: the products that it is added to have different scales. Empty where they agree."""
    scales = {
        (groups.get(data := site.bias_of[0], data), site.bias_of[1]): site.node for site in consumers if site.bias_of
    }
    first, *others = scales.values()
    return (
        f"the products of {first} and {others[0]} that it is added to have scales of their own; {advice}"
        if others
        else ""
    )


def _stored_as_integers(graph: GraphProto) -> dict[str, str]:
    """Result of a DequantizeLinear on stored integers → the dtype of the integers."""
    stored = {tensor.name: tensor.data_type for tensor in graph.initializer}
    return {
        node.output[0]: TensorProto.DataType.Name(stored[node.input[0]]).lower()
        for node in graph.node
        if node.op_type == "DequantizeLinear" and node.domain in ONNX_DOMAINS and node.input[0] in stored
    }


def _find_moved_weights(graph: GraphProto, moved: Mapping[str, MovedConstant]) -> dict[str, tuple[str, ...]]:
    """The constants that a product reads as its weight after layout operators, with all values that these make."""
    weights = {
        value.source
        for node in graph.node
        for index, name in enumerate(node.input)
        if (value := moved.get(name)) is not None and weight_axes(node, index, len(value.axes)) is not None
    }
    values: dict[str, tuple[str, ...]] = {}
    for name, value in moved.items():
        if value.source in weights:
            own = () if name == value.source else (name,)
            values[value.source] = (*values.get(value.source, ()), *own)
    return values


def _shared_inputs(node: NodeProto) -> list[str]:
    """The inputs whose elements reach the result as they are, so that one encoding serves the inputs and the result."""
    if node.domain in ONNX_DOMAINS and node.op_type in PICKS:
        return [node.input[index] for index in PICKS[node.op_type] if index < len(node.input)]
    return moved_inputs(node)


def _constant_site(
    node: NodeProto, index: int, moved: Mapping[str, MovedConstant], shapes: Mapping[str, tuple[int, ...]]
) -> Site:
    """What a stored tensor is to the node that reads it as its input `index`, as it is or in another layout.

    Args:
        shapes: those of stored tensors.
    """
    name = node.input[index]
    value = moved[name]
    site = Site(value.source, "constant", "", node.op_type, known_as(node))
    if node.domain not in ONNX_DOMAINS:
        return site
    rank, is_moved = len(value.axes), name != value.source
    parameter = "" if is_moved else PARAMETERS.get(node.op_type, {}).get(index, "")
    axes = weight_axes(node, index, rank)
    if axes is not None:
        channel, summed = map(value.axis_of_source, axes)
        size = 0 if summed is None else shapes[value.source][summed]
        site = replace(site, role="weight", parameter=parameter or "weight")
        return replace(site, channel_axis=channel, summed_axis=summed, summed_size=size)
    if index == BIAS and node.op_type in BIASED and not is_moved and set(shapes[name][:-1]) <= {1}:
        data, weight = (moved[read].source if read in moved else read for read in node.input[:2])
        site = replace(site, role="bias", bias_of=(data, weight), bias_rank=rank, parameter=parameter)
        channels, size = _count_channels(node, moved, shapes), math.prod(shapes[name])
        return site if channels in (None, size) else replace(site, disagreement=f"one value serves {channels} channels")
    return replace(site, parameter=parameter)


def _count_channels(
    node: NodeProto, moved: Mapping[str, MovedConstant], shapes: Mapping[str, tuple[int, ...]]
) -> int | None:
    """How many channels the stored weight of a product has; None where that is not known."""
    weight = moved.get(node.input[1])
    axes = None if weight is None else weight_axes(node, 1, len(weight.axes))
    channel = None if weight is None or axes is None else weight.axis_of_source(axes[0])
    return None if weight is None or channel is None else shapes[weight.source][channel]


def _modules_of(node: NodeProto) -> tuple[str, ...]:
    place = module_path_of(node)
    return place.paths if place else ()


def advise_untie(names: OptionNames) -> str:
    """How each reader of a stored tensor gets one of its own."""
    return f"{names.step.format('untie')} for a copy for each module, or {{untie: {{each_node: true}}}} for each node"


PICKS: Final[Mapping[str, tuple[int, ...]]] = {
    "MaxPool": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "TensorScatter": (0, 1),
}
"""Ops whose result holds elements of these inputs, besides the ops that only move them. A cache that is written in
place is one: its past, what is added, and its present share an encoding."""

SETTINGS: Final[Mapping[str, tuple[int, ...]]] = {
    "DequantizeLinear": (1,),
    "NonMaxSuppression": (3, 4),
    "QuantizeLinear": (1,),
    "Range": (0, 1, 2),
    "Resize": (1, 2),
    "Upsample": (1,),
}
"""Op → inputs that say how it computes, or of which shape its result is. Rounded, they would make another operator."""

WEIGHT_AND_BIAS: Final = {1: "weight", 2: "bias"}

WEIGHTS_OF_CELLS: Final = {1: "weight", 2: "weight_r", 3: "bias"}

PARAMETERS: Final[Mapping[str, Mapping[int, str]]] = {
    **dict.fromkeys(BIASED, WEIGHT_AND_BIAS),
    **dict.fromkeys((f"{name}Normalization" for name in ("Layer", "Group", "Instance")), WEIGHT_AND_BIAS),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), WEIGHTS_OF_CELLS),
    "BatchNormalization": {**WEIGHT_AND_BIAS, 3: "running_mean", 4: "running_var"},
    "RMSNormalization": {1: "weight"},
}
"""Op → input → what AIMET calls the constant there. Either factor of a MatMul can be its weight."""


@dataclass(slots=True)
class _SharedEncodings:
    """Sets of tensors that share an encoding, each named by its first tensor."""

    places: Mapping[str, int]
    _above: dict[str, str] = field(default_factory=dict)

    def first(self, name: str) -> str:
        while name in self._above:
            name = self._above[name]
        return name

    def join(self, tensor: str, other: str) -> None:
        first, second = sorted((self.first(tensor), self.first(other)), key=lambda name: self.places[name])
        if first != second:
            self._above[second] = first
