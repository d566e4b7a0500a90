"""Weights in formats of few bits, by onnxline and by second implementations: torchao, and AIMET for LPBQ.

    python -m benchmarks.narrow_formats

Needs torchao 0.18, and aimet-torch 2.42 for the last row, in the interpreter that runs it. A weight of 256 × 1,024
elements, whose rows and blocks have very different sizes, and in which one block is zero, is rounded by both. The table
has how many values differ, by how many units in the last place of float32, and the ratio of signal to noise.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping
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


def round_to_lpbq(weight: np.ndarray) -> np.ndarray:
    from aimet_torch.quantization.affine import GroupedBlockQuantizeDequantize

    blocks = COLUMNS // 64
    quantizer = GroupedBlockQuantizeDequantize(
        shape=(ROWS, blocks),
        bitwidth=4,
        symmetric=True,
        decompressed_bw=8,
        block_size=(1, 64),
        block_grouping=(1, blocks),
    )
    tensor = torch.from_numpy(weight)
    steps = tensor.reshape(ROWS, blocks, 64).abs().amax(-1) / 7
    with torch.no_grad():  # the range of 7 steps on both sides, as of signed formats here
        quantizer.min.copy_(-8 * steps)
        quantizer.max.copy_(7 * steps)
        return quantizer(tensor).numpy()


JUDGES: Final[Mapping[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]] = {
    "mxfp4": ("torchao to_mx", round_to_mx(torch.float4_e2m1fn_x2)),
    "mxfp8": ("torchao to_mx", round_to_mx(torch.float8_e4m3fn)),
    "mxfp8e5m2": ("torchao to_mx", round_to_mx(torch.float8_e5m2)),
    "nvfp4": ("torchao nvfp4_quantize", round_to_nvfp4),
    "int2/block32": ("torchao quantize_affine", round_to_integers(2, 32)),
    "int3/block32": ("torchao quantize_affine", round_to_integers(3, 32)),
    "lpbq64": ("AIMET GroupedBlockQuantizeDequantize", round_to_lpbq),
}

if __name__ == "__main__":
    main()
