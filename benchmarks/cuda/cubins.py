"""Registers and spills of our Triton kernels, compiled for GPUs that this machine need not have.

    python -m benchmarks.cuda.cubins

Each kernel is launched as a plan launches it, by a driver that compiles it to machine code and runs nothing. The tool
`cuobjdump` that comes with Triton says what a thread uses. A thread with a stack has more values than registers, and
keeps the others in memory. No GPU is needed, and `TRITON_INTERPRET` must not be set.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from pipeline.ops.row_programs import read_program
from pipeline.runtime.kernels.base import Launch
from pipeline.runtime.kernels.cuda import launch_adam, launch_clamp, launch_row_program

ARCHITECTURES: Final = (80, 90)


@dataclass(frozen=True, slots=True)
class Case:
    """A row program on operands with these strides along the axes of the result."""

    name: str
    program: str
    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


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
    Case("product as float16, 512 × 3,072", "mul(i0, i1); float16(v0); add(v1, i1)", (512, 3072), ((3072, 1),) * 2),
)
TYPES: Final = (torch.float16, torch.bfloat16, torch.float32)
ADAM: Final = "AdamW over all parameters"
ADAM_ATTRS: Final = {
    **{"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01},
    **{"decoupled": True, "maximize": False},
}
INDICES: Final = "check of indices"


def main() -> None:
    drivers = [TargetDriver(capability) for capability in ARCHITECTURES]
    rows = [f"| kernel | dtype | {' | '.join(f'sm_{part}: registers, bytes of stack' for part in ARCHITECTURES)} |"]
    rows.append("| --- " * (2 + len(ARCHITECTURES)) + "|")
    for name, dtype, launch in list_launches():
        found = [measure_launch(launch, driver) for driver in drivers]
        rows.append(f"| {name} | {dtype} | " + " | ".join(f"{used.registers}, {used.stack}" for used in found) + " |")
    print("\n".join(rows))


def list_launches(types: Sequence[torch.dtype] = TYPES) -> Iterator[tuple[str, str, Launch]]:
    """Name, dtype and launch of each kernel; the memory of the operands is never touched."""
    for case in CASES:
        program = read_program(case.program)
        for dtype in types:
            ins = [make_operand(case.sizes, strides, dtype) for strides in case.strides]
            launch = launch_row_program(program, ins, torch.empty(case.sizes, dtype=dtype))
            yield case.name, str(dtype).removeprefix("torch."), launch
    parameters, gradients, *moments = ([torch.empty(768, 768), torch.empty(768)] for _ in range(4))
    step, rate, skip = torch.ones(()), torch.ones((), dtype=torch.float64), torch.zeros(())
    adam = launch_adam([parameters, *moments], gradients, step, rate, skip, ADAM_ATTRS)
    indices, flag = torch.empty(2, 512, dtype=torch.int64), torch.zeros((), dtype=torch.bool)
    clamp = launch_clamp(indices[0], indices[1], flag, 0, 30521, -100)
    assert adam is not None and clamp is not None
    yield ADAM, "float32", adam
    yield INDICES, "int64", clamp


def make_operand(
    sizes: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
    make: Callable[..., torch.Tensor] = torch.empty,
) -> torch.Tensor:
    """What `make` gives (memory that is not written yet, or random elements), with these strides."""
    span = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
    return make(span, dtype=dtype, device=device).as_strided(sizes, strides)


@dataclass(eq=False)
class TargetDriver:
    """A driver of Triton for a GPU of one compute capability (80 for sm_80), which need not be there.

    Triton keeps what it has compiled by the number of the device, so that is the capability.
    """

    capability: int
    binaries: list[bytes] = field(default_factory=list)
    """Machine code of the kernels that were launched, each once."""

    @property
    def utils(self) -> TargetDriver:
        return self

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_device_properties(self, device: int) -> Mapping[str, int]:
        return {"max_shared_mem": 163 * 2**10}

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and the most threads of a block."""
        self.binaries.append(binary)
        return 0, 0, 0, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Launch:
        return launch_nothing


def launch_nothing(*_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class Used:
    """What a thread of a kernel uses: registers, and bytes of memory for what they do not hold."""

    registers: int
    stack: int


def measure_launch(launch: Launch, driver: TargetDriver) -> Used:
    """Compile what `launch` launches, for the GPU of `driver`."""
    from triton import knobs
    from triton.runtime.driver import driver as drivers

    drivers.set_active(driver)  # pyright: ignore[reportArgumentType] - it has what a launch asks of a driver
    known = len(driver.binaries)
    launch()
    (binary,) = driver.binaries[known:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", said), re.search(r"STACK:(\d+)", said)
    if registers is None or stack is None:
        raise RuntimeError(f"cuobjdump said {said!r}; expected REG and STACK of a kernel")
    return Used(int(registers[1]), int(stack[1]))


if __name__ == "__main__":
    main()
