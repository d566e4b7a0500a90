"""`onnxline diff` on files and runs, and the diffs that a run leaves behind."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from typer.testing import CliRunner, Result

from pipeline import Pipeline, RunConfig
from pipeline.cli import app
from pipeline.errors import UsageError

BEFORE = "g (float[2, 3] x) => (float[2, 3] y) { [a] h = Neg (x) [b] y = Softmax <axis = 1> (h) }"
RENAMED = "g (float[2, 3] x) => (float[2, 3] y) { [first] z = Neg (x) [second] y = Softmax <axis = 1> (z) }"
AFTER = "g (float[2, 3] x) => (float[2, 3] y) { [a] h = Neg (x) [b] y = Softmax <axis = 0> (h) }"
OTHER_NAMES = "g (float[2, 3] in) => (float[2, 3] out) { [a] h = Neg (in) [b] out = Softmax <axis = 0> (h) }"
OTHER_INPUT = "g (int64[2, 3] other) => (float[2, 3] y) { h = Cast <to = 1> (other) y = Softmax <axis = 1> (h) }"


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, words)])


@pytest.fixture
def model(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.onnx"
        onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": 20]> {text}'), path)
        return path

    return write


def test_other_names_are_no_difference(model) -> None:
    shown = ask(model("before", BEFORE), model("after", RENAMED), "--names")
    assert (shown.exit_code, shown.stdout.splitlines()) == (
        0,
        [
            "no difference",
            "",
            "renamed, which is no difference",
            "  node a → first",
            "  value h → z",
            "  node b → second",
        ],
    )


def test_a_difference_is_named_with_its_numbers(model) -> None:
    shown = ask(model("before", BEFORE), model("after", AFTER), "--values")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert lines[:4] == ["1 with other attributes", "", "attributes", "  Softmax b: axis 1 → 0"]
    assert lines[5] == "numbers"
    assert lines[6].startswith("  output y: max error 0.")
    assert lines[7] == "  of 1 values between, 1 are equal in every bit"
    assert lines[8].startswith("  the worst of draw 0; draw 1 (")


def test_json_holds_every_entry(model) -> None:
    shown = ask(model("before", BEFORE), model("after", AFTER), "--json")
    assert shown.exit_code == 1
    data = json.loads(shown.stdout)
    assert data["format_version"] == 1
    assert data["different"] is True
    assert data["attributes"] == [
        {"node": {"op": "Softmax", "name": "b", "module": ""}, "attribute": "axis", "before": "1", "after": "0"}
    ]
    assert data["outputs"]["y"]["max_abs"] > 0.1


def test_an_input_of_another_name_is_listed_once_and_fed_all_the_same(model) -> None:
    lines = ask(model("before", BEFORE), model("after", OTHER_NAMES)).stdout.splitlines()
    assert lines[0] == "1 with other attributes, 4 changes of the model itself"
    assert "  Softmax b: axis 1 → 0" in lines
    assert "inputs of nodes" not in lines
    assert lines[-2].startswith("  output out: max error 0.")


def test_models_that_take_other_inputs_are_compared_by_structure_alone(model) -> None:
    shown = ask(model("before", BEFORE), model("after", OTHER_INPUT))
    assert shown.exit_code == 1
    assert "  input x float[2,3] → (none)" in shown.stdout.splitlines()
    assert shown.stdout.splitlines()[-1] == (
        "no numbers: the second model has an input 'other' that the first has not, so there are no values to compare"
    )


def test_layers_as_a_table_and_as_json(model) -> None:
    zeros = ", ".join(["0"] * 15)
    signature = f"g (float[N, 4] x) => (float[N, 4] y) <float[4, 4] w = {{1, {zeros}}}>"
    text = signature + " { [a] h = MatMul (x, w) [b] y = %s (h) }"
    files = model("before", text % "Relu"), model("after", text % "Tanh")
    shown = ask(*files, "--layers")
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert "N=1" in next(line for line in lines if line.startswith("  the worst of draw 0 (")), "the draws of a proof"
    assert [line.split() for line in lines[lines.index("layers") + 2 :]] == [
        ["MatMul", "a", "MatMul", "float32", "0", "equal"]
    ]
    (layer,) = json.loads(ask(*files, "--layers", "--json").stdout)["layers"]
    assert (layer["layer"], layer["dtype"], layer["errors"]["sqnr_db"]) == ("MatMul a", "float32", "Infinity")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--structure-only", "--layers"], "--structure-only runs no model, and --layers, --values"),
        (["--structure-only", "--draws", "2"], "--values and --draws need runs; leave them out"),
        (["--json", "--most", "3"], "--json writes out every entry, so --most has no effect"),
        (["--all", "--most", "3"], "--all writes out every entry, so --most has no effect"),
        (["--part", "decoder"], "found --part decoder with ONNX files alone; leave it out"),
    ],
)
def test_options_that_exclude_each_other(model, words: list[str], said: str) -> None:
    refused = ask(model("before", BEFORE), model("after", AFTER), *words).exception
    assert isinstance(refused, UsageError)
    assert said in str(refused)


def test_colours_are_for_terminals(model, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model("before", BEFORE), model("other", OTHER_INPUT)
    assert "\x1b[" not in ask(*files, "--structure-only").stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in ask(*files, "--structure-only").stdout


def test_a_broken_file_is_a_mistake(model, tmp_path: Path) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"\x08\x07 this is no model")
    command = [
        sys.executable,
        "-m",
        "pipeline.cli",
        "diff",
        str(model("before", BEFORE)),
        str(tmp_path / "broken.onnx"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "is not a readable ONNX file" in ended.stderr


def test_each_pass_of_a_run_leaves_its_diff(config_file, tmp_path: Path) -> None:
    recipe = ["default", "onnxsim"]
    out = tmp_path / "out"
    config = config_file(passes={"recipe": recipe, "keep": ["qkv"]})
    result = Pipeline(RunConfig.from_yaml(config), out).run()
    changed = [f"{place + 1:02}-{row.name}" for place, row in enumerate(result.passes) if row.changed]
    assert sorted(folder.name for folder in (out / "passes").iterdir()) == sorted(changed)
    assert len(changed) > 3
    (folder,) = (out / "passes").glob("*-eliminate_deadend")
    data = json.loads((folder / "diff.json").read_text(encoding="utf-8"))
    (row,) = [row for row in result.passes if row.name == "eliminate_deadend"]
    assert sum(len(replacement["removed"]) for replacement in data["replaced"]) == row.nodes_before - row.nodes_after
    text = (folder / "diff.txt").read_text(encoding="utf-8")
    assert text.startswith(data["summary"])
    assert text.splitlines()[-2:][0] == "numbers, against the reference"
    assert data["outputs"].keys() == row.errors.keys()

    stored = {tensor.name for tensor in onnx.load(out / "model.onnx").graph.initializer}
    assert {"q.weight_transposed", "k.weight_transposed", "v.weight_transposed"} <= stored
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert {"q", "k", "v", "out"} >= {layer["layer"] for layer in report["layers"]} >= {"q", "k", "v"}

    Pipeline(RunConfig.from_yaml(config, ("passes.recipe=[eliminate_identity]",)), out).run()
    assert len(list((out / "passes").glob("*"))) <= 1, "those of the last run are gone"


def test_a_run_is_compared_with_its_source(config_file, tmp_path: Path) -> None:
    Pipeline(RunConfig.from_yaml(config_file(passes={"recipe": []})), tmp_path / "out").run()
    shown = ask(tmp_path / "out" / "exported.onnx", tmp_path / "out", "--structure-only")
    assert (shown.exit_code, shown.stdout) == (0, "no difference\n")


@pytest.fixture
def two_runs(model, tmp_path: Path) -> tuple[Path, Path]:
    """Two runs in parts, as far as a diff reads them: `head` differs, `body` does not, each has a part of its own."""
    parts = {
        "old": {"body": BEFORE, "head": BEFORE, "tail": BEFORE},
        "new": {"body": RENAMED, "head": AFTER, "vision": BEFORE},
    }
    for run, texts in parts.items():
        for name, text in texts.items():
            folder = tmp_path / run / "parts" / name
            folder.mkdir(parents=True)
            model("plain", text).rename(folder / "model.onnx")
    return tmp_path / "old", tmp_path / "new"


def test_two_runs_in_parts_have_a_row_and_a_section_for_each_part(two_runs: tuple[Path, Path]) -> None:
    old, new = two_runs
    shown = ask(old, new)
    assert shown.exit_code == 1
    lines = shown.stdout.splitlines()
    assert lines[0] == "4 parts"
    rows = [line.split() for line in lines[2:6]]
    assert rows[0] == ["body", "2", "→", "2", "no", "difference"]
    assert rows[1][:8] == ["head", "2", "→", "2", "1", "with", "other", "attributes"] and float(rows[1][8]) > 0.1
    assert rows[2:] == [
        ["tail", *f"only {old} has this part".split()],
        ["vision", *f"only {new} has this part".split()],
    ]
    assert lines[lines.index("part body: no difference") + 1 :][:2] == ["", "part head: 1 with other attributes"]
    assert "  Softmax b: axis 1 → 0" in lines
    alone = ask(old, new, "--part", "head")
    assert alone.stdout.splitlines()[0] == "1 with other attributes"


def test_parts_as_json_and_as_annotations(two_runs: tuple[Path, Path]) -> None:
    data = json.loads(ask(*two_runs, "--json").stdout)
    assert {name: part["different"] for name, part in data["parts"].items()} == {"body": False, "head": True}
    assert data["different"] and data["only_in"] == {"tail": str(two_runs[0]), "vision": str(two_runs[1])}
    shown = ask(*two_runs, "--format", "github").stdout
    assert "part head: attributes; Softmax b: axis 1 → 0" in shown
    assert f"part tail; only {two_runs[0]} has this part" in shown


def test_runs_without_a_part_in_common_and_a_run_of_one_model(two_runs: tuple[Path, Path], model) -> None:
    old, new = two_runs
    same = ask(old, old)
    assert (same.exit_code, same.stdout.splitlines()[0]) == (0, "3 parts")
    for name in ("body", "head"):
        shutil.rmtree(new / "parts" / name)
    refused = ask(old, new).exception
    assert isinstance(refused, UsageError)
    assert "has the parts body, head, tail, and" in str(refused) and "expected a part that both have" in str(refused)
    refused = ask(old, model("plain", BEFORE)).exception
    assert isinstance(refused, UsageError) and "expected --part body or --part head" in str(refused)
