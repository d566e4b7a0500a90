"""Versions and digests of everything that can change a result: libraries, and our own code."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import passes
from passes.recipe.steps import library_versions


def own_code_digest() -> str:
    """Digest of every file of onnxline's packages, data such as audit tables included: any edit makes cached results
    stale."""
    return digest_of_packages(Path(passes.__file__).parent, Path(__file__).parent)


def digest_of_packages(*packages: Path) -> str:
    """Digest of the name and content of each file; `__pycache__` is left out."""
    digest = hashlib.blake2b(digest_size=8)
    for package in packages:
        files = {path.relative_to(package).as_posix(): path for path in package.rglob("*") if path.is_file()}
        for name, path in sorted(files.items()):
            if path.parent.name != "__pycache__":
                digest.update(name.encode() + b"\0")
                digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Digest of the content of a file, read in pieces; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=8)).hexdigest()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Name → version of Python and of each library that is installed, sorted."""
    libraries = library_versions(("onnxline", "torch", "transformers", "safetensors"))
    return dict(sorted({"python": platform.python_version(), **libraries}.items()))
