"""Weights in formats of few bits, by onnxline and by second implementations: torchao, and AIMET for LPBQ.

    AIMET_PYTHON=PYTHON python -m benchmarks.narrow_formats

Needs torchao 0.18 in the interpreter that runs it, and for the last row aimet-onnx 2.42 in that of AIMET_PYTHON. A
weight of 256 × 1,024 elements, whose rows and blocks have very different sizes, and in which one block is zero, is
rounded by both. The table has how many values differ, by how many units in the last place of float32, and the ratio of
signal to noise.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmarks.measure import machine, versions_line
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode_weight, round_trip

ROWS: Final = 256
COLUMNS: Final = 1024


def main() -> None:
    print(f"{machine()}; {versions_line()}\n")
    print("| format | second implementation | values that differ | at most by | ratio |")
    print("| --- | --- | --- | --- | --- |")
    weight = draw_weight()
    for text, (name, judge) in JUDGES.items():
        precision = parse_precision(text)
        assert precision is not None
        own = round_trip(weight, encode_weight(weight, precision, 1), is_stored=True)
        try:
            other = judge(weight)
        except ImportError as error:
            print(f"| `{text}` | {name} | not measured: {error} | | |")
            continue
        ulps = np.abs(own - other) / np.spacing(np.abs(other))
        ratio = 10 * np.log10(np.square(weight).sum() / np.square(weight - own).sum())
        differ = f"{(own != other).sum()} of {own.size}"
        print(f"| `{text}` | {name} | {differ} | {ulps.max():.0f} ulp | {ratio:.2f} dB |")


def draw_weight() -> np.ndarray:
    draw = np.random.default_rng(0)
    blocks = np.exp(np.repeat(draw.normal(size=(ROWS, COLUMNS // 16)), 16, 1))
    weight = draw.normal(size=(ROWS, COLUMNS)) * np.exp(draw.normal(size=(ROWS, 1))) * blocks
    weight[0, :32] = 0
    return weight.astype(np.float32)


def round_to_mx(element: torch.dtype) -> Callable[[np.ndarray], np.ndarray]:
    def judge(weight: np.ndarray) -> np.ndarray:
        from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

        scales, numbers = to_mx(torch.from_numpy(weight), element, 32)
        return to_dtype(numbers, scales, element, 32, torch.float32).numpy()

    return judge


def round_to_nvfp4(weight: np.ndarray) -> np.ndarray:
    from torchao.prototype.mx_formats import nvfp4_tensor
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

    tensor = torch.from_numpy(weight)
    outer = nvfp4_tensor.per_tensor_amax_to_scale(tensor.abs().max())
    scales, numbers = nvfp4_tensor.nvfp4_quantize(tensor, 16, outer)
    values = f4_unpacked_to_f32(unpack_uint4(numbers)).reshape(len(weight), -1, 16)
    steps = scales.float().reshape(len(weight), -1, 1) * outer
    return (values * steps).reshape(weight.shape).numpy()


def round_to_integers(bits: int, block: int) -> Callable[[np.ndarray], np.ndarray]:
    def judge(weight: np.ndarray) -> np.ndarray:
        from torchao.quantization.quant_primitives import dequantize_affine, quantize_affine

        tensor, size, highest = torch.from_numpy(weight), (1, block), 2 ** (bits - 1) - 1
        steps = tensor.reshape(len(weight), -1, block).abs().amax(-1) / highest
        steps[steps == 0] = 1
        zeros = torch.zeros_like(steps)
        numbers = quantize_affine(tensor, size, steps, zeros, torch.int8, -highest, highest)
        return dequantize_affine(numbers, size, steps, zeros, torch.int8, -highest, highest).numpy()

    return judge


ASK_AIMET: Final = """
import sys
import numpy as np, onnx, onnxruntime
from aimet_onnx import QuantizationSimModel
from aimet_onnx.quantsim import set_lpbq_for_params
weight = np.load(sys.argv[1])
values = [onnx.helper.make_tensor_value_info(name, 1, [1, size]) for name, size in zip("xy", weight.shape)]
node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], "product")
graph = onnx.helper.make_graph([node], "g", values[:1], values[1:], [onnx.numpy_helper.from_array(weight, "w")])
opsets = [onnx.helper.make_opsetid("", 21)]
sim = QuantizationSimModel(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
set_lpbq_for_params(sim, 4, 64, op_types=("MatMul",))
for name, quantizer in sim.qc_quantize_op_dict.items():
    quantizer.enabled = name == "w"
sim.compute_encodings([{"x": np.ones((1, len(weight)), np.float32)}])
written = sim.to_onnx_qdq()
written.graph.output.append(onnx.helper.make_tensor_value_info("w_qdq", 1, weight.shape))
session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
np.save(sys.argv[2], session.run(["w_qdq"], {"x": np.ones((1, len(weight)), np.float32)})[0])
"""


def round_to_lpbq(weight: np.ndarray) -> np.ndarray:
    """As aimet-onnx writes it with QuantizeLinear and DequantizeLinear."""
    python = os.environ.get("AIMET_PYTHON")
    if not python:
        raise ImportError("AIMET_PYTHON names no interpreter")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "weight.npy"), Path(folder, "rounded.npy")
        np.save(source, weight.T)
        subprocess.run([python, "-c", ASK_AIMET, str(source), str(target)], check=True, capture_output=True)
        return np.load(target).T


JUDGES: Final[Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "mxfp4": ("torchao to_mx", round_to_mx(torch.float4_e2m1fn_x2)),
    "mxfp8": ("torchao to_mx", round_to_mx(torch.float8_e4m3fn)),
    "mxfp8e5m2": ("torchao to_mx", round_to_mx(torch.float8_e5m2)),
    "nvfp4": ("torchao nvfp4_quantize", round_to_nvfp4),
    "int2/block32": ("torchao quantize_affine", round_to_integers(2, 32)),
    "int3/block32": ("torchao quantize_affine", round_to_integers(3, 32)),
    "lpbq64": ("aimet-onnx, `to_onnx_qdq`", round_to_lpbq),
}

if __name__ == "__main__":
    main()
