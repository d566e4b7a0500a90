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


@pytest.mark.parametrize("capability", [80, 90])
def test_no_kernel_has_more_values_than_registers(capability: int, tmp_path: Path) -> None:
    """In a process without the interpreter, which the other tests use."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", CODE.format(capability=capability)]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True).stdout
    rows = [line.split("\t") for line in said.splitlines()]
    assert len(rows) == 9
    assert all(0 < int(registers) <= 128 and stack == "0" for registers, stack, _ in rows), rows
