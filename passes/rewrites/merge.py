"""Join two models into one, and the step `merge` of a recipe, which joins the model with one of a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import onnx
from onnx import compose

from passes.context import PassContext
from passes.errors import ModelError, PolicyError, StepFailed
from passes.graph.formatting import format_type
from passes.graph.index import replace_all_uses_with, replace_entries, take_name
from passes.graph.op_facts import ONNX_DOMAINS, opset_of
from passes.graph.traversal import every_graph, every_node
from passes.model.analysis import what_is_invalid
from passes.model.signature import contradicts
from passes.step import Continuation, PassResult, Relation, Step
from passes.suggest import describe_absence, nearest
from passes.weights.detached import DetachedModel, read_model


@dataclass(frozen=True, slots=True)
class Merge(Step, name="merge", reads="structure"):
    """Let the model of a file run after the model, as one model. Outputs of this model become inputs of the other.

    The proof runs both models, one after the other.

    Args:
        model: the path of the other model.
        map: output or input of this model → the input of the other that it feeds, or a list of them; every input of the
            other is fed.
    """

    model: str = ""
    map: Mapping[str, str | Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        if self.model == "":
            raise PolicyError(f"{self.name}: found no model; expected the path of an ONNX file that runs second")
        if not isinstance(self.model, str) or not Path(self.model).is_file():
            absence = describe_absence(Path(str(self.model)))
            raise PolicyError(f"{self.name}: model is {self.model!r}: {absence}; expected the path of an ONNX file")
        pairs_of(self.map)

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        first = model.without_functions()
        try:
            second = read_model(Path(self.model)).without_functions()
        except ModelError as error:  # of the recipe's file: no step on the model has failed
            raise PolicyError(f"{self.name}: {error}") from error
        joined = join_models(first, second, self.map)
        fed = {new: old for old, new in pairs_of(self.map)}
        unfed = [name for name in second.index.required_inputs if name not in fed]
        if unfed:
            raise PolicyError(
                f"{self.name}: no output is mapped to the second model's input {unfed[0]!r}, and a step has no "
                "values for it; map an output to it, or use `onnxline merge`"
            )
        names = {name: joined.renamed.get(name, name) for name in second.index.outputs}
        kept = [name for name in joined.model.index.outputs if name in first.index.outputs]
        outputs = {name: name for name in (*kept, *names.values())}
        inputs = {name: name for name in joined.model.index.required_inputs}
        return PassResult(joined.model, relation=Relation(inputs, outputs, then=Continuation(second, fed, names)))


def pairs_of(map: object) -> list[tuple[str, str]]:
    """(value of the first model, input of the second) for each input that `map` says is fed.

    Raises:
        PolicyError: it is no mapping of names to names, or to lists of names.
    """
    if isinstance(map, Mapping):
        pairs = [
            (old, new) for old, news in map.items() for new in (news if isinstance(news, list | tuple) else [news])
        ]
        if all(isinstance(name, str) for pair in pairs for name in pair):
            return pairs
    raise PolicyError(f"merge: map is {map!r}; expected a mapping of names, as in {{a_out: b_in}}")


@dataclass(frozen=True, slots=True)
class JoinedModels:
    """Two models as one. `renamed`: name in the second model → its new name, for each name that has one."""

    model: DetachedModel
    renamed: Mapping[str, str]


def join_models(first: DetachedModel, second: DetachedModel, map: Mapping[str, str | Sequence[str]]) -> JoinedModels:
    """Join two models without functions; names of the second that the first has too get `_2` after them.

    So do keys of its metadata that have another value in the first.

    Args:
        first: the model that runs first; its outputs that are not mapped stay outputs.
        second: the model that runs after it, of the same opset.
        map: output of the first → the input of the second that it feeds, or a list of them; an input of the first feeds
            both models.

    Returns:
        The joined model, whose nodes keep their order.

    Raises:
        PolicyError: `map` is no mapping; no such output or input, two outputs for one input, or two types or opsets
            that do not fit.
        StepFailed: the result is not valid ONNX.
    """
    mapped = pairs_of(map)
    outputs, inputs = first.index.outputs, second.index.required_inputs
    givers = {**first.index.required_inputs, **outputs}
    for names, known, what in (
        (map, givers, "first model has no output or input"),
        ([new for _, new in mapped], inputs, "second model has no input"),
    ):
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f"; it has: {', '.join(known) or 'none'}"
                raise PolicyError(f"merge: the {what} {name!r}{hint}")
    if not mapped:
        raise PolicyError(
            "merge: found no pair; expected an output of the first model with the input of the second that it feeds"
        )
    twice = [new for new, count in Counter(new for _, new in mapped).items() if count > 1]
    if twice:
        feeding = " and ".join(repr(old) for old, new in mapped if new == twice[0])
        raise PolicyError(f"merge: {feeding} are mapped to the input {twice[0]!r}; expected one output for an input")
    if opset_of(first.proto) != opset_of(second.proto):
        raise PolicyError(
            f"merge: the first model has opset {opset_of(first.proto)}, and the second {opset_of(second.proto)}; bring "
            "both to one opset with `onnxline convert-opset`"
        )
    own, others = _custom_opsets(first), _custom_opsets(second)
    for domain in [domain for domain in own.keys() & others.keys() if own[domain] != others[domain]]:
        raise PolicyError(
            f"merge: the first model has version {own[domain]} of the operators {domain}, and the second "
            f"{others[domain]}; write both models with one version"
        )
    for old, new in mapped:
        if contradicts(givers[old].type, inputs[new].type):
            raise PolicyError(
                f"merge: {old!r} of the first model is {format_type(givers[old])}, and the input {new!r} that it feeds "
                f"is {format_type(inputs[new])}; give both one type, by `onnxline fix-shapes` say"
            )
    left, right = first.copy_proto(), second.copy_proto()
    taken = {name for name in _all_names(left) if name in _all_names(right)}
    known = _all_names(left) | _all_names(right)
    renamed = {name: take_name(name, known) for name in sorted(taken)}
    right = _rename(right, renamed)
    fed = {new: renamed.get(new, new) for _, new in mapped}
    fed |= {new: _copy_to_output(right, name, known) for new, name in fed.items() if new in second.index.outputs}
    pairs = [(old, fed[new]) for old, new in mapped if old in outputs]
    shared = {fed[new]: old for old, new in mapped if old not in outputs}
    ends = [*(name for name in outputs if name not in map), *(info.name for info in right.graph.output)]
    graph = compose.merge_graphs(left.graph, right.graph, pairs, outputs=ends)  # without the checker: weights stand in
    replace_all_uses_with(graph.node, shared)
    replace_entries(graph.input, [info for info in graph.input if info.name not in shared])
    replace_entries(
        graph.quantization_annotation, _join_annotations(left, right, {fed[new]: old for old, new in mapped})
    )
    replace_entries(graph.metadata_props, _join_metadata(left.graph, right.graph))
    left.graph.CopyFrom(graph)
    replace_entries(left.metadata_props, _join_metadata(left, right))
    left.ir_version = max(left.ir_version, right.ir_version)
    versions = [onnx.helper.make_opsetid(*entry) for entry in {**others, **own}.items()]
    of_onnx = [entry for entry in left.opset_import if entry.domain in ONNX_DOMAINS]
    replace_entries(left.opset_import, [*of_onnx, *versions])
    merged = DetachedModel(left, {**first.weights, **second.weights})
    broken = what_is_invalid(merged)
    if broken:
        raise StepFailed(f"merge: the result is not valid ONNX: {broken}")
    return JoinedModels(merged, renamed)


def _join_annotations(
    left: onnx.ModelProto, right: onnx.ModelProto, fed: Mapping[str, str]
) -> list[onnx.TensorAnnotation]:
    """What both models say of quantized tensors; of an input of the second, what the first says of its value first."""
    notes = {note.tensor_name: note for note in left.graph.quantization_annotation}
    for note in right.graph.quantization_annotation:
        note.tensor_name = fed.get(note.tensor_name, note.tensor_name)
        notes.setdefault(note.tensor_name, note)
    return list(notes.values())


def _join_metadata(
    left: onnx.ModelProto | onnx.GraphProto, right: onnx.ModelProto | onnx.GraphProto
) -> list[onnx.StringStringEntryProto]:
    """The metadata of both; a key of the second with another value in the first gets `_2` after it."""
    known = {entry.key: entry.value for entry in left.metadata_props}
    more = [entry for entry in right.metadata_props if known.get(entry.key) != entry.value]
    taken = {*known, *(entry.key for entry in more if entry.key not in known)}
    for entry in more:
        if entry.key in known:
            entry.key = take_name(entry.key, taken)
    return [*left.metadata_props, *more]


def _custom_opsets(model: DetachedModel) -> dict[str, int]:
    """The versions of domains other than ONNX's of which the model has nodes."""
    used = {node.domain for node in every_node(model.proto.graph)}
    known = {entry.domain: entry.version for entry in model.proto.opset_import}
    return {domain: version for domain, version in known.items() if domain in used - {*ONNX_DOMAINS}}


