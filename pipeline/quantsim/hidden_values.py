"""What quantizers cannot see of a model: values that it quantizes itself, insides of operators, untyped values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnx import NodeProto

from passes.graph.inference import types_of
from passes.graph.op_facts import ONNX_DOMAINS
from passes.graph.traversal import every_node
from passes.provenance.annotations import annotations_of
from passes.rewrites.attention_operators import is_attention
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from pipeline.config import KEYS, OptionNames
from pipeline.errors import UsageError


def refuse_quantized_activations(model: DetachedModel, names: OptionNames = KEYS) -> None:
    """Refuse a model that quantizes what it computes: what it would compute in float is not in it; `names` are the
    words of the message.

    Raises:
        UsageError: it does; the message says how its encodings are simulated.
    """
    stored = model.index.initializers
    nodes = [node for node in model.index.nodes if node.op_type in ("QuantizeLinear", "DynamicQuantizeLinear")]
    found = [node for node in nodes if node.domain in ONNX_DOMAINS and node.input[0] not in stored]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise UsageError(
            f"found {found[0].op_type} of {found[0].input[0]!r}{more} in the model, "
            "expected a model that quantizes weights at most; simulate the float model with these encodings: onnxline "
            f"encodings QUANTIZED.onnx --of FLOAT.onnx -o net.encodings, and {names.encodings}: net.encodings"
        )


def describe_opaque_operators(model: DetachedModel, names: OptionNames = KEYS) -> tuple[str, ...]:
    """A sentence for each operator that quantizers take as one piece or do not know, with the step that helps."""
    found: dict[str, list[NodeProto]] = {}
    for node in every_node(model.proto.graph):
        domain = "" if node.domain in ONNX_DOMAINS else f"{node.domain}::"
        if domain or is_attention(node):
            found.setdefault(f"{domain}{node.op_type}", []).append(node)
    return tuple(_describe_operator(name, nodes, names) for name, nodes in found.items())


def _describe_operator(name: str, nodes: Sequence[NodeProto], names: OptionNames) -> str:
    """One sentence on the nodes of one operator."""
    if is_attention(nodes[0]):
        why, step = "hides its scores and softmax from quantizers", names.step.format("decompose-attention")
    else:
        authors = ", ".join(dict.fromkeys(annotations_of(node).author for node in nodes if annotations_of(node).author))
        writer = f"the pass of {authors} that writes it" if authors else "what writes it"
        why, step = "is an operator that few quantizers know", f"skip {writer} (`onnxline passes --group fusions`)"
    return f"{name} ({plural(len(nodes), 'node')}) {why}; {step}"


def describe_untyped_values(model: DetachedModel) -> Iterator[str]:
    """A sentence where ONNX's inference does not know the types of values, which thus stay in float."""
    types = types_of(model.proto)
    unknown = [node for node in model.proto.graph.node if any(name and name not in types for name in node.output)]
    if unknown:
        first = unknown[0]
        yield (
            f"the values of {plural(len(unknown), 'node')}, the first is {first.name or first.output[0]!r} "
            f"({first.op_type}), have no type that ONNX's inference knows, so they stay in float; give the model "
            "value_info for them, or replace the operator that hides their types"
        )
