"""The tensors of a model that can be quantized, what each is to the model, and which of them share an encoding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from onnx import NodeProto

from passes.graph.float_tensors import FLOATS, float_tensors, weight_axes
from passes.graph.op_facts import ONNX_DOMAINS, moved_inputs
from passes.provenance.annotations import module_path_of
from passes.weights.detached import DetachedModel

__all__ = ["Role", "Site", "find_sites", "float_tensors"]

Role = Literal["input", "activation", "constant", "weight", "bias"]


@dataclass(frozen=True, slots=True)
class Site:
    """One float tensor of the model.

    `group` names the tensors that share one encoding: a Reshape moves numbers and leaves them as they are, and a Concat
    puts them side by side. It is the name of the tensor that is computed first.
    """

    tensor: str
    role: Role
    group: str
    op: str
    """The operator that computes it; of a constant or an input, the first that reads it."""
    node: str
    """The name of that node."""
    modules: tuple[str, ...] = ()
    """The torch modules around that node, from the root inwards."""
    channel_axis: int | None = None
    """Of a weight: the axis of output channels."""
    summed_axis: int | None = None
    """Of a weight: the axis that products sum over, which blocks divide."""
    moves: bool = False
    """Whether that node only moves the numbers that it reads."""
    bias_of: tuple[str, str] | None = None
    """Of a bias: the data and the weight whose products it is added to."""
    parameter: str = ""
    """What a constant is to its operator in AIMET's words: weight, bias, running_mean …; empty for other constants."""


def find_sites(model: DetachedModel) -> tuple[Site, ...]:
    """Every float tensor outside of bodies, in graph order: inputs, then constants and results as nodes read and make
    them. Constants that nothing reads are left out."""
    graph = model.proto.graph
    floats = float_tensors(model.proto)
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_type in FLOATS}
    sites: dict[str, Site] = {}
    moves: list[tuple[str, str]] = []
    for info in graph.input:
        if info.name in floats and info.name not in constants:
            sites[info.name] = Site(info.name, "input", "", "", "")
    for node in graph.node:
        modules = _modules_of(node)
        for index, name in enumerate(node.input):
            if name in constants:
                known = sites.get(name)
                found = replace(_constant_site(node, index, len(constants[name].dims)), modules=modules)
                if known is None or (known.role == "constant" and found.role != "constant"):
                    sites[name] = found
            elif name in sites and not sites[name].op:
                sites[name] = replace(sites[name], op=node.op_type, node=_name_of(node), modules=modules)
        for name in node.output:
            if name in floats:
                moved = [source for source in _shared_inputs(node) if source in sites]
                sites[name] = Site(name, "activation", "", node.op_type, _name_of(node), modules, moves=bool(moved))
                moves += ((source, name) for source in moved)
    groups = _SharedEncodings({name: place for place, name in enumerate(sites)})
    for source, name in moves:
        groups.join(source, name)
    return tuple(replace(site, group=groups.first(site.tensor)) for site in sites.values())


def _shared_inputs(node: NodeProto) -> list[str]:
    """The inputs whose numbers reach the result as they are, so that one encoding serves them and it."""
    if node.domain in ONNX_DOMAINS and node.op_type in PICKS:
        return [node.input[index] for index in PICKS[node.op_type] if index < len(node.input)]
    return moved_inputs(node)


def _constant_site(node: NodeProto, index: int, rank: int) -> Site:
    """What a constant is to the node that reads it as its input `index`."""
    name = node.input[index]
    site = Site(name, "constant", "", node.op_type, _name_of(node))
    if node.domain not in ONNX_DOMAINS:
        return site
    site = replace(site, parameter=PARAMETERS.get(node.op_type, {}).get(index, ""))
    axes = weight_axes(node, index, rank)
    if axes is not None:
        return replace(
            site, role="weight", channel_axis=axes[0], summed_axis=axes[1], parameter=site.parameter or "weight"
        )
    if index == 2 and node.op_type in BIASED and rank == 1:
        return replace(site, role="bias", bias_of=(node.input[0], node.input[1]))
    return site


def _modules_of(node: NodeProto) -> tuple[str, ...]:
    place = module_path_of(node)
    return place.paths if place else ()


def _name_of(node: NodeProto) -> str:
    return node.name or node.output[0]


PICKS: Final[Mapping[str, tuple[int, ...]]] = {
    "MaxPool": (0,),
    "ScatterElements": (0, 2),
    "ScatterND": (0, 2),
    "TensorScatter": (0, 1),
}
"""Ops whose result holds numbers of these inputs, beside those that only move them. A cache that is written in place is
one: its past, what is added, and its present share an encoding."""

WEIGHT_AND_BIAS: Final = {1: "weight", 2: "bias"}

WEIGHTS_OF_CELLS: Final = {1: "weight", 2: "weight_r", 3: "bias"}

PARAMETERS: Final[Mapping[str, Mapping[int, str]]] = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm"), WEIGHT_AND_BIAS),
    **dict.fromkeys((f"{name}Normalization" for name in ("Layer", "Group", "Instance")), WEIGHT_AND_BIAS),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), WEIGHTS_OF_CELLS),
    "BatchNormalization": {**WEIGHT_AND_BIAS, 3: "running_mean", 4: "running_var"},
    "RMSNormalization": {1: "weight"},
}
"""Op → input → what AIMET calls the constant there. Either factor of a MatMul can be its weight."""

BIASED: Final = frozenset({"Conv", "ConvTranspose", "Gemm"})


@dataclass(slots=True)
class _SharedEncodings:
    """Sets of tensors that share an encoding, each known by the one that comes first."""

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
