"""Headers of safetensors shards: where each tensor lies, and everything that may be wrong with them at once."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import safetensors.torch
import torch

from pipeline.errors import SourceError, UsageError
from pipeline.export import save_model
from pipeline.export.call_watch import capture_output
from pipeline.export.checkpoint import read_shards

INDEX = "model.safetensors.index.json"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two shards and their index."""
    torch.manual_seed(0)
    first, second = {"a": torch.randn(3, 5), "b": torch.arange(7)}, {"c": torch.randn(4, 2).to(torch.bfloat16)}
    for place, tensors in enumerate((first, second), start=1):
        safetensors.torch.save_file(tensors, tmp_path / f"model-0000{place}-of-00002.safetensors")
    placed = {name: f"model-0000{1 + (name == 'c')}-of-00002.safetensors" for name in "abc"}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": placed}))
    return tmp_path


def test_the_bytes_at_a_place_are_the_tensor(checkpoint: Path) -> None:
    shards = read_shards(checkpoint)
    for name, stored in shards.tensors.items():
        whole = safetensors.torch.load_file(checkpoint / stored.shard)[name]
        raw = (checkpoint / stored.shard).read_bytes()[stored.offset : stored.offset + stored.nbytes]
        assert raw == whole.contiguous().view(torch.uint8).numpy().tobytes()
        assert stored.shape == tuple(whole.shape)
    assert {name: entry.dtype for name, entry in shards.tensors.items()} == {"a": "F32", "b": "I64", "c": "BF16"}
    assert read_shards(checkpoint / INDEX).tensors == shards.tensors
    assert set(read_shards(checkpoint / "model-00002-of-00002.safetensors").tensors) == {"c"}


def test_the_fingerprint_follows_the_files(checkpoint: Path) -> None:
    before = read_shards(checkpoint).fingerprint()
    assert read_shards(checkpoint).fingerprint() == before
    shard = checkpoint / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert read_shards(checkpoint).fingerprint() != before


def with_header(shard: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def link(shard: Path) -> None:
    shard.rename(shard.with_name("blob"))
    shard.symlink_to("blob")


DAMAGES: list[tuple[Callable[[Path], object], str]] = [
    (Path.unlink, "it is missing"),
    (lambda shard: shard.write_bytes(b""), "it has 0 bytes, and says that its header alone has 0"),
    (lambda shard: shard.write_bytes(shard.read_bytes()[:-3]), "before 'c' does .* it is cut off"),
    (
        lambda shard: shard.write_bytes(b"\xff" * 7 + b"\0" + shard.read_bytes()),
        "its header alone has 72057594037927935",
    ),
    (lambda shard: shard.write_bytes(shard.read_bytes().replace(b"{", b"[", 1)), "its header is not JSON"),
    (lambda shard: with_header(shard, lambda header: header["c"].pop("shape")), "says nothing sound of 'c'"),
    (
        lambda shard: with_header(shard, lambda header: header["c"].update(dtype="F4")),
        "'c' has the dtype 'F4'; known are BOOL",
    ),
    (
        lambda shard: with_header(shard, lambda header: header["c"].update(shape=[4, 3])),
        r"'c' has 16 bytes, but BF16\[4, 3\]",
    ),
    (
        lambda shard: with_header(shard, lambda header: header["c"].update(shape=[-4, -2])),
        r"'c' has 16 bytes, but BF16\[-4",
    ),
    (link, "it is a link to blob, which ONNX refuses"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES, ids=[said[:24] for _, said in DAMAGES])
def test_a_damaged_shard_is_named(checkpoint: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(checkpoint / "model-00002-of-00002.safetensors")
    with pytest.raises(SourceError, match=rf"1 mistake; .*\n  model-00002-of-00002.safetensors: .*{said}"):
        read_shards(checkpoint)


def test_all_mistakes_are_listed_at_once(checkpoint: Path) -> None:
    placed = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {**placed, "d": "gone.safetensors", "e": placed["c"]}}))
    (checkpoint / placed["a"]).write_bytes(b"short")
    with pytest.raises(SourceError) as caught:
        read_shards(checkpoint)
    lines = str(caught.value).splitlines()
    assert "3 mistakes" in lines[0]
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["gone.safetensors", placed["a"], INDEX]
    assert lines[-1].endswith("it names tensors that are in no shard: e")


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/hostname", "sub/one.safetensors"])
def test_an_index_does_not_lead_out_of_the_folder(checkpoint: Path, name: str) -> None:
    (checkpoint / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(SourceError, match="leaves the folder"):
        read_shards(checkpoint)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(SourceError, match="only where they lie in safetensors"):
            read_shards(path)


# Saving: whole files under final names, external data above the limit, and what torch says stays off the terminal.


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
