"""Split a model into files that feed each other, and merge two models into one, with their encodings; proven by running
the whole and the chain of its parts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from passes.context import PassContext
from passes.diff.formats import distance_text
from passes.encodings.aimet import AimetVersion, aimet_text_of
from passes.encodings.encoding import Encoding, fit_encodings
from passes.errors import PolicyError, StepFailed
from passes.graph.index import GraphIndex, computed_values, values_read
from passes.graph.traversal import read_names, reads_of
from passes.model.analysis import what_is_invalid
from passes.model.signature import fill_in_outputs
from passes.proof.numbers import Errors
from passes.provenance.annotations import known_as, module_path_of
from passes.rewrites.interface import cut_out
from passes.rewrites.merge import join_models, pairs_of
from passes.suggest import is_named, nearest, plural
from passes.tools.chain import UNPROVEN, prove_chain
from passes.visible import Table, TableResult
from passes.weights.detached import DetachedModel, attach, open_model
from passes.weights.files import write_errors, write_file, write_model

MANIFEST: Final = "manifest.json"


class WritableModel:
    """What `model` holds, as a file or a message."""

    __slots__ = ()

    model: DetachedModel

    def save(self, path: str | PathLike[str]) -> None:
        """Write the model; above 100 MB its weights go to a file next to it.

        Raises:
            UsageError: the file cannot be written; an existing file is unchanged.
        """
        write_model(self.model, path)

    def to_proto(self) -> onnx.ModelProto:
        """The model as one message, with its weights.

        Raises:
            ModelError: it has more than 2 GiB; `save` it.
        """
        return attach(self.model)


@dataclass(frozen=True, slots=True, repr=False)
class ModelPart(TableResult, WritableModel):
    """One part of a model: its name, what it takes and gives, and the values of these names in `model`.

    `label` is the torch module of the part, or `taken` or `refused` by a target; empty where the way of the split says
    neither.
    """

    name: str
    model: DetachedModel
    encodings: Mapping[str, Encoding]
    label: str = ""

    @property
    def inputs(self) -> list[str]:
        return list(self.model.index.required_inputs)

    @property
    def outputs(self) -> list[str]:
        return list(self.model.index.outputs)

    def tables(self) -> Iterator[Table]:
        yield Table(f"part {self.name}", [self.row()], TITLES)

    def row(self) -> tuple[str, str, str, str]:
        """The cells below `TITLES`."""
        nodes = plural(len(self.model.proto.graph.node), "node")
        name = f"{self.name} ({self.label})" if self.label else self.name
        return name, nodes, ", ".join(self.inputs), ", ".join(self.outputs)


TITLES: Final = ("part", "nodes", "takes", "gives")
"""Of a table of parts."""


@dataclass(frozen=True, slots=True, repr=False)
class PartedModel(TableResult):
    """The parts of a model, in an order in which they can run, with the errors of their chain against the whole."""

    parts: tuple[ModelPart, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    errors: Mapping[str, Errors]

    def tables(self) -> Iterator[Table]:
        yield Table("parts", [part.row() for part in self.parts], TITLES)
        yield Table("against the whole", [(name, distance_text(errors)) for name, errors in self.errors.items()])

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
                    "label": part.label,
                    "inputs": {name: makers.get(name, "model") for name in part.inputs},
                    "outputs": part.outputs,
                    "bytes": part.model.nbytes(),
                }
                for part in self.parts
            ],
        }

    def save(self, folder: str | PathLike[str], version: AimetVersion = "1.0.0") -> None:
        """Write a file for each part, its encodings where the model has some, and the manifest.

        Args:
            folder: where to write; it is made where it does not exist.
            version: that of AIMET's format for the encodings.

        Raises:
            UsageError: a file cannot be written.
        """
        folder = Path(folder)
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            part.save(folder / f"{part.name}.onnx")
            if any(known.encodings for known in self.parts):
                text = aimet_text_of(part.model, part.encodings, version)
                write_file(folder / f"{part.name}.encodings", text)
        write_file(folder / MANIFEST, json.dumps(self.manifest(), indent=2) + "\n")


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
        at: values at which to cut, in any order; what computes them, and has not been computed before, is a part.
        max_bytes: a part ends before its weights would be more than this.
        module: a glob of torch module paths; each module that it matches is a part, and so is what is between them.
        runs_on: node name, or the first output → whether a target takes it; neighbours that are alike are a part.
        encodings: by tensor; each part gets those of its tensors.
        proof: run the chain of parts and the whole on draws, and compare the outputs.
        context: workers and a folder that several calls share.

    Returns:
        A PartedModel: the parts, with `save(folder)` and `manifest()`.

    Raises:
        PolicyError: no such value or module, or not exactly one way.
        UsageError: encodings of a tensor that the model does not have.
        ModelError: the model does not run, so that its parts cannot be proven.
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
    index, labels = whole.index, list[str]()
    if at:
        if isinstance(at, str):
            raise PolicyError(f"split: at is {at!r}; expected a list of names")
        numbers = _parts_at(index, at)
    elif max_bytes is not None:
        if not isinstance(max_bytes, int | float | np.integer) or max_bytes < 1:
            raise PolicyError(f"split: max_bytes is {max_bytes!r}; expected a number of bytes, such as 1_000_000_000")
        numbers = _parts_by_bytes(whole, max_bytes)
    elif module is not None:
        labels = _modules_of(index, module)
        numbers = _parts_by_label(index, labels)
    else:
        known = dict.fromkeys(known_as(node) for node in whole.proto.graph.node)
        for name in runs_on or {}:
            if name and name not in known:
                raise PolicyError(f"split: runs_on has {name!r}, which is no node of the model{nearest(name, known)}")
        labels = ["taken" if (runs_on or {}).get(known_as(node), True) else "refused" for node in index.own]
        numbers = _parts_by_label(index, labels)
    label_of = dict(zip(numbers, labels, strict=False))  # all nodes of a part have one label; of a cut they have none
    parts = _cut_parts(whole, numbers, fit_encodings(encodings or {}, whole), label_of)
    errors: Mapping[str, Errors] = {}
    if proof:
        errors = prove_chain(whole, [part.model for part in parts], {}, context)
    return PartedModel(tuple(parts), tuple(index.required_inputs), tuple(index.outputs), errors)


def _parts_at(index: GraphIndex, values: Sequence[str]) -> list[int]:
    """The part of each node: the first cut, in the order of the graph, that needs it, or the last part."""
    for name in values:
        if name not in index.producers:
            raise PolicyError(f"split: no node makes a value {name!r}{nearest(name, index.producers)}")
    numbers = [len(values)] * len(index.own)
    for cut, name in reversed(list(enumerate(sorted(values, key=index.positions.__getitem__)))):
        for node in index.ancestors([name]):
            numbers[index.positions[next(filter(None, node.output))]] = cut
    return numbers


def _parts_by_bytes(model: DetachedModel, most: int) -> list[int]:
    numbers, part, size = [], 0, 0
    seen = set[str]()
    stored = model.index.initializers
    for node in model.index.own:
        new = {name for name in reads_of(node) if name in stored and name not in seen}
        more = sum(_bytes_of(model, name) for name in new)
        if more > most:
            raise PolicyError(
                f"split: {known_as(node)!r} alone has {more:,} bytes of weights, and a part may have {most:,}"
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


def _modules_of(index: GraphIndex, glob: str) -> list[str]:
    """For each node the module that the glob matches, or an empty text."""
    labels, known = [], dict[str, None]()
    for node in index.own:
        path = module_path_of(node)
        paths = path.paths if path is not None else ()
        known |= dict.fromkeys(paths)
        labels.append(next((name for name in paths if name and is_named(name, glob)), ""))
    if not any(labels):
        raise PolicyError(f"split: no torch module of this model is {glob!r}{nearest(glob, known)}")
    return labels


def _parts_by_label(index: GraphIndex, labels: Sequence[str]) -> list[int]:
    """Parts of nodes with one label each; a part comes as early as possible after all parts that feed it."""
    found: list[tuple[str, int]] = []
    level: dict[str, int] = {}
    for node, label in zip(index.own, labels, strict=True):
        need = max((level[name] for name in reads_of(node) if name in level), default=0)
        fitting = [at for at, (name, _) in enumerate(found) if name == label and at >= need]
        part = fitting[0] if fitting else len(found)
        if not fitting:
            found.append((label, part))
        level |= dict.fromkeys(node.output, part)
    return [level[next(filter(None, node.output))] for node in index.own]


def _cut_parts(
    model: DetachedModel, numbers: Sequence[int], encodings: Mapping[str, Encoding], label_of: Mapping[int, str]
) -> list[ModelPart]:
    index = model.index
    if not index.own:
        raise PolicyError("split: the model has no node; expected one or more")
    used = sorted(set(numbers))
    stored = [name for name in index.outputs if name in index.initializers]
    groups = [[node for node, number in zip(index.own, numbers, strict=True) if number == part] for part in used]
    parts = []
    for part_index, nodes in enumerate(groups):
        made = computed_values(nodes)
        later = read_names(itertools.chain(*groups[part_index + 1 :])) | index.outputs.keys()
        # What is computed from stored tensors alone is computed again in each part that reads it.
        ends = [name for name in made if name in index.outputs or (name in later and name not in index.folded)]
        if part_index == len(groups) - 1:
            ends += stored
        if not ends:
            continue
        given = [name for name in values_read(nodes) if name in index.producers and name not in index.folded]
        part = cut_out(model, sorted(given, key=index.positions.__getitem__), ends)
        broken = what_is_invalid(part)
        if broken:
            raise StepFailed(f"split: part {part_index} is not valid ONNX: {broken}")
        names = {*GraphIndex(part.proto.graph).producers, *part.index.initializers, *part.index.inputs}
        own = {name: encoding for name, encoding in encodings.items() if name in names}
        parts.append(ModelPart(f"part{len(parts)}", part, own, label_of.get(used[part_index], "")))
    return parts


@dataclass(frozen=True, slots=True, repr=False)
class MergedModel(TableResult, WritableModel):
    """Two models as one, the errors of its outputs against the two one after the other, and the encodings of both."""

    model: DetachedModel
    errors: Mapping[str, Errors]
    encodings: Mapping[str, Encoding]

    def tables(self) -> Iterator[Table]:
        index = self.model.index
        ends = [("takes", ", ".join(index.required_inputs)), ("gives", ", ".join(index.outputs))]
        yield Table("merged model", [("nodes", str(len(index.own))), *ends, ("encodings", str(len(self.encodings)))])
        rows = [(name, distance_text(errors)) for name, errors in self.errors.items()]
        yield Table("against one after the other", rows)


def merge(
    first: onnx.ModelProto | str | Path | DetachedModel,
    second: onnx.ModelProto | str | Path | DetachedModel,
    map: Mapping[str, str | Sequence[str]],
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
        map: output of the first → the input of the second that it feeds, or a list of them; an input of the first feeds
            both models.
        encodings: those of the first model and those of the second, by tensor.
        proof: run both one after the other, and the merged model, on draws; compare the outputs.
        context: workers and a folder that several calls share.

    Returns:
        A MergedModel: `model`, `errors` of each output, and `encodings` by the names of the merged model.

    Raises:
        PolicyError: no such output or input, or two types that do not fit; or a value has one encoding in the first
            model and another in the second.
        UsageError: encodings of a tensor that a model does not have.
        ModelError: the merged model does not run, so that it cannot be proven.
        StepFailed: the merged model computes something else, or is not valid.

    Example:
        >>> import onnxline
        >>> merged = onnxline.merge("model.onnx", "model.onnx", {"y": "x"})
        >>> [*merged.errors]
        ['y_2']
    """
    one, two = (fill_in_outputs(open_model(model).without_functions()) for model in (first, second))
    joined = join_models(one, two, map)
    types = {**one.index.required_inputs, **one.index.outputs}
    lists = [old for old in map if types[old].type.WhichOneof("value") != "tensor_type"]
    if proof and lists:
        raise PolicyError(f"merge: {lists[0]!r} is no tensor, and a proof feeds tensors to a model; {UNPROVEN}")
    own = [fit_encodings(known, model) for known, model in zip(encodings, (one, two), strict=True)]
    merged, renamed = joined.model, joined.renamed
    fed = {new: old for old, new in pairs_of(map)}
    names = {**renamed, **fed}
    carried = _join_encodings(own[0], {names.get(name, name): encoding for name, encoding in own[1].items()})
    if not proof:
        return MergedModel(merged, {}, carried)
    names = {renamed.get(new, new): new for new in (*two.index.required_inputs, *two.index.outputs)}
    errors = prove_chain(merged, [one, two], {"fed": fed, "names": names}, context)
    return MergedModel(merged, errors, carried)


def _join_encodings(first: Mapping[str, Encoding], second: Mapping[str, Encoding]) -> dict[str, Encoding]:
    """The encodings of both models, by the names of the merged one.

    Raises:
        PolicyError: they differ at a value that one model makes and the other reads.
    """
    for name in first.keys() & second.keys():
        left, right = first[name], second[name]
        alike = (left.precision, left.axis) == (right.precision, right.axis)
        same = all(np.array_equal(getattr(left, key), getattr(right, key)) for key in ("scale", "zero_point"))
        if not (alike and same):
            raise PolicyError(
                f"merge: the first model makes {name!r} with one encoding, and the second reads it with another; "
                "expected one of a value: calibrate both models on the same data, or leave one of the encodings out"
            )
    return {**second, **first}
