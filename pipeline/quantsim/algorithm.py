"""One algorithm of a library on one model: `PYTHON algorithm.py FOLDER`, in the interpreter that has the library.

So a crash of the library ends no simulation, and AIMET or NNCF may be in an environment of their own. This file imports
nothing of onnxline. FOLDER holds `job.json` (step, options, seed, weights), `model.onnx`, `scales.npz` and `samples/`,
a .npz file each; the result is `found.npz` and `found.json` there. Weights are known by their index in the job:
`0/scale` and `0/zero_point` have the shape of those given, `0/numbers` that of the weight;
biases have `0/shift`, a number for each channel.
"""

# pyright: reportMissingImports=false, reportPrivateImportUsage=false
from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

Job = dict[str, Any]
Weight = dict[str, Any]
Arrays = dict[str, np.ndarray]
Left = dict[str, str]
"""Weight → why it stays as it was."""

HESSIANS = 2**29
"""Bytes of the Hessians that are in memory together; for more there are more runs of the model."""


def read_samples(folder: Path) -> Iterator[Arrays]:
    for path in sorted((folder / "samples").glob("*.npz")):
        with np.load(path) as archive:
            yield {name: archive[name] for name in archive.files}


def run_gptq(job: Job, folder: Path) -> tuple[Arrays, Left]:
    """onnxsim's column by column rounding (`onnxsim.gptq`), by the numpy functions that its nine relatives share.

    Its `apply_gptq` is the same in scalar C++: it computes the Hessian of each layer anew and knows int4 in blocks that
    divide the axis, where these take any number of bits and any block.
    """
    stored, scales = initializers(folder), np.load(folder / "scales.npz")
    found: Arrays = {}
    left: Left = {}
    for group in by_memory(job["weights"]):
        hessians = measure_hessians(folder, {name for weight in group for name in weight["data"]})
        for weight in group:
            hessian = np.sum([hessians[name] for name in weight["data"]], axis=0)
            if hessian.shape != (weight["summed_size"],) * 2:
                left[weight["tensor"]] = f"its data has {hessian.shape[0]} channels, not {weight['summed_size']}"
                continue
            array, key = stored[weight["tensor"]], weight["index"]
            grid = scales[f"{key}/scale"], scales[f"{key}/zero_point"]
            found[f"{key}/numbers"] = round_by_gptq(weight, array, *grid, hessian, job["options"])
    return found, left


def round_by_gptq(
    weight: Weight,
    array: np.ndarray,
    scale: np.ndarray,
    zero_point: np.ndarray,
    hessian: np.ndarray,
    options: Mapping[str, Any],
) -> np.ndarray:
    """The integers of a matrix, or of some of its output channels, as int32.

    A zero point is an integer, so the integers of `array + zero_point * scale` on a grid without one have the errors of
    `array` on its own grid. That is what the library rounds.

    Args:
        weight: its entry in the job.
        scale: of each channel, or of each block in the layout of the matrix, as `zero_point` is.
        hessian: the sum of xᵀx over the rows x of its data.
    """
    from onnxsim.gptq import _gptq_quantize_columns as quantize_columns

    array = matrix_of(weight, array).astype(np.float64)
    block = weight["block"] or array.shape[1]

    def spread(values: np.ndarray) -> np.ndarray:
        return matrix_of(weight, values) if weight["block"] else np.broadcast_to(values, array.shape[:1])[:, None]

    scale, zero_point = spread(scale.astype(np.float64)), spread(zero_point)
    if zero_point.any():
        array += np.repeat(scale * zero_point, block, axis=1)[:, : array.shape[1]]
    order: Any = slice(None)
    if options["act_order"]:
        order = np.argsort(-np.diag(hessian), kind="stable")
        array, hessian = array[:, order], hessian[np.ix_(order, order)]
        if weight["block"]:  # the columns of a block are no neighbours now
            scale, block = np.repeat(scale, block, axis=1)[:, order], 1
    numbers = np.empty(array.shape, np.int32)
    numbers[:, order] = quantize_columns(
        array,
        scale,
        block,
        hessian,
        options["percdamp"],
        options["proc_block_size"],
        weight["lowest"],
        weight["highest"],
    )
    return matrix_of(weight, numbers)


def matrix_of(weight: Weight, array: np.ndarray) -> np.ndarray:
    """A stored matrix as [output channels, summed], and back."""
    return array if weight["channel_axis"] == 0 else array.T


def initializers(folder: Path) -> Arrays:
    graph = onnx.load(folder / "model.onnx").graph
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


def by_memory(weights: list[Weight]) -> Iterator[list[Weight]]:
    """The weights in groups whose Hessians fit into memory together."""
    group: list[Weight] = []
    size = 0
    for weight in weights:
        added = 8 * weight["summed_size"] ** 2
        if group and size + added > HESSIANS:
            yield group
            group, size = [], 0
        group.append(weight)
        size += added
    if group:
        yield group


