"""Importing onnxsim, in the worker."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Final

__all__ = ["import_onnxsim"]

OPTIONAL: Final = ("torch", "sympy")
"""What onnxsim imports where it is installed, for functions that we do not call: 1.2 s and 0.25 s, and 200 MB."""


def import_onnxsim() -> ModuleType:
    """onnxsim without torch and sympy: 0.4 s in place of 1.9."""
    absent = [name for name in OPTIONAL if name not in sys.modules]
    if "onnxsim" in sys.modules or "torch" in sys.modules:
        absent = []
    for name in absent:
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        import onnxsim
    finally:
        for name in absent:
            del sys.modules[name]
    return onnxsim
