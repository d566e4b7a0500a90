"""Checkpoints of GPTQ and AWQ against loops that pack as their libraries do, and back without a bit lost."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from onnx import numpy_helper

from passes import Status, optimize
from passes.errors import PolicyError, UsageError
from passes.rewrites.file_weights import FileWeights
from passes.rewrites.nibble_files import (
    AWQ_ORDER,
    IN_ORDER,
    NibbleLayout,
    pack_words,
    read_checkpoint,
    read_nibbles,
    write_nibbles,
)
from passes.weights.detached import DetachedModel, attach
from passes.weights.sessions import Session
from tests.support.onnx_models import detached, model_of

K, N, GROUP = 64, 16, 32
DRAW = np.random.default_rng(0)
INTEGERS = DRAW.integers(0, 16, size=(K, N))
ZEROS = DRAW.integers(1, 16, size=(K // GROUP, N))
SCALES = DRAW.uniform(0.01, 0.1, size=(K // GROUP, N)).astype(np.float16)
WEIGHT = (INTEGERS - ZEROS.repeat(GROUP, 0)) * SCALES.astype(np.float32).repeat(GROUP, 0)


def pack_gptq(zeros: np.ndarray) -> dict[str, np.ndarray]:
    """As AutoGPTQ's `QuantLinear.pack` does it, bit by bit."""
    qweight, qzeros = np.zeros((K // 8, N), np.uint32), np.zeros((len(zeros), N // 8), np.uint32)
    for row in range(K):
        qweight[row // 8] |= (INTEGERS[row] << (4 * (row % 8))).astype(np.uint32)
    for column in range(N):
        qzeros[:, column // 8] |= (zeros[:, column] << (4 * (column % 8))).astype(np.uint32)
    return {"qweight": qweight.view(np.int32), "qzeros": qzeros.view(np.int32), "scales": SCALES}


def pack_awq() -> dict[str, np.ndarray]:
    """As AutoAWQ's `WQLinear_GEMM.from_linear` does it."""
    found: dict[str, np.ndarray] = {"scales": SCALES}
    for name, array in (("qweight", INTEGERS), ("qzeros", ZEROS)):
        words = np.zeros((len(array), N // 8), np.uint32)
        for word in range(N // 8):
            for nibble, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                words[:, word] |= (array[:, word * 8 + column] << (4 * nibble)).astype(np.uint32)
        found[name] = words.view(np.int32)
    return found


def checkpoint(folder: Path, layout: NibbleLayout) -> Path:
    parts = pack_awq() if layout == "awq" else pack_gptq(ZEROS - (layout == "gptq"))
    path = folder / "model.safetensors"
    safetensors.numpy.save_file({f"net.fc.{name}": array for name, array in parts.items()}, path)
    settings = {"bits": 4, "group_size": GROUP, "checkpoint_format": layout}
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    return path


def float_model(transposed: bool) -> DetachedModel:
    """A product with the weight of torch, [outputs, inputs], or its transpose, which the passes name after it."""
    weight = np.zeros((N, K) if transposed else (K, N), np.float32)
    op = "Gemm <transB = 1>(x, weight)" if transposed else "MatMul(x, weight)"
    model = detached(model_of(f"g (float[2, {K}] x) => (float[2, {N}] y) {{ y = {op} }}", 21, weight=weight))
    name = "net.fc.weight" if transposed else "net.fc.weight_transposed"
    model.proto.graph.node[0].input[1] = name
    model.proto.graph.initializer[0].name = name
    return model


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_checkpoint_goes_into_a_model_and_out_again(layout: NibbleLayout, transposed: bool, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, layout)
    source = float_model(transposed)
    quantized = read_checkpoint(source, path).store(source)
    integers = numpy_helper.to_array(next(t for t in attach(quantized).graph.initializer if t.data_type == 21))
    np.testing.assert_array_equal(integers.astype(int), INTEGERS.T if transposed else INTEGERS)
    x = DRAW.normal(size=(2, K)).astype(np.float32)
    np.testing.assert_allclose(Session.of(quantized).run({"x": x})["y"], x @ WEIGHT, rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match=r"cannot write to .*again.*: No such file or directory"):
        write_nibbles(quantized, tmp_path / "again" / "model.safetensors", layout)
    (tmp_path / "again").mkdir()
    assert write_nibbles(quantized, tmp_path / "again" / "model.safetensors", layout) == 1
    known, found = (safetensors.numpy.load_file(file) for file in (path, tmp_path / "again" / "model.safetensors"))
    for name, array in known.items():
        assert found[name].dtype == array.dtype and (found[name] == array).all(), name
    assert read_nibbles(tmp_path / "again" / "model.safetensors").keys() == {"net.fc"}


@pytest.mark.parametrize("product", ["MatMul (x, fc)", "Gemm (x, fc)", "Gemm <transB = 1> (x, fc)"])
def test_a_square_weight_lies_as_its_product_reads_it(product: str, tmp_path: Path) -> None:
    """The shape does not say which axis has the inputs."""
    integers, zeros, scales = INTEGERS[:N], ZEROS[:1], SCALES[:1]
    parts = {"qweight": pack_words(integers, AWQ_ORDER), "qzeros": pack_words(zeros, AWQ_ORDER), "scales": scales}
    safetensors.numpy.save_file({f"fc.{name}": array for name, array in parts.items()}, tmp_path / "w.safetensors")
    settings = {"bits": 4, "group_size": GROUP, "checkpoint_format": "awq"}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    text = f"g (float[2, {N}] x) => (float[2, {N}] y) {{ y = {product} }}"
    source = detached(model_of(text, 21, fc=np.zeros((N, N), np.float32)))
    quantized = read_checkpoint(source, tmp_path / "w.safetensors").store(source)
    x = DRAW.normal(size=(2, N)).astype(np.float32)
    weight = (integers - zeros) * scales.astype(np.float32)
    np.testing.assert_allclose(Session.of(quantized).run({"x": x})["y"], x @ weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("blocks", "group"), [((64, 32), -1), ((16, 16), 16), ((32, 32), 32), ((16, 32), None), ((64, 16), None)]
)
def test_a_checkpoint_has_one_group_or_one_scale_for_each_channel(
    blocks: tuple[int, int], group: int | None, tmp_path: Path
) -> None:
    """Of 64 and 32 inputs; a block that is a whole channel is one of the group where it is no larger."""
    draw = np.random.default_rng(1)
    stored: dict[str, np.ndarray] = {}
    for name, rows, block in zip("ab", (64, 32), blocks, strict=True):
        size = min(block, rows)
        stored[f"{name}_q"] = draw.integers(0, 16, (rows, 32)).astype(np.float32)
        stored[f"{name}_s"] = draw.uniform(0.1, 1, (-(-rows // size), 32)).astype(np.float32)
    text = "g (float[2, 64] x) => (float[2, 32] y) { "
    for name, data, block in zip("ab", ("x", "h"), blocks, strict=True):
        text += f"{name} = DequantizeLinear <axis = 0, block_size = {min(block, 64 if name == 'a' else 32)}>"
        text += f" ({name}_q, {name}_s) {'h' if name == 'a' else 'y'} = MatMul ({data}, {name}) "
    proto = model_of(f"{text} }}", 21, **stored)
    for tensor in proto.graph.initializer:
        if tensor.name.endswith("_q"):
            tensor.CopyFrom(numpy_helper.from_array(stored[tensor.name].astype(ml_dtypes.uint4), tensor.name))
    path, model = tmp_path / "model.safetensors", detached(proto)
    if group is None:
        with pytest.raises(UsageError, match="expected one size, which a checkpoint has for all"):
            write_nibbles(model, path, "gptq_v2")
        return
    assert write_nibbles(model, path, "gptq_v2") == 2
    assert json.loads((tmp_path / "quantize_config.json").read_text())["group_size"] == group
    for name, weight in read_nibbles(path).items():
        np.testing.assert_array_equal(weight.integers, stored[f"{name}_q"])
        np.testing.assert_array_equal(weight.scales, stored[f"{name}_s"])


def test_what_has_no_form_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, "gptq_v2")
    tensors = safetensors.numpy.load_file(path)
    order = np.arange(K)[::-1] // GROUP
    safetensors.numpy.save_file({**tensors, "net.fc.g_idx": order.astype(np.int32)}, path)
    with pytest.raises(UsageError, match=r"net\.fc orders its inputs by g_idx"):
        read_nibbles(path)
    safetensors.numpy.save_file({name: array for name, array in tensors.items() if "scales" not in name}, path)
    with pytest.raises(UsageError, match=r"net\.fc lacks scales"):
        read_nibbles(path)
    tensors["net.fc.qzeros"] = np.zeros_like(tensors["net.fc.qzeros"])
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UsageError, match="a zero point of 0, which gptq has no form for"):
        write_nibbles(
            read_checkpoint(float_model(False), path).store(float_model(False)), tmp_path / "out.safetensors", "gptq"
        )
    with pytest.raises(UsageError, match="the model has no such weight"):
        read_checkpoint(detached(model_of("g (float[2] x) => (float[2] y) { y = Relu(x) }")), path)


def test_a_checkpoint_is_taken_by_a_step_with_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares with floats of the file, so a model with other integers fails it."""
    path = checkpoint(tmp_path, "awq")
    run = optimize(attach(float_model(False)), [{"take-weights": {"file": str(path)}}])
    assert [row.status for row in run.rows] == [Status.RAN]
    assert run.rows[0].reason == "1 weight of 4 bits"
    store = FileWeights.store

    def store_next(self: FileWeights, model: DetachedModel) -> DetachedModel:
        nibbles = {
            name: replace(weight, integers=weight.integers ^ 1, zero_points=weight.zero_points)
            for name, weight in self.nibbles.items()
        }
        return store(replace(self, nibbles=nibbles), model)

    monkeypatch.setattr(FileWeights, "store", store_next)
    run = optimize(attach(float_model(False)), [{"take-weights": {"file": str(path)}}])
    assert [row.status for row in run.rows] == [Status.REVERTED]
    with pytest.raises(PolicyError, match=r"file is 'w\.npz'; expected a file \.gguf, \.safetensors, \.pt, \.bin"):
        optimize(attach(float_model(False)), [{"take-weights": {"file": "w.npz"}}])
    model = attach(float_model(False))
    model.opset_import[0].version = 20
    with pytest.raises(UsageError, match="the model has opset 20, and DequantizeLinear has blocks of 4 bits"):
        optimize(model, [{"take-weights": {"file": str(path)}}])


def test_a_checkpoint_of_torch_has_the_same_weights_and_no_code_of_it_is_run(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = checkpoint(tmp_path, "gptq")
    tensors = {name: torch.from_numpy(array) for name, array in safetensors.numpy.load_file(path).items()}
    state = {name: torch.nn.Parameter(tensor, tensor.is_floating_point()) for name, tensor in tensors.items()}
    torch.save({"state_dict": state}, tmp_path / "model.pt")
    found, known = read_nibbles(tmp_path / "model.pt")["net.fc"], read_nibbles(path)["net.fc"]
    for part in ("integers", "zero_points", "scales"):
        np.testing.assert_array_equal(getattr(found, part), getattr(known, part))
    run = optimize(attach(float_model(True)), [{"take-weights": {"file": str(tmp_path / "model.pt")}}])
    assert [row.status for row in run.rows] == [Status.RAN]
    torch.save({"net.fc.qweight": torch.nn.Parameter(torch.ones(2)).to_sparse()}, tmp_path / "model.bin")
    with pytest.raises(UsageError, match=r"model\.bin: .*; expected dense tensors of dtypes that numpy has"):
        read_nibbles(tmp_path / "model.bin")
    torch.save({"net.fc.qweight": Path("weights")}, tmp_path / "model.bin")
    with pytest.raises(UsageError, match="torch reads no tensors there with weights_only=True"):
        read_nibbles(tmp_path / "model.bin")
    torch.save([1], tmp_path / "model.bin")
    with pytest.raises(UsageError, match="found list, expected a mapping from names to tensors alone"):
        read_nibbles(tmp_path / "model.bin")


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2", "awq"])
@pytest.mark.parametrize(("rows", "columns"), [(64, 12), (56, 16), (50, 12), (40, 1)])
def test_padding_of_packed_integers_is_no_weight(layout: NibbleLayout, rows: int, columns: int, tmp_path: Path) -> None:
    """The last word of a row has nibbles that belong to none, and the last group fewer inputs than others."""
    if layout == "awq" and columns == 1:
        pytest.skip("one word of one output says not which layout it is of")
    integers, zeros, scales = INTEGERS[:rows, :columns], ZEROS[:, :columns], SCALES[:, :columns]
    order = AWQ_ORDER if layout == "awq" else IN_ORDER

    def fill(array: np.ndarray) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, -array.shape[1] % 8)), constant_values=15)

    words = pack_words(fill(integers), order) if layout == "awq" else pack_words(fill(integers.T), order).T
    parts = {"qweight": words, "qzeros": pack_words(fill(zeros - (layout == "gptq")), order), "scales": scales}
    if layout != "awq":
        parts["g_idx"] = (np.arange(rows) // GROUP).astype(np.int32)
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({f"fc.{name}": np.ascontiguousarray(array) for name, array in parts.items()}, path)
    settings = {"bits": 4, "group_size": GROUP, "checkpoint_format": layout}
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    found = read_nibbles(path)["fc"]
    assert found.block == GROUP
    np.testing.assert_array_equal(found.integers, integers)
    np.testing.assert_array_equal(found.zero_points, zeros)
    model = detached(
        model_of(
            f"g (float[2, {rows}] x) => (float[2, {columns}] y) {{ y = MatMul(x, fc) }}",
            21,
            fc=np.zeros((rows, columns), np.float32),
        )
    )
    spread = np.arange(rows) // GROUP
    expected = (integers.astype(np.float32) - zeros[spread]) * scales.astype(np.float32)[spread]
    x = DRAW.normal(size=(2, rows)).astype(np.float32)
    quantized = read_checkpoint(model, path).store(model)
    np.testing.assert_allclose(Session.of(quantized).run({"x": x})["y"], x @ expected, rtol=1e-5, atol=1e-4)
    (tmp_path / "quantize_config.json").write_text(json.dumps({**settings, "group_size": 16}))
    with pytest.raises(UsageError, match="do not fit each other in 4 bits and groups of 16"):
        read_nibbles(path)
