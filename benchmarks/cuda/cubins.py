"""Registers and spills of our Triton kernels, compiled for GPUs that this machine need not have.

    python -m benchmarks.cuda.cubins

Triton compiles each kernel to machine code, and the tool `cuobjdump` that comes with Triton says what a thread of it
uses. A thread with a stack has more values than registers, and keeps the others in memory. No GPU is needed, and
`TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipeline.ops.row_programs import needs_whole_rows, read_program
from pipeline.runtime.kernels.cuda.rows import build_kernel
from pipeline.runtime.kernels.cuda.source import Tile, join_axes, write_source

ARCHITECTURES: Final = (80, 90)


@dataclass(frozen=True, slots=True)
class Case:
    """A row program on operands with these strides along the axes of the result; None for the optimizer."""

    name: str
    program: str
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    dtype: str = "fp16"


NORM: Final = "mean(v0); sub(v0, v1); square(v2); mean(v3); add(v4, 1e-05); rsqrt(v5); mul(v2, v6)"
CASES: Final = (
    Case("bias and GELU, 512 × 3,072", "add(i0, i1); gelu(v0)", (512, 3072), ((3072, 1), (0, 1))),
    Case("SwiGLU, 512 × 11,008", "silu(i0); mul(v0, i1)", (512, 11008), ((11008, 1),) * 2),
    Case(
        "sum and LayerNorm, 512 × 768",
        f"add(i0, i1); {NORM}; mul(v7, i2); add(v8, i3)",
        (512, 768),
        ((768, 1), (768, 1), (0, 1), (0, 1)),
    ),
    Case(
        "RMSNorm, 512 × 4,096",
        "square(i0); mean(v0); add(v1, 1e-06); rsqrt(v2); mul(i0, v3); mul(v4, i1)",
        (512, 4096),
        ((4096, 1), (0, 1)),
    ),
    Case(
        "softmax with mask, 12 × 512 × 512",
        "mul(i0, 0.125); add(v0, i1); amax(v1); sub(v1, v2); exp(v3); sum(v4); div(v4, v5)",
        (12, 512, 512),
        ((262144, 512, 1), (0, 512, 1)),
    ),
    Case(
        "softmax with mask, 32 × 2,048 × 2,048",
        "mul(i0, 0.125); add(v0, i1); amax(v1); sub(v1, v2); exp(v3); sum(v4); div(v4, v5)",
        (32, 2048, 2048),
        ((4194304, 2048, 1), (0, 2048, 1)),
    ),
    Case(
        "RoPE, 32 × 512 × 128",
        "mul(i1, i0); rotate(i1); mul(v1, i2); add(v0, v2)",
        (32, 512, 128),
        ((0, 128, 1), (65536, 128, 1), (0, 128, 1)),
    ),
)
TYPES: Final = ("fp16", "bf16", "fp32")
ADAM: Final = "AdamW over all parameters"
INDICES: Final = "check of indices"


def main() -> None:
    rows = ["| kernel | dtype | " + " | ".join(f"sm_{one}: registers, bytes of stack" for one in ARCHITECTURES) + " |"]
    rows.append("| --- " * (2 + len(ARCHITECTURES)) + "|")
    for name, dtype, kernel, signature, constants, warps in list_kernels():
        found = [measure_kernel(kernel, signature, constants, warps, capability) for capability in ARCHITECTURES]
        rows.append(f"| {name} | {dtype} | " + " | ".join(f"{used.registers}, {used.stack}" for used in found) + " |")
    print("\n".join(rows))


def list_kernels(types: Sequence[str] = TYPES) -> Iterator[tuple[str, str, Any, dict[str, str], dict[str, Any], int]]:
    """Name, dtype, kernel, types of its arguments, constants and warps."""
    for case in CASES:
        program = read_program(case.program)
        space = join_axes(case.sizes, case.strides, keeps_rows=needs_whole_rows(program))
        tile = Tile.for_program(program, space)
        kernel = build_kernel(write_source(program, space, tile))
        for dtype in types:
            signature = dict.fromkeys(kernel.arg_names, f"*{dtype}")
            yield case.name, dtype, kernel, signature, {}, tile.warps
    yield ADAM, "fp32", *adam_kernel()
    yield INDICES, "int64", *indices_kernel()


def adam_kernel() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    from pipeline.runtime.kernels.cuda import adam_kernel

    of_betas = {"beta1": 0.9, "beta2": 0.999, "log_beta1": -0.105, "log_beta2": -0.001}
    settings = {"epsilon": 1e-8, "decay": 0.01, "decoupled": True, "maximize": False, "has_largest": False}
    constants = {**of_betas, **settings, "dtype": adam_kernel.tl.float32, "length": 1024}
    tables = {"table": "*i64", "blocks": "*i64", "step": "*fp32", "rate": "*fp64", "skip": "*fp32"}
    return adam_kernel.update, {**tables, **dict.fromkeys(constants, "constexpr")}, constants, 4


def indices_kernel() -> tuple[Any, dict[str, str], dict[str, Any], int]:
    from pipeline.runtime.kernels.cuda import index_kernel

    constants = {"has_ignored": True, "length": 256}
    numbers = dict.fromkeys(("low", "high", "ignored", "count"), "i32")
    pointers = {"index": "*i64", "safe": "*i64", "flag": "*u8"}
    return index_kernel.clamp, {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}, constants, 4


@dataclass(frozen=True, slots=True)
class Used:
    """What a thread of a kernel uses: registers, and bytes of memory for what they do not hold."""

    registers: int
    stack: int


def measure_kernel(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], warps: int, capability: int
) -> Used:
    """Compile `kernel` for a GPU of this compute capability (80 for sm_80)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature, constexprs=places)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(made.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump said {said!r}; expected REG and STACK of a kernel")
    return Used(int(registers[1]), int(stack[1]))


if __name__ == "__main__":
    main()
