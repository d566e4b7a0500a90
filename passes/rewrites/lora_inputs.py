"""The step `lora-inputs`: an adapter becomes an input of the model, so that one file serves many adapters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from onnx import ModelProto, NodeProto, TensorProto, helper

from passes.context import PassContext
from passes.graph.index import GraphIndex, copy_of, replace_entries, take_name, value_names
from passes.step import PassResult, Relation, Step
from passes.structures.adapters import find_adapters
from passes.structures.view import GraphView, modules_of
from passes.suggest import ELLIPSIS, join_first, plural
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class LoraInputs(Step, name="lora-inputs", reads="structure"):
    """Make the matrices of adapters inputs, whose defaults they stay. An adapter has two matrices, and the inputs have
    their names.

    A caller that feeds none of them has the outputs of before. A matrix that several adapters read, as zeros before the
    training of which a step has left one copy, is an input for each of them.
    """

    makes_reference: ClassVar[bool] = True
    keeps_outputs: ClassVar[bool] = True

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        view = GraphView(model)
        adapters = list(find_adapters(view))
        if not adapters:
            return PassResult(model, changed=False, why="no product with matrices of low rank is added to another")
        products = {node.output[0]: node for down, up, *_ in adapters for node in (down, up)}
        proto = model.copy_proto()
        new = list(_separate(proto, view, list(products.values())))
        if not new:
            return PassResult(model, changed=False, why="the adapters are inputs already")
        proto.graph.input.extend(
            helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in new
        )
        shown = join_first(list(map(_describe, new)), SHOWN, ELLIPSIS)
        counts = f"{plural(len(new), 'input')} of {plural(len(adapters), 'adapter')}"
        relation = Relation.between_namesakes(model.index.required_inputs, model.index.outputs)
        why = f"{counts}, with their values as defaults: {shown}"
        return PassResult(model.with_proto(proto), why=why, relation=relation)


def _separate(proto: ModelProto, view: GraphView, products: list[NodeProto]) -> Iterator[TensorProto]:
    """The matrix of each product, which no other product reads after this: a copy for every product but the first.
    Matrices that are inputs already are left out.

    Args:
        proto: changed in place.
        view: of the model.
        products: nodes of the view.
    """
    graph = proto.graph
    index, taken, titles = GraphIndex(graph), value_names(graph), {node.name for node in graph.node}
    first: dict[str, NodeProto] = {}
    for seen in products:
        weight, product = view.find_weight(seen.input[1]), index.producers[seen.output[0]]
        if weight is None or weight.name in index.inputs:
            continue
        if weight.name not in first:
            first[weight.name] = product
            yield index.initializers[weight.name]
            continue
        own = graph.initializer.add()
        own.CopyFrom(index.initializers[weight.name])
        own.name = _name_for(weight.name, first[weight.name], product, taken)
        names, nodes, value = {weight.name: own.name}, list[NodeProto](), product.input[1]
        while value != weight.name:  # a Transpose, say
            nodes.insert(0, copy_of(index.producers[value]))
            names[value] = take_name(value, taken)
            value = nodes[0].input[0]
        for node in nodes:
            node.name = take_name(node.name, titles) if node.name else ""
            node.input[0], node.output[0] = names[node.input[0]], names[node.output[0]]
        product.input[1] = names[product.input[1]]
        replace_entries(graph.node, [*nodes, *graph.node])
        yield own


def _name_for(name: str, first: NodeProto, product: NodeProto, taken: set[str]) -> str:
    """What the matrix `name` of the product `first` is called for another product: by the module of that, if known."""
    before, after = ((modules_of(node) or ("",))[-1] for node in (first, product))
    if before and after and name.startswith(f"{before}."):
        name = f"{after}{name.removeprefix(before)}"
    return take_name(name, taken)


SHOWN: Final = 4


def _describe(tensor: TensorProto) -> str:
    dtype = TensorProto.DataType.Name(tensor.data_type).lower()
    return f"{tensor.name} {dtype}{list(tensor.dims)}"