def _all_names(proto: onnx.ModelProto) -> set[str]:
    """The names of values and nodes, also those inside of bodies: a body may not make a value of an outer name."""
    names = set[str]()
    for graph in every_graph(proto.graph):
        names |= {entry.name for entry in _entries(graph)}
        for node in graph.node:
            names |= {node.name, *node.input, *node.output}
    return names - {""}


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    for graph in every_graph(proto.graph):
        for node in graph.node:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]
            if node.name in names:  # setting "" would be a change of a node without a name
                node.name = names[node.name]
        for entry in _entries(graph):
            entry.name = names.get(entry.name, entry.name)
        for note in graph.quantization_annotation:
            note.tensor_name = names.get(note.tensor_name, note.tensor_name)
            for entry in note.quant_parameter_tensor_names:
                entry.value = names.get(entry.value, entry.value)
    return proto


def _entries(graph: onnx.GraphProto) -> Iterator[onnx.ValueInfoProto | onnx.TensorProto]:
    yield from (*graph.input, *graph.output, *graph.initializer, *graph.value_info)
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)


def _copy_to_output(proto: onnx.ModelProto, name: str, known: set[str]) -> str:
    """Let an Identity make the output `name`, which is an input too; the name that the input has then."""
    graph, taken = proto.graph, take_name(name, known)
    replace_all_uses_with(graph.node, {name: taken})
    for info in graph.input:
        info.name = taken if info.name == name else info.name
    graph.node.append(onnx.helper.make_node("Identity", [taken], [name]))
    return taken
