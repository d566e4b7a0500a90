"""`onnxline passes` and `onnxline passes show NAME`, as people and programs see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from passes.advisories import AuditFinding, table_of, table_text
from passes.catalog.listing import GALLERY
from passes.errors import PolicyError
from passes.recipe.recipe import library_versions
from pipeline.cli import app
from pipeline.commands.passes import FORMAT_VERSION
from tests.support.paths import ROOT


def onnxline(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["passes", *arguments], catch_exceptions=False)


def passes_of(*arguments: str) -> list[dict[str, Any]]:
    data = json.loads(onnxline("--json", *arguments).stdout)
    assert data["format_version"] == FORMAT_VERSION
    assert {"onnxsim", "onnxoptimizer", "onnx"} <= set(data["versions"])
    return data["passes"]


def test_the_list_has_every_library_and_fits_a_page() -> None:
    shown = onnxline()
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert "\x1b" not in shown.stdout
    assert lines[0].startswith("steps of a recipe")
    rows = {line.split()[0]: line.split()[1:] for line in lines if line and not line.startswith(" ")}
    assert rows["fuse_qkv"] == ["default", "structure", "fusions"]
    assert rows["onnxsim/fuse_attention"] == ["default", "values", "fusions"]
    assert rows["onnxsim/nf4"] == ["extra", "values", "quantizing"]
    assert rows["onnxsim/eliminate_shape_gather"][0] == "never"
    assert rows["infer_shapes"] == ["extra", "structure"]
    below = lines[next(i for i, line in enumerate(lines) if line.startswith("fuse_qkv ")) + 1]
    assert below.startswith("    Merge three MatMuls")
    assert below.endswith("May destroy: qkv.")


def test_filters_narrow_the_list() -> None:
    ours = passes_of("--source", "onnxsim")
    assert {row["source"] for row in ours} == {"onnxsim"}
    assert {"onnxsim", "onnxsim/fuse_qkv", "onnxsim/nf4"} <= {row["name"] for row in ours}
    theirs = passes_of("--source", "onnxoptimizer")
    assert [row for row in theirs if "layout" in row["groups"]] == passes_of(
        "--source", "onnxoptimizer", "--group", "layout"
    )
    destroying = passes_of("--source", "onnxoptimizer", "--destroys", "qkv")
    assert "fuse_qkv" in {row["name"] for row in destroying}
    assert destroying == [row for row in theirs if "qkv" in row["destroys"]]
    assert "no pass of this installation is all of that" in onnxline("--source", "onnx", "--group", "fusions").stdout


def test_a_composite_step_says_what_is_destroyed_inside_of_it() -> None:
    said = " ".join(onnxline("show", "onnxsim").stdout.split())
    destroyed = said.partition(" destroys ")[2].partition(", each by a pass inside of it")[0].split(", ")
    assert {"qkv", "attention", "batchnorm", "rope"} <= set(destroyed)


def test_a_quarantine_is_a_group_too(tmp_path: Path) -> None:
    findings = [AuditFinding("eliminate_identity", "wrong", "models/mine")]
    table = table_of("onnxoptimizer", library_versions()["onnxoptimizer"], ["eliminate_identity"], findings, {}, {})
    (tmp_path / "mine.txt").write_text(table_text(table), encoding="utf-8")
    ours = {row["name"] for row in passes_of("--source", "onnxoptimizer", "--group", "unsafe")}
    theirs = {row["name"] for row in passes_of("--source", "onnxoptimizer", "--group", f"unsafe:{tmp_path}")}
    assert theirs == ours | {"eliminate_identity"} != ours


def test_json_has_all_that_is_known_of_a_pass() -> None:
    [row] = [row for row in passes_of("--source", "onnxoptimizer") if row["name"] == "fuse_qkv"]
    assert row == {
        "name": "fuse_qkv",
        "source": "onnxoptimizer",
        "runs": "default",
        "does": "Merge three MatMuls that read the same value into one, with a Split after it",
        "reads": "structure",
        "groups": ["fusions"],
        "destroys": ["qkv"],
        "note": "",
        "options": {},
    }


SHOWN = """\
eliminate_identity, a pass of onnxoptimizer
  does       Drop Identity
  runs       wherever a recipe says `default`, and wherever a recipe names it
  reads      structure: operators, attributes, shapes, constants such as axes; never what is in a
             weight
  groups     eliminations
  destroys   nothing that onnxline knows of
  same name  onnxsim/eliminate_identity

Identity passes its input on.

before
  example (float[2,3] x) => (float[2,3] y) {
     same = Identity (x)
     y = Relu (same)
  }

after
  example (float[2,3] x) => (float[2,3] y) {
     y = Relu (x)
  }
"""


def test_show_runs_the_pass_on_a_small_model() -> None:
    assert onnxline("show", "eliminate_identity").stdout == SHOWN


def test_show_says_what_stays_behind_and_elides_weights() -> None:
    shown = onnxline("show", "fuse_qkv").stdout
    assert "float[8,8] wq," in shown
    assert "Concat <axis = 1> (wq, wk, wv)" in shown
    assert "2 operators are left that nothing reads; eliminate_deadend removes them." in shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_show_finds_a_pass_inside_of_a_step_by_its_bare_name() -> None:
    shown = onnxline("show", "fuse_gelu").stdout
    assert shown.startswith("onnxsim/fuse_gelu, a pass of onnxsim\n")
    assert "y = Gelu (x)" in shown.partition("\nafter\n")[2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("onnxsim/nop", "No picture: it does nothing, on purpose."),
        ("onnxsim/gguf_q4_k", "No picture in this release of onnxline."),
        ("onnxsim/extract_constant_to_initializer", "It is listed, but never run: onnxsim keeps constants apart"),
    ],
)
def test_show_says_why_there_is_nothing_to_see(name: str, words: str) -> None:
    shown = onnxline("show", name)
    assert shown.exit_code == 0
    assert words in shown.stdout
    assert "\nafter\n" not in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("show", "onnxsim/fuse_atention"),
            "no pass named 'onnxsim/fuse_atention'; did you mean 'onnxsim/fuse_attention'",
        ),
        (("--group", "unsafe:/nowhere"), "unsafe:/nowhere: no table of an audit in '/nowhere'"),
        (("--group", "fusion"), "no group named 'fusion'; did you mean 'fusions'"),
        (("--source", "onnxsimm"), "no source named 'onnxsimm'; did you mean 'onnxsim'"),
        (("--destroys", "qvk"), "no kind of structure named 'qvk'; did you mean 'qkv'"),
    ],
)
def test_unknown_names_are_mistakes_with_the_nearest_name(arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(PolicyError) as mistake:
        onnxline(*arguments)
    assert words in str(mistake.value)
    assert mistake.value.exit_code == 2


def test_it_works_without_torch(tmp_path: Path) -> None:
    """Also in the worker, which gets the same path."""
    absent = tmp_path / "torch.py"
    absent.write_text('raise ModuleNotFoundError("torch is not installed", name="torch")\n')
    paths = [str(tmp_path), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.cli", "passes", "show", "onnxsim/fuse_gelu"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 0, done.stderr
    assert "y = Gelu (x)" in done.stdout


def test_the_gallery_is_part_of_the_package() -> None:
    """What pyproject.toml packs holds every picture."""
    data = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packed = {file for pattern in data["passes"] for file in (ROOT / "passes").glob(pattern)}
    assert set(GALLERY.iterdir()) <= packed
