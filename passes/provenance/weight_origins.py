"""Trace which of the source's weights a stored tensor was made of, and how, and name the tensor after them.

A step that folds a Transpose of `layer.0.query.weight` names the result after a value, such as `val_27`, which hides
the origin. So `trace_weights` writes the origin on the tensor after each step, and `name_weights` renames the tensor in
the end.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from onnx import GraphProto, TensorProto

from passes.graph.index import free_name, replace_all_uses_with, value_names
from passes.graph.inference import INTEGERS
from passes.graph.op_facts import BIAS, COMMUTATIVE, RESHAPES
from passes.matching.flat_graph import ABSENT, TELLING, FlatGraph, NodeMatching
from passes.matching.replacements import PRODUCTS, ReplacedNodes
from passes.provenance.annotations import SHOWN, NodeAnnotations, annotations_of, write_annotations, write_metadata
from passes.weights.detached import DetachedModel
from passes.weights.relations import TensorForms

FORM_KEY: Final = "onnxline.form"
"""How a stored tensor was made of its weights: one of `FORMS`; absent where it is the weight itself."""

PART_KEY: Final = "onnxline.part"
"""Which part of a merged weight a stored tensor is, such as `q`."""

FORMS: Final = ("reshaped", "transposed", "cast", "merged", "folded")
"""Weakest first: a weight that was transposed and then folded is folded."""

FORM_BY_OP: Final = {
    "Identity": "",
    **dict.fromkeys(RESHAPES, "reshaped"),
    "Transpose": "transposed",
    "Cast": "cast",
    "CastLike": "cast",
}
"""The form that an operator gives a weight; other operators fold it."""


def form_of(tensor: TensorProto) -> str:
    """How a stored tensor was made of its weights: one of `FORMS`; empty for the weight itself."""
    return next((entry.value for entry in tensor.metadata_props if entry.key == FORM_KEY), "")


def mark_part(tensor: TensorProto, whole: TensorProto, part: str) -> None:
    """Annotate `tensor` as the `part` of the stored tensor `whole`, with the metadata of `whole`."""
    tensor.metadata_props.extend(whole.metadata_props)
    if not annotations_of(tensor).author:
        write_annotations(tensor, NodeAnnotations(replaced=(whole.name,), count=1))
    _write_part(tensor, part)


def _write_part(tensor: TensorProto, part: str) -> None:
    if part:
        tensor.metadata_props.add(key=PART_KEY, value=part)


def part_of(tensor: TensorProto) -> str:
    """Which part of a merged weight a stored tensor is, such as `q`; empty for a whole weight."""
    return next((entry.value for entry in tensor.metadata_props if entry.key == PART_KEY), "")


@dataclass(frozen=True, slots=True)
class _Chain:
    """The stored tensors that a constant is computed from, and the form that the operators give them."""

    weights: tuple[TensorProto, ...]
    form: str = ""


def trace_weights(
    matching: NodeMatching, models: tuple[DetachedModel, DetachedModel], author: str, replaced: Iterable[ReplacedNodes]
) -> None:
    """Annotate each new initializer after a step with its origin; give other initializers their annotations back."""
    lost_by = {new: replacement.lost for replacement in replaced for new in replacement.news}
    chains: dict[int, _Chain] | None = None
    for value, tensor in matching.after.tensors.items():
        old = _find_unchanged(matching, value)
        if old is not None:
            _give_back(tensor, old)
        elif part_of(tensor):
            write_annotations(tensor, replace(annotations_of(tensor), author=author))
        elif _is_weight(tensor):
            chains = _chains(matching.before) if chains is None else chains
            _mark(tensor, _sources_of(matching, value, lost_by, chains), models, author)


def _is_weight(tensor: TensorProto) -> bool:
    """Whether a tensor may be a weight: small integers are shapes and axes, a scalar is a constant of the code."""
    size = math.prod(tensor.dims)
    if not tensor.dims or tensor.data_type == TensorProto.STRING:
        return False
    return size >= TELLING or (size > 1 and tensor.data_type not in INTEGERS)


def _find_unchanged(matching: NodeMatching, value: int) -> TensorProto | None:
    """The stored tensor of the model before that has the same content; of several, the namesake."""
    if matching.value_of[value] < 0:
        return None
    digest = matching.after.value_digests[value]
    before = matching.before
    olds = [
        old
        for old in matching.values_equal_to(matching.value_of[value])
        if old in before.tensors and before.value_digests[old] == digest
    ]
    name = matching.after.names[value]
    return next((before.tensors[old] for old in sorted(olds, key=lambda old: before.names[old] != name)), None)


def _give_back(tensor: TensorProto, old: TensorProto) -> None:
    known = {entry.key for entry in tensor.metadata_props}
    tensor.metadata_props.extend(entry for entry in old.metadata_props if entry.key not in known)
    if tensor.name != old.name and annotations_of(tensor) == NodeAnnotations() and _is_weight(old):
        write_annotations(tensor, NodeAnnotations(replaced=(old.name,), count=1))


def _sources_of(
    matching: NodeMatching, value: int, lost_by: Mapping[int, tuple[int, ...]], chains: Mapping[int, _Chain]
) -> _Chain:
    """The weights that a new tensor replaces: those that its consumers read before, else those of lost nodes nearby."""
    before, neighbours = matching.before, []
    known = matching.value_of[value]
    olds = [known] if known in before.constants and known != ABSENT else []
    for consumer, position in matching.after.uses[value]:
        old = matching.old_of[consumer]
        if old >= 0:
            olds.extend(_constants_read_before(matching, consumer, old, position))
            neighbours.extend(_lost_neighbours(matching, old))
        else:
            neighbours.extend(lost_by.get(consumer, ()))
    known_chains = [chains[constant] for constant in dict.fromkeys(olds) if constant in chains]
    weights = [tensor for chain in known_chains for tensor in chain.weights]
    if len(weights) == 1:
        tensor, form = weights[0], known_chains[0].form
        if math.prod(tensor.dims) == math.prod(matching.after.tensors[value].dims) and form not in ("", "folded"):
            return _Chain((tensor,), form)
    read = (operand for old in dict.fromkeys(neighbours) for operand in before.items[old].inputs if operand in chains)
    weights.extend(tensor for constant in read for tensor in chains[constant].weights)
    if any(
        position == BIAS and matching.after.items[index].op[1] in PRODUCTS
        for index, position in matching.after.uses[value]
    ):
        weights.sort(key=lambda tensor: not "".join(_names_of(tensor)[:1]).endswith("bias"))  # a bias goes first
    return _Chain(tuple({tensor.name: tensor for tensor in weights}.values()))


def _constants_read_before(matching: NodeMatching, consumer: int, old: int, position: int) -> list[int]:
    """The old constants that a node read where it now reads a new tensor."""
    item, inputs = matching.after.items[consumer], matching.before.items[old].inputs
    if item.op[1] in COMMUTATIVE:
        kept = {matching.counterpart(value) for value in item.inputs}
        read = [value for value in inputs if matching.representative(value) not in kept]
    else:
        read = [inputs[position]] if position < len(inputs) else []
    return [value for value in read if value != ABSENT and value in matching.before.constants]


def _lost_neighbours(matching: NodeMatching, old: int) -> list[int]:
    """The lost nodes that consume an output of `old`, or produce one of its inputs."""
    before = matching.before
    item = before.items[old]
    consumers = [consumer for value in item.outputs if value != ABSENT for consumer, _ in before.uses[value]]
    producers = [before.producers[value] for value in item.inputs if value != ABSENT and value not in before.constants]
    return [index for index in (*consumers, *producers) if index >= 0 and matching.is_lost(index)]


def _chains(before: FlatGraph) -> dict[int, _Chain]:
    """Constant value → the weights that it is computed from, in the order in which they are read."""
    chains = {value: _Chain((tensor,)) for value, tensor in before.tensors.items() if _is_weight(tensor)}
    for item in before.items:
        if all(value in before.constants for value in item.outputs):
            known = [chains[value] for value in item.inputs if value in chains]
            weights = {tensor.name: tensor for chain in known for tensor in chain.weights}
            form = _strongest([*(chain.form for chain in known), FORM_BY_OP.get(item.op[1], "folded")])
            if weights:
                chains |= dict.fromkeys(item.outputs, _Chain(tuple(weights.values()), form))
    return chains


def _strongest(forms: Iterable[str]) -> str:
    return max(forms, key=lambda form: FORMS.index(form) if form else -1, default="")


def _mark(tensor: TensorProto, sources: _Chain, models: tuple[DetachedModel, DetachedModel], author: str) -> None:
    """Annotate `tensor` with its sources; without any it is a constant that the step made."""
    form, weights = (sources.form, sources.weights) if sources.form else _compare(tensor, sources.weights, models)
    names: dict[str, None] = {}
    forms = [form]
    for weight in weights:
        names |= dict.fromkeys(_names_of(weight))
        forms.append(form_of(weight))
    is_back = forms == ["transposed", "transposed"] and len(tensor.dims) == 2
    write_annotations(tensor, NodeAnnotations(author, tuple(names)[:SHOWN], len(names)))
    write_metadata(tensor, {FORM_KEY: _strongest(forms) if names and not is_back else ""})
    _write_part(tensor, part_of(weights[0]) if len(weights) == 1 else "")


def _names_of(tensor: TensorProto) -> tuple[str, ...]:
    """The source's initializers that a tensor was made of: itself, if it is one of them."""
    marks = annotations_of(tensor)
    return marks.replaced or (() if marks.author else (tensor.name,))


