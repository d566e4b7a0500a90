"""Headers of safetensors shards: where each tensor lies, and everything that may be wrong with them at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pipeline.errors import SourceError
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