def measure_hessians(folder: Path, names: set[str]) -> Arrays:
    """Value → the sum of xᵀx over its rows x, for all samples, in the float model."""
    import onnxruntime

    model = onnx.load(folder / "model.onnx", load_external_data=False)
    known = {info.name for info in model.graph.output} | {info.name for info in model.graph.input}
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(names - known))
    path = folder / "probed.onnx"
    onnx.save(model, path)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    made = [output.name for output in session.get_outputs() if output.name in names]
    found: Arrays = {}
    for sample in read_samples(folder):
        arrays = session.run(made, sample) if made else []  # no name would mean all outputs
        values = {**sample, **dict(zip(made, arrays, strict=True))}
        for name in names:
            rows = values[name].reshape(-1, values[name].shape[-1]).astype(np.float64)
            found[name] = found.get(name, 0.0) + rows.T @ rows
    return found


def run_seq_mse(job: Job, folder: Path) -> tuple[Arrays, Left]:
    """AIMET's search of each scale by the error of its layer, each layer on what the quantized ones before it give."""
    from aimet_onnx import apply_seq_mse

    sim, left = quantize_weights(job, folder)
    others = [op.name for op in sim.connected_graph.ordered_ops if op.type in PRODUCTS and not reads_enabled(sim, op)]
    apply_seq_mse(sim, list(read_samples(folder)), num_candidates=job["options"]["candidates"], nodes_to_exclude=others)
    return scales_of(sim, job, left), left


PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul")


def reads_enabled(sim: Any, op: Any) -> bool:
    """Whether an operator reads no stored tensor, or one that AIMET quantizes."""
    quantizers = [sim.qc_quantize_op_dict.get(name) for name in op.parameters]
    return not quantizers or any(quantizer is not None and quantizer.enabled for quantizer in quantizers)


def part_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with an Identity between each of its inputs and the products that read it.

    SeqMSE 2.42 does not give the samples to what follows a product that is left out and reads an input of the model.
    """
    names = {value.name for value in model.graph.input}
    parted: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in PRODUCTS and node.input[0] in names:
            node.input[0] = parted.setdefault(node.input[0], f"{node.input[0]}/parted")
    for name, copy in parted.items():
        model.graph.node.insert(0, onnx.helper.make_node("Identity", [name], [copy], name=copy))
    return model


def run_ada_round(job: Job, folder: Path) -> tuple[Arrays, Left]:
    """AIMET's adaptive rounding: up or down, number by number, by gradients of each layer's error."""
    from aimet_onnx import apply_adaround

    for weight in job["weights"]:
        if weight["block"]:
            raise SystemExit(f"AIMET rounds no blocks, and {weight['tensor']} has blocks of {weight['block']}")
    sim, left = quantize_weights(job, folder)
    apply_adaround(sim, list(read_samples(folder)), num_iterations=job["options"]["iterations"])
    after = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in sim.model.model.graph.initializer}
    found = scales_of(sim, job, left)
    for weight in job["weights"]:
        name, key = weight["tensor"], str(weight["index"])
        if name in left:
            continue
        scale = found[f"{key}/scale"]
        shape = [1] * after[name].ndim
        if scale.ndim:
            shape[weight["channel_axis"]] = -1
        found[f"{key}/numbers"] = np.rint(after[name] / scale.reshape(shape)).astype(np.int32)
    return found, left


def run_scale_estimation(job: Job, folder: Path) -> tuple[Arrays, Left]:
    """NNCF's scales by the error of each layer on what its data has most of, with integers and zero points."""
    import nncf

    model = onnx.load(folder / "model.onnx")
    for place, node in enumerate(model.graph.node):  # which NNCF knows by their names
        node.name = f"node/{place}"
    samples = list(read_samples(folder))
    readers = {name: node.name for node in model.graph.node for name in node.input}
    found: Arrays = {}
    left: Left = {}
    for size in sorted({weight["block"] for weight in job["weights"]}):
        group = [weight for weight in job["weights"] if weight["block"] == size]
        taken = {readers[weight["tensor"]] for weight in group}
        others = [node.name for node in model.graph.node if node.name not in taken]
        compressed = nncf.compress_weights(
            model,
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            group_size=size or -1,
            ratio=1.0,
            all_layers=True,
            ignored_scope=nncf.IgnoredScope(names=others),
            dataset=nncf.Dataset(samples),
            subset_size=len(samples),
            scale_estimation=True,
        )
        stored = {tensor.name: tensor for tensor in compressed.graph.initializer}
        for weight in group:
            name, key = weight["tensor"], weight["index"]
            names = [f"{name}_{part}" for part in ("quantized", "scale", "zero_point")]
            parts = [stored[part] for part in names if part in stored]
            if len(parts) < len(names) or parts[0].data_type != onnx.TensorProto.UINT4:
                left[name] = "NNCF takes no such layer"
                continue
            numbers, scale, zero = (onnx.numpy_helper.to_array(part) for part in parts)
            shape = np.load(folder / "scales.npz")[f"{key}/scale"].shape
            found[f"{key}/scale"] = scale.astype(np.float32).reshape(shape)
            found[f"{key}/zero_point"] = zero.astype(np.int64).reshape(shape) + weight["lowest"]
            found[f"{key}/numbers"] = numbers.astype(np.int64) + weight["lowest"]
    return found, left


