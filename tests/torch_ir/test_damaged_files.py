"""Files that were cut, damaged or mistaken for others are refused in words, and stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.torch_ir import IR, SerializationError, extract_ir
from tests.torch_ir.models import MaskedLinear

Damage = Callable[[bytes], bytes]


def flipped(at: int) -> Damage:
    """One byte, so far from the end."""
    return lambda whole: whole[:-at] + bytes([whole[-at] ^ 255]) + whole[len(whole) - at + 1 :]


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "cut": ("m.json", lambda whole: whole[:700], "m.json ends early, after 700 bytes in line "),
    "cut at its end": ("m.json", lambda whole: whole[:-3], "m.json ends early"),
    "empty": ("m.json", lambda whole: b"", "m.json is empty; expected the JSON that IR.save writes: copy it again"),
    "text": ("m.json", lambda whole: b"PK\3\4" + whole, r"is no JSON: it begins with b'PK"),
    "damaged": ("m.json", lambda whole: whole.replace(b'"nodes":', b'"nodes" '), r"is damaged in line \d+, column \d+"),
    "Latin-1": ("m.json", lambda whole: whole.replace(b"MaskedLinear", b"Mod\xe8le"), r"is not in UTF-8: byte \d+ is"),
    "packed cut": ("m.json.zst", lambda whole: whole[:-1], r"m.json.zst ends early, after \d+ packed bytes; copy it"),
    "packed empty": ("m.json.zst", lambda whole: b"", "ends early, after 0 packed bytes"),
    "packed damaged": ("m.json.zst", flipped(20), "m.json.zst is damaged .*; copy it again"),
    "packed and more": ("m.json.zst", lambda whole: whole + b"more", "goes on for 4 bytes after its end"),
    "not packed": ("m.json.zst", lambda whole: b"{}", "is no zstd file: it begins with b'{}'; .* is called .json"),
    "constants cut": ("*.safetensors", lambda whole: whole[:-1], r"the constants of m.json, ends early or is damaged"),
    "constants damaged": ("*.safetensors", flipped(1), "the constants of m.json, is damaged: it holds other bytes"),
}


@pytest.mark.parametrize("name, damage, said", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file(name: str, damage: Damage, said: str, tmp_path: Path) -> None:
    path = tmp_path / ("m.json.zst" if name == "m.json.zst" else "m.json")
    extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False).save(path, threshold=8)
    assert IR.load(path).graph.ops
    (file,) = tmp_path.glob(name)
    file.write_bytes(damage(file.read_bytes()))
    held = file.read_bytes()
    with pytest.raises(SerializationError, match=said):
        IR.load(path)
    assert file.read_bytes() == held


def test_what_is_no_file_of_an_ir(tmp_path: Path) -> None:
    ir = extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False)
    ir.save(tmp_path / "m.json.zst", threshold=8)
    (tmp_path / "m.json").write_bytes((tmp_path / "m.json.zst").read_bytes())
    (beside,) = tmp_path.glob("*.safetensors")
    beside.unlink()
    (tmp_path / "folder").mkdir()
    for name, said in {
        "m.json": "m.json is packed with zstd; rename it to m.json.zst",
        "m.json.zst": "has its large constants in .*safetensors, which is not beside it; copy it too",
        "folder": "folder cannot be read: it is a folder; expected a file",
        "none.json": "there is no such file or folder",
    }.items():
        with pytest.raises(SerializationError, match=said):
            IR.load(tmp_path / name)
    for name, said in {
        "folder": "it is a folder",
        "none/m.json": "there is no such file",
        "a" * 300: "too long",
    }.items():
        for threshold in (8, 4096):
            with pytest.raises(SerializationError, match=f"cannot be written: .*{said}"):
                ir.save(tmp_path / name, threshold=threshold)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "m.json", "m.json.zst"]
