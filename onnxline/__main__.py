"""The `onnxline` command, and `python -m onnxline`."""

from __future__ import annotations

import importlib
import sys

from onnxline import PREFIX

__all__ = ["main"]


def main() -> None:
    """Run the command line; it ends the process with its exit code."""
    try:
        cli = importlib.import_module(f"{PREFIX}pipeline.cli")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells expect it after Ctrl-C
    cli.main()


if __name__ == "__main__":
    main()
