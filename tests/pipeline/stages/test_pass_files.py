"""The files of a pass, when the same run is done again."""

from __future__ import annotations

from pathlib import Path

import onnx

from pipeline.config import RunConfig
from pipeline.run import Pipeline
from tests.support.onnx_models import model_of


def test_the_diff_of_a_pass_that_was_removed_or_cut_is_written_again(tmp_path: Path) -> None:
    """The run took the passes from the last run, and the diff stayed away or half."""
    onnx.save(model_of("g (float[2] x) => (float[2] y) { a = Identity (x) y = Neg (a) }"), tmp_path / "model.onnx")
    config = RunConfig.from_mapping(
        {
            "model": {"onnx": str(tmp_path / "model.onnx")},
            "passes": {"recipe": ["eliminate_identity"]},
            "runtime": {"backends": ["onnxruntime"]},
        }
    )
    Pipeline(config, tmp_path / "run").run()
    text, data = (tmp_path / "run/passes/01-eliminate_identity" / name for name in ("diff.txt", "diff.json"))
    before = text.read_text(), data.read_text()
    text.unlink()
    data.write_text("{")
    Pipeline(config, tmp_path / "run").run()
    assert (text.read_text(), data.read_text()) == before
