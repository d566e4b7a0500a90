"""The `onnxline` command, and `python -m onnxline`."""

from __future__ import annotations

import importlib

from onnxline import PREFIX

__all__ = ["main"]


def main() -> None:
    """Run the command line; it ends the process with its exit code."""
    importlib.import_module(f"{PREFIX}pipeline.cli").main()


if __name__ == "__main__":
    main()
