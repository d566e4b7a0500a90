"""What the judge says of a result, as pictures: the case before, and what some pass might make of it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from passes.audit.cases import Case
from passes.audit.judge import READY, Result, add_marks, differs, judge, what_is_lost

HEAD = '<ir_version: 10, opset_import: ["": 20]>'
BEFORE = "g (float[2, n] x) => (float[2, n] y) { h = Neg (x) y = Abs (h) }"
FEEDS = {"x": np.array([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]], np.float32)}


def model(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f"{HEAD} {text}")


def judge_result(after: onnx.ModelProto, before: str = BEFORE) -> dict[str, str]:
    case = Case("planted/one", model(before), FEEDS)
    ready, (place, verdict) = judge(case, [Result(after.SerializeToString(), True)], 0, True)
    assert (ready, place) == (READY, 0)
    return {kind: why for kind, why in verdict.items() if kind != "lost-metadata"}


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ("g (float[2, n] x) => (float[2, n] y) { y = Abs (x) }", {}),
        ("g (float[2, n] x) => (float[2, n] y) { y = Neg (x) }", {"wrong": "max error 1e+01"}),
        ("g (float[2, n] x) => (float[2, n] y) { y = Transpose (x) }", {"wrong": "shape [3, 2], expected [2, 3]"}),
        ("g (float[2, n] x) => (float[2, n] z) { z = Abs (x) }", {"signature": "other outputs"}),
        ("g (float[2, 3] x) => (float[2, 3] y) { y = Abs (x) }", {"signature": "inputs of another type or size"}),
        ("g (float[2, n] x) => (float[2, 3] y) { y = Abs (x) }", {}),
        ("g (float[2, n] x, float z) => (float[2, n] y) { y = Abs (x) }", {"signature": "+1 inputs"}),
        (
            "g (float[2, n] x) => (float[2, n] y) { h = Neg (x) i = Neg (h) y = Abs (i) }",
            {"grew-nodes": ""},
        ),
        (
            "g (float[2, n] x) => (float[2, n] y) { y = Abs <broken = 1> (x) }",
            {"invalid": "Unrecognized attribute: broken for operator Abs"},
        ),
    ],
)
def test_verdicts(after: str, verdict: dict[str, str]) -> None:
    assert judge_result(model(after)) == verdict


def test_a_result_that_grows_by_a_table_of_numbers() -> None:
    after = model("g (float[2, n] x) => (float[2, n] y) <float[1] w> { y = Abs (x) }")
    after.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1000, np.float32), "table"))
    assert judge_result(after) == {"grew-bytes": ""}


def test_what_was_invalid_before_is_not_called_so_after() -> None:
    broken = "g (float[2, n] x) => (float[2, n] y) { y = Abs <broken = 1> (x) }"
    assert "invalid" not in judge_result(model(broken), before=broken)


def test_random_numbers_are_not_judged() -> None:
    text = "g () => (float[4] y) { y = RandomNormal <shape = [4]> () }"
    case = Case("planted/random", model(text))
    assert next(judge(case, [], 0, True)) == "it draws random values"


def test_metadata_that_is_gone() -> None:
    before = add_marks(model(BEFORE))
    assert what_is_lost(before, before) == ""
    after = onnx.ModelProto()
    after.CopyFrom(before)
    del after.graph.node[1].metadata_props[:]
    after.graph.node[0].doc_string = ""
    after.ClearField("metadata_props")
    assert what_is_lost(before, after) == "the model's metadata, operators' metadata, operators' doc strings"
    del after.graph.node[:]  # what a pass has dropped has lost nothing
    assert what_is_lost(before, after) == "the model's metadata"


@pytest.mark.parametrize(
    ("expected", "got", "why"),
    [
        (np.float32([1, np.nan]), np.float32([1, np.nan]), ""),
        (np.float32([1, np.nan]), np.float32([1, 2]), "NaN or infinity on one side only"),
        (np.float32([1]), np.float64([1]), "dtype float64, expected float32"),
        ([np.float32([1])], np.float32([1]), "a sequence on one side only"),
        (None, np.float32([1]), "an output is None on one side only"),
        (np.array(["a"], object), np.array(["b"], object), "other strings"),
        (np.int64([1, 2]), np.int64([1, 4]), "max error 2"),
    ],
)
def test_how_outputs_differ(expected: object, got: object, why: str) -> None:
    assert differs([expected], [got], 1e-3, 1e-7) == why
