"""Launches of the Triton kernels become machine code for GPUs that this machine does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CODE = """
import torch
from benchmarks.cuda.cubins import TargetDriver, list_launches, measure_launch
driver = TargetDriver({capability})
for name, _, launch in list_launches((torch.float16,)):
    used = measure_launch(launch, driver)
    launch()
    print(used.registers, used.stack, name, sep="\\t")
assert len(driver.binaries) == 9, "a launch compiles once"
"""

EACH = """
import torch
from benchmarks.cuda.cubins import TargetDriver, measure_launch
from pipeline.ops.row_programs import INSTRUCTIONS, read_program
from pipeline.runtime.kernels.cuda import launch_row_program
driver = TargetDriver(90)
for name, count in INSTRUCTIONS.items():
    ins, out = [torch.empty(5, 6)] * (1 if name == "rotate" else count), torch.empty(5, 6)
    program = read_program(f"{name}({', '.join(f'i{at}' for at in range(len(ins)))})")
    used = measure_launch(launch_row_program(program, ins, out), driver)
    assert 0 < used.registers <= 64 and (used.stack == 0 or name in ("sin", "cos")), (name, used)
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_no_kernel_has_more_values_than_registers(capability: int, tmp_path: Path) -> None:
    """In a process without the interpreter, which the other tests use."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CODE.format(capability=capability)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
    rows = [line.split("\t") for line in said.splitlines()]
    assert len(rows) == 9
    assert all(0 < int(registers) <= 128 and stack == "0" for registers, stack, _ in rows), rows


def test_each_instruction_becomes_machine_code(tmp_path: Path) -> None:
    """The interpreter, by which the other tests run them, takes more than the compiler does.

    CUDA's sine and cosine have a stack, for angles of more than 100,000.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", EACH], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
