"""Annotations and summaries for GitHub, and the composite action: its steps are run as a workflow would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import yaml

from pipeline.commands.github import MOST_ANNOTATIONS, annotate, summary_table
from pipeline.errors import UsageError
from tests.support.onnx_models import biased_attention
from tests.support.paths import ROOT


def test_names_stay_text(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    annotate("a: b, c", ("what",), [("x\n::error::y 100%",)], file=Path("m.onnx"))
    assert capsys.readouterr().out == "::error file=m.onnx,title=a%3A b%2C c::x\\n::error::y 100%25\n".replace(
        "\\n", "%0A"
    )
    table = summary_table("t", ("name", "why"), [("<img src=x>|`", "a*b")])
    assert "| &lt;img src=x>\\|\\` | a\\*b |" in table


def test_many_findings_are_counted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    annotate("t", ("n",), [(str(place),) for place in range(300)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == MOST_ANNOTATIONS, "GitHub drops the rest"
    assert lines[-1].endswith("291 more, in the summary")
    annotate("t", ("n",), [(str(place),) for place in range(MOST_ANNOTATIONS)])
    assert capsys.readouterr().out.splitlines()[-1] == "::error title=t::9"
    assert "and 100 more rows" in summary_table("t", ("n",), [(str(place),) for place in range(300)])


@pytest.mark.parametrize("place", [".", "none/summary.md"])
def test_a_summary_that_cannot_be_written_is_no_bug_of_ours(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / place))
    with pytest.raises(UsageError, match=r"^GITHUB_STEP_SUMMARY is .*, which cannot be written: "):
        annotate("t", ("n",), [])


def replay(inputs: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the steps of action.yml that have a script, with GitHub's expressions over `inputs` filled in."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    values = {name: entry.get("default", "") for name, entry in action["inputs"].items()} | inputs

    def fill(text: str) -> str:
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)

    result = subprocess.CompletedProcess([], 0, "", "")
    for step in action["runs"]["steps"]:
        condition = re.fullmatch(r"inputs\.([\w-]+) != ''", step.get("if", "inputs.command != ''"))
        assert condition is not None, step
        if "run" not in step or not values[condition[1]]:
            continue
        assert "${{" not in step["run"]  # an input would be run as a script
        settings = {name: fill(value) for name, value in step["env"].items()}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "GITHUB_STEP_SUMMARY": str(folder / "summary.md"), **settings}
        result = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=folder, env=env, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if result.returncode:
            break
    return result


def test_the_action_on_a_diff(tmp_path: Path) -> None:
    model = biased_attention()
    onnx.save(model, tmp_path / "a.onnx")
    next(node for node in model.graph.node if node.op_type == "Relu").op_type = "Abs"
    onnx.save(model, tmp_path / "b.onnx")
    found = replay({"command": "diff a.onnx b.onnx --structure-only", "install": ""}, tmp_path)
    assert found.returncode == 1, found.stderr
    assert found.stdout.startswith("::error file=b.onnx,title=onnxline diff::")
    assert "Abs" in found.stdout
    assert "| section | what differs |" in (tmp_path / "summary.md").read_text()
    lines = replay({"command": "diff a.onnx\n  b.onnx\n--structure-only\n", "install": ""}, tmp_path)
    assert (lines.returncode, lines.stdout) == (1, found.stdout), "a command of several lines is one"
    (tmp_path / "b.onnx").rename(tmp_path / "b $(touch hacked)`touch hacked`.onnx")
    quoted = replay(
        {"command": "diff a.onnx 'b $(touch hacked)`touch hacked`.onnx' \"--structure-only\"", "install": ""}, tmp_path
    )
    assert quoted.stdout.replace("b $(touch hacked)`touch hacked`", "b") == found.stdout
    (tmp_path / "a.onnx").rename(tmp_path / "a\\a.onnx")
    backslash = replay({"command": "diff 'a\\a.onnx' b* --structure-only", "install": ""}, tmp_path)
    assert (backslash.returncode, "b*" in backslash.stderr) == (2, True), "the file is found, and nothing is expanded"
    open_quote = replay({"command": "diff 'a.onnx a.onnx", "install": ""}, tmp_path)
    assert open_quote.returncode == 2
    assert "unmatched single quote" in open_quote.stderr
    same = replay({"command": "diff 'a\\a.onnx' 'a\\a.onnx'; touch hacked", "install": ""}, tmp_path)
    assert same.returncode == 2
    assert not (tmp_path / "hacked").exists()


@pytest.mark.parametrize(
    "words",
    [
        "diff a.onnx a.onnx --json",
        "diff a.onnx a.onnx --names",
        "audit --json",
        "baseline check a.onnx --json",
    ],
)
def test_options_of_other_forms_are_refused(words: str, tmp_path: Path) -> None:
    ended = replay({"command": words, "install": ""}, tmp_path)
    assert ended.returncode == 2
    assert f"so {words.split()[-1]} has no effect" in ended.stderr
