"""Split a model into files that feed each other, and merge two models; both are proven by running what was whole and
what is in parts on the same inputs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, compose

from passes.context import PassContext, limit_runs, open_context
from passes.diff import match_models
from passes.diff.numbers import draw_inputs
from passes.encodings.encoding import Encoding, fit_encodings
from passes.errors import PolicyError, StepFailed
from passes.graph.formatting import format_type
from passes.graph.index import GraphIndex, computed_values, replace_all_uses_with, values_read
from passes.graph.op_facts import opset_of
from passes.graph.traversal import reads_of
from passes.model.analysis import what_is_invalid
from passes.model.signature import contradicts
from passes.proof.numbers import Errors, compare
from passes.proof.precision import Precisions, computed_types
from passes.proof.prover import worst_errors
from passes.provenance.annotations import module_path_of
from passes.rewrites.interface import cut_out
from passes.suggest import nearest, plural
from passes.visible import html_table, text_table
from passes.weights.detached import DetachedModel, open_model
from passes.weights.files import write_model
from passes.weights.sharing import MappedModel, portable

MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One part of a model: its name, what it takes and gives, and the values of these names in `model`."""

    name: str
    model: DetachedModel
    encodings: Mapping[str, Encoding]

    @property
    def inputs(self) -> list[str]:
        return list(self.model.index.required_inputs)

    @property
    def outputs(self) -> list[str]:
        return list(self.model.index.outputs)


