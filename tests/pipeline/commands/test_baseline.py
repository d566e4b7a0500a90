"""`onnxline baseline`: what was accepted is checked, entry by entry."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from pipeline.baseline import changes, read_baseline, write_baseline
from pipeline.cli import app
from pipeline.errors import CheckFailed, UsageError
from tests.support.paths import EXAMPLES
from tests.support.processes import run_forked

NEGS = '<ir_version: 8, opset_import: ["": 18]> g (float[2] x) => (float[2] y) { a = Identity (x) y = Neg (a) }'

FACTORY = EXAMPLES / "attention_block.py"


def ask(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["baseline", *map(str, words)])


@pytest.fixture(scope="module")
def first(config_in, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration, its baseline, and the folder of its runs."""
    folder = tmp_path_factory.mktemp("accepted")
    recipe = ["eliminate_deadend", "onnxsim"]
    config = config_in(folder, passes={"recipe": recipe}, runtime={"backends": ["onnxruntime"]})
    result = ask("accept", config, "--out", folder / "out")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == f"written to {config.with_suffix('.baseline')}"
    return folder


@pytest.fixture
def accepted(first: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A configuration with its baseline, and the folder of its runs; for one test to change."""
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    return tmp_path / "block.yaml", tmp_path / "out"


def test_what_was_accepted_passes_the_check(accepted, tmp_path: Path) -> None:
    config, out = accepted
    shown = ask("check", config, "--out", out)
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, f"as in {config.with_suffix('.baseline')}")
    # Nothing in it comes from the time, or from the place of the files.
    text = config.with_suffix(".baseline").read_text(encoding="utf-8")
    again = ask("accept", config, "--out", tmp_path / "elsewhere", "--file", tmp_path / "other.baseline")
    assert again.exit_code == 0
    assert (tmp_path / "other.baseline").read_text(encoding="utf-8") == text
    assert str(tmp_path) not in text


def test_a_model_by_itself_has_a_baseline_beside_it(tmp_path: Path) -> None:
    model = tmp_path / "negs.onnx"
    model.write_bytes(onnx.parser.parse_model(NEGS).SerializeToString())
    options = ("--out", tmp_path / "out", "--set", "passes.recipe=[eliminate_identity]")
    shown = ask("accept", model, *options)
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, f"written to {tmp_path}/negs.baseline"), shown.output
    shown = ask("check", model, *options)
    assert (shown.exit_code, shown.stdout.splitlines()[-1]) == (0, f"as in {tmp_path}/negs.baseline"), shown.output
    shown = ask("check", f"{FACTORY}:make")
    assert str(shown.exception).startswith(f"no baseline at {FACTORY.with_name('attention_block-make.baseline')};")


def test_another_recipe_is_listed_entry_by_entry(accepted) -> None:
    config, out = accepted
    shown = ask("check", config, "--out", out, "--set", "passes.skip=[onnxsim]", "--set", "passes.watch=false")
    assert isinstance(shown.exception, CheckFailed)
    lines = shown.stdout.splitlines()
    (row,) = [line for line in lines if line.startswith("passes › 02 onnxsim")]
    assert row.endswith(" → skipped")
    assert "structures › qkv › kept: 0 → 1" in lines


def test_the_command_ends_with_1_and_says_what_to_do(accepted) -> None:
    config, out = accepted
    file = config.with_suffix(".baseline")
    known = read_baseline(file)
    version = known["versions"]["onnxsim"]
    file.write_text(file.read_text(encoding="utf-8").replace(f"onnxsim: {version}", "onnxsim: 0.0.1"), encoding="utf-8")
    ended = run_forked("-m", "onnxline", "baseline", "check", config, "--out", out)
    assert ended.returncode == 1
    assert f"versions › onnxsim: 0.0.1 → {version}" in ended.stdout.splitlines()
    assert "nothing but versions changed" in ended.stderr
    assert f"onnxline baseline accept {config}" in ended.stderr


def test_accepting_tells_what_is_new(accepted) -> None:
    config, out = accepted
    shown = ask("accept", config, "--out", out, "--set", "passes.keep=[qkv]")
    assert shown.exit_code == 0
    assert "structures › qkv › kept: 0 → 1" in shown.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no baseline at .*; make it with `onnxline baseline accept .*.yaml`$"),
        ("[1, 2", "cannot be read as a baseline"),
        ("name: vit\n", "is not a baseline"),
        ("format_version: 99\n", "has format version 99, this release reads 1"),
    ],
)
def test_a_file_that_is_no_baseline_is_a_mistake(config_file, text: str | None, words: str) -> None:
    config = config_file()
    if text is not None:
        config.with_suffix(".baseline").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        CliRunner().invoke(app, ["baseline", "check", str(config)], catch_exceptions=False)


def test_what_is_no_baseline_is_not_written_over(config_file, tmp_path: Path) -> None:
    config = config_file()
    text = config.read_text(encoding="utf-8")
    refused = ask("accept", config, "--out", tmp_path / "out", "--file", config)
    assert isinstance(refused.exception, UsageError)
    assert "is there already and is no baseline" in str(refused.exception)
    assert config.read_text(encoding="utf-8") == text


def test_a_baseline_may_lie_in_a_folder_that_is_yet_to_be_made(config_file, tmp_path: Path) -> None:
    config = config_file(passes={"recipe": []}, runtime={"backends": []})
    ask_for = ("accept", config, "--out", tmp_path / "out", "--file")
    assert ask(*ask_for, tmp_path / "new" / "a.baseline").exit_code == 0
    below_a_file = ask(*ask_for, ask_for[1] / "a.baseline")
    assert isinstance(below_a_file.exception, UsageError)


def test_where_files_lie_is_not_in_it(config_file, tmp_path: Path) -> None:
    """A pass that makes an operator which nobody knows: onnxruntime's complaint would name a file."""
    (tmp_path / "ghost.py").write_text(GHOST, encoding="utf-8")
    config = config_file(passes={"recipe": ["ghost.py:Ghost"]}, runtime={"backends": []})
    assert ask("accept", config, "--out", tmp_path / "one").exit_code == 0
    text = config.with_suffix(".baseline").read_text(encoding="utf-8")
    assert "status: reverted" in text or "status: failed" in text
    assert "onnxruntime refuses the model: " in text
    assert "onnxline-" not in text and str(tmp_path) not in text
    assert ask("check", config, "--out", tmp_path / "two").exit_code == 0


GHOST = """
class Ghost:
    name = "ghost"
    def apply(self, model):
        model.graph.node[0].domain = "ghost"
        model.opset_import.add(domain="ghost", version=1)
        return model
"""


@pytest.mark.parametrize(
    ("before", "after", "is_alike"),
    [
        ("<= 1e-06", "<= 1e-06", True),
        ("<= 1e-06", "<= 1e-05", True),
        ("<= 1e-06", "<= 1e-04", False),
        ("0", "<= 1e-08", True),
        ("0", "<= 1e-07", False),
        ("<= 1e-06", "inf", False),
    ],
)
def test_errors_may_differ_by_a_power_of_ten(before: str, after: str, is_alike: bool) -> None:
    assert bool(changes({"output": before}, {"output": after})) != is_alike


def test_a_baseline_has_letters_of_any_alphabet(tmp_path: Path) -> None:
    write_baseline({"name": "größe"}, tmp_path / "a.baseline")
    assert "name: größe" in (tmp_path / "a.baseline").read_text(encoding="utf-8")


plain = st.recursive(
    st.one_of(st.integers(), st.text(max_size=5)), lambda inner: st.dictionaries(st.text(max_size=3), inner, max_size=4)
)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_nothing_changes_by_itself(data: dict) -> None:
    assert changes(data, data) == []


@given(st.dictionaries(st.text(min_size=1, max_size=3), plain, min_size=1, max_size=4), st.data())
def test_whatever_goes_is_listed(data: dict, draw: st.DataObject) -> None:
    gone = draw.draw(st.sampled_from(sorted(data)))
    less = {key: value for key, value in data.items() if key != gone}
    assert any(line.startswith(gone) for line in changes(data, less))
    assert any(line.startswith(gone) for line in changes(less, data))


def test_changes_as_annotations(accepted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, out = accepted
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    baseline = config.with_suffix(".baseline")
    same = ask("check", config, "--out", out, "--format", "github")
    assert same.exit_code == 0
    assert f"::notice file={baseline},title=onnxline baseline check::nothing to report" in same.stdout
    text = baseline.read_text()
    assert "onnxsim" in text
    baseline.write_text(text.replace("onnxsim", "onnxsam"))
    changed = ask("check", config, "--out", out, "--format", "github")
    assert "::error file=" in changed.stdout
    assert "| entry | change |" in (tmp_path / "summary.md").read_text()
