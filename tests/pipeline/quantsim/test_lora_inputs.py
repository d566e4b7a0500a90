"""Adapters that are inputs: formats of what they adapt, integers of their defaults, and another adapter fed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from passes.optimize import optimize
from passes.weights.detached import DetachedModel, attach
from pipeline import Pipeline, RunConfig
from pipeline.errors import UsageError
from pipeline.quantsim import QuantSim, insert_qdq
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

GRAPH = """g (float[2, 4, 32] x) => (float[2, 4, 24] y) {
    base = MatMul (x, w) h = MatMul (x, a) d = MatMul (h, b) y = Add (base, d)
}"""
DRAW = np.random.default_rng(0)
WEIGHTS = {
    name: DRAW.normal(size=size).astype(np.float32)
    for name, size in {"w": (32, 24), "a": (32, 4), "b": (4, 24)}.items()
}
X = DRAW.normal(size=(2, 4, 32)).astype(np.float32)


def with_inputs() -> DetachedModel:
    return optimize(attach(model_of(GRAPH, 21, **WEIGHTS)), ["lora-inputs"]).model


def quantized(model: DetachedModel, weights: str) -> onnx.ModelProto:
    placement = place(model, [rule("op:*", weights, "float")])
    proto = attach(insert_qdq(model, encode(placement, {}, model)))
    onnx.checker.check_model(proto)
    return proto


def run(model: onnx.ModelProto, **adapters: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: Any = session.run(None, {"x": X, **adapters})
    return found[0]


@pytest.mark.parametrize("weights", ["int8/channel", "int4/block16", "uint4/channel", "int16/channel"])
def test_inputs_are_quantized_as_stored_adapters_are(weights: str) -> None:
    model = quantized(with_inputs(), weights)
    np.testing.assert_array_equal(run(model), run(quantized(model_of(GRAPH, 21, **WEIGHTS), weights)))
    none = run(model, b=np.zeros_like(WEIGHTS["b"]))
    base = model_of("g (float[2, 4, 32] x) => (float[2, 4, 24] y) { y = MatMul (x, w) }", w=WEIGHTS["w"])
    np.testing.assert_array_equal(none, run(quantized(base, weights)))
    assert [info.name for info in model.graph.input] == ["x", "a", "b"]


def test_adapters_have_the_format_of_what_they_adapt() -> None:
    rules = [rule("op:*", "int8/channel", "float"), rule("tensor:w", "int4/channel")]
    for model in (with_inputs(), model_of(GRAPH, 21, **WEIGHTS)):
        formats = place(model, rules).formats()
        assert {name: str(formats[name]) for name in "wab"} == dict.fromkeys("wab", "int4/channel")
        formats = place(model, [*rules, rule("tensor:b", "int8/channel")]).formats()
        assert {name: str(formats[name]) for name in "ab"} == {"a": "int4/channel", "b": "int8/channel"}


def test_a_format_that_no_node_makes_of_floats_is_refused() -> None:
    with pytest.raises(
        UsageError, match="the input 'a' has a default and is to be int3/channel; expected 4, 8 or 16 bits"
    ):
        quantized(with_inputs(), "int3/channel")


class Adapted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.a, self.b = (torch.nn.Parameter(torch.from_numpy(WEIGHTS[name])) for name in "wab")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w + (x @ self.a) @ self.b


def make() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """What the run below calls."""
    return Adapted(), (torch.from_numpy(X),)


def test_adapters_of_a_torch_module_become_inputs(tmp_path: Path) -> None:
    config = {"model": {"factory": f"{__name__}:make"}, "passes": {"recipe": ["lora-inputs"], "keep": ["lora"]}}
    result = Pipeline(RunConfig.model_validate({**config, "runtime": {"backends": ["onnxruntime"]}}), tmp_path).run()
    model = onnx.load(result.model)
    assert {info.name for info in model.graph.input} == {"x", "a", "b"}
    expected = X @ WEIGHTS["w"]
    np.testing.assert_allclose(run(model, b=np.zeros_like(WEIGHTS["b"])), expected, atol=1e-5)


def simulate(folder: Path, name: str, text: str, weights: dict[str, np.ndarray], **more: str) -> dict[str, Any]:
    """The encodings of a simulation, by tensor."""
    onnx.save(attach(model_of(text, 21, **weights)), folder / f"{name}.onnx")
    np.savez(folder / "x.npz", x=X)
    settings = {"profile": "qnn-htp", "calibration": {"data": [str(folder / "x.npz")]}, **more}
    config = {"model": {"onnx": str(folder / f"{name}.onnx")}, "passes": {"recipe": []}, "quantsim": settings}
    QuantSim(RunConfig.model_validate(config), folder / name).run()
    found = json.loads((folder / name / "model.encodings").read_text())
    return {entry["name"]: entry for entry in (*found["param_encodings"], *found["activation_encodings"])}


def test_an_adapter_has_the_encodings_of_its_base(tmp_path: Path) -> None:
    """Those of a file for what the base has, and calibrated ones for what only the adapter has."""
    base = "g (float[2, 4, 32] x) => (float[2, 4, 24] y) { y = MatMul (x, w) }"
    of_base = simulate(tmp_path, "base", base, {"w": WEIGHTS["w"]})
    alone = simulate(tmp_path, "adapted", GRAPH, WEIGHTS)
    encodings = str(tmp_path / "base" / "model.encodings")
    shared = simulate(tmp_path, "adapted", GRAPH, WEIGHTS, encodings_from=encodings)
    assert shared.keys() == {"x", "w", "a", "h", "b", "d", "base", "y"}
    assert {name: shared[name] for name in of_base} == of_base
    assert {name: shared[name] for name in "abhd"} == {name: alone[name] for name in "abhd"}
    assert shared["y"] != alone["y"]


def test_the_base_may_be_the_same_network_with_zeros(tmp_path: Path) -> None:
    """Its values then have the same names, which torch's exporter numbers. The scales of zeros are no adapter's."""
    text = GRAPH.replace("MatMul (x, a)", "MatMul (x, ta)").replace("h =", "ta = Transpose <perm = [1, 0]> (a) h =")
    weights = {**WEIGHTS, "a": np.ascontiguousarray(WEIGHTS["a"].T)}
    fresh = {**weights, "a": weights["a"] / 4, "b": np.zeros_like(weights["b"])}
    zeros = simulate(tmp_path, "zeros", text, fresh)
    alone = simulate(tmp_path, "adapted", text, weights)
    shared = simulate(tmp_path, "adapted", text, weights, encodings_from=str(tmp_path / "zeros" / "model.encodings"))
    assert {name: shared[name] for name in "xwy"} == {name: zeros[name] for name in "xwy"}
    assert {name: shared[name] for name in "ahbd"} == {name: alone[name] for name in "ahbd"}


def test_a_base_whose_values_have_other_names_is_refused_with_the_reason(tmp_path: Path) -> None:
    """As torch's exporter numbers values: the second one of the base is x·A of the adapted model."""
    values = "m = MatMul (x, w) m1 = MatMul (x, a) m2 = MatMul (m1, b) s = Add (m, m2) s1 = Neg (s) y = Neg (s1)"
    cases = {
        "m1 = Neg (m) y = Neg (m1)": ("m1", "m1 is a value of an adapter"),
        "y = Neg (m)": ("h", "1 of 10 tensors that are to be quantized have no encoding in the file: 's1'"),
        "m5 = Neg (m) y = Neg (m5)": ("h", "does not have as float tensors: 'm5'"),
    }
    for number, (rest, (name, message)) in enumerate(cases.items()):
        base = f"g (float[2, 4, 32] x) => (float[2, 4, 24] y) {{ m = MatMul (x, w) {rest} }}"
        simulate(tmp_path, f"base{number}", base, {"w": WEIGHTS["w"]})
        text = f"g (float[2, 4, 32] x) => (float[2, 4, 24] y) {{ {values.replace('m1', name)} }}"
        with pytest.raises(UsageError, match=f"{message}.*zeros for B"):
            encodings = str(tmp_path / f"base{number}" / "model.encodings")
            simulate(tmp_path, "adapted", text, WEIGHTS, encodings_from=encodings)


