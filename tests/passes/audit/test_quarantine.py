"""`skip: [unsafe]` leaves out what the audit of the installed releases has found."""

from __future__ import annotations

from pathlib import Path

import pytest

import passes
from passes.audited import Finding, table_of, table_text
from passes.audited.quarantine import check_quarantine, quarantined
from passes.errors import PolicyMistake
from passes.groups import groups_of
from passes.policy import Policy
from passes.result import Status
from passes.versions import library_versions
from tests.passes.models import attention

NAMES = ("eliminate_shape_op", "eliminate_identity", "onnxslim", "onnxsim", "onnxsim/fuse_qkv")


def write_table(folder: Path, version: str, *findings: Finding) -> Path:
    table = table_of("onnxoptimizer", version, ["nop", "eliminate_identity"], findings, {"node": 1}, {})
    folder.mkdir(exist_ok=True)
    (folder / f"onnxoptimizer-{version}.txt").write_text(table_text(table), encoding="utf-8")
    return folder


def test_what_our_tables_say() -> None:
    unsafe = quarantined("unsafe")
    assert {"eliminate_shape_op", "eliminate_if_with_const_cond", "eliminate_consecutive_idempotent_ops"} <= unsafe
    assert unsafe.isdisjoint({"nop", "eliminate_identity", "onnxsim", "onnxsim/eliminate_shape_op"})
    assert "unsafe" in groups_of("eliminate_shape_op")
    assert quarantined("fusions") == frozenset()


def test_a_run_without_the_unsafe_ones() -> None:
    run = passes.optimize(attention(), recipe=["eliminate_shape_op", "eliminate_identity"], skip=["unsafe"])
    assert [(row.name, row.status, row.reason) for row in run.rows] == [
        ("eliminate_shape_op", Status.SKIPPED, "skip: unsafe names eliminate_shape_op"),
        ("eliminate_identity", Status.RAN, ""),
    ]


def test_a_folder_of_ones_own_comes_before_ours(tmp_path: Path) -> None:
    version = library_versions()["onnxoptimizer"]
    folder = write_table(tmp_path / "tables", version, Finding("eliminate_identity", "wrong", "models/mine"))
    policy = Policy((f"unsafe:{folder}",))
    policy.check(NAMES)
    assert [name for name in NAMES if policy.skips(name)] == ["eliminate_identity", "onnxslim"]


def test_a_release_that_nobody_has_audited_is_refused() -> None:
    """A quarantine that knows nothing of what it guards would be a false comfort."""
    installed = {**library_versions(), "onnxoptimizer": "9.9", "onnxsim": "9.8", "onnxslim": "9.7"}
    with pytest.raises(PolicyMistake, match=r"none of onnxoptimizer 9\.9, only of 0\.4\.2; run `onnxline audit --only"):
        check_quarantine("unsafe", NAMES, installed)
    installed["onnxoptimizer"] = "0.4.2"
    with pytest.raises(PolicyMistake, match=r"none of onnxsim 9\.8"):
        check_quarantine("unsafe", NAMES, installed)
    check_quarantine("unsafe", NAMES[:4], installed)  # neither onnxsim nor onnxslim is in the recipe


def test_a_folder_without_tables(tmp_path: Path) -> None:
    with pytest.raises(PolicyMistake, match="no table of an audit in"):
        Policy((f"unsafe:{tmp_path}",)).check(NAMES)
