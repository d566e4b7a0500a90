"""Every library whose release can change a result."""

from __future__ import annotations

import hashlib
import platform
from importlib import metadata
from pathlib import Path

import passes
from passes.versions import library_versions

__all__ = ["own_code", "versions"]


def own_code() -> str:
    """A digest of onnxline's own sources: after an edit nothing that was computed before counts as known."""
    digest = hashlib.blake2b(digest_size=8)
    for package in (Path(passes.__file__).parent, Path(__file__).parent):
        for path in sorted(package.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), **library_versions()}
    for name in ("onnxline", "torch", "transformers", "safetensors"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return dict(sorted(found.items()))
