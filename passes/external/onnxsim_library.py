"""Importing onnxsim, in the worker."""

from __future__ import annotations

import sys
from types import ModuleType

__all__ = ["import_onnxsim"]


def import_onnxsim() -> ModuleType:
    """onnxsim without torch, which it loads where that is installed (1.6 s in place of 0.4, and 200 MB); nothing that
    we call needs it."""
    if "onnxsim" in sys.modules or "torch" in sys.modules:
        import onnxsim

        return onnxsim
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import onnxsim
    finally:
        del sys.modules["torch"]
    return onnxsim
