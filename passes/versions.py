"""Every library whose release can change the result of a pass run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

__all__ = ["library_versions"]


def library_versions(more: Sequence[str] = ()) -> dict[str, str]:
    """Name → version of those that are installed, and of `more` beside them."""
    tools = ("onnxoptimizer", "onnxsim", "onnxslim", "onnxscript", "onnxruntime")
    names = ("onnx", "onnx_ir", *tools, "numpy", "protobuf", *more)
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