def test_a_matrix_of_zeros_that_adapters_share_is_an_input_of_each() -> None:
    """Passes store equal matrices once, and a caller feeds each adapter its own."""
    text = """g (float[2, 4, 32] x) => (float[2, 4, 24] y, float[2, 4, 24] z) {
        base = MatMul (x, w) up = Transpose <perm = [1, 0]> (b)
        h = MatMul (x, a) d = MatMul (h, up) y = Add (base, d)
        i = MatMul (x, c) e = MatMul (i, up) z = Add (base, e)
    }"""
    proto = attach(model_of(text, 21, **WEIGHTS, c=WEIGHTS["a"][::-1].copy()))
    proto.graph.initializer[2].CopyFrom(numpy_helper.from_array(np.zeros((24, 4), np.float32), "q.up.weight"))
    for node in proto.graph.node:
        node.input[:] = ["q.up.weight" if name == "b" else name for name in node.input]
        module = {"d": "q.up", "e": "v.up"}.get(node.output[0])
        if module:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=str(["", module, "matmul"]))
    model = attach(optimize(proto, ["lora-inputs"]).model)
    assert [info.name for info in model.graph.input] == ["x", "a", "q.up.weight", "c", "v.up.weight"]
    fed = np.ascontiguousarray(WEIGHTS["b"].T)
    options = onnxruntime.SessionOptions()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    y, z = map(np.asarray, session.run(None, {"x": X, "v.up.weight": fed}))
    base = X @ WEIGHTS["w"]
    np.testing.assert_allclose(y, base, atol=1e-4)
    np.testing.assert_allclose(z, base + X @ WEIGHTS["a"][::-1] @ WEIGHTS["b"], atol=1e-4)  # sums of float32
