"""What a whole run draws, where torch runs and the export holds: sizes, whole tables, masks. And what it says of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from passes import Status
from passes.context import PassContext
from passes.proof.prover import Reference
from passes.weights.detached import read_model
from pipeline import Pipeline, RunConfig, RunResult
from pipeline.errors import CheckFailed, SourceError
from pipeline.events import Event, Note
from pipeline.stages.export import describe_ties
from pipeline.stages.source import open_source
from pipeline.verify.references import compute_references, plan_draws
from tests.support.onnx_models import matrix, model_of
from tests.support.paths import TESTS

SIZED = TESTS / "support" / "torch_models" / "sized.py"
HOSTILE = TESTS / "support" / "hostile_passes.py"
X = {"x": {"shape": ["N", 3]}}
TOKENS = {name: {"shape": ["N", "S"], "dtype": "int64"} for name in ("ids", "mask")}


def config(factory: str, inputs: dict[str, Any], **sections: Any) -> RunConfig:
    model = {"factory": f"{SIZED}:{factory}", "inputs": inputs}
    off = {"passes": {"recipe": []}, "runtime": {"backends": []}}
    return RunConfig.from_mapping({"name": factory, "model": model, **off, **sections})


def run(settings: RunConfig, folder: Path) -> RunResult:
    return Pipeline(settings, folder).run()


@pytest.mark.parametrize(
    ("factory", "sizes", "note"),
    [
        ("alone", (2, 3, 4, 7, 8, 9), "not drawn: (N=1) (y: max abs error"),
        ("few", (1, 2, 3, 4), "not drawn: (N=8) (the export holds for N from 2 to 4)"),
    ],
)
def test_a_size_that_the_export_does_not_hold_for_is_left_out_and_said(
    factory: str, sizes: tuple[int, ...], note: str, tmp_path: Path
) -> None:
    settings = config(factory, X, export={"output_names": ["y"]})
    coverage = run(settings, tmp_path / "out").report.coverage
    assert coverage is not None and coverage.sizes == {"N": sizes}
    assert [gap for gap in coverage.not_covered if gap.startswith(note)], coverage.not_covered


def test_a_trace_that_keeps_a_number_of_chunks_says_up_to_which_size_it_holds(tmp_path: Path) -> None:
    events: list[Event] = []
    settings = config("chunked", X, export={"output_names": ["y"]})
    report = Pipeline(settings, tmp_path / "out", events.append).run().report
    assert report.coverage is not None and report.coverage.sizes == {"N": (1, 2, 3, 4)}
    assert any(note.startswith("not drawn: (N=8) (the export holds for N") for note in report.coverage.not_covered)
    (said,) = (event.text for event in events if isinstance(event, Note) and "the export holds" in event.text)
    assert said.startswith("the export holds for N up to 4, which the ONNX file cannot say")


def test_a_default_size_for_which_the_trace_has_no_place_is_left_out_and_said(tmp_path: Path) -> None:
    events: list[Event] = []
    settings = config("pairs", X, export={"output_names": ["y"]})
    report = Pipeline(settings, tmp_path / "out", events.append).run().report
    assert report.coverage is not None and 2 in report.coverage.sizes["N"] and 3 not in report.coverage.sizes["N"]
    said = [event.text for event in events if isinstance(event, Note) and "the export does not hold" in event.text]
    assert len(said) == 1 and said[0].startswith("the export does not hold for N of 3, which the ONNX file cannot say")


def test_dims_of_one_name_set_each_other_no_limit(tmp_path: Path) -> None:
    events: list[Event] = []
    report = Pipeline(config("masked", TOKENS), tmp_path / "out", events.append).run().report
    assert report.coverage is not None and max(report.coverage.sizes["S"]) > 4
    assert not [event.text for event in events if isinstance(event, Note) and "the export" in event.text]


def test_masks_of_zeros_for_which_the_export_differs_are_left_out_and_said(tmp_path: Path) -> None:
    """Of attention to nothing torch gives NaN or some number, and the exported model another."""
    inputs = {"x": {"shape": [2, 6, 4]}, "mask": {"shape": [2, 6], "dtype": "int64"}}
    coverage = run(config("attends", inputs), tmp_path / "out").report.coverage
    assert coverage is not None and coverage.masks == {"mask": ("mixed", "ones")}
    assert [gap for gap in coverage.not_covered if gap.startswith("not drawn: (masks of zeros) (")]


def test_tables_and_masks_of_a_torch_module(context: PassContext) -> None:
    settings = config("words", TOKENS)
    source = open_source(settings)
    references = compute_references(source, plan_draws(source, settings.model, settings.verify), context)
    ids = np.concatenate([draw.feeds["ids"].ravel() for draw in references.draws[1:]])
    assert (ids.min(), ids.max()) == (0, 39)
    masks = [set(draw.feeds["mask"].ravel().tolist()) for draw in references.draws]
    assert {1} in masks and {0} in masks and masks[0] == {0, 1}
    drawn = {(draw.draw.sizes["N"], draw.draw.sizes["S"]) for draw in references.draws if draw.draw is not None}
    assert drawn == {(2, 2), (3, 3), (1, 2), (8, 1), (4, 2), (7, 2), (9, 2)}
    assert [note.partition(" (the model does not run on it")[0] for note in references.skipped] == [
        f"not drawn: S={size}" for size in (7, 8, 13)
    ]


def test_a_range_is_kept_and_its_ends_are_drawn(context: PassContext) -> None:
    inputs = {"ids": {**TOKENS["ids"], "range": [10, 20]}, "mask": {**TOKENS["mask"], "range": [1, 1]}}
    settings = config("words", inputs, verify={"sizes": []})
    source = open_source(settings)
    references = compute_references(source, plan_draws(source, settings.model, settings.verify), context)
    ids = np.concatenate([draw.feeds["ids"].ravel() for draw in references.draws])
    assert (ids.min(), ids.max()) == (10, 19)
    assert {tuple(np.unique(draw.feeds["mask"])) for draw in references.draws} == {(1,)}
    assert [draw.label for draw in references.draws] == [
        "draw 0 (N=2, S=2)",
        "draw 1 (N=2, S=2)",
        "draw 2 (N=3, S=3)",
    ]


def test_a_pass_that_is_wrong_at_batch_1_is_reverted_and_named(tmp_path: Path) -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { h = MatMul (x, w1) y = Tanh (h) }"
    onnx.save(model_of(text, w1=matrix(4, 4, 0)), tmp_path / "model.onnx")
    steps = ["eliminate_identity", {f"{HOSTILE}:at_size": {"size": 1}}, {f"{HOSTILE}:at_size": {"size": 8}}]
    data = {
        "model": {"onnx": str(tmp_path / "model.onnx"), "dims": {"N": [2, 3]}},
        "passes": {"recipe": steps},
        "runtime": {"backends": []},
    }
    report = run(RunConfig.from_mapping(data), tmp_path / "out").report
    assert [row.status for row in report.passes] == [Status.RAN, Status.REVERTED, Status.REVERTED]
    assert report.coverage is not None and report.coverage.sizes == {"N": (1, 2, 3, 4, 7, 8, 9)}
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "size of N" in page and "1, 2, 3, 4, 7, 8, 9" in page


def onnx_config(folder: Path, text: str, **weights: np.ndarray) -> RunConfig:
    onnx.save(model_of(text, **weights), folder / "model.onnx")
    return RunConfig.from_mapping({"model": {"onnx": str(folder / "model.onnx")}})


def test_an_onnx_file_whose_dims_nobody_sizes_is_drawn_where_it_runs(tmp_path: Path, context: PassContext) -> None:
    """The convolution needs 64 samples: the batch stays small."""
    text = "g (float[N, 1, samples] x) => (float[N, 1, frames] y) { y = Conv <strides = [8]> (x, w) }"
    settings = onnx_config(tmp_path, text, w=np.ones((1, 1, 64), np.float32))
    source = open_source(settings)
    references = compute_references(source, plan_draws(source, settings.model, settings.verify), context)
    drawn = [draw.draw.sizes for draw in references.draws if draw.draw is not None]
    assert drawn[:3] == [{"N": 2, "samples": 64}, {"N": 2, "samples": 64}, {"N": 3, "samples": 66}]
    assert {"N": 8, "samples": 64} in drawn
    assert {sizes["samples"] for sizes in drawn} == {64, 66, 69, 70, 75}
    assert [note.partition(" (")[0] for note in references.skipped] == ["not drawn: samples=63"]


def test_an_onnx_file_that_runs_at_no_size_asks_for_sizes(tmp_path: Path, context: PassContext) -> None:
    text = "g (float[3, N] x) => (float[3, 3] y) { y = MatMul (x, w) }"
    settings = onnx_config(tmp_path, text, w=np.ones((7, 3), np.float32))
    source = open_source(settings)
    with pytest.raises(SourceError, match=r"the ONNX file does not run as it is.*set model\.dims: \{N: \[2, 3\]\} to"):
        compute_references(source, plan_draws(source, settings.model, settings.verify), context)


def test_an_export_that_differs_by_ties_says_so(tmp_path: Path) -> None:
    """As of RT-DETR's queries and a router's experts, with random weights."""
    settings = config("best", {"x": {"shape": [1, 84]}}, export={"output_names": ["y"]})
    with pytest.raises(CheckFailed, match=r"what torch computes \(y: .*the TopK '.*' chooses among equal values"):
        run(settings, tmp_path / "out")


SCORES = "g (float[1, 4] x) => (float[1, 4] s, int64[N] y) { s = Add (x, one) y = CHOICE (s) }"


@pytest.mark.parametrize(
    ("choice", "scores", "tied"),
    [
        ("ArgMax <axis = 1>", [0.5, 3, 1, 3], True),
        ("ArgMax <axis = 1>", [1, 1, 3, 0.5], False),
        ("ArgMin <axis = -1>", [1e-9, 2, 0, 900], True),  # equal against the rounding of the largest
        ("ArgMin <axis = -1>", [0.1, 2, 0, 900], False),
    ],
)
def test_a_choice_among_equal_values(choice: str, scores: list[float], tied: bool, tmp_path: Path) -> None:
    onnx.save(model_of(SCORES.replace("CHOICE", choice), one=np.float32(1)), tmp_path / "m.onnx")
    reference = Reference({"x": np.array([scores], np.float32)}, {})
    said = describe_ties(read_model(tmp_path / "m.onnx"), [reference])
    assert said.startswith(f"the {choice.split()[0]} '' chooses among equal values") == tied


@pytest.mark.parametrize(("scale", "noted"), [(0, True), (1e-30, False)])
def test_an_output_of_zeros_alone_is_named(scale: float, noted: bool, tmp_path: Path) -> None:
    text = """g (float[2, 4] x) => (float[2, 4] h, float[2, 4] y, int64[2] i, int4[2, 4] n, bool[2, 4] b) {
        h = MatMul (x, w) y = MatMul (h, s) z = Sub (x, x) i = ArgMax <axis = 1, keepdims = 0> (z)
        n = QuantizeLinear <output_dtype = 22> (z, one) b = Greater (z, one) }"""
    weights = {"w": matrix(4, 4, 0), "s": np.full((4, 4), scale, np.float32), "one": np.float32(1)}
    onnx.save(model_of(text, 21, **weights), tmp_path / "m.onnx")
    off = {"passes": {"recipe": []}, "runtime": {"backends": []}}
    events: list[Event] = []
    settings = RunConfig.from_mapping({"model": {"onnx": "m.onnx"}, **off}, tmp_path)
    Pipeline(settings, tmp_path / "out", events.append).run()
    assert [event.text for event in events if isinstance(event, Note) and "0 on every draw" in event.text] == [
        "output y is 0 on every draw, so errors of the export and of a runtime do not show there; "
        "take trained weights, or weights that do not begin as zeros"
    ] * noted


def test_outputs_without_numbers_are_said_to_be_compared_by_shape_alone(tmp_path: Path, context: PassContext) -> None:
    onnx.save(
        model_of("g (float[2] x) => (float[0] y) { y = Slice (x, zero, zero) }", zero=np.zeros(1, np.int64)),
        tmp_path / "m.onnx",
    )
    settings = RunConfig.from_mapping({"model": {"onnx": "m.onnx"}}, tmp_path)
    source = open_source(settings)
    references = compute_references(source, plan_draws(source, settings.model, settings.verify), context)
    assert (
        "no number: every output is empty on every draw, so only shapes and dtypes are compared" in references.skipped
    )


def test_the_sizes_that_run_are_known_after_the_run(tmp_path: Path) -> None:
    """The convolution needs 64 samples, and the mean of a row without a one is no number."""
    text = """g (float[N, 1, samples] x, int64[N] kept, int64[N] ids) => (float[N, 4, frames] y) {
        h = Conv <strides = [8]> (x, w) row = Gather (table, ids) one = Unsqueeze (row, last)
        n = Cast <to = 1> (kept) c = Unsqueeze (n, both) m = Mul (h, c) d = Div (m, c) y = Add (d, one)
    }"""
    weights = {"w": np.ones((4, 1, 64), np.float32), "table": matrix(50, 4, 0)}
    axes = {"last": np.array([2]), "both": np.array([1, 2])}
    result = run(onnx_config(tmp_path, text, **weights, **axes), tmp_path / "out")
    assert result.sampler is not None and result.sampler.sizes == {"N": 2, "samples": 64}
    drawn = [result.sampler.draw(seed) for seed in range(3)]
    assert {array.shape for feeds in drawn for array in (feeds["x"],)} == {(2, 1, 64)}
    assert {number for feeds in drawn for number in feeds["kept"].tolist()} == {1}
    assert {0, 49} <= {number for feeds in drawn for number in feeds["ids"].tolist()}
