"""Fold equal layers: one function for each group, and a call in place of each layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import FunctionProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto, helper

from passes.errors import ModelError
from passes.functions.find import ConstantFacts, EqualLayers, LayerNodes, find_equal_layers
from passes.graph.index import (
    GraphIndex,
    computed_values,
    copy_of,
    drop_unread,
    replace_entries,
    take_name,
    unread_tensors,
)
from passes.graph.layer_calls import LAYERS, MODULE_KEY, inline_layers, layer_functions, rename_values
from passes.graph.traversal import reads_of, sort_nodes
from passes.model.canonical import canonicalize
from passes.provenance.annotations import write_module_path
from passes.suggest import plural
from passes.weights.detached import DetachedModel

VERSION: Final = 1
"""The version of the domain of layer functions."""

FIRST_IR: Final = 10
"""The first IR version in which a function has types and metadata."""


def fold_layers(model: ModelProto, *, unread: bool = False) -> ModelProto:
    """`model` with one function for each group of equal layers, and a call for each layer; itself where none are equal.

    The functions are proven: with their bodies in place of the calls, the model computes the same values by the same
    operators.

    Args:
        model: with module paths of torch's exporter; weights may lie in files, which are not read.
        unread: no later step reads them either.

    Raises:
        ModelError: the proof failed, which would be a fault of ours.
    """
    groups = find_equal_layers(model.graph, unread=unread)
    if not groups or model.ir_version < FIRST_IR:
        return model
    folded = _LayerFolder(model).fold(groups)
    if _digest_outputs(model) != _digest_outputs(inline_layers(folded)):
        raise ModelError("the model with layers as functions does not compute what the model computes")
    return folded


def describe_layers(model: ModelProto) -> str:
    """A sentence on the layer functions of a model."""
    functions = layer_functions(model)
    calls = Counter(node.op_type for node in model.graph.node if node.domain == LAYERS)
    if not functions:
        return "export.functions: the model has no two equal layers, so it is exported without functions"
    listing = ", ".join(
        f"{name} ({len(function.node)} nodes, {plural(calls[name], 'call')})" for name, function in functions.items()
    )
    return f"layers as functions: {listing}"


def _digest_outputs(model: ModelProto) -> str:
    """A digest of all outputs, in which a weight counts by its name."""
    return canonicalize(DetachedModel(model, {}), lambda _, tensor: tensor.name).value_digests().whole


@dataclass
class _LayerFolder:
    model: ModelProto

    def __post_init__(self) -> None:
        self.index = GraphIndex(self.model.graph)
        self.facts = ConstantFacts.of(self.index)
        self.nodes = self.index.nodes

    def fold(self, groups: Sequence[EqualLayers]) -> ModelProto:
        folded = copy_of(self.model)
        calls: dict[int, NodeProto] = {}
        gone: set[int] = set()
        names: set[str] = set()
        for group in groups:
            name = take_identifier(group.layers[0].module.classes[-1].rpartition(".")[2], names)
            function = self._function(name, group)
            folded.functions.append(function)
            for layer in group.layers:
                calls[layer.nodes[0]] = self._call(name, layer, group.outputs)
                gone.update(layer.nodes)
        kept = [calls.get(at, node) for at, node in enumerate(self.nodes) if at in calls or at not in gone]
        replace_entries(folded.graph.node, without_unread(kept, self.facts.plain, self.index.outputs))
        sort_nodes(folded.graph)
        drop_unread(folded.graph, unread_tensors(self.model.graph))
        folded.opset_import.add(domain=LAYERS, version=VERSION)
        return folded

    def _function(self, name: str, group: EqualLayers) -> FunctionProto:
        """The function whose body is the first layer of `group`."""
        first = group.layers[0]
        body = [self.nodes[at] for at in first.nodes]
        plain = self._plain_nodes(body)
        taken = {*computed_values((*plain, *body))}
        inputs = {value: take_identifier(self._name_inside(value, f"{first.path}."), taken) for value in first.inputs}
        function = FunctionProto(name=name, domain=LAYERS)
        function.input.extend(inputs.values())
        function.node.extend(rename_values(node, lambda value: inputs.get(value, value)) for node in (*plain, *body))
        function.output.extend(body[at].output[number] for at, number in group.outputs)
        complete_function(function, self.model.opset_import, self.index.types)
        function.metadata_props.add(key=MODULE_KEY, value=first.path)
        return function

    def _name_inside(self, value: str, prefix: str) -> str:
        """The name of an input: that of the layer's weight that it is computed from; of another value its own."""
        weight = value
        while weight in self.facts.stored and weight in self.index.producers:
            weight = next((name for name in self.index.producers[weight].input if name in self.facts.stored), "")
        return weight.removeprefix(prefix) if weight.startswith(prefix) else value

    def _plain_nodes(self, body: Sequence[NodeProto]) -> list[NodeProto]:
        """The nodes that compute the plain values that `body` reads; a stored one becomes a Constant."""
        wanted = [name for node in body for name in node.input if name in self.facts.plain]
        found = self.index.ancestors(wanted)
        read = dict.fromkeys((*wanted, *(name for node in found for name in node.input)))
        stored = [self.index.initializers[name] for name in read if name in self.index.initializers]
        return [*(helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in stored), *found]

    def _call(self, name: str, layer: LayerNodes, outputs: Sequence[tuple[int, int]]) -> NodeProto:
        values = [self.nodes[layer.nodes[at]].output[number] for at, number in outputs]
        call = helper.make_node(name, list(layer.inputs), values, name=layer.path, domain=LAYERS)
        write_module_path(call, layer.module, name)
        call.metadata_props.add(key=MODULE_KEY, value=layer.path)
        return call


def complete_function(
    function: FunctionProto, opsets: Iterable[OperatorSetIdProto], types: Mapping[str, ValueInfoProto]
) -> None:
    """Give a function the versions of the operators of its nodes, and the types of the values that they make."""
    used = {node.domain for node in function.node}
    del function.opset_import[:], function.value_info[:]
    function.opset_import.extend(entry for entry in opsets if entry.domain in used or not entry.domain)
    made = [types[name] for node in function.node for name in node.output if name in types]
    function.value_info.extend(info for info in made if info.type.WhichOneof("value"))


def without_unread(nodes: Sequence[NodeProto], names: Collection[str], outputs: Collection[str]) -> list[NodeProto]:
    """`nodes` without those that make values of `names` alone, none of which is read or an output."""
    read, left = set(outputs), []
    for node in reversed(nodes):
        if all(name in names and name not in read for name in node.output if name):
            continue
        read.update(reads_of(node))
        left.append(node)
    return left[::-1]


def take_identifier(name: str, taken: set[str]) -> str:
    """`name` with `_` for each character that is no letter, digit, `_`, `.` or `/`, and with a number where `taken` has
    that name. The result is added to `taken`."""
    name = "".join(character if character.isalnum() or character in "_./" else "_" for character in name)
    return take_name(name, taken)
