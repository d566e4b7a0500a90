"""`onnxline bisect`: what it says, what it writes, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx
import onnxoptimizer
import pytest
from typer.testing import CliRunner, Result

from passes.errors import PolicyError
from pipeline.cli import app
from pipeline.config import read_recipe, recipe_of_run
from pipeline.errors import ConfigError, UsageError
from tests.support.onnx_models import attention, attention_on_the_input, merged_attention
from tests.support.paths import EXAMPLES, ROOT


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["bisect", *map(str, words)])


@pytest.fixture
def block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with one attention block, in the working directory."""
    monkeypatch.chdir(tmp_path)
    onnx.save(attention(), tmp_path / "block.onnx")
    return tmp_path / "block.onnx"


def test_the_culprit_the_nodes_and_the_file(block: Path) -> None:
    shown = ask(block, "--recipe", "default", "--lost", "qkv")
    assert shown.exit_code == 0, shown.output
    place = onnxoptimizer.get_fuse_and_elimination_passes().index("fuse_qkv") + 1
    lines = shown.stdout.splitlines()
    assert lines[:7] == [
        f"fuse_qkv (onnxoptimizer), step {place} of {len(onnxoptimizer.get_fuse_and_elimination_passes())}",
        "  qkv attention 0: no separate product with the matrix of Q (wq), K (wk), V (wv)",
        "nodes at fault",
        "  - MatMul q",
        "  - MatMul k",
        "  - MatMul v",
        f"  + {lines[6].removeprefix('  + ')}",
    ]
    assert lines[-1] == "what comes next without it: add --skip fuse_qkv"
    small = onnx.load("bisect-block-fuse_qkv.onnx")
    assert f"smallest model: bisect-block-fuse_qkv.onnx, {len(small.graph.node)} nodes (" in shown.stdout
    assert len(small.graph.node) <= 12
    assert not list(Path().glob(".*tmp*"))


def test_json_and_a_place_for_the_file(block: Path, tmp_path: Path) -> None:
    shown = ask(
        block, "--recipe", "onnxoptimizer/fuse_qkv", "--lost", "qkv", "--json", "--out", tmp_path / "to" / "small.onnx"
    )
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert (data["format_version"], data["fault"], data["found"], data["steps"]) == (1, "lost qkv", True, 1)
    culprit = data["culprit"]
    assert (culprit["name"], culprit["inner"], culprit["turn"], culprit["lost"]) == ("fuse_qkv", "", 1, ["attention 0"])
    assert data["smallest"]["file"] == str(tmp_path / "to" / "small.onnx")
    assert data["smallest"]["removed"][0] == {"op": "MatMul", "name": "q", "module": ""}
    assert onnx.load(data["smallest"]["file"]).graph.node


def test_nothing_is_wrong(block: Path) -> None:
    shown = ask(block, "--recipe", "default", "--lost", "qkv", "--skip", "fuse_qkv")
    assert shown.exit_code == 1
    assert shown.stdout.startswith("nothing lost: the one qkv stands, after 38 steps (")
    assert [path.name for path in Path().iterdir()] == ["block.onnx"]


def test_a_crash_is_found_by_error_codes_too(block: Path) -> None:
    onnx.save(attention_on_the_input(), "crash.onnx")
    shown = ask("crash.onnx", "--recipe", "default", "--crash")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("fuse_qkv (onnxoptimizer)")
    assert "\n  - MatMul q0\n  - MatMul k0\n  - MatMul v0\n" in shown.stdout


def test_a_configuration_brings_its_model_and_its_recipe(block: Path) -> None:
    Path("block.yaml").write_text(
        "name: block\nmodel: {onnx: block.onnx}\npasses: {recipe: [nop, fuse_qkv], keep: [qkv]}\n"
    )
    shown = ask("block.yaml", "--lost", "qkv", "--json", "--budget-s", "0")
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    assert (data["steps"], data["culprit"]["name"], data["culprit"]["place"]) == (2, "fuse_qkv", 2)
    assert [line for line in shown.stderr.splitlines() if line.startswith("bisect: ")] == [
        "bisect: exporting the model",
        "bisect: running the recipe",
    ]
    assert ask("block.yaml", "--lost", "qkv", "--recipe", "nop").exit_code == 1, "another recipe"
    refused = ask("block.yaml", "--lost", "qvk").exception
    assert "did you mean" in str(refused)


def test_a_configuration_of_a_torch_model_is_exported(config_file, block: Path) -> None:
    shown = ask(config_file(passes={"recipe": ["onnxsim"]}), "--lost", "qkv", "--budget-s", "0")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("onnxsim/")


