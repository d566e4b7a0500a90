"""The `onnxline` command, and `python -m onnxline`."""

from __future__ import annotations

import atexit
import gc
import importlib
import sys
from typing import Final

from onnxline import PREFIX

__all__ = ["main"]

ALLOCATIONS: Final = 100_000
"""Objects that are made between two walks of Python's collector, instead of 700: what torch and onnx make when they are
imported stays, so most walks find nothing. Measured on the second run of a small torch module: 0.3 of 3.3 s."""


def main() -> None:
    """Run the command line; it ends the process with its exit code."""
    gc.set_threshold(ALLOCATIONS, 20)
    atexit.register(gc.freeze)  # else the interpreter's end walks all of torch's objects once more: 0.5 of 3.3 s
    try:
        cli = importlib.import_module(f"{PREFIX}pipeline.cli")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect it after Ctrl-C
    cli.main()


if __name__ == "__main__":
    main()
