"""Merge two models into one, with the encodings of both, proven by running them one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import compose

from passes.context import PassContext
from passes.diff.formats import distance_text
from passes.encodings.encoding import Encoding, fit_encodings
from passes.errors import PolicyError, StepFailed
from passes.graph.formatting import format_type
from passes.graph.index import replace_all_uses_with, take_name
from passes.graph.op_facts import opset_of
from passes.model.analysis import what_is_invalid
from passes.model.signature import contradicts
from passes.proof.numbers import Errors
from passes.suggest import nearest
from passes.tables import Table, TableResult
from passes.tools.parts import prove_chain
from passes.weights.detached import DetachedModel, open_model


@dataclass(frozen=True, slots=True, repr=False)
class MergedModel(TableResult):
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
    one, two = (open_model(model).without_functions() for model in (first, second))
    outputs, inputs = one.index.outputs, two.index.required_inputs
    for names, known, what in ((map, outputs, "A has no output"), (map.values(), inputs, "B has no input")):
        for name in names:
            if name not in known:
                hint = nearest(name, known) or f"; it has: {', '.join(known) or 'none'}"
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
    known = _all_names(left) | _all_names(right)
    renamed = {name: take_name(name, known) for name in sorted(taken)}
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
    errors = prove_chain(merged, [one, two], {"map": dict(map), "names": names}, context)
    return MergedModel(merged, errors, carried)


def _inverse(map: Mapping[str, str]) -> dict[str, str]:
    return {new: old for old, new in map.items()}


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
                f"merge: A makes {name!r} with one encoding, and B reads it with another; expected one encoding of a "
                "value: calibrate both on the same data, or leave one of the two out"
            )
    return {**second, **first}


def _all_names(proto: onnx.ModelProto) -> set[str]:
    graph = proto.graph
    entries = (*graph.input, *graph.output, *graph.initializer, *graph.value_info, *_sparse_parts(graph))
    names = {entry.name for entry in entries} | {name for node in graph.node for name in (*node.input, *node.output)}
    return (names | {node.name for node in graph.node}) - {""}


def _rename(proto: onnx.ModelProto, names: Mapping[str, str]) -> onnx.ModelProto:
    graph = proto.graph
    replace_all_uses_with(graph.node, names)
    for node in graph.node:
        node.output[:] = [names.get(name, name) for name in node.output]
        node.name = names.get(node.name, node.name)
    for entry in (*graph.input, *graph.output, *graph.initializer, *graph.value_info, *_sparse_parts(graph)):
        entry.name = names.get(entry.name, entry.name)
    return proto


def _sparse_parts(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
