"""Every picture of the gallery runs on the installed libraries, and shows what the catalogue says of its pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from passes.catalog import CatalogEntry, catalog
from passes.catalog.listing import GALLERY, UNPICTURED, example_of, fires, isolate_pass, read_example
from passes.context import PassContext
from passes.external.onnxsim import OnnxSim
from passes.graph.formatting import graph_text
from passes.proof.draws import draw_array
from passes.proof.numbers import compare
from passes.recipe.recipe import OWN_STEPS
from passes.weights.detached import attach, open_model

FILES = sorted(GALLERY.glob("*.onnxtxt"))

NOT_ON_ONNXRUNTIME = {"rewrite_bool_where": "onnxruntime has no Where on bool, which is what the pass is for"}
"""Pictures whose model before the pass only ONNX's reference evaluator can run."""


@dataclass(frozen=True)
class Library:
    rows: tuple[CatalogEntry, ...]
    context: PassContext

    def run_alone(self, row: CatalogEntry, model: onnx.ModelProto) -> onnx.ModelProto:
        return attach(isolate_pass(row, self.rows).apply(open_model(model), self.context).model)


@pytest.fixture(scope="module")
def library(context: PassContext) -> Library:
    return Library(catalog(context), context)


def rows_of_picture(file: Path, rows: Sequence[CatalogEntry]) -> list[CatalogEntry]:
    return [row for row in rows if example_of(row.name) == file and row.runs != "missing"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_pass_fires_on_its_picture_and_keeps_what_is_computed(file: Path, library: Library) -> None:
    rows = rows_of_picture(file, library.rows)
    assert rows, "no pass of this installation has this name"
    model = read_example(file).model
    onnx.checker.check_model(model)
    for row in rows:
        after = library.run_alone(row, model)
        fired = fires(open_model(model), open_model(after))
        assert fired == (row.runs != "never"), row.name
        for seed in ("a", "b"):
            feeds = feeds_of(model, seed)
            for name, expected in outputs_of(model, feeds, reference=file.stem in NOT_ON_ONNXRUNTIME).items():
                errors = compare(expected, outputs_of(after, feeds)[name])
                assert errors.ok, (row.name, name, errors)


def outputs_of(
    model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, reference: bool = False
) -> dict[str, np.ndarray]:
    names = [info.name for info in model.graph.output]
    if reference:
        return dict(zip(names, ReferenceEvaluator(model).run(None, feeds), strict=True))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip(names, session.run(names, feeds), strict=True))


def feeds_of(model: onnx.ModelProto, seed: str) -> dict[str, np.ndarray]:
    stored = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for info in model.graph.input:
        if info.name in stored:
            continue
        tensor = info.type.tensor_type
        shape = [dim.dim_value or 2 for dim in tensor.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
        low, high = (-1.0, 1.0) if "float" in dtype else (0.0, 2.0)
        feeds[info.name] = draw_array(f"{seed}:{info.name}", shape, dtype, low, high)
    return feeds


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_pass_reads(file: Path, library: Library) -> None:
    """On other weights, a pass that reads the structure does the very same and makes no other numbers of its own; one
    that reads values does not."""
    model = read_example(file).model
    for row in rows_of_picture(file, library.rows):
        if row.name in OWN_STEPS or row.runs == "never" or not row.described:
            continue  # a whole step has more in it than its picture shows
        outcomes = [
            outcome(library.run_alone(row, drawn_model), drawn_model) for drawn_model in (model, redrawn(model, "a"))
        ]
        assert (outcomes[0] == outcomes[1]) == (row.reads == "structure"), row.name


def outcome(after: onnx.ModelProto, before: onnx.ModelProto) -> tuple[str, frozenset[bytes]]:
    """The graph without any numbers, and the weights that were not there before."""
    text = " ".join(graph_text(after).split())
    return re.sub(r"( = )?\{[-+0-9.einfa,…]*\}", "", text), frozenset(tensors_of(after) - tensors_of(before))


def tensors_of(model: onnx.ModelProto) -> set[bytes]:
    return {numpy_helper.to_array(tensor).tobytes() for tensor in weights_in(model)}


def weights_in(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    """Float tensors of more than one element, in initializers and Constants."""
    constants = [attribute.t for node in model.graph.node for attribute in node.attribute if attribute.HasField("t")]
    return [
        tensor
        for tensor in (*model.graph.initializer, *constants)
        if tensor.data_type == onnx.TensorProto.FLOAT and int(np.prod(tensor.dims)) > 1
    ]


def redrawn(model: onnx.ModelProto, seed: str) -> onnx.ModelProto:
    """The same model with other numbers in every weight, no two of them equal."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for number, tensor in enumerate(weights_in(copy)):
        array = draw_array(f"{seed}:{number}", list(tensor.dims), "float32", 0.5, 1.0)
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return copy


def test_every_default_pass_and_every_step_has_a_picture_or_a_reason(library: Library) -> None:
    steps = [row.name for row in library.rows if row.name in OWN_STEPS]
    default = [row.name for row in library.rows if row.runs == "default" and row.source in ("onnxoptimizer", "onnxsim")]
    assert len(default) > 90
    lacking = [name for name in (*steps, *default) if example_of(name) is None]
    assert [name for name in lacking if name.rpartition("/")[2] not in UNPICTURED] == []


def test_reasons_are_only_for_what_is_there_and_has_no_picture(library: Library) -> None:
    bare = {row.bare for row in library.rows}
    assert [name for name in UNPICTURED if name not in bare or example_of(name) is not None] == []


def test_an_extra_pass_of_onnxsim_runs_only_where_it_is_named(library: Library) -> None:
    inner = [row for row in library.rows if row.name.startswith("onnxsim/")]
    extra = [row for row in inner if row.runs == "extra" and example_of(row.name)]
    assert len(extra) > 10
    for row in extra:
        model = open_model(read_example(example_of(row.name) or Path()).model)
        unnamed = OnnxSim().without([other.bare for other in inner if other is not row])
        assert not fires(model, unnamed.apply(model, library.context).model), row.name


def test_pictures_hold_no_weights() -> None:
    """A file stays small, and its first line is a sentence."""
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        assert len(text) < 1600, file.name
        assert re.match(r"# [A-Z].*\.\n<ir_version: \d+, opset_import: \[", text), file.name