def run_bias_correction(job: Job, folder: Path) -> tuple[Arrays, Left]:
    """What onnxsim's `correct_bias` adds after each product of the quantized model, by channel."""
    from onnxsim import correct_bias

    float_model, quantized = (onnx.load(folder / name) for name in ("model.onnx", "quantized.onnx"))
    corrected = correct_bias(float_model, quantized, list(read_samples(folder)), seed=job["seed"])
    producers = {name: node for node in corrected.graph.node for name in node.output}
    stored = {tensor.name: tensor for tensor in corrected.graph.initializer}
    found: Arrays = {}
    left: Left = {}
    for bias in job["weights"]:
        name = producers[bias["output"]].input[-1]
        if name.startswith(f"{bias['output']}_bias_correction"):
            found[f"{bias['index']}/shift"] = onnx.numpy_helper.to_array(stored[name]).ravel()
        else:
            left[bias["tensor"]] = "onnxsim finds nothing to correct"
    return found, left


def quantize_weights(job: Job, folder: Path) -> tuple[Any, Left]:
    """AIMET's simulation with the weights of the job in their formats and everything else in float."""
    from aimet_onnx import QuantizationSimModel, int8, int16

    model = part_inputs(onnx.load(folder / "model.onnx"))
    sim = QuantizationSimModel(model, param_type=int8, activation_type=int16)
    wanted = {weight["tensor"]: weight for weight in job["weights"]}
    left: Left = dict.fromkeys(wanted.keys() - sim.qc_quantize_op_dict.keys(), "AIMET has no quantizer for it")
    for name, quantizer in sim.qc_quantize_op_dict.items():
        weight = wanted.get(name)
        if weight is not None and quantizer.tensor_quantizer_params is None:
            left[name] = "AIMET knows no channels of it, since a layout operator stands between it and its product"
            weight = None
        if weight is None or (weight["granularity"] == "block" and weight["summed_size"] % weight["block"]):
            if weight is not None:
                left[name] = (
                    f"AIMET's blocks divide the axis, and {weight['block']} do not divide {weight['summed_size']}"
                )
            quantizer.enabled = False
            continue
        quantizer.enabled = True
        quantizer.set_bitwidth(weight["bits"])
        quantizer.use_symmetric_encodings = quantizer.use_strict_symmetric = True
        if weight["granularity"] == "tensor":
            quantizer.enable_per_channel_quantization(False)
        elif weight["granularity"] == "channel":
            quantizer.enable_per_channel_quantization()
        else:
            quantizer._enable_blockwise_quantization(weight["block"])
        if weight["granularity"] != "tensor" and quantizer.quant_info.channelAxis != weight["channel_axis"]:
            left[name] = f"AIMET has its channels along axis {quantizer.quant_info.channelAxis}"
            quantizer.enabled = False
    return sim, left


def scales_of(sim: Any, job: Job, left: Left) -> Arrays:
    """The scales that AIMET has chosen, in the shape of ours: one block of a kernel is repeated for its positions."""
    scales = np.load(Path(job["folder"]) / "scales.npz")
    found: Arrays = {}
    for weight in job["weights"]:
        quantizer = sim.qc_quantize_op_dict.get(weight["tensor"])
        if weight["tensor"] not in left and not quantizer.is_encoding_frozen():
            left[weight["tensor"]] = "AIMET takes no such layer"
        if weight["tensor"] not in left:
            scale = quantizer._get_scale()
            shape = scales[f"{weight['index']}/scale"].shape
            found[f"{weight['index']}/scale"] = np.ascontiguousarray(np.broadcast_to(scale, shape), np.float32)
    return found


ALGORITHMS: dict[str, tuple[str, Callable[[Job, Path], tuple[Arrays, Left]]]] = {
    "gptq": ("onnxsim", run_gptq),
    "seq-mse": ("aimet-onnx", run_seq_mse),
    "ada-round": ("aimet-onnx", run_ada_round),
    "scale-estimation": ("nncf", run_scale_estimation),
    "bias-correction": ("onnxsim", run_bias_correction),
}
"""Step → the distribution of its library, and what calls it."""


def main(folder: Path) -> None:
    job: Job = json.loads((folder / "job.json").read_text(encoding="utf-8")) | {"folder": str(folder)}
    package, algorithm = ALGORITHMS[job["step"]]
    random.seed(job["seed"])
    np.random.seed(job["seed"])  # the libraries draw from it
    if "torch" in sys.modules or package != "onnxsim":
        import torch

        torch.manual_seed(job["seed"])
    found, left = algorithm(job, folder)
    np.savez(folder / "found.npz", **found)  # type: ignore[arg-type]
    result = {"library": package, "version": version(package), "left": left}
    (folder / "found.json").write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, whose modules are no top-level ones
    main(Path(sys.argv[1]))