@dataclass(frozen=True, slots=True)
class PartedModel:
    """The parts of a model, in an order in which they can run, with the errors of their chain against the whole."""

    parts: tuple[ModelPart, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    errors: Mapping[str, Errors]

    def rows(self) -> list[tuple[str, str, str, str]]:
        return [
            (
                part.name,
                plural(len(part.model.proto.graph.node), "node"),
                ", ".join(part.inputs),
                ", ".join(part.outputs),
            )
            for part in self.parts
        ]

    def __str__(self) -> str:
        return text_table([("part", "nodes", "takes", "gives"), *self.rows()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table("parts", ("part", "nodes", "takes", "gives"), self.rows())

    def manifest(self) -> dict[str, Any]:
        """What feeds what: the source of each input is `model` or the name of a part."""
        makers = {name: part.name for part in self.parts for name in part.outputs}
        return {
            "format_version": 1,
            "inputs": list(self.inputs),
            "outputs": {name: makers.get(name, "model") for name in self.outputs},
            "parts": [
                {
                    "name": part.name,
                    "file": f"{part.name}.onnx",
                    "inputs": {name: makers.get(name, "model") for name in part.inputs},
                    "outputs": part.outputs,
                    "bytes": part.model.nbytes(),
                }
                for part in self.parts
            ],
        }

    def save(self, folder: Path) -> None:
        """Write a file for each part, and the manifest.

        Raises:
            UsageError: a file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            write_model(part.model, folder / f"{part.name}.onnx")
        (folder / MANIFEST).write_text(json.dumps(self.manifest(), indent=2) + "\n", encoding="utf-8")


def split(
    model: onnx.ModelProto | str | Path | DetachedModel,
    *,
    at: Sequence[str] = (),
    max_bytes: int | None = None,
    module: str | None = None,
    runs_on: Mapping[str, bool] | None = None,
    encodings: Mapping[str, Encoding] | None = None,
    proof: bool = True,
    context: PassContext | None = None,
) -> PartedModel:
    """Split a model into parts that compute the same one after the other.

    Exactly one of the four ways is given.

    Args:
        model: a path, a message or a DetachedModel; it stays as it is.
        at: values at which to cut; what computes them, and has not been computed before, is a part.
        max_bytes: a part ends before its weights would be more than this.
        module: a glob of torch module paths; each module that it matches is a part, and so is what is between them.
        runs_on: node name, or the first output → whether a target takes it; neighbours that are alike are a part.
        encodings: by tensor; each part gets those of its tensors.
        proof: run the chain of parts and the whole on draws, and compare the outputs.
        context: where to work, for who splits several models.

    Returns:
        A PartedModel: the parts, with `save(folder)` and `manifest()`.

    Raises:
        PolicyError: no such value or module, or not exactly one way.
        UsageError: encodings of a tensor that the model does not have.
        StepFailed: the chain computes something else, or a part is not valid.

    Example:
        >>> import onnxline
        >>> [part.outputs for part in onnxline.split("model.onnx", at=["scores"]).parts][-1]
        ['y']
    """
    ways = [way for way in (at or None, max_bytes, module, runs_on) if way is not None]
    if len(ways) != 1:
        raise PolicyError("split: expected one of at, max_bytes, module and runs_on")
    opened = open_model(model)
    whole = opened.without_functions()
    index = whole.index
    if at:
        numbers = _stages_at(index, at)
    elif max_bytes is not None:
        numbers = _stages_by_bytes(whole, max_bytes)
    elif module is not None:
        numbers = _stages_by_module(index, module)
    else:
        numbers = _stages_by_label(index, [str((runs_on or {}).get(_known_as(node), True)) for node in index.own])
    parts = _cut_parts(whole, numbers, fit_encodings(encodings or {}, whole))
    errors: Mapping[str, Errors] = {}
    if proof:
        errors = _prove(whole, [part.model for part in parts], {}, context)
    return PartedModel(tuple(parts), tuple(index.required_inputs), tuple(index.outputs), errors)


def _known_as(node: NodeProto) -> str:
    return node.name or node.output[0]


def _stages_at(index: GraphIndex, values: Sequence[str]) -> list[int]:
    """The part of each node: the first cut that needs it, or the last part."""
    numbers = [len(values)] * len(index.own)
    for name in values:
        if name not in index.producers:
            raise PolicyError(f"split: no node makes a value {name!r}{nearest(name, index.producers)}")
    for cut, name in reversed(list(enumerate(values))):
        for node in index.ancestors([name]):
            numbers[index.positions[next(filter(None, node.output))]] = cut
    return numbers


def _stages_by_bytes(model: DetachedModel, most: int) -> list[int]:
    numbers, part, size = [], 0, 0
    seen = set[str]()
    stored = model.index.initializers
    for node in model.index.own:
        new = {name for name in reads_of(node) if name in stored and name not in seen}
        more = sum(_bytes_of(model, name) for name in new)
        if more > most:
            raise PolicyError(
                f"split: {_known_as(node)!r} alone has {more:,} bytes of weights, and a part may have {most:,}"
            )
        if size + more > most:
            part, size, seen = part + 1, 0, set()
            new = {name for name in reads_of(node) if name in stored}
            more = sum(_bytes_of(model, name) for name in new)
        size, seen = size + more, seen | new
        numbers.append(part)
    return numbers


def _bytes_of(model: DetachedModel, name: str) -> int:
    tensor = model.index.initializers[name]
    weight = model.weight(tensor)
    return model.array(tensor).nbytes if weight is None else weight.data.nbytes


def _stages_by_module(index: GraphIndex, glob: str) -> list[int]:
    labels, known = [], dict[str, None]()
    for node in index.own:
        path = module_path_of(node)
        paths = path.paths if path is not None else ()
        known |= dict.fromkeys(paths)
        labels.append(next((name for name in paths if name and fnmatchcase(name, glob)), ""))
    if not any(labels):
        raise PolicyError(f"split: no torch module of this model is {glob!r}{nearest(glob, known)}")
    return _stages_by_label(index, labels)


def _stages_by_label(index: GraphIndex, labels: Sequence[str]) -> list[int]:
    """Parts of nodes with one label each; a part comes after all parts that feed it, and as early as it can."""
    found: list[tuple[str, int]] = []
    level: dict[str, int] = {}
    for node, label in zip(index.own, labels, strict=True):
        need = max((level[name] for name in reads_of(node) if name in level), default=0)
        fitting = [at for at, (name, _) in enumerate(found) if name == label and at >= need]
        stage = fitting[0] if fitting else len(found)
        if not fitting:
            found.append((label, stage))
        level |= dict.fromkeys(node.output, stage)
    return [level[next(filter(None, node.output))] for node in index.own]


def _cut_parts(model: DetachedModel, numbers: Sequence[int], encodings: Mapping[str, Encoding]) -> list[ModelPart]:
    index = model.index
    used = sorted(set(numbers))
    groups = [[node for node, number in zip(index.own, numbers, strict=True) if number == part] for part in used]
    parts = []
    for part_index, nodes in enumerate(groups):
        made = computed_values(nodes)
        later = {
            name for group in groups[part_index + 1 :] for node in group for name in reads_of(node)
        } | index.outputs.keys()
        # What is computed from stored tensors alone is computed again in each part that reads it.
        ends = [name for name in made if name in index.outputs or (name in later and name not in index.folded)]
        if not ends:
            continue
        given = [name for name in values_read(nodes) if name in index.producers and name not in index.folded]
        part = cut_out(model, sorted(given, key=index.positions.__getitem__), ends)
        broken = what_is_invalid(part)
        if broken:
            raise StepFailed(f"split: part {part_index} is not valid ONNX: {broken}")
        names = {*GraphIndex(part.proto.graph).producers, *part.index.initializers, *part.index.inputs}
        own = {name: encoding for name, encoding in encodings.items() if name in names}
        parts.append(ModelPart(f"part{len(parts)}", part, own))
    return parts


@dataclass(frozen=True, slots=True)
class MergedModel:
    """Two models as one, the errors of its outputs against the two one after the other, and the encodings of both."""

    model: DetachedModel
    errors: Mapping[str, Errors]
    encodings: Mapping[str, Encoding]


def merge(
    first: onnx.ModelProto | str | Path | DetachedModel,
    second: onnx.ModelProto | str | Path | DetachedModel,
    map: Mapping[str, str],
    *,
    encodings: tuple[Mapping[str, Encoding], Mapping[str, Encoding]] = ({}, {}),
    proof: bool = True,
    context: PassContext | None = None,
) -> MergedModel:
    """Join two models: outputs of the first become inputs of the second.

    Names of the second that the first has too get `_2` after them. Outputs of the first that are not mapped stay
    outputs.

    Args:
        first: a path, a message or a DetachedModel; it stays as it is.
        second: the model that runs after it, in any of these forms.
        map: output of the first → the input of the second that it feeds.
        encodings: those of the first model and those of the second, by tensor.
        proof: run both one after the other, and the merged model, on draws; compare the outputs.
        context: where to work, for who merges several models.

    Returns:
        A MergedModel: `model`, `errors` of each output, and `encodings` by the names of the merged model.

    Raises:
        PolicyError: no such output or input, or two types that do not fit; or a value has one encoding in the first
            model and another in the second.
        UsageError: encodings of a tensor that a model does not have.
        StepFailed: the merged model computes something else, or is not valid.

    Example:
        >>> import onnxline
        >>> merged = onnxline.merge("model.onnx", "model.onnx", {"y": "x"})
        >>> [*merged.errors]
        ['y_2']
    """
    one, two = (open_model(model).without_functions() for model in (first, second))
    outputs, inputs = one.index.outputs, two.index.required_inputs
    for names, known, what in ((map, outputs, "A has no output"), (map.values(), inputs, "B has no input")):
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f"; it has: {', '.join(known)}"
                raise PolicyError(f"merge: {what} {name!r}{hint}")
    if not map:
        raise PolicyError("merge: found no pair; expected an output of A with the input of B that it feeds")
    if opset_of(one.proto) != opset_of(two.proto):
        raise PolicyError(
            f"merge: A has opset {opset_of(one.proto)} and B {opset_of(two.proto)}; bring one to the other's with "
            "`onnxline convert-opset`"
        )
    for old, new in map.items():
        if contradicts(outputs[old].type, inputs[new].type):
            found = f"{format_type(outputs[old])}, and B's {new!r} is {format_type(inputs[new])}"
            raise PolicyError(f"merge: A's {old!r} is {found}; give both one type, by `onnxline fix-shapes` say")
    own = [fit_encodings(known, model) for known, model in zip(encodings, (one, two), strict=True)]
    left, right = one.copy_proto(), two.copy_proto()
    taken = {name for name in _all_names(left) if name in _all_names(right)}
    renamed = {name: _free(name, left, right) for name in taken}
    right = _rename(right, renamed)
    pairs = [(old, renamed.get(new, new)) for old, new in map.items()]
    ends = [*(name for name in outputs if name not in map), *(info.name for info in right.graph.output)]
    graph = compose.merge_graphs(left.graph, right.graph, pairs, outputs=ends)  # without the checker: weights stand in
    whole = left
    whole.graph.CopyFrom(graph)
    whole.ir_version = max(left.ir_version, right.ir_version)
    domains = {entry.domain for entry in whole.opset_import}
    whole.opset_import.extend(entry for entry in right.opset_import if entry.domain not in domains)
    merged = DetachedModel(whole, {**one.weights, **two.weights})
    broken = what_is_invalid(merged)
    if broken:
        raise StepFailed(f"merge: the result is not valid ONNX: {broken}")
    carried = _join_encodings(own[0], {{**renamed, **_inverse(map)}.get(name, name): e for name, e in own[1].items()})
    if not proof:
        return MergedModel(merged, {}, carried)
    names = {renamed.get(new, new): new for new in (*inputs, *two.index.outputs)}
    errors = _prove(merged, [one, two], {"map": dict(map), "names": names}, context)
    return MergedModel(merged, errors, carried)


def _inverse(map: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in map.items()}


def _join_encodings(first: Mapping[str, Encoding], second: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of both models, by the names of the merged one.

    Raises:
        PolicyError: they differ at a value that one model makes and the other reads.
    """
    for name in first.keys() & second.keys():
        one, other = first[name], second[name]
        alike = (one.precision, one.axis) == (other.precision, other.axis)
        same = all(np.array_equal(getattr(one, key), getattr(other, key)) for key in ("scale", "zero_point"))
        if not (alike and same):
            raise PolicyError(
                f"merge: A makes {name!r} with one encoding, and B reads it with another; expected one encoding of a "
                "value: calibrate both on the same data, or leave one of the two out"
            )
    return {**second, **first}


def _all_names(proto: onnx.ModelProto) -> set[str]:
    graph = proto.graph
    entries = (*graph.input, *graph.output, *graph.initializer, *graph.value_info)
    names = {entry.name for entry in entries} | {name for node in graph.node for name in (*node.input, *node.output)}
    return (names | {node.name for node in graph.node}) - {""}


def _free(name: str, *protos: onnx.ModelProto) -> str:
    known, count = {text for proto in protos for text in _all_names(proto)}, 2
    while f"{name}_{count}" in known:
        count += 1
    return f"{name}_{count}"


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    graph = proto.graph
    replace_all_uses_with(graph.node, names)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.name = names.get(node.name, node.name)
    for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info):
        entry.name = names.get(entry.name, entry.name)
    return proto


def _prove(
    whole: DetachedModel,
    parts: Sequence[DetachedModel],
    joined: Mapping[str, Mapping[str, str]],
    context: PassContext | None,
) -> Mapping[str, Errors]:
    """The errors of `whole` against the chain of `parts`; both run on the draws of a proof.

    Raises:
        StepFailed: an output is out of tolerance.
    """
    with nullcontext(context) if context else open_context() as context, limit_runs(context, whole):
        draws = [draw.feeds for draw in draw_inputs(match_models(whole, whole), context)]
        errors = context.proofs.ask(
            measure_chain,
            whole=portable(whole, context.spill),
            parts=[portable(part, context.spill) for part in parts],
            joined={key: dict(names) for key, names in joined.items()},
            draws=draws,
            computed_in=computed_types(whole, whole.index.outputs),
        )
    bad = [f"{name}: {found.why}" for name, found in errors.items() if not found.ok]
    if bad:
        raise StepFailed(f"the parts compute something else than the whole: {'; '.join(bad[:3])}")
    return errors


def measure_chain(
    whole: MappedModel,
    parts: Sequence[MappedModel],
    joined: Mapping[str, Mapping[str, str]],
    draws: Sequence[Mapping[str, np.ndarray]],
    computed_in: Precisions,
) -> dict[str, Errors]:
    """In the proof worker: run the parts in order, each on what was given and what the parts before have made.

    Args:
        whole: the model whose outputs are expected.
        parts: the models that compute them together, in the order in which they run.
        draws: arrays by the names of the inputs of `whole`, once for each run.
        computed_in: the types that `whole` computes each output in, by which tolerances are chosen.
        joined: for a merged model, `map` from outputs of the first part to inputs of the second, and `names` from names
            in the whole to those of the second part.
    """
    session, chain = whole.session(), [part.session() for part in parts]
    map_, names = joined.get("map", {}), joined.get("names", {})
    measured = []
    for feeds in draws:
        expected = session.run(feeds)
        known: dict[str, np.ndarray] = dict(feeds)
        for index, part in enumerate(chain):
            given = known
            if index and names:
                given = {new: known[old] for old, new in names.items() if old in feeds}
                given |= {new: known[old] for old, new in map_.items()}
            made = part.run(given)
            back = {new: old for old, new in names.items()} if index else {}
            known |= {back.get(name, name): array for name, array in made.items()}
        measured.append(
            {name: compare(known[name], expected[name], computed_in=computed_in.get(name)) for name in expected}
        )
    return worst_errors(measured)