def _compare(
    tensor: TensorProto, weights: Sequence[TensorProto], models: tuple[DetachedModel, DetachedModel]
) -> tuple[str, Sequence[TensorProto]]:
    """The form of `tensor` relative to some of `weights`, and these weights, judged by shape and content."""
    before, after = models
    size = math.prod(tensor.dims)
    of_size = [candidate for candidate in weights if math.prod(candidate.dims) == size]
    known = dict(enumerate(of_size))
    found = TensorForms(before, known).find(tensor, after.digest(tensor)) if known else None
    if found is not None:
        form, index = found
        return form or "reshaped", [known[index]]
    of_type = [candidate for candidate in weights if candidate.data_type == tensor.data_type]
    for kind_of in (_dims_of, _rank_of):  # Q, K and V may have different widths
        for kind in dict.fromkeys(map(kind_of, of_type)):
            pieces = [candidate for candidate in of_type if kind_of(candidate) == kind]
            if len(pieces) > 1 and sum(math.prod(candidate.dims) for candidate in pieces) == size:
                return "merged", pieces
    if _is_uniform(after, tensor):
        return "", []
    return "folded", [*of_size, *(candidate for candidate in weights if candidate not in of_size)]


def _dims_of(tensor: TensorProto) -> Hashable:
    return tuple(tensor.dims)


