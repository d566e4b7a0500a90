"""Files that were cut, damaged or mistaken for others are refused in words, and stay as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import UsageError
from pipeline.torch_ir import IR, ExecutionError, IRExecutor, SerializationError, execute_ir, extract_ir
from pipeline.torch_ir.command_files import read_arrays
from tests.pipeline.torch_ir.small_modules import Does, MaskedLinear
from tests.support.files import forbid_reading

Damage = Callable[[bytes], bytes]


def flip_byte(at: int) -> Damage:
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
    "packed damaged": ("m.json.zst", flip_byte(20), "m.json.zst is damaged .*; copy it again"),
    "packed and more": ("m.json.zst", lambda whole: whole + b"more", "goes on for 4 bytes after its end"),
    "not packed": ("m.json.zst", lambda whole: b"{}", "is no zstd file: it begins with b'{}'; .* is called .json"),
    "constants cut": ("*.safetensors", lambda whole: whole[:-1], r"the constants of m.json, ends early or is damaged"),
    "constants damaged": ("*.safetensors", flip_byte(1), "the constants of m.json, is damaged: it holds other bytes"),
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
        "m.json.zst": "has its large constants in .*safetensors, which is not in the same folder; copy it too",
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


WRONG: dict[str, tuple[tuple[str | int, ...], Any, str]] = {
    "nodes": (("nodes",), None, "nodes: found null, expected a list; save the IR again$"),
    "a node": (("nodes", 0), 5, r"nodes\[0\]: found 5, expected an object; save the IR again$"),
    "op_type": (("nodes", 1, "op_type"), 3, r"nodes\[1\].op_type: found 3, expected a string; save the IR again$"),
    "attrs": (("nodes", 0, "attrs"), [1], r"nodes\[0\].attrs: found \[1\], expected an object; save the IR again$"),
    "dtype": (("graph_inputs", 0, "dtype"), "float33", r"graph_inputs\[0\]: unknown dtype 'float33'; known: "),
    "letters": (("graph_inputs", 0, "shape"), "abc", r"graph_inputs\[0\].shape: found 'abc', expected a list of sizes"),
    "half a size": (("weights", 0, "shape"), [1.5, 4], r"weights\[0\].shape: found \[1.5, 4\], .* an integer of 0 or"),
    "below zero": (("graph_inputs", 0, "shape"), [-1, 4], r"graph_inputs\[0\].shape: found \[-1, 4\], expected "),
    "strides": (("graph_inputs", 0, "strides"), [1], r"strides: found \[1\], expected a list of 2, as many as dims"),
    "dims": (("dims",), {"n": "x"}, "dims.n: found 'x', expected the least and the most size"),
    "no size": (("dims",), {"n": [5, 2]}, r"dims.n: found \[5, 2\], expected the least"),
    "guards": (("guards",), "n > 2", "guards: found 'n > 2', expected a list of expressions; save the IR again"),
    "a guard": (("guards",), ["n +"], r"guards\[0\]: 'n \+' is no expression of named dims"),
    "a guard that runs": (("guards",), ["exit(1)"], r"guards\[0\]: 'exit\(1\)' is no expression of named dims"),
    "a guard of nothing": (("guards",), ["n > 2"], r"guards\[0\]: found 'n > 2', expected none, as there are no dims"),
    "place": (
        ("nodes", 1, "inputs", 0, "producer_output_idx"),
        7,
        r"nodes\[1\]: 'linear': producer_output_idx: found 7, expected 0",
    ),
    "place of a result": (
        ("graph_outputs", 0),
        {"name": "mul", "shape": [1, 4], "dtype": "float32", "producer_node": "mul", "producer_output_idx": -1},
        r"graph_outputs\[0\]: 'mul': producer_output_idx: found -1, expected 0",
    ),
    "device": (
        ("nodes", 1),
        {
            "name": "zeros",
            "op_type": "aten.zeros.default",
            "inputs": [],
            "outputs": [{"name": "mul", "shape": [1, 4], "dtype": "float32"}],
            "attrs": {"size": [1, 4], "device": "warp:9"},
        },
        r"nodes\[1\]: torch has no device 'warp:9', expected one such as 'cpu'",
    ),
    "call": (("nodes", 0, "call"), {"dtype": {"word": ["dtype", "float33"]}}, "torch has no dtype 'float33'"),
    "device of a tensor": (("weights", 0, "device"), "warp", r"weights\[0\]: torch has no device 'warp'"),
    "dim": (("graph_inputs", 0, "shape"), ["n n", 4], r"graph_inputs\[0\]: shape: 'n n' is no expression"),
    "a dim that is not there": (
        ("nodes", 0, "outputs", 0, "shape"),
        ["2*n", 4],
        r"nodes\[0\]: shape: found '2\*n' of the dim 'n', expected only integers, as there are no dims; save",
    ),
    "a size of 100 bits": (
        ("nodes", 0, "outputs", 0, "shape"),
        [1, 2**100],
        r"nodes\[0\].outputs\[0\].shape: found \[1, 12676506",
    ),
    "a stride of no dim": (
        ("nodes", 0, "outputs", 0, "strides"),
        ["n", 1],
        r"nodes\[0\]: strides: found 'n' of the dim",
    ),
    "line": (("nodes", 0, "line"), [1], r"nodes\[0\].line: found \[1\], expected a string"),
    "no inputs": (("nodes", 1, "inputs"), [], r"nodes\[1\]: aten.mul.Tensor: it lacks 2 arguments: self, other;"),
    "an argument twice": (("nodes", 1, "attrs"), {"other": 2}, r"mul.Tensor: found 2 inputs, expected 1, as many as"),
    "an argument of no type": (
        ("nodes", 1, "attrs"),
        {"other": "p_w"},
        r"nodes\[1\]: aten.mul.Tensor: the argument 'other' is 'p_w'; expected Tensor; save the IR again",
    ),
    "an unknown argument": (
        ("nodes", 1, "attrs"),
        {"zzz": 3},
        r"nodes\[1\]: aten.mul.Tensor: it has no argument 'zzz'; its arguments: self, other; save",
    ),
    "an unknown argument of a call": (
        ("nodes", 1, "call"),
        {"zzz": {"int": 3}},
        r"mul.Tensor: it has no argument 'zzz'",
    ),
    "a number of 100 bits": (
        ("nodes", 1, "attrs"),
        {"other": 2**100},
        r"nodes\[1\]: aten.mul.Tensor: the argument 'other' is 1267650600228229401496703205376; expected Tensor, int",
    ),
    "a tensor of a call": (
        ("nodes", 1, "call"),
        {"self": {"use": 0}, "other": {"use": 10**30}},
        r"nodes\[1\]: aten.mul.Tensor: found inputs \(0, 10{30}\), expected each of 2 once, in order; save",
    ),
    "a size of no dim": (
        ("nodes", 1, "call"),
        {"other": {"size": "n"}},
        r"nodes\[1\]: other: found 'n' of the dim 'n'",
    ),
    "a body": (
        ("nodes", 1),
        {
            "name": "mul",
            "op_type": "higher_order.cond",
            "inputs": [],
            "outputs": [{"name": "mul", "shape": [1, 4], "dtype": "float32"}],
            "bodies": [{"name": "yes", "inputs": [], "outputs": [], "nodes": []}],
        },
        r"nodes\[1\].bodies\[0\]: outputs: found 0, expected 1, as its node has; save the IR again",
    ),
    "signature": (("signature",), "x", "signature: found 'x', expected an object; save the IR again"),
    "kind": (("signature", "inputs", "kind"), 3, "signature.inputs.kind: found 3, expected a string"),
    "no call": (("signature", "inputs"), 0, "signature.inputs: found 0, expected a tuple of the positional arguments"),
    "tensor 7": (
        ("signature", "inputs", "items", 0, "items"),
        [7],
        r"signature.inputs: found \[7\], expected each tensor of graph_inputs once, by the indices 0 to 0",
    ),
    "no tensor": (("signature", "outputs"), {"value": 1}, r"signature.outputs: found \[\], expected each tensor of"),
    "keys": (
        ("signature", "inputs", "items", 1, "keys"),
        ["x"],
        r"signature.inputs.items\[1\].keys: found \['x'\], expected a list of 0 strings",
    ),
    "a constant": (
        ("signature", "inputs", "items", 0, "items"),
        [0, {"int": "x"}],
        r"signature.inputs.items\[0\].items\[1\]: found \{'int': 'x'\}, expected one of value, float, int",
    ),
    "name": (("model_name",), 5, "model_name: found 5, expected a string"),
}


@pytest.mark.parametrize("path, item, said", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_in_a_file_is_said_with_its_place(path: tuple[str | int, ...], item: Any, said: str) -> None:
    data = extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False).to_dict()
    data = json.loads(json.dumps(data))
    part = data
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = item
    with pytest.raises(SerializationError, match=f"IR JSON: .*{said}"):
        assert IR.from_dict(data).graph


UNLIKELY: dict[str, tuple[int, dict[str, Any], str]] = {
    "a shape": (0, {"shape": [5, 3]}, r"op 'sum_1' .*: found float32\[5, 3\] in the IR for what it makes, expected"),
    "a dtype": (0, {"dtype": "int32"}, r"op 'sum_1' .*: found int32\[2, 3\] in the IR for what it makes, expected"),
    "a rank": (1, {"shape": [6]}, r"op 'view' .*: found float32\[6\] in the IR for .*, expected float32\[3, 2\]"),
    "of a copy": (2, {"dtype": "int64"}, r"op 'to' .*: found int64\[3, 2\] in the IR for .*, expected float64\[3, 2\]"),
}


@pytest.mark.parametrize("at, output, said", UNLIKELY.values(), ids=UNLIKELY.keys())
def test_a_result_that_its_operator_does_not_make(at: int, output: dict[str, Any], said: str) -> None:
    """Which no reader sees; it was a bug of ours once, and a plan took its word for what only moves elements."""
    data = extract_ir(Does(lambda x: x.sum(0).view(3, 2).double()), (torch.ones(2, 2, 3),), strict=False).to_dict()
    made = data["nodes"][at]["outputs"][0]["name"]
    tensors = [meta for node in data["nodes"] for meta in (*node["outputs"], *node["inputs"])]
    for meta in (*tensors, *data["graph_outputs"]):
        if meta["name"] == made:
            meta |= output
    with pytest.raises(ExecutionError, match=f"{said}.*; correct the node, or extract the IR again"):
        execute_ir(IR.from_dict(data), (torch.ones(2, 2, 3),))


def test_an_argument_that_its_operator_does_not_take() -> None:
    data = extract_ir(Does(lambda x: x.sum(0).view(3, 2)), (torch.ones(2, 2, 3),), strict=False).to_dict()
    data["nodes"][1]["attrs"]["size"] = [2**62, 2]
    for planned in (True, False):
        with pytest.raises(ExecutionError, match=r"op 'view' .*: torch refuses it on float32\[2, 3\] \(shape"):
            IRExecutor(IR.from_dict(data), {}, planned=planned).execute((torch.ones(2, 2, 3),))


@pytest.mark.parametrize(
    "written, said",
    [
        ({"dtype": 7, "data": [1]}, "dtype: found 7, expected a string"),
        ({"dtype": "float33", "data": [1]}, "unknown dtype 'float33'; known: "),
        ({"dtype": "float32", "shape": [2], "bytes": ""}, r"found 0 bytes, expected 8 of float32\[2\]"),
        ({"dtype": "float32", "shape": [2], "bytes": "00" * 9}, r"found 9 bytes, expected 8 of float32\[2\]"),
        ({"dtype": "float32", "shape": [-1], "bytes": "00" * 4}, r"shape: found \[-1\], expected a list of sizes"),
        ({"dtype": "float32", "bytes": "00" * 4}, "it has no 'shape'"),
        ({"dtype": "int64", "data": [10**30]}, "Overflow"),
    ],
)
def test_a_damaged_constant(written: dict[str, Any], said: str) -> None:
    data = extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False).to_dict()
    with pytest.raises(SerializationError, match=f"constant 'mask' cannot be read: {said}.*; save the IR again$"):
        IR.from_dict(data | {"constants": {"mask": written}})


def test_a_guard_may_name_every_dim() -> None:
    data = extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False).to_dict()
    assert IR.from_dict(data | {"dims": {"n": [1, 9]}, "guards": ["n > 2"]}).guards == ("n > 2",)


def test_the_head_of_a_file_is_refused_before_anybody_asks_for_its_graph() -> None:
    data = extract_ir(MaskedLinear(), (torch.ones(1, 4),), strict=False).to_dict()
    for wrong in ({"signature": {"inputs": "x"}}, {"guards": ["n +"]}, {"dims": {"n": 3}}):
        with pytest.raises(SerializationError):
            IR.from_dict(data | wrong)


@pytest.mark.parametrize("name", ["x.npz", "x.safetensors"])
def test_tensors_that_may_not_be_read_are_not_called_damaged(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    with forbid_reading(file), pytest.raises(UsageError, match=f"{name} cannot be read: Permission denied$"):
        read_arrays(file)
