"""Q4_0 and Q4_K of GGUF: loops as in ggml's sources, and the library gguf as the judge of a whole file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from passes import Status, optimize
from passes.errors import UsageError
from passes.rewrites.gguf_files import read_gguf, read_q4_0, read_q4_k
from passes.rewrites.matmul_nbits import pack_nibbles, unpack_nibbles
from passes.weights.detached import DetachedModel, attach, detach, read_model
from passes.weights.sessions import Session
from pipeline.cli import app
from tests.support.onnx_models import detached, model_of

HEADS, KEY_HEADS, HIDDEN, INNER = 4, 2, 256, 512

Q_PROJ, K_PROJ = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
UP, TABLE, HEAD = "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight", "lm_head.weight"

GRAPH = """g (int64[1, 3] ids) => (float[1, 3, 256] q, float[1, 3, 128] k, float[1, 3, 512] u, float[1, 3, 64] y) {
    x = Gather(table, ids)
    wq = Transpose <perm = [1, 0]> (q_proj)
    q = MatMul(x, wq)
    wk = Transpose <perm = [1, 0]> (k_proj)
    k = MatMul(x, wk)
    u = MatMul(x, up)
    y = MatMul(x, head)
}"""


def draw_bytes(rows: int, blocks: int, size: int, scales: int) -> np.ndarray:
    """Random blocks whose `scales` floats of 16 bits, at their beginning, are small and of either sign."""
    draw = np.random.default_rng(rows)
    found = draw.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    found[:, :, : 2 * scales] = draw.uniform(-0.1, 0.1, (rows, blocks, scales)).astype(np.float16).view(np.uint8)
    return found.reshape(rows, -1)


def test_q4_0_is_read_as_ggml_does() -> None:
    """`dequantize_row_q4_0`."""
    rows = draw_bytes(3, 2, 18, 1)
    weight, _ = read_q4_0(rows)
    for row in range(3):
        for block in range(2):
            start = rows[row, 18 * block :]
            assert weight.scales[block, row] == start[:2].copy().view(np.float16)[0]
            for place in range(16):
                assert weight.integers[32 * block + place, row] == start[2 + place] & 15
                assert weight.integers[32 * block + place + 16, row] == start[2 + place] >> 4
    assert (weight.zero_points == 8).all()


def test_q4_k_is_read_as_ggml_does() -> None:
    """`dequantize_row_q4_K` and `get_scale_min_k4`."""
    rows = draw_bytes(2, 2, 144, 2)
    weight, minima = read_q4_k(rows)
    for row in range(2):
        for block in range(2):
            data = rows[row, 144 * block : 144 * (block + 1)]
            outer = data[:4].copy().view(np.float16).astype(np.float32)
            packed = data[4:16].astype(int)
            for part in range(8):
                if part < 4:
                    scale, bottom = packed[part] & 63, packed[part + 4] & 63
                else:
                    scale = (packed[part + 4] & 15) | ((packed[part - 4] >> 6) << 4)
                    bottom = (packed[part + 4] >> 4) | ((packed[part] >> 6) << 4)
                assert weight.scales[8 * block + part, row] == outer[0] * np.float32(scale)
                assert minima[8 * block + part, row] == outer[1] * np.float32(bottom)
                numbers = data[16 + 32 * (part // 2) : 48 + 32 * (part // 2)] >> (4 * (part % 2)) & 15
                start = 256 * block + 32 * part
                np.testing.assert_array_equal(weight.integers[start : start + 32, row], numbers)


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """As `LlamaModel.permute` of llama.cpp's `convert_hf_to_gguf.py`."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_file(folder: Path, gguf: Any) -> tuple[Path, DetachedModel, dict[str, np.ndarray]]:
    """A file, the float model that it was quantized from, and the values of the file in the order of the model."""
    types = gguf.GGMLQuantizationType
    q4_0, q4_k = types.Q4_0, types.Q4_K
    data = {
        "blk.0.attn_q.weight": (draw_bytes(HIDDEN, HIDDEN // 32, 18, 1), q4_0),
        "blk.0.attn_k.weight": (draw_bytes(HIDDEN // 2, 1, 144, 2), q4_k),
        "blk.0.ffn_up.weight": (draw_bytes(INNER, 1, 144, 2), q4_k),
        "token_embd.weight": (draw_bytes(64, HIDDEN // 32, 18, 1), q4_0),
        "output.weight": (gguf.quantize(np.random.default_rng(0).normal(size=(64, HIDDEN)), types.Q8_0), types.Q8_0),
    }
    path = folder / "net.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    for name, (rows, kind) in data.items():
        stored = permute(rows, HEADS if "attn_q" in name else KEY_HEADS) if "attn" in name else rows
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    names = (Q_PROJ, K_PROJ, UP, TABLE, HEAD)
    values = {name: gguf.dequantize(rows, kind) for name, (rows, kind) in zip(names, data.values(), strict=True)}
    draw = np.random.default_rng(5)
    source = {name: array + draw.normal(size=array.shape) * array.std() / 10 for name, array in values.items()}
    source = {name: array.T if name in (UP, HEAD) else array for name, array in source.items()}
    short = {Q_PROJ: "q_proj", K_PROJ: "k_proj", UP: "up", TABLE: "table", HEAD: "head"}
    model = detached(model_of(GRAPH, 21, **{short[name]: array.astype(np.float32) for name, array in source.items()}))
    proto = attach(model)
    for name, brief in short.items():
        for tensor in proto.graph.initializer:
            tensor.name = name if tensor.name == brief else tensor.name
        for node in proto.graph.node:
            node.input[:] = [name if read == brief else read for read in node.input]
    onnx.save(proto, folder / "net.onnx")
    return path, read_model(folder / "net.onnx"), values


def test_a_model_has_the_values_of_the_file(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path, model, values = write_file(tmp_path, gguf)
    out = tmp_path / "out.onnx"
    result = CliRunner().invoke(app, ["encodings", str(tmp_path / "net.onnx"), "--apply", str(path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 weights of Q4_0, 2 weights of Q4_K, 1 weight of Q8_0; those of Q8_0 as floats" in " ".join(
        result.output.split()
    )
    quantized = read_model(out)
    assert {node.name for node in model.proto.graph.node} <= {node.name for node in quantized.proto.graph.node}
    stored = {tensor.name: tensor for tensor in attach(quantized).graph.initializer}
    for name in (Q_PROJ, K_PROJ, UP, TABLE):
        assert stored[f"{name}_quantized"].data_type == TensorProto.UINT4
    results = Session.of(quantized, [f"{name}_dequantized" for name in (Q_PROJ, K_PROJ, UP, TABLE)])
    found = results.run({"ids": np.array([[1, 5, 63]])})
    for name in (Q_PROJ, K_PROJ, TABLE):
        np.testing.assert_array_equal(found[f"{name}_dequantized"], values[name])
    np.testing.assert_array_equal(found[f"{UP}_dequantized"], values[UP].T)
    np.testing.assert_array_equal(numpy_helper.to_array(stored[HEAD]), values[HEAD].T)
    recipe = [{"take-weights": {"file": str(path)}}, "to-matmul-nbits"]  # which reads the products of Q4_0
    run = optimize(tmp_path / "net.onnx", recipe=recipe)
    assert [row.status for row in run.rows] == [Status.RAN, Status.RAN]
    assert all(errors.ok for errors in run.rows[0].errors.values()) and len(run.rows[0].errors) == 4
    packed = run.model
    assert [node.op_type for node in packed.proto.graph.node].count("MatMulNBits") == 1


def test_a_weight_is_found_under_what_passes_call_it(tmp_path: Path) -> None:
    """A folded Transpose gives `NAME_transposed`, and a tied table stands in the file as the embedding alone."""
    gguf = pytest.importorskip("gguf")
    kind = gguf.GGMLQuantizationType.Q4_0
    draw = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "net.gguf", "llama")
    writer.add_block_count(1)
    for name, array in zip(("token_embd.weight", "blk.0.ffn_up.weight"), draw, strict=True):
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    text = """g (int64[1, 3] ids) => (float[1, 3, 64] u, float[1, 3, 64] y) {
        x = Gather(table, ids)
        u = MatMul(x, up)
        head = Transpose <perm = [1, 0]> (table)
        y = MatMul(x, head)
    }"""
    proto = attach(detached(model_of(text, 21, table=draw[0], up=draw[1].T)))
    names = {"table": HEAD, "up": f"{UP}_transposed"}
    for tensor in proto.graph.initializer:
        tensor.name = names[tensor.name]
    for node in proto.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
    found = read_gguf(detach(proto), tmp_path / "net.gguf")
    assert found.nibbles.keys() == {*names.values()} and found.turned == {HEAD}


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path, model, _ = write_file(tmp_path, gguf)
    other = detached(
        model_of("g (float[2, 256] x) => (float[2, 512] y) { y = MatMul(x, w) }", w=np.ones((256, 512), np.float32))
    )
    with pytest.raises(UsageError, match="found 5 quantized tensors that the model lacks, such as blk"):
        read_gguf(other, path)
    proto = attach(model)
    for tensor in proto.graph.initializer:
        if tensor.name == UP:
            array = numpy_helper.to_array(tensor)[:, np.random.default_rng(0).permutation(INNER)]
            tensor.CopyFrom(numpy_helper.from_array(array, UP))
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.raises(UsageError, match=r"up_proj\.weight: found values \[512, 256\] that are not those of the model"):
        read_gguf(read_model(tmp_path / "other.onnx"), path)
    path.write_bytes(b"none")
    with pytest.raises(UsageError, match="is no file of GGUF that gguf reads"):
        read_gguf(model, path)


# Weights of 4 bits as DequantizeLinear and as MatMulNBits: the same integers and names both ways, equal outputs.

K, N, BLOCK = 80, 6, 32


def quantized(
    op: str = "MatMul", signed: bool = True, by_channel: bool = False, transposed: bool = False, bias: bool = False
) -> DetachedModel:
    """A product of x [2, 80] with a weight of 4 bits; 80 is no multiple of the block."""
    draw = np.random.default_rng(0)
    blocks = -(-K // BLOCK)
    low = -8 if signed else 0
    integers = draw.integers(low, low + 16, size=(K, N))
    shape = (N,) if by_channel else (blocks, N)
    scales = draw.uniform(0.5, 2, size=shape).astype(np.float32)
    zeros = draw.integers(0, 16, size=shape)
    dtype = ml_dtypes.int4 if signed else ml_dtypes.uint4
    turn = (lambda array: array.T if array.ndim == 2 else array) if transposed else (lambda array: array)
    tensors = {"w_quantized": turn(integers).astype(dtype), "w_scale": turn(scales)}
    if not signed:
        tensors["w_zero_point"] = turn(zeros).astype(dtype)
    axis = (1 if by_channel else 0) ^ transposed
    block: dict[str, Any] = {} if by_channel else {"block_size": BLOCK}
    turned: dict[str, Any] = {"transB": 1} if transposed else {}
    nodes = [helper.make_node("DequantizeLinear", list(tensors), ["w_dequantized"], axis=axis, **block)]
    reads = ["x", "w_dequantized"] + ["b"] * bias
    nodes.append(helper.make_node(op, reads, ["y"], "fc", **turned))
    tensors |= {"b": draw.normal(size=N).astype(np.float32)} if bias else {}
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, [2, K])],
        [helper.make_tensor_value_info("y", 1, [2, N])],
        [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in tensors.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model)
    return detach(model)


def stored(model: DetachedModel) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in attach(model).graph.initializer}


def outputs(model: DetachedModel) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(2, K)).astype(np.float32)
    return Session.of(model).run({"x": x})["y"]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"signed": False},
        {"op": "Gemm", "transposed": True, "bias": True},
        {"op": "Gemm", "signed": False, "transposed": True},
    ],
)
def test_there_and_back_again_is_bit_for_bit_what_it_was(case: dict[str, bool]) -> None:
    model = quantized(**case)  # type: ignore[arg-type]
    packed = optimize(attach(model), ["to-matmul-nbits"])
    assert [row.status.value for row in packed.rows] == ["ran"]
    there = detach(packed.model.proto) if not isinstance(packed.model, DetachedModel) else packed.model
    assert [node.op_type for node in there.proto.graph.node] == ["MatMulNBits"] + ["Add"] * case.get("bias", False)
    assert there.proto.graph.node[0].name == "fc"
    np.testing.assert_allclose(outputs(there), outputs(model), rtol=1e-5, atol=1e-4)
    back = optimize(attach(there), ["from-matmul-nbits"]).model
    found, known = stored(back), stored(model)
    assert found.keys() == known.keys()
    for name, array in found.items():
        before = known[name].T if case.get("transposed") and known[name].ndim == 2 else known[name]
        assert array.dtype == before.dtype and (array == before).all(), name


def test_a_computed_bias_is_computed_still() -> None:
    model = quantized("Gemm", bias=True)
    model.proto.graph.node[1].input[2] = "c"
    model.proto.graph.node.insert(0, helper.make_node("Neg", ["b"], ["c"]))
    there = optimize(attach(model), ["to-matmul-nbits"])
    back = optimize(attach(there.model), ["from-matmul-nbits"])
    for run in (there, back):
        assert [(row.status.value, row.changed) for row in run.rows] == [("ran", True)]
        np.testing.assert_allclose(outputs(run.model), outputs(model), rtol=1e-5, atol=1e-4)


def test_channels_become_blocks_of_one_scale() -> None:
    model = quantized(by_channel=True)
    there = optimize(attach(model), [{"to-matmul-nbits": {"block_size": 16}}]).model
    scales = stored(there)["w_scale"]
    assert scales.shape == (N, K // 16) and (scales == scales[:, :1]).all()
    np.testing.assert_allclose(outputs(there), outputs(model), rtol=1e-5, atol=1e-4)


def test_what_matmulnbits_does_not_take_stays_with_its_reason() -> None:
    model = quantized("Gemm", bias=True)
    model.proto.graph.node[1].attribute.append(helper.make_attribute("alpha", 2.0))
    run = optimize(attach(model), ["to-matmul-nbits"])
    assert not run.rows[0].changed
    assert run.rows[0].reason == "1 product left as they are, the first is fc: its factors are transposed or scaled"


def test_nibbles_of_an_odd_row_end_with_a_zero() -> None:
    rows = np.array([[1, 2, 15]])
    assert pack_nibbles(rows).tolist() == [[0x21, 0x0F]]
    assert unpack_nibbles(pack_nibbles(rows)).tolist() == [[1, 2, 15, 0]]