def _rank_of(tensor: TensorProto) -> Hashable:
    return len(tensor.dims)


def _is_uniform(model: DetachedModel, tensor: TensorProto) -> bool:
    """Whether all elements are equal. No weight is uniform, so a uniform tensor was made of no weight."""
    if model.is_unread(tensor):
        return False
    flat = model.array(tensor).ravel()
    return bool((flat == flat[0]).all())


def name_weights(before: DetachedModel, after: DetachedModel) -> DetachedModel:
    """`after` with each initializer that was made of weights of `before` named after them; the same object if none is.

    One weight gives its name and the form, `layer.0.query.weight_transposed`, or just its name where the tensor is the
    weight itself. Merged weights give the common parts of their names, `layer.0.weight_merged`. A number is added where
    the name is taken. An initializer that already has the name of one of its weights, or of another initializer of
    `before`, keeps it, and so does an initializer that is an input or an output.
    """
    graph, index = after.proto.graph, after.index
    signature = index.inputs.keys() | index.outputs.keys()
    settled = signature | before.index.initializers.keys()
    taken = value_names(graph)
    renamed: dict[str, str] = {}
    for tensor in graph.initializer:
        sources = annotations_of(tensor).replaced
        if sources and tensor.name not in sources and tensor.name not in settled:
            taken.discard(tensor.name)  # a name that is right, such as that of an untied copy, stays
            known_as = _name_for([part_name(name, part_of(tensor)) for name in sources], form_of(tensor))
            name = free_name(known_as, taken)
            if name != tensor.name:
                renamed[tensor.name] = name
            taken.update((tensor.name, name))
    if not renamed:
        return after
    proto = after.copy_proto()
    _rename(proto.graph, renamed)
    for annotation in proto.graph.quantization_annotation:
        annotation.tensor_name = renamed.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = renamed.get(entry.value, entry.value)
    return after.with_proto(proto)


def untransposed_name(name: str) -> str:
    """The name of the weight that a stored tensor is, or that it is the transpose of: `query.weight` for
    `query.weight_transposed`, as `name_weights` calls it."""
    return name.removesuffix("_transposed")


def _name_for(sources: Sequence[str], form: str) -> str:
    if form != "merged":
        return f"{sources[0]}_{form}" if form else sources[0]
    paths = [name.split(".") for name in sources]
    common = [column[0] for column in zip(*(path[:-1] for path in paths), strict=False) if len(set(column)) == 1]
    endings = {path[-1] for path in paths}
    return ".".join([*common, *(endings if len(endings) == 1 else [])] or [sources[0]]) + f"_{form}"


def _rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Rename values in `graph` and in the bodies that read them, unless a body has its own value of that name."""
    for entry in (*graph.initializer, *graph.value_info):
        entry.name = names.get(entry.name, entry.name)
    replace_all_uses_with(graph.node, names)


def part_name(name: str, part: str) -> str:
    """`attn.c_attn.q.weight` for the part `q` of `attn.c_attn.weight`; `name` itself for no part."""
    stem, dot, last = name.rpartition(".")
    if not part:
        return name
    return f"{stem}.{part}.{last}" if dot and last in ("weight", "bias") else f"{name}.{part}"
