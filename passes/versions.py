"""Every library whose release can change the result of a pass run."""

from __future__ import annotations

from importlib import metadata

__all__ = ["library_versions"]


def library_versions() -> dict[str, str]:
    """Name → version of those that are installed."""
    tools = ("onnxoptimizer", "onnxsim", "onnxslim", "onnxscript", "onnxruntime")
    names = ("onnx", "onnx_ir", *tools, "numpy", "protobuf")
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
