"""What the judge says of a result, as pictures: the case before, and what some pass might make of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest

import passes
from passes import PolicyError, Status
from passes.advisories import AuditFinding, table_of, table_text
from passes.advisories.known import check_quarantine, quarantined_by_entry, quarantined_passes
from passes.audit.cases import Case
from passes.audit.judge import READY, Result, add_marks, differs, judge, what_is_lost
from passes.context import PassContext
from passes.policy.policy import Policy, groups_of
from passes.recipe.recipe import library_versions
from tests.support.onnx_models import attention

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


# `skip: [unsafe]` leaves out what the audit of the installed releases has found.

NAMES = ("eliminate_shape_op", "eliminate_identity", "onnxslim", "onnxsim", "onnxsim/fuse_qkv")


TRIED = ("nop", "eliminate_identity")


def write_table(folder: Path, version: str, *findings: AuditFinding, tried: Sequence[str] = TRIED) -> Path:
    table = table_of("onnxoptimizer", version, tried, findings, {"node": 1}, {})
    folder.mkdir(exist_ok=True)
    (folder / f"onnxoptimizer-{version}.txt").write_text(table_text(table), encoding="utf-8")
    return folder


def test_what_our_tables_say() -> None:
    unsafe = quarantined_passes("unsafe")
    assert {"eliminate_shape_op", "eliminate_if_with_const_cond", "eliminate_consecutive_idempotent_ops"} <= unsafe
    assert unsafe.isdisjoint({"nop", "eliminate_identity", "onnxsim", "onnxsim/eliminate_shape_op"})
    assert "unsafe" in groups_of("eliminate_shape_op")
    assert quarantined_passes("fusions") == frozenset()


def test_a_run_without_the_unsafe_ones(context: PassContext) -> None:
    run = passes.optimize(
        attention(), recipe=["eliminate_shape_op", "eliminate_identity"], skip=["unsafe"], context=context
    )
    assert [(row.name, row.status, row.reason) for row in run.rows] == [
        ("eliminate_shape_op", Status.SKIPPED, "skip: unsafe names eliminate_shape_op"),
        ("eliminate_identity", Status.RAN, ""),
    ]


def test_a_folder_of_ones_own_comes_before_ours(tmp_path: Path) -> None:
    version = library_versions()["onnxoptimizer"]
    folder = write_table(tmp_path / "tables", version, AuditFinding("eliminate_identity", "wrong", "models/mine"))
    policy = Policy((f"unsafe:{folder}",))
    policy.check(NAMES, NAMES)
    assert {name for name in NAMES if policy.skips(name)} == {"eliminate_shape_op", "eliminate_identity", "onnxslim"}


def test_of_passes_that_no_table_has_ours_says_more(tmp_path: Path) -> None:
    tried = (*TRIED, "eliminate_shape_op")
    folder = write_table(tmp_path, library_versions()["onnxoptimizer"], tried=tried)
    assert quarantined_passes(f"unsafe:{folder}") == quarantined_passes("unsafe") - {"eliminate_shape_op"}


def test_a_table_that_is_replaced_counts_at_once(tmp_path: Path) -> None:
    version = library_versions()["onnxoptimizer"]
    entry = f"unsafe:{write_table(tmp_path, version)}"
    before = quarantined_by_entry([entry, "fuse_qkv"])
    write_table(tmp_path, version, AuditFinding("eliminate_identity", "wrong", "models/mine"))
    assert set(quarantined_by_entry([entry])[entry]) == {*before[entry], "eliminate_identity"}


def test_a_release_that_nobody_has_audited_is_refused() -> None:
    """A quarantine that knows nothing of what it guards would be a false comfort."""
    installed = {**library_versions(), "onnxoptimizer": "9.9", "onnxsim": "9.8", "onnxslim": "9.7"}
    with pytest.raises(PolicyError, match=r"none for onnxoptimizer 9\.9, only for 0\.4\.2; run `onnxline audit --o"):
        check_quarantine("unsafe", ["eliminate_identity"], installed)
    with pytest.raises(PolicyError, match=r"none for onnxsim 9\.8"):
        check_quarantine("unsafe", ["onnxsim"], installed)
    with pytest.raises(PolicyError, match=r"none for onnx 9\.6"):  # without passes inside of it
        check_quarantine("unsafe", ["infer_shapes"], {"onnx": "9.6"})
    check_quarantine("unsafe", ["onnxscript"], installed)  # no other is in the recipe


def test_a_new_release_of_which_only_some_passes_were_audited(tmp_path: Path) -> None:
    entry, installed = f"unsafe:{write_table(tmp_path, '9.9')}", {"onnxoptimizer": "9.9"}
    check_quarantine(entry, TRIED, installed)
    with pytest.raises(PolicyError, match=r"of fuse_qkv there is none for onnxoptimizer 9\.9"):
        check_quarantine(entry, [*TRIED, "fuse_qkv"], installed)


def test_a_folder_without_tables(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no table of an audit in"):
        Policy((f"unsafe:{tmp_path}",)).check(NAMES, NAMES)
