"""Operators that common quantizers and compilers do not take, found in a model, with the reason and what to do.

The table lists families of operators that QDQ quantizers, TensorRT-like compilers and NPU toolchains refuse
or leave in full precision. It names no tool, since each has a list of its own.

The first of these are operators that ONNX does not have: onnxruntime's `com.microsoft`, and those of others. A policy
can refuse that a step brings them in (`passes.contrib`); what the source has already is named, with the step that
rewrites it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import onnx
from onnx import NodeProto, TensorProto

from passes.custom_ops import declared_ops
from passes.graph.layer_calls import LAYERS
from passes.graph.op_facts import ONNX_DOMAINS, op_name
from passes.graph.traversal import every_node
from passes.provenance import known_as, module_path_of
from passes.rewrites.attention_operators import is_attention
from passes.suggest import AND_MORE, join_first

MOST_MODULES: Final = 3


@dataclass(frozen=True, slots=True)
class Obstacle:
    """One family of operators: what is wrong with it, and what its user can do."""

    operators: frozenset[str]
    reason: str
    advice: str


def find_obstacles(model: onnx.ModelProto) -> tuple[str, ...]:
    """A sentence for each family of operators in `model` that many targets cannot take; none for most models."""
    functions = {(function.domain, function.name) for function in model.functions}
    stored = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.STRING}
    declared = declared_ops()
    texts = {info.name for info in model.graph.input if info.type.tensor_type.elem_type == TensorProto.STRING}
    found: dict[Obstacle, list[NodeProto]] = {}
    for node in (*every_node(model.graph), *(node for function in model.functions for node in function.node)):
        if node.domain == LAYERS:
            obstacle = None  # export.functions asks for them
        elif (node.domain, node.op_type) in functions:
            obstacle = FUNCTION
        elif node.domain not in ONNX_DOMAINS:
            obstacle = DECLARED if (node.domain, node.op_type) in declared else CUSTOM
        elif not (stored | texts).isdisjoint(node.input):
            obstacle = STRINGS
        else:
            obstacle = BY_OPERATOR.get(node.op_type)
        if obstacle is not None:
            found.setdefault(obstacle, []).append(node)
    return tuple(_sentence(obstacle, nodes) for obstacle, nodes in found.items())


def _sentence(obstacle: Obstacle, nodes: Sequence[NodeProto]) -> str:
    counted = ", ".join(f"{count} {name}" for name, count in sorted(Counter(map(op_name, nodes)).items()))
    paths = (module.paths for node in nodes if (module := module_path_of(node)) and module.paths)
    modules = list(dict.fromkeys(path[-1] for path in paths if path[-1]))
    where = f" (in {join_first(modules, MOST_MODULES)})" if modules else ""
    return f"left over: {counted}{where}: {obstacle.reason}; {obstacle.advice}"


CUSTOM: Final = Obstacle(
    frozenset(),
    "it is no operator of ONNX's main set, and few targets have it",
    "skip the pass that writes it, which `onnxline why MODEL NODE` names, or keep what it replaces",
)
DECLARED: Final = Obstacle(
    frozenset(), "it is a custom operator, which few targets have", "its runtime needs a kernel for it"
)
FUNCTION: Final = Obstacle(
    frozenset(), "many targets do not look inside of a local function", "inline it: put onnxscript first in the recipe"
)
STRINGS: Final = Obstacle(
    frozenset({"StringConcat", "StringNormalizer", "StringSplit", "RegexFullMatch", "TfIdfVectorizer"}),
    "few targets have strings",
    "turn the text into numbers outside of the model",
)

OBSTACLES: Final = (
    Obstacle(
        frozenset(
            {
                *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase"),
                *("SequenceInsert", "SequenceLength", "SequenceMap", "SplitToSequence"),
            }
        ),
        "a sequence is no tensor, so it has neither a shape nor a scale",
        "put onnxscript first in the recipe; what is left then has a length that depends on data",
    ),
    Obstacle(
        frozenset({"Optional", "OptionalGetElement", "OptionalHasElement"}),
        "an optional value is no tensor",
        "give the value always, or export without it",
    ),
    Obstacle(
        frozenset({"CastLike"}),
        "its type is that of another value, which few targets look up",
        "put onnxscript first in the recipe, which writes the Cast where the type is known",
    ),
    Obstacle(
        frozenset({"If", "Loop", "Scan"}),
        "most targets take one straight graph, and quantizers leave bodies alone",
        "export the one branch, or unroll the loop, where what it depends on is known beforehand",
    ),
    Obstacle(
        frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"}),
        "the size of its result depends on data, where most targets want to know it beforehand",
        "compute it outside of the model, or with a mask of a fixed size",
    ),
    STRINGS,
)
"""Families of ONNX's own operators. Local functions and custom operators are recognized by their domains."""

BY_OPERATOR: Final = {name: obstacle for obstacle in OBSTACLES for name in obstacle.operators}


DOMAINS: Final = frozenset({*ONNX_DOMAINS, "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training"})


def find_contrib(proto: onnx.ModelProto) -> list[NodeProto]:
    """The nodes, also in bodies and functions, whose operators neither ONNX nor a function of the model defines."""
    functions = {(function.domain, function.name) for function in proto.functions}
    nodes = (node for graph in (proto.graph, *proto.functions) for node in every_node(graph))
    return [node for node in nodes if (node.domain, node.op_type) not in functions and not _is_standard(node)]


def _is_standard(node: NodeProto) -> bool:
    """Whether ONNX has the operator. onnxruntime adds some to ONNX's own domain: SimplifiedLayerNormalization."""
    if node.domain not in DOMAINS:
        return False
    domain = "" if node.domain in ONNX_DOMAINS else node.domain
    return onnx.defs.has(node.op_type, domain)


def describe_brought_in(before: onnx.ModelProto, after: onnx.ModelProto) -> str:
    """Which of them a step has brought in; empty if it left no more of them than there were.

    So a step may write one in the place of another, as `split-qkv` does with a packed Attention.
    """
    had, has = find_contrib(before), find_contrib(after)
    if len(has) <= len(had):
        return ""
    known = {tuple(node.output) for node in had}
    new = [node for node in has if tuple(node.output) not in known] or has
    return f"brings in {_names(new)}, which ONNX does not have; passes.contrib: keep lets it in"


def describe_left(proto: onnx.ModelProto) -> tuple[str, ...]:
    """A sentence for each of these operators in a final model into which no step could bring one."""
    found: dict[str, list[NodeProto]] = {}
    for node in find_contrib(proto):
        found.setdefault(op_name(node), []).append(node)
    left = ((_names(nodes), _advice(nodes[0])) for nodes in found.values())
    return tuple(f"passes.contrib: {names} is left of the source; {advice}" for names, advice in left)


def _advice(node: NodeProto) -> str:
    if is_attention(node):
        return "put decompose-attention into the recipe"
    step = REWRITTEN_BY.get(node.op_type) if node.domain not in ONNX_DOMAINS else None
    if step is not None:
        return f"put {step} into the recipe"
    return "no step of onnxline rewrites it, so export the model without it"


REWRITTEN_BY: Final = {"QAttention": "split-qkv and decompose-attention"}
"""Operator → the steps after which it is gone, for operators other than attention."""


def _names(nodes: Sequence[NodeProto]) -> str:
    labels = [f"{op_name(node)} {known_as(node)!r}" for node in nodes]
    return join_first(labels, 1, AND_MORE)
