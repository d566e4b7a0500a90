"""The `onnxline` command begins here, under a name that no script has: PYTHONPATH, or `python -m`, may put a folder
first that has a `passes` or a `pipeline` of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["main"]

OWN_NAMES: Final = Path(__file__).resolve().parent / "passes" / "own_names.py"


def main() -> None:
    """Run `pipeline.cli`; where somebody else's modules have our names, ours run under other ones, and theirs stay."""
    own_names = _load("_onnxline.passes.own_names", OWN_NAMES)
    taken = own_names.taken_names()
    if taken:
        own_names.add_private_names()
    importlib.import_module("_onnxline.pipeline.cli" if taken else "pipeline.cli").main()


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
