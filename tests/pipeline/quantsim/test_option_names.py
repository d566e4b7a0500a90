"""Messages of a simulation name what their reader can set: keys of a configuration, or options of `to-int8`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import onnxline
from passes.errors import OnnxlineError, UsageError
from passes.weights.detached import attach
from pipeline.config import RunConfig
from pipeline.events import Event, Note
from pipeline.quantsim import QuantSim
from tests.pipeline.quantsim.pictures_of_qdq import model_of

KEYS = re.compile(r"quantsim[.:]|passes\.recipe|model\.(inputs|dims)|verify\.|proof")
"""What a configuration has, and `to-int8` has not."""

MODELS = {
    "half": ("g (float16[4, 4] x) => (float16[4, 4] y) { y = MatMul(x, x) }", 17, {}),
    "attention": (
        "g (float[1, 2, 4, 4] x) => (float[1, 2, 4, 4] y) { a = Attention(x, x, x) y = MatMul(a, w) }",
        23,
        {"w": np.eye(4)},
    ),
    "shared": (
        "g (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) b = Gemm<transB=1>(a, w) y = Add(b, x) }",
        17,
        {"w": np.eye(4)},
    ),
    "nan": ("g (float[2, 4] x) => (float[2, 4] y) { a = MatMul(x, w) y = Log(a) }", 17, {"w": np.eye(4)}),
    "divided": (
        "g (float[2, 4] x) => (float[2, 4] y, float[2, 4] e) { e = Exp(x) i = Div(e, z) y = MatMul(i, w) }",
        17,
        {"w": np.ones((4, 4)), "z": np.zeros(1)},
    ),
    "stored": (
        "g (float[2, 4] x) => (float[2, 4] y) { y = Gemm(x, w, b) }",
        17,
        {"w": np.eye(4), "b": np.array([0, 0, 0, np.inf], np.float32)},
    ),
    "wide": (
        "g (float[2, 4] x) => (float[2, 8] y) { s = Sigmoid(x) a = MatMul(x, w) y = Concat<axis = 1>(s, a) }",
        17,
        {"w": 1000 * np.eye(4)},
    ),
    "empty": ("g (float[0, 4] x) => (float[0, 4] y) { y = MatMul(x, w) }", 17, {"w": np.eye(4)}),
    "masked": (
        "g (float[2, 4] x) => (float[2, 4] y) { a = MatMul(x, w) m = Add(a, k) s = Softmax(m) y = MatMul(s, w) }",
        17,
        {"w": np.eye(4), "k": np.array([0, 0, 0, -3e38], np.float32)},
    ),
    "open": ("g (float[n, n] x) => (float[n, 3] y) { y = MatMul(x, w) }", 17, {"w": np.ones((5, 3))}),
    "plain": ("g (float[2, 4] x) => (float[2, 4] y) { y = MatMul(x, w) }", 17, {"w": np.eye(4)}),
}
"""Name → graph, opset and weights."""

SAID = [
    ("half", "put to-float32 into quantsim.prepare", "apply to-float32 first (onnxline optimize MODEL -o OUT"),
    ("attention", "put decompose-attention into quantsim.prepare", "apply decompose-attention first (onnxline"),
    ("shared", "put untie into quantsim.prepare for a copy for each module", "apply untie first (onnxline optimize"),
    ("divided", "in float: quantsim.rules, tensor:i: {activations: float}", "leave the tensor in float: keep tensor:i"),
    ("nan", "say by model.inputs.NAME.range which numbers", "check the weights, and give data like that in use"),
    ("wide", "in float: quantsim.rules, node:y: {activations: float}", "leave that node in float: keep node:y"),
    ("empty", "give quantsim.calibration.data samples with elements", "give data samples with elements there"),
    ("plain", "nothing of the model in use; give quantsim.calibration.data", "nothing of the model in use; give data"),
    ("masked", "put clamp-mask into quantsim.prepare, which raises", "apply clamp-mask first (onnxline optimize MODEL"),
    ("open", "set model.dims: {n: [2, 3]} to sizes that fit", "give data of sizes that fit"),
]
"""A model → what `onnxline quantsim` says of it, and what `to-int8` says."""


def write(name: str, folder: Path) -> Path:
    text, opset, weights = MODELS[name]
    known = {key: np.asarray(array, np.float32) for key, array in weights.items()}
    onnx.save(attach(model_of(text, opset, **known)), folder / "model.onnx")
    return folder / "model.onnx"


def by_quantsim(model: Path, **section: Any) -> str:
    """All notes and the error of a simulation."""
    said = list[str]()

    def note(event: Event) -> None:
        if isinstance(event, Note):
            said.append(event.text)

    settings: dict[str, Any] = {"model": {"onnx": str(model)}, "passes": {"recipe": []}}
    settings |= {"runtime": {"backends": ["onnxruntime"]}, "quantsim": {"sensitivity": False, **section}}
    try:
        report = QuantSim(RunConfig.from_mapping(settings, model.parent), model.parent / "out", note).run().report
        said += report.notes
    except OnnxlineError as error:
        said.append(str(error))
    return "\n".join(said)


def by_command(model: Path, **options: Any) -> str:
    """All notes and reasons, and the error, of `to_int8`."""
    try:
        result = onnxline.to_int8(model, **options)
    except OnnxlineError as error:
        return str(error)
    return "\n".join((*result.notes, *(placed.reason for placed in result.placement.left_in_float())))


@pytest.mark.parametrize(("name", "key", "option"), SAID, ids=[entry[0] for entry in SAID])
def test_each_reader_gets_own_options(name: str, key: str, option: str, tmp_path: Path) -> None:
    model = write(name, tmp_path)
    assert key in by_quantsim(model)
    said = by_command(model)
    assert option in said
    assert not KEYS.search(said)


def test_data_is_named_where_the_model_computes_nan_on_a_sample(tmp_path: Path) -> None:
    model = write("nan", tmp_path)
    np.savez(tmp_path / "above.npz", x=np.ones((2, 4), np.float32))
    np.savez(tmp_path / "below.npz", x=np.full((2, 4), -1, np.float32))
    data = [tmp_path / name for name in ("above.npz", "below.npz")]
    assert "give samples like those in use (data)" in by_command(model, data=data, keep=["Log"])
    said = by_quantsim(model, calibration={"data": ["below.npz"]}, rules={"op:Log": {"activations": "float"}})
    assert "holds NaN" in said


def test_a_stored_tensor_with_infinity(tmp_path: Path) -> None:
    model = write("stored", tmp_path)
    said = by_quantsim(model, rules={"tensor:y": {"activations": "float"}})
    assert said.endswith("leave the tensor in float: quantsim.rules, tensor:b: {activations: float}")
    assert by_command(model, keep=["tensor:y"]).endswith("leave the tensor in float: keep tensor:b")


def test_a_selector_without_a_name_is_no_node(tmp_path: Path) -> None:
    assert by_command(write("plain", tmp_path), keep=["tensor:"]).startswith(
        "to-int8: keep: the model has no node or operator 'tensor:'"
    )


def test_a_node_whose_name_has_brackets_is_meant_by_its_name() -> None:
    model = attach(model_of("g (float[4, 4] x) => (float[4, 4] y) { y = MatMul(x, w) }", w=np.eye(4, dtype=np.float32)))
    model.graph.node[0].name = "dense[0]/MatMul"
    with pytest.raises(UsageError, match=r"3 tensors: the rule 'node:dense\[0\]/MatMul' says float"):
        onnxline.to_int8(model, keep=["dense[0]/MatMul"])


def test_an_encoding_that_is_missing_in_a_file(tmp_path: Path) -> None:
    model = write("plain", tmp_path)
    by_quantsim(model)
    file = tmp_path / "out" / "model.encodings"
    known = json.loads(file.read_text())
    known["param_encodings"].clear()
    file.write_text(json.dumps(known))
    said = by_command(model, encodings=file)
    assert said.startswith("encodings: 1 of 3 tensors that are to be quantized have no encoding in the file: 'w'")
    assert "leave them in float: keep tensor:w" in said
    advice = "quantsim.rules, tensor:w: {weights: float}"
    assert advice in by_quantsim(model, encodings_from=str(file))
    followed = by_quantsim(model, encodings_from=str(file), rules={"tensor:w": {"weights": "float"}})
    assert "quantsim.rules" not in followed


def test_a_model_that_does_not_run_is_a_mistake_of_its_user(tmp_path: Path) -> None:
    feeds = [{"x": np.ones((2, 4), np.float32)}]
    w, sizes = np.eye(4, dtype=np.float32), np.array([7, 4])
    text = "g (float[n, 4] x) => (float[7, 4] y) { a = MatMul(x, w) y = Reshape(a, s) }"
    onnx.save(attach(model_of(text, 17, w=w, s=sizes)), tmp_path / "fixed.onnx")
    said = by_command(tmp_path / "fixed.onnx", feeds=feeds)
    assert said.startswith("the float model does not run: ")
    assert said.endswith("give samples of other sizes (data)")
    model = onnx.parser.parse_model(
        '<ir_version: 9, opset_import: ["": 21, "acme": 1]>'
        "g (float[2, 4] x) => (float[2, 4] y) { a = acme.Foo(x) y = MatMul(a, w) }"
    )
    model.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    for profile in ("ort-cpu", "weight-only"):
        with pytest.raises(UsageError, match=r"acme:Foo.*declare the operator"):
            onnxline.to_int8(model, feeds=feeds, profile=profile)


def test_a_relu_of_a_weight() -> None:
    text = "g (float[4, 4] x) => (float[4, 4] y) { a = MatMul(x, w) r = Relu(w) y = MatMul(a, r) }"
    model = attach(model_of(text, 17, w=np.eye(4, dtype=np.float32)))
    with pytest.raises(UsageError, match="does not take Relu 'r' of the stored tensor 'w'"):
        onnxline.to_int8(model)
    assert onnxline.to_int8(onnxline.optimize(model).to_proto()).placement.quantized_sites()
