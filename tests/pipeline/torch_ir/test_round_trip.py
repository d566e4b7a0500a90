"""A saved IR is the unsaved one: calls, constants, outputs, bit for bit."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeline.ir.graph import DTYPE_BITS
from pipeline.torch_ir import IR, SerializationError, deserialize_ir, execute_ir, extract_ir, serialize_ir
from pipeline.torch_ir.constants import read_constant, write_constant
from tests.pipeline.torch_ir.small_modules import Cache, MaskedLinear, cache_call

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def bits(tensor: Tensor) -> tuple[object, ...]:
    flat = tensor.contiguous().reshape(-1)
    raw = flat.view(torch.uint8).tolist() if flat.numel() else []
    return tensor.dtype, tuple(tensor.shape), raw


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Of any dtype and shape, of random bytes: NaNs, infinities and subnormals among them; some permuted."""
    dtype, shape = getattr(torch, draw(st.sampled_from(sorted(DTYPE_BITS)))), draw(SHAPES)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count))).view(shape)
    size = count * dtype.itemsize
    raw = torch.frombuffer(bytearray(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape)
    return tensor.permute(*draw(st.permutations(range(len(shape))))) if len(shape) > 1 else tensor


@given(tensors())
@settings(max_examples=150, derandomize=True)
def test_constants_keep_their_bits_and_their_strides(tensor: Tensor) -> None:
    written = json.loads(json.dumps(write_constant("k", tensor), allow_nan=False))
    read = read_constant("k", written, {})
    assert bits(read) == bits(tensor)
    assert read.stride() == tensor.stride() or not tensor.numel() or 1 in tensor.shape


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324])
def test_floats_that_json_has_not(value: float) -> None:
    tensor = torch.tensor([[value, 1.5]], dtype=torch.float64)
    assert bits(read_constant("k", json.loads(json.dumps(write_constant("k", tensor))), {})) == bits(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_file_keeps_what_json_has_no_number_for(dtype: torch.dtype, tmp_path: Path) -> None:
    """Small constants, in the JSON itself; a NaN with a payload and a sign too."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    odd = torch.tensor([math.nan], dtype=dtype).view(whole).bitwise_or(1)
    held = {
        "infinite": torch.tensor([math.inf, -math.inf, 1.5], dtype=dtype),
        "no number": torch.cat([odd.view(dtype), -odd.view(dtype), torch.zeros(1, dtype=dtype)]),
        "finite": torch.tensor([-0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).max], dtype=dtype),
    }
    IR(constants=held).save(tmp_path / "m.json")
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]
    assert '"bytes"' not in (tmp_path / "m.json").read_text().split('"finite"')[1]
    read = IR.load(tmp_path / "m.json").constants
    assert {name: bits(tensor) for name, tensor in read.items()} == {
        name: bits(tensor) for name, tensor in held.items()
    }


class Calls(nn.Module):
    """Arguments by keyword, None in the middle, lists of tensors, tensors by keyword, dtypes, infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(4))
        self.table = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
        self.wave = torch.tensor([1 + 2j, complex(math.inf, 0)])

    def forward(self, x: Tensor, q: Tensor, wide: Tensor) -> tuple[Tensor, ...]:
        normed = nn.functional.layer_norm(x, (4,), None, self.bias)
        attended = nn.functional.scaled_dot_product_attention(q, q, q, scale=0.3)
        clamped = torch.clamp(x, max=self.bias)
        picked = wide[:, None, torch.tensor([0, 1])]
        joined = torch.cat([x, normed, clamped]).to(torch.float64).sum(0, dtype=torch.float32)
        full = torch.full((2,), -math.inf, dtype=torch.float16)
        layout = wide.to(memory_format=torch.channels_last) * 2
        return (normed, attended, clamped, picked, joined, full, layout, self.table * 2, self.wave * 1j)


def test_a_saved_ir_runs_to_the_same_bits(tmp_path: Path) -> None:
    model = Calls()
    inputs = (torch.randn(3, 4), torch.randn(1, 2, 3, 4), torch.randn(2, 3, 4, 4))
    ir = extract_ir(model, inputs, strict=False)
    ir.save(tmp_path / "m.json.zst", threshold=4)
    wanted = execute_ir(ir, inputs, model.state_dict())
    assert [bits(tensor) for tensor in wanted] == [bits(tensor) for tensor in model(*inputs)]
    for again in (IR.load(tmp_path / "m.json.zst"), deserialize_ir(serialize_ir(ir)), IR.from_dict(ir.to_dict())):
        assert [op.attrs for op in again.graph.ops] == [op.attrs for op in ir.graph.ops]
        assert [value.strides for value in again.graph.values] == [value.strides for value in ir.graph.values]
        outputs = execute_ir(again, inputs, model.state_dict())
        assert [bits(tensor) for tensor in outputs] == [bits(tensor) for tensor in wanted]
        assert [tensor.stride() for tensor in outputs] == [tensor.stride() for tensor in wanted]


