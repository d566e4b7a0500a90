"""A library's own call, as its documentation writes it: `PYTHON library_calls.py FOLDER`, in the library's interpreter.

FOLDER holds `call.json` (call, block, weights, options), `float.onnx`, `nearest.onnx` (the same model with its weights
rounded to the nearest) and `seen/`, a .npz file for each sample. The result is `result.npz` there, with `NAME/scale`,
`NAME/zero_point`, `NAME/integers` and `NAME/values` by the name of a stored tensor, and `version.txt`. This file
imports nothing of onnxline, and shares no code with its adapters.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

Call = dict[str, Any]
Arrays = dict[str, np.ndarray]

INT4 = (-7, 7)

PRODUCTS = ("Conv", "Gemm", "MatMul")


def read_seen(folder: Path) -> list[Arrays]:
    return [dict(np.load(path)) for path in sorted((folder / "seen").glob("*.npz"))]


def stored_in(model: onnx.ModelProto) -> Arrays:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def call_gptq(call: Call, folder: Path) -> Arrays:
    from onnxsim import apply_gptq

    stored = stored_in(
        apply_gptq(onnx.load(folder / "float.onnx"), onnx.load(folder / "nearest.onnx"), read_seen(folder))
    )
    return {f"{name}/integers": stored[f"{name}_quantized"].astype(np.int64) for name in call["weights"]}


def call_awq(call: Call, folder: Path) -> Arrays:
    """Integers of the weights after scaling."""
    from onnxsim import apply_awq, quantize_weight_only_int4

    model = onnx.load(folder / "float.onnx")
    scaled = apply_awq(model, quantize_weight_only_int4(model), read_seen(folder))
    return integers_of(scaled, call["weights"])


def integers_of(model: onnx.ModelProto, names: list[str]) -> Arrays:
    """The integers that a DequantizeLinear reads before the product of each name."""
    stored = stored_in(model)
    made = {node.output[0]: node for node in model.graph.node}
    found: Arrays = {}
    for name in names:
        (product,) = (node for node in model.graph.node if node.name == f"product of {name}")
        found[f"{name}/integers"] = stored[made[product.input[1]].input[0]].astype(np.int64)
    return found


def call_smooth_quant(call: Call, folder: Path) -> Arrays:
    from onnxsim.quark_smoothquant import smooth_quant

    model = smooth_quant(onnx.load(folder / "float.onnx"), read_seen(folder), alpha=0.5)
    stored = stored_in(model)
    products = {node.name: node for node in model.graph.node}
    return {f"{name}/values": stored[products[f"product of {name}"].input[1]] for name in call["weights"]}


def call_equalization(call: Call, folder: Path) -> Arrays:
    from onnxsim.quark_equalization import equalize

    stored = stored_in(equalize(onnx.load(folder / "float.onnx"), steps=1, weight_threshold=0.5))
    return {f"{name}/values": stored[name] for name in call["weights"]}


def call_bias_correction(call: Call, folder: Path) -> Arrays:
    """Each bias with what the library adds after its product."""
    from onnxsim import correct_bias

    before = onnx.load(folder / "float.onnx")
    model = correct_bias(before, onnx.load(folder / "nearest.onnx"), read_seen(folder))
    stored, made = stored_in(model), {name: node for node in model.graph.node for name in node.output}
    found: Arrays = {}
    for node in before.graph.node:
        for name in set(node.input[2:3]).intersection(call["weights"]):
            shift = stored[made[node.output[0]].input[-1]]
            found[f"{name}/values"] = (stored_in(before)[name] + shift.ravel()).astype(np.float32)
    return found


def simulate(call: Call, folder: Path) -> Any:
    """AIMET's simulation of weights in 4 bits alone, none of which is -8."""
    from aimet_onnx import QuantizationSimModel, int4, int16
    from aimet_onnx.quantsim import set_blockwise_quantization_for_weights

    sim = QuantizationSimModel(onnx.load(folder / "float.onnx"), param_type=int4, activation_type=int16)
    if call["block"]:
        set_blockwise_quantization_for_weights(sim, PRODUCTS, 4, True, call["block"], strict=True)
    for name, quantizer in sim.qc_quantize_op_dict.items():
        quantizer.enabled = name in call["weights"]
        if quantizer.enabled:
            quantizer.use_symmetric_encodings = quantizer.use_strict_symmetric = True
            if not call["block"]:
                quantizer.enable_per_channel_quantization()
    return sim


