"""Models with metadata as torch's exporter writes it, carried across a pass, and what is known of them then."""

from __future__ import annotations

from collections.abc import Iterator

from onnx import GraphProto, ModelProto, NodeProto

from passes.provenance import annotations_of, carry, module_path_of
from tests.support.onnx_models import detached

SCOPES_KEY = "pkg.torch.onnx.name_scopes"
CLASSES_KEY = "pkg.torch.onnx.class_hierarchy"
STACK_KEY = "pkg.torch.onnx.stack_trace"


def annotate_modules(model: ModelProto, **modules: str) -> ModelProto:
    """`model` with metadata as torch's exporter writes it: node name → module path."""
    for node in every_node(model.graph):
        if node.name in modules:
            path = modules[node.name]
            parts = path.split(".") if path else []
            scopes = ["", *(".".join(parts[: i + 1]) for i in range(len(parts))), node.name]
            node.metadata_props.add(key=SCOPES_KEY, value=repr(scopes))
            node.metadata_props.add(key=CLASSES_KEY, value=repr(["Net", *(part.title() for part in parts), "aten.op"]))
            frame = f'File "net.py", line 7, in forward\n    {node.name}()'
            node.metadata_props.add(
                key=STACK_KEY, value=f'File "net.py", line 3, in forward\n    self.top(x)\n  {frame}'
            )
    return model


def every_node(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
                yield from every_node(body)


def carry_annotations(before: ModelProto, after: ModelProto, author: str = "some_pass") -> ModelProto:
    return carry(detached(before), detached(after), author).proto


def modules(model: ModelProto) -> dict[str, str | None]:
    """Node name → path of its module, or None where nothing is known."""
    places = {node.name: module_path_of(node) for node in every_node(model.graph)}
    return {name: place.paths[-1] if place and place.paths else None for name, place in places.items()}


def authors(model: ModelProto) -> dict[str, str]:
    return {node.name: annotations_of(node).author for node in every_node(model.graph)}


def node_of(model: ModelProto, name: str) -> NodeProto:
    return next(node for node in every_node(model.graph) if node.name == name)


def replaced_nodes(model: ModelProto) -> dict[str, tuple[str, ...]]:
    """First output → what the node stands for, of the nodes that a pass made."""
    marked = ((node.output[0], annotations_of(node)) for node in every_node(model.graph))
    return {name: marks.replaced for name, marks in marked if marks.author}