def test_updates_trees_and_named_dims_come_back() -> None:
    args, kwargs = cache_call()
    ir = extract_ir(Cache(), args, kwargs=kwargs, strict=False)
    again = deserialize_ir(serialize_ir(ir))
    assert (again.signature, again.graph.updates, again.graph.sources) == (
        ir.signature,
        ir.graph.updates,
        ir.graph.sources,
    )
    batch = torch.export.Dim("batch", min=2, max=9)
    model = nn.Sequential(nn.Linear(4, 2), nn.Flatten(0))
    ir = extract_ir(model, (torch.randn(3, 4),), strict=False, dynamic_shapes=({0: batch},))
    again = deserialize_ir(serialize_ir(ir))
    assert (again.graph.dims, again.graph_outputs[0].shape) == (ir.graph.dims, ("2*batch",))
    x = torch.randn(7, 4)
    assert torch.equal(execute_ir(again, (x,), model.state_dict())[0], model(x))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y * torch.tensor([1.0, math.inf]), lambda y: y + 1, (x,))


def test_copies_and_pickles_are_equal() -> None:
    ir = extract_ir(Branches(), (torch.ones(2, 2),), strict=False)
    for again in (copy.deepcopy(ir), pickle.loads(pickle.dumps(ir)), IR.from_dict(ir.to_dict())):
        assert again == ir
        assert execute_ir(again, (torch.ones(2, 2),))[0].tolist() == [[1.0, math.inf]] * 2
        assert replace(again, model_name="another") != ir


def test_an_unbind_of_1024_is_small() -> None:
    class Unbind(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack(list(torch.unbind(x)[::2]))

    ir = extract_ir(Unbind(), (torch.randn(1024, 2),), strict=False)
    assert len(serialize_ir(ir)) < 1_000_000
    assert len(ir.nodes) == 2


def test_large_constants_lie_beside_and_a_failed_save_leaves_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MaskedLinear()
    ir = extract_ir(model, (torch.randn(1, 4),), strict=False)
    path = tmp_path / "m.json"
    ir.save(path, threshold=8)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert [name.endswith(".safetensors") for name in sorted(before)] == [False, True]
    assert torch.equal(IR.load(path).constants["mask"], model.mask)

    with pytest.raises(TypeError, match=r"the constants of an IR cannot be changed; .*dataclasses.replace\(ir"):
        ir.constants["mask"] = torch.zeros(4)  # type: ignore[index]
    ir = replace(ir, constants={"mask": torch.full((4,), 7.0)})
    monkeypatch.setattr("pipeline.torch_ir.nodes.OpNode.to_dict", _failing)
    with pytest.raises(SerializationError, match="No space left"):
        ir.save(path, threshold=8)
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert before == kept
    assert torch.equal(IR.load(path).constants["mask"], model.mask)
    monkeypatch.undo()

    ir.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["m.json"]  # the files of older saves are gone
    assert torch.equal(IR.load(path).constants["mask"], ir.constants["mask"])


def _failing(graph: object) -> object:
    raise OSError(28, "No space left on device")


WRONG = {
    "no JSON": ("{", "ends early, after 1 bytes"),
    "no object": ("[]", "expected the object that IR.save writes"),
    "a key is missing": ('{"nodes": []}', "m.json: the keys graph_inputs, graph_outputs, weights are missing"),
    "a later format": ('{"format_version": 99}', "found format_version 99, expected 1"),
    "a file elsewhere": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [],'
        ' "constants": {"k": {"file": "../k.safetensors", "key": "k", "dtype": "int8", "shape": []}}}',
        "which is not in the same folder",
    ),
    "a file without a name": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [],'
        ' "constants": {"k": {"file": "", "key": "k", "dtype": "int8", "shape": []}}}',
        "names the file '' for its constants",
    ),
    "an unknown dtype": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [],'
        ' "constants": {"k": {"data": [1], "dtype": "load"}}}',
        "m.json: constant 'k' cannot be read: unknown dtype 'load'",
    ),
    "constants that are no mapping": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [], "constants": [1]}',
        "constants",
    ),
    "a tree that is none": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [], "signature": {"inputs": "x"}}',
        "signature.inputs: found",
    ),
    "names that are none": (
        '{"nodes": [], "graph_inputs": [], "graph_outputs": [], "weights": [], "unsaved": 3}',
        "unsaved: found 3",
    ),
    "a dangling tensor": (
        '{"graph_inputs": [], "weights": [], "nodes": [],'
        ' "graph_outputs": [{"name": "y", "shape": [], "dtype": "bool"}]}',
        "m.json: .*'y' is used, and nothing makes it",
    ),
    "a node that is no mapping": (
        '{"graph_inputs": [], "weights": [], "graph_outputs": [], "nodes": ["add"]}',
        r"nodes\[0\]",
    ),
}


@pytest.mark.parametrize("text, said", WRONG.values(), ids=WRONG.keys())
def test_files_that_are_no_ir(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(text)
    with pytest.raises(SerializationError, match=said):
        assert IR.load(path).graph
