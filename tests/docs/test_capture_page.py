"""docs/how-to/capture.md: its code runs, one block after the other, and prints what the page says."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.runtime.capture.feed_buffers import COPIED, STATIC_BY_MODE
from tests.support.pages import blocks, rows

PAGE = "docs/how-to/capture.md"


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    for block in blocks(PAGE, "python"):
        exec(compile(block, PAGE, "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("captured for inference: 1 captured segment, 0 eager calls")
    assert "tensor([[1., 1.]]) tensor([1., 0., 0., 0.])" in printed
    assert "<views of total: the next replay overwrites them>\ntorch.Size([2, 3])\ntorch.Size([5, 3])\n" in printed


def test_the_default_roles() -> None:
    table = {name.partition(" ")[0]: cell for name, cell, _ in rows(PAGE)}
    assert table["copied"] == "input" == COPIED[0]
    assert table["static"] == 'param`, `const`; with `mode="train"` also `state'
    assert {mode: set(roles) for mode, roles in STATIC_BY_MODE.items()} == {
        "inference": {"param", "const"},
        "train": {"param", "const", "state"},
    }
