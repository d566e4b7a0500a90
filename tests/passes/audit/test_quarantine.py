"""`skip: [unsafe]` leaves out what the audit of the installed releases has found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import passes
from passes.advisories import AuditFinding, table_of, table_text
from passes.advisories.known import check_quarantine, quarantined_by_entry, quarantined_passes
from passes.context import PassContext
from passes.errors import PolicyError
from passes.policy.policy import Policy, groups_of
from passes.recipe.recipe import library_versions
from passes.run.result import Status
from tests.support.onnx_models import attention

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