def test_numbers(block: Path) -> None:
    model, own = EXAMPLES / "attention.onnx", EXAMPLES / "own_pass.py"
    shown = ask(model, "--recipe", f"nop,{{{own}:fold_scale: {{into: key}}}}", "--error", "1e-9", "--budget-s", "0")
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.startswith("fold_scale (user), step 2 of 2\n  output ")
    assert ask(model, "--recipe", f"{{{own}:fold_scale: {{into: key}}}}", "--error", "1e-3").exit_code == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            [],
            "looks for one thing, found none; expected one of --lost KIND, --error TOLERANCE, --crash and --metric",
        ),
        (["--lost", "qkv", "--crash"], "found --lost and --crash"),
        (["--lost", "gelu"], "--lost: gelu matches nothing in this model, which has no GELU, but "),
        (["--lost", "qkv", "--recipe", "defualt"], "no pass named 'defualt'; did you mean 'default'?"),
        (["--lost", "qkv", "--recipe", "none.yaml"], "none.yaml: no such file"),
        (["--lost", "qkv", "--recipe", "fuse_qkv", "--skip", "fuse_qvk"], "did you mean 'fuse_qkv'?"),
    ],
)
def test_mistakes(block: Path, words: list[str], said: str) -> None:
    shown = ask(block, *words)
    assert isinstance(shown.exception, UsageError | PolicyError)
    assert shown.exception.exit_code == 2
    assert said in str(shown.exception)


def test_the_model_itself_is_not_written_over(block: Path) -> None:
    before = block.read_bytes()
    refused = ask(block, "--lost", "qkv", "--recipe", "onnxsim", "--out", str(block))
    assert "is the model itself, which is not written over" in str(refused.exception)
    assert block.read_bytes() == before


def test_what_is_one_matrix_already_cannot_be_lost(block: Path) -> None:
    onnx.save(merged_attention(), "merged.onnx")
    shown = ask("merged.onnx", "--lost", "qkv")
    assert "one matrix in the source already: w (32×96)" in str(shown.exception)


def test_recipes_are_read_from_words_and_files(tmp_path: Path) -> None:
    assert read_recipe(["default,onnxsim", "onnxoptimizer/fuse_qkv"]) == ("default", "onnxsim", "fuse_qkv")
    assert read_recipe(["{onnxsim: {check_n: 1}}, nop"]) == ({"onnxsim": {"check_n": 1}}, "nop")
    (tmp_path / "steps.yaml").write_text("recipe: [nop, own.py:Mine]\n")
    assert read_recipe([str(tmp_path / "steps.yaml")]) == ("nop", f"{tmp_path}/own.py:Mine")
    (tmp_path / "list.yaml").write_text("- nop\n- own.py:Mine: {factor: 2}\n")
    assert read_recipe([str(tmp_path / "list.yaml")]) == ("nop", {f"{tmp_path}/own.py:Mine": {"factor": 2}})
    own = read_recipe([str(ROOT / "configs" / "own_pass.yaml")])
    assert own[0] == f"{ROOT}/examples/own_pass.py:ScaleQuery"
    assert own[2] == "onnxsim"
    assert read_recipe([str(ROOT / "configs" / "attention_block.yaml")]) == (
        "onnxscript",
        "default",
        "onnxsim",
        "clean",
    )
    assert read_recipe([str(ROOT / "configs" / "onnx_file.yaml")]) == ("default", "onnxsim", "clean")


def test_a_run_is_bisected_by_its_own_recipe(tmp_path: Path) -> None:
    assert recipe_of_run(tmp_path / "model.onnx") == ("default", "onnxsim", "clean")
    (tmp_path / "run.yaml").write_text("model: {factory: m:f}\npasses: {recipe: [nop]}\n")
    assert recipe_of_run(tmp_path) == ("nop",)


@pytest.mark.parametrize(
    ("entry", "said"), [("3", "recipe.*expected the name of a pass"), ("{a: 1", "--recipe.*not YAML")]
)
def test_what_is_no_recipe(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_recipe([entry])


def test_a_file_without_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("name: other\n")
    with pytest.raises(ConfigError, match="found no recipe; expected a configuration, or"):
        read_recipe([str(tmp_path / "other.yaml")])
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(ConfigError, match="found nothing, expected a list of steps, or a configuration"):
        read_recipe([str(tmp_path / "empty.yaml")])


def test_a_terminal_has_a_bar(block: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert re.search("running the recipe .*━", ask(block, "--recipe", "nop", "--lost", "qkv").stderr)
