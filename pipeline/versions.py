"""Every library whose release can change a result."""

from __future__ import annotations

import platform
from importlib import metadata

from passes.runner import library_versions

__all__ = ["versions"]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **library_versions()}
    for name in ("onnxline", "torch", "transformers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))
