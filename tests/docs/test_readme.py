"""What the README and the pages on Python and the configuration show runs as it is shown."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pipeline.cli import app
from pipeline.config import RunConfig
from tests.support.pages import PAGES, blocks
from tests.support.paths import ROOT

README, PYTHON, CONFIGURATION = "README.md", "docs/reference/python.md", "docs/reference/configuration.md"


@pytest.fixture
def beside_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory that sees what the README's relative paths name, and where runs/ may be written."""
    for name in ("configs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_python_examples_run(beside_the_checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    examples = blocks(PYTHON, "python")
    assert len(examples) == 3
    assert blocks(README, "python") == [examples[0].rpartition("print(result.model")[0]]
    for number, example in enumerate(examples):
        exec(compile(example, f"{PYTHON}, block {number}", "exec"), names)
    assert names["result"].report.exit_code == 0
    assert [structure.kept for structure in names["result"].structures] == [True]
    assert (beside_the_checkout / "runs" / "tiny" / "smaller.onnx").is_file()
    assert [call.kept for call in names["log"].calls] == [{"qkv": 1}]
    assert "qkv attention 0 kept" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["written-buffers", "native", "training"])
def test_the_python_example_of_a_guide_runs(
    page: str, beside_the_checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It prints what the comment after a `print` says."""
    [example] = blocks(f"docs/how-to/{page}.md", "python")
    exec(compile(example, page, "exec"), {})
    written = capsys.readouterr().out
    assert all(line in written for line in re.findall(r"^print\(.*\)  # (.+)$", example, re.MULTILINE))


def test_each_link_of_the_readme_is_absolute_and_names_a_file() -> None:
    """PyPI shows the README without the repository."""
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / README).read_text(encoding="utf-8"))
    homes = tuple(f"https://{host}/onnxline/onnxline/" for host in ("github.com", "raw.githubusercontent.com"))
    assert [link for link in links if not link.startswith("https://")] == []
    files = [link.partition("/main/")[2].partition("#")[0] for link in links if link.startswith(homes)]
    assert len(files) > 20 and [file for file in files if not (ROOT / file).exists()] == []


def test_the_configuration_page_is_a_configuration(beside_the_checkout: Path) -> None:
    [text] = blocks(CONFIGURATION, "yaml")
    path = beside_the_checkout / "page.yaml"
    path.write_text(text, encoding="utf-8")
    config = RunConfig.from_yaml(path)
    assert config.passes.recipe == ("default", {"onnxsim": {"check_n": 1}})
    assert config.model.dims == {"batch": (2, 5)}
    assert config.model.factory == f"{(ROOT / 'examples/attention_block.py').resolve()}:make"


def test_the_sources_that_are_commented_out_are_right_too(beside_the_checkout: Path) -> None:
    [text] = blocks(CONFIGURATION, "yaml")
    for source in ("transformers", "onnx"):
        lines = [line for line in text.splitlines() if not re.match(r"extends|  factory:|  args:", line)]
        shown = [line.replace(f"  # {source}:", f"  {source}:").split(", or package:")[0] for line in lines]
        (beside_the_checkout / "page.yaml").write_text("\n".join(shown), encoding="utf-8")
        assert getattr(RunConfig.from_yaml("page.yaml").model, source) is not None


def commands(tool: str) -> list[list[str]]:
    lines = [line for block in blocks(README, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [command for command in words if command[:1] == [tool]]


def test_the_onnxline_commands_exist() -> None:
    shown = commands("onnxline")
    assert {words[1] for words in shown} <= set(get_command(app).commands)  # type: ignore[attr-defined]
    assert len(shown) >= 5
    for _, name, *arguments in shown:
        if name != "run" or not arguments[0].endswith(".yaml"):
            continue
        overrides = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
        RunConfig.from_source(ROOT / arguments[0], overrides)


def test_the_make_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^(\w+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"\$[({](\w+)", makefile))
    shown = commands("make")
    assert len(shown) >= 5
    for _, target, *settings in shown:
        assert target in targets
        for name, _, value in (setting.partition("=") for setting in settings):
            assert name in variables
            assert name != "CONFIG" or (ROOT / value).is_file()


MADE_BY_THE_SITE = {"reference/operators.md", "operators.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: os.path.relpath(page, ROOT))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in target and target not in MADE_BY_THE_SITE:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