def read_simulation(sim: Any, call: Call) -> Arrays:
    """The scales, and the integers that rounding to the nearest gives with them."""
    stored, found = stored_in(sim.model.model), {}
    for name in call["weights"]:
        quantizer = sim.qc_quantize_op_dict[name]
        scale, array = quantizer._get_scale(), stored[name]
        found[f"{name}/scale"] = scale
        if call["block"]:
            axis = quantizer.quant_info.blockAxis
            steps = np.repeat(scale, call["block"], axis)
        else:
            shape = [1] * array.ndim
            shape[quantizer.quant_info.channelAxis] = -1
            steps = scale.reshape(shape)
        found[f"{name}/integers"] = np.clip(np.rint(array / steps), *INT4).astype(np.int64)
    return found


def call_seq_mse(call: Call, folder: Path) -> Arrays:
    from aimet_onnx import apply_seq_mse

    sim = simulate(call, folder)
    wanted = set(call["weights"])
    ops = [op for op in sim.connected_graph.ordered_ops if op.type in PRODUCTS]  # with the names that fusions give
    others = [op.name for op in ops if op.parameters and wanted.isdisjoint(op.parameters)]
    apply_seq_mse(sim, read_seen(folder), nodes_to_exclude=others)
    return read_simulation(sim, call)


def call_ada_round(call: Call, folder: Path) -> Arrays:
    from aimet_onnx import apply_adaround

    sim = simulate(call, folder)
    apply_adaround(sim, read_seen(folder), num_iterations=call["options"]["iterations"])
    return read_simulation(sim, call)


def call_scale_estimation(call: Call, folder: Path) -> Arrays:
    import nncf

    samples, model = read_seen(folder), onnx.load(folder / "float.onnx")
    readers = {name: node.name for node in model.graph.node for name in node.input}
    chosen = {readers[name] for name in call["weights"]}
    model = nncf.compress_weights(
        model,
        mode=nncf.CompressWeightsMode.INT4_ASYM,
        group_size=call["block"] or -1,
        ratio=1.0,
        all_layers=True,
        ignored_scope=nncf.IgnoredScope(names=[node.name for node in model.graph.node if node.name not in chosen]),
        dataset=nncf.Dataset(samples),
        subset_size=len(samples),
        scale_estimation=True,
    )
    stored, found = stored_in(model), {}
    for name in call["weights"]:
        found[f"{name}/scale"] = stored[f"{name}_scale"]
        found[f"{name}/zero_point"] = stored[f"{name}_zero_point"].astype(np.int64)
        found[f"{name}/integers"] = stored[f"{name}_quantized"].astype(np.int64)
    return found


CALLS: dict[str, tuple[str, Callable[[Call, Path], Arrays]]] = {
    "gptq": ("onnxsim", call_gptq),
    "awq": ("onnxsim", call_awq),
    "smooth-quant": ("onnxsim", call_smooth_quant),
    "cross-layer-equalization": ("onnxsim", call_equalization),
    "bias-correction": ("onnxsim", call_bias_correction),
    "seq-mse": ("aimet-onnx", call_seq_mse),
    "ada-round": ("aimet-onnx", call_ada_round),
    "scale-estimation": ("nncf", call_scale_estimation),
}
"""Step of onnxline → the distribution of its library, and the library's own call."""


def main(folder: Path) -> None:
    call: Call = json.loads((folder / "call.json").read_text())
    package, function = CALLS[call["call"]]
    random.seed(0)
    np.random.seed(0)
    if package != "onnxsim":
        import torch

        torch.manual_seed(0)
    np.savez(folder / "result.npz", **function(call, folder))  # type: ignore[arg-type]
    (folder / "version.txt").write_text(f"{package} {version(package)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
