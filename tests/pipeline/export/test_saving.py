"""Saving: whole files under final names, external data above the limit, and what torch says stays off the terminal."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

from pipeline.errors import UsageError
from pipeline.export import save_model
from pipeline.export.call_watch import capture_output


def model(elements: int, fill: float = 1.0) -> ir.Model:
    text = f"""
        <ir_version: 10, opset_import: ["": 20]>
        g (float[{elements}] x) => (float[{elements}] y) {{ y = Add(x, weight) }}
    """
    proto = onnx.parser.parse_model(text)
    model = ir.from_proto(proto)
    array = np.full(elements, fill, np.float32)
    value = ir.Value(name="weight", const_value=ir.tensor(array, name="weight"))
    value.shape, value.type = ir.Shape([elements]), ir.TensorType(ir.DataType.FLOAT)
    node = model.graph[0]
    node.replace_input_with(1, value)
    model.graph.initializers["weight"] = value
    return model


def test_small_weights_stay_inside(tmp_path: Path) -> None:
    save_model(model(10), tmp_path / "out" / "model.onnx")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.onnx"]
    onnx.checker.check_model(tmp_path / "out" / "model.onnx", full_check=True)


def test_large_weights_lie_beside_under_the_final_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    save_model(model(26_000_000, fill=3.0), path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
    assert path.stat().st_size < 2000
    [weight] = onnx.load(path).graph.initializer
    assert onnx.numpy_helper.to_array(weight)[-1] == 3.0
    save_model(model(10), path)  # a smaller model takes the old data away
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.onnx"
    save_model(model(10), path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ir, "save", full)
    with pytest.raises(UsageError, match="No space left on device; free space or choose another folder"):
        save_model(model(20), path)
    assert path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        save_model(model(10), tmp_path / "file" / "model.onnx")


def test_quiet_collects_and_restores(capfd: pytest.CaptureFixture[str]) -> None:
    child = logging.getLogger("torch.onnx")
    handlers = list(child.handlers)
    with capture_output() as notes:
        print("printed")
        print("to stderr", file=sys.stderr)
        warnings.warn("warned", UserWarning, stacklevel=1)
        logging.getLogger("torch.onnx.something").warning("logged %s", 1)
    assert notes == ["torch.onnx.something: logged 1", "printed", "to stderr", "UserWarning: warned"]
    assert capfd.readouterr() == ("", "")
    assert child.handlers == handlers
    with pytest.raises(KeyError), capture_output():
        raise KeyError
    assert child.handlers == handlers


def test_what_libraries_say_of_themselves_is_no_note_of_the_model() -> None:
    with capture_output() as notes:
        logging.getLogger("torch.onnx._internal.exporter._registration").warning("torchvision is not installed")
        warnings.warn_explicit("their own", FutureWarning, os.__file__, 1)
        warnings.warn_explicit("of a value", UserWarning, torch.__file__, 1)
        warnings.warn("by the user", DeprecationWarning, stacklevel=1)
    assert notes == ["UserWarning: of a value", "DeprecationWarning: by the user"]


def test_torchs_advice_on_attributes_is_no_note_since_ours_says_which_ones_matter() -> None:
    """A module that leaves its attention in an attribute, and never reads it again, needs no buffer."""
    with capture_output() as notes:
        warnings.warn_explicit(
            "The tensor attribute self.attn was assigned during export.", UserWarning, torch.__file__, 1
        )
    assert notes == []
