"""docs/how-to/authoring.md: its code runs, and it names every layer, loss and optimizer."""

from __future__ import annotations

from typing import Any

import pytest

from onnxline import authoring
from pipeline.authoring.layers import LossModule
from tests.support.pages import blocks
from tests.support.paths import ROOT

PAGE = "docs/how-to/authoring.md"


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(PAGE, "python"):
        exec(compile(block, PAGE, "exec"), names)
    printed = capsys.readouterr().out
    assert "torch.Size([3, 10])" in printed
    assert 'graph "block" (%0 "input": float32[4, 7, 16])' in printed


def test_every_part_is_named() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    kinds = (authoring.Module, authoring.OptimizerSpec)
    bases = {authoring.Module, authoring.OptimizerSpec, LossModule}
    parts = [getattr(authoring, name) for name in authoring.__all__]
    named = [
        part.__name__ for part in parts if isinstance(part, type) and issubclass(part, kinds) and part not in bases
    ]
    assert len(named) > 20
    assert [name for name in named if f"`{name}`" not in text] == []
