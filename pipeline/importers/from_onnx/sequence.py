"""SplitToSequence and SequenceAt with constant places are a Split: torch exports GPT-2's q, k, v that way."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Node

__all__ = ["IMPORTERS"]


def split_to_sequence(node: Node) -> None:
    sequence = node.output_names[0]
    node.attributes.settle("axis", "keepdims")  # in the pieces
    node.settle_inputs(1)
    pieces = node.pieces(sequence)
    names = [pieces.names.get(place) or node.fresh(f"{sequence}.{place}") for place in range(len(pieces.sizes))]
    squeezed = pieces.parts != pieces.items
    outputs = [(node.fresh(name) if squeezed else name, part) for name, part in zip(names, pieces.parts, strict=True)]
    made = node.make("Split", [node.operand(0)], outputs, {"axis": pieces.axis, "sizes": pieces.sizes})
    for name, item, vid in zip(names, pieces.items, made, strict=True):
        if squeezed:
            (vid,) = node.make("Reshape", [vid], [(name, item)], {"shape": item.sizes})
        node.bind(name, vid)


def sequence_at(node: Node) -> None:
    pieces = node.pieces(node.input_names[0])
    node.settle_inputs(0)
    index = range(len(pieces.items))[int(node.need_constant(1, "the place").item())]
    first = pieces.names[index]
    if first != node.output_names[0]:
        node.alias(node.vid(first))


IMPORTERS = {"SequenceAt": sequence_at, "SplitToSequence": split_to_sequence}
