"""Merge two models into one, with the encodings of both, proven by running them one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from passes.context import PassContext
from passes.diff.formats import distance_text
from passes.encodings.encoding import Encoding, fit_encodings
from passes.errors import PolicyError
from passes.proof.numbers import Errors
from passes.rewrites.merge import join_models
from passes.tools.parts import prove_chain
from passes.visible import Table, TableResult
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
    joined = join_models(one, two, map)
    own = [fit_encodings(known, model) for known, model in zip(encodings, (one, two), strict=True)]
    merged, renamed = joined.model, joined.renamed
    carried = _join_encodings(own[0], {{**renamed, **_inverse(map)}.get(name, name): e for name, e in own[1].items()})
    if not proof:
        return MergedModel(merged, {}, carried)
    names = {renamed.get(new, new): new for new in (*two.index.required_inputs, *two.index.outputs)}
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
                f"merge: the first model makes {name!r} with one encoding, and the second reads it with another; "
                "expected one of a value: calibrate both models on the same data, or leave one of the encodings out"
            )
    return {**second, **first}
