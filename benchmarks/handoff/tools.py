"""Runs one quantization tool on one model. Started by the interpreter of that tool's environment, so it imports nothing
of onnxline: `PYTHON benchmarks/handoff/tools.py JOB.json`.

The job names the tool, the model, folders of samples (.npz files) and a folder for what comes out. There `result.json`
says the version, the seconds and the tensors that have a quantizer; `model.onnx` is the quantized model, and AIMET,
whose simulation has operators of its own, leaves `outputs.npz` instead.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Feeds = dict[str, np.ndarray]
Job = dict[str, Any]
Found = dict[str, Any]


def read_samples(folder: str) -> list[Feeds]:
    return [dict(np.load(path)) for path in sorted(Path(folder).glob("*.npz"))]


class Reader:
    """The samples as onnxruntime's and Quark's calibrators take them."""

    def __init__(self, samples: list[Feeds]) -> None:
        self._samples = samples
        self.rewind()

    def get_next(self) -> Feeds | None:
        return next(self._left, None)

    def rewind(self) -> None:
        self._left: Iterator[Feeds] = iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)


def run_aimet(job: Job, calibration: list[Feeds], out: Path) -> Found:
    import onnxruntime
    from aimet_onnx import int8, int16
    from aimet_onnx.quantsim import QuantizationSimModel, load_encodings_to_sim

    disabled = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    level = {"graph_optimization_level": disabled} if job.get("like_ours") else {}
    model = onnx.load(job["model"])
    begun = time.perf_counter()
    sim = QuantizationSimModel(
        model, param_type=int8, activation_type=int16, quant_scheme="min_max", session_options_kwargs=level
    )
    own = {name for name, quantizer in sim.qc_quantize_op_dict.items() if quantizer.enabled}
    found: Found = {}
    if job.get("encodings"):
        mismatched = load_encodings_to_sim(sim, job["encodings"], strict=False)
        found["mismatched"] = [repr(entry) for entry in mismatched or ()]
    elif job.get("like_ours"):
        _compute_like_ours(sim, calibration)
    else:
        sim.compute_encodings(calibration)
    found["quantize_s"] = time.perf_counter() - begun
    begun = time.perf_counter()
    outputs = {
        str(index): sim.session.run(None, sample)[0] for index, sample in enumerate(read_samples(job["evaluation"]))
    }
    found["evaluate_s"] = time.perf_counter() - begun
    np.savez(out / "outputs.npz", **outputs)
    found["own"] = sorted(own)
    found["quantized"] = sorted(name for name, quantizer in sim.qc_quantize_op_dict.items() if quantizer.enabled)
    for number in ("1.0.0", "2.0.0"):
        sim.export(str(out), f"encodings_{number}", export_model=False, encoding_version=number)
    return found


def _compute_like_ours(sim: Any, calibration: list[Feeds]) -> None:
    """Ranges of the float model, and weights whose lowest number is unused. AIMET's own way is to measure activations
    after quantized weights, and to give the lowest number to those weights whose least value has the largest size."""
    weights = [sim.qc_quantize_op_dict[name] for name in sim.param_names if sim.qc_quantize_op_dict[name].enabled]
    activations = [sim.qc_quantize_op_dict[name] for name in sim.activation_names]
    for quantizer in weights:
        quantizer.enabled = False
    sim.compute_encodings(calibration)
    for quantizer in activations:
        quantizer.freeze_encodings()
    for quantizer in weights:
        quantizer.enabled = True
        quantizer.use_strict_symmetric = True
    sim.compute_encodings(calibration[:1])


def run_onnxruntime(job: Job, calibration: list[Feeds], out: Path) -> Found:
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    quantize_static(
        job["model"],
        out / "model.onnx",
        Reader(calibration),  # type: ignore[arg-type]
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt16,
        weight_type=QuantType.QInt8,
    )
    return {}


def run_quark(job: Job, calibration: list[Feeds], out: Path) -> Found:
    from quark.onnx import ExtendedQuantType, ModelQuantizer, QuantFormat
    from quark.onnx.quantization.config.config import Config, QuantizationConfig

    # Quark gives tables and the constants of normalizations 8 bits, and the others give them 16, as activations.
    settings = QuantizationConfig(
        quant_format=QuantFormat.QDQ,
        activation_type=ExtendedQuantType.QUInt16,
        weight_type=ExtendedQuantType.QInt8,
        per_channel=True,
        optimize_model=False,
        include_cle=False,
        print_summary=False,
        specific_tensor_precision=True,
        extra_options={"MixedPrecisionTensor": {ExtendedQuantType.QUInt16: _constants_beside_weights(job["model"])}},
    )
    ModelQuantizer(Config(global_quant_config=settings)).quantize_model(
        job["model"],
        str(out / "model.onnx"),
        Reader(calibration),  # type: ignore[arg-type]
    )
    return {}


def _constants_beside_weights(path: str) -> list[str]:
    """The float constants that no product reads."""
    graph = onnx.load(path).graph
    products = {name for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul") for name in node.input}
    floats = [tensor for tensor in graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    return [tensor.name for tensor in floats if tensor.name not in products]


def run_nncf(job: Job, calibration: list[Feeds], out: Path) -> Found:
    """NNCF has 8 bits of activations at most on ONNX models."""
    import nncf

    model = nncf.quantize(onnx.load(job["model"]), nncf.Dataset(calibration), subset_size=len(calibration))
    onnx.save(model, out / "model.onnx")
    return {}


def run_nncf_int4(job: Job, calibration: list[Feeds], out: Path) -> Found:
    """Weights alone; below opset 21 NNCF writes MatMulNBits."""
    import nncf

    mode = nncf.CompressWeightsMode.INT4_SYM
    model = nncf.compress_weights(onnx.load(job["model"]), mode=mode, group_size=32, ratio=1.0, all_layers=True)
    onnx.save(model, out / "model.onnx")
    return {}


def run_onnxsim(job: Job, calibration: list[Feeds], out: Path) -> Found:
    from onnxsim.full_qdq import quantize_full_qdq

    model = onnx.load(job["model"])
    onnx.save(quantize_full_qdq(model, calibration, activation_dtype="uint16"), out / "model.onnx")
    return {}


TOOLS: dict[str, tuple[str, Callable[[Job, list[Feeds], Path], Found]]] = {
    "aimet": ("aimet-onnx", run_aimet),
    "onnxruntime": ("onnxruntime", run_onnxruntime),
    "quark": ("amd-quark", run_quark),
    "nncf": ("nncf", run_nncf),
    "nncf-int4": ("nncf", run_nncf_int4),
    "onnxsim": ("onnxsim", run_onnxsim),
}
"""Tool → its distribution, and how it is run."""


def main(path: str) -> None:
    job: Job = json.loads(Path(path).read_text())
    package, tool = TOOLS[job["tool"]]
    out = Path(job["out"])
    found: Found = {"version": version(package)}
    begun = time.perf_counter()
    found |= {"quantize_s": 0.0} | tool(job, read_samples(job["calibration"]), out)
    found["quantize_s"] = found["quantize_s"] or time.perf_counter() - begun
    (out / "result.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
