"""How long the command line takes for what needs no work: `--help`, a mistake, a second run.

    python -m benchmarks.front_door [REPEATS]

Each command is a process of its own, measured from outside: wall time, and processor time of it and its workers.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

ONNXLINE: Final = str(Path(sys.executable).parent / "onnxline")

COMMANDS: Final[Mapping[str, Sequence[str]]] = {
    "--help": ["--help"],
    "no such file": ["run", "none.yaml"],
    "a misspelt key": ["run", "configs/attention_block.yaml", "--set", "passes.kep=[]"],
    "a misspelt keep": ["run", "configs/attention_block.yaml", "--keep", "qvk"],
    "a misspelt step": ["run", "configs/attention_block.yaml", "--recipe", "onnxsmi"],
    "a misspelt skip, for which onnxsim is asked": ["run", "configs/attention_block.yaml", "--skip", "fuse_qvk"],
    "a second run of an ONNX file": ["run", "examples/attention.onnx", "-q", "--out", "{folder}/onnx"],
    "a second run of a torch module": ["run", "configs/attention_block.yaml", "-q", "--out", "{folder}/torch"],
}


def main(repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("| command | wall time, s | processor time, s |\n| --- | --- | --- |")
        for name, words in COMMANDS.items():
            _show(name, [ONNXLINE, *(word.format(folder=folder) for word in words)], repeats)
        _show("for comparison: `import torch` alone", [sys.executable, "-c", "import torch"], repeats)


def _show(name: str, command: Sequence[str], repeats: int) -> None:
    _time(command)  # the first run of a model; files of Python are read once
    wall, processor = (statistics.median(each) for each in zip(*(_time(command) for _ in range(repeats)), strict=True))
    print(f"| {name} | {wall:.2f} | {processor:.2f} |", flush=True)


def _time(command: Sequence[str]) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
