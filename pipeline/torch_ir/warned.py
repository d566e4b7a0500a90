"""Warnings point to the line of the user's that called us, however deep they arise."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

__all__ = ["warn"]

OURS = ("onnxline", "_onnxline", "pipeline", "passes", "torch_ir")
"""Packages that are passed over; the last is the stand-in for pytorch-ir."""


def warn(said: str) -> None:
    """A UserWarning at the user's line; so Python shows the same words again where another line asks for them."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and _is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(said, stacklevel=level)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in OURS
