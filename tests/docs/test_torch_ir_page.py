"""docs/reference/torch-ir.md runs as it is shown, and names the options that there are."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import load_command
from tests.support.pages import blocks, rows

PAGE = "docs/reference/torch-ir.md"


@pytest.mark.filterwarnings("ignore::UserWarning")  # transformers' own
def test_the_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    first, second = blocks(PAGE, "python")
    exec(compile(first, PAGE, "exec"), names)
    assert capsys.readouterr().out.startswith("flowchart TD\n")
    exec(compile(second, PAGE, "exec"), names)
    assert len(names["decode"].graph_inputs) == 4 + 2 * 4


def test_the_options() -> None:
    group = load_command("ir")
    documented = {cells[0].split()[1]: cells[1] for cells in rows(PAGE) if cells[0].startswith("ir ")}
    assert set(documented) == set(group.commands)
    for name, text in documented.items():
        known = {option for param in group.commands[name].params for option in (*param.opts, *param.secondary_opts)}
        assert set(re.findall(r"--[\w-]+", text)) <= known, name
