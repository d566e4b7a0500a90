"""Compile the kernels in `sources/` with the C++ compiler of this machine, once, and load them.

The library lies in `$XDG_CACHE_HOME/onnxline` (`~/.cache/onnxline`), under a name that says what it was made from:
sources, flags, compiler, torch and processor.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from passes.weights.files import replace_when_done
from pipeline.compiler import LEAVE_OUT, find_compiler
from pipeline.errors import UsageError
from pipeline.runtime.kernels.native.library import NativeLibrary

__all__ = ["build_library", "is_library_built", "load_library"]

SOURCES = Path(__file__).with_name("sources")

FLAGS = (
    *("-std=c++20", "-O3", "-shared", "-fPIC"),
    *("-march=native", "-ffp-contract=fast", "-fno-math-errno"),
)


@cache
def load_library() -> NativeLibrary:
    """The kernels; they are compiled if this machine has not compiled them yet, which takes some 15 seconds.

    Raises:
        UsageError: no compiler is there, it fails, or the folder for the library cannot be written or is not ours.
    """
    path = build_library()
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise UsageError(
            f"native: {path} cannot be loaded ({error}); remove it, so that it is compiled again"
        ) from error
    return NativeLibrary(ctypes.CDLL(str(path)))


def build_library() -> Path:
    """The library as a file, compiled where it is not there yet.

    Raises:
        UsageError: as `load_library`.
    """
    compiler = find_compiler()
    path = _library_path(compiler)
    if not path.is_file():
        if not os.access(path.parent, os.W_OK):
            raise UsageError(
                f"native: {path.parent} cannot be written; set XDG_CACHE_HOME to a folder that can, {LEAVE_OUT}"
            )
        _compile(compiler, path)
    _refuse_foreign(path)
    return path


def is_library_built() -> bool:
    """Whether this machine has compiled them already.

    Raises:
        UsageError: as `load_library`.
    """
    return _library_path(find_compiler()).is_file()


def _library_path(compiler: Sequence[str]) -> Path:
    return _cache_folder() / f"native-{_digest(compiler)}.so"


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxline"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"native: {folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder that can, {LEAVE_OUT}"
        ) from error
    _refuse_foreign(folder)
    return folder


def _refuse_foreign(path: Path) -> None:
    """Raise UsageError where somebody else could have put code there, which would run here."""
    if not hasattr(os, "getuid"):
        return
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0) or found.st_mode & 0o022:
        raise UsageError(
            f"native: others can write to {path}, and code in it would be run; expected that only you can "
            f"(`chmod go-w`), or set XDG_CACHE_HOME to another folder"
        )


def _digest(compiler: Sequence[str]) -> str:
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=False).stdout
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    for part in (*FLAGS, *compiler, version, torch.__version__, platform.machine(), _processor()):
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """What the processor can do: a home folder may be shared by machines of different kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(compiler: Sequence[str], path: Path) -> None:
    root = Path(torch.__file__).parent
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    with replace_when_done(path) as unfinished:
        found = subprocess.run(
            [
                *(*compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
                *(f"-isystem{root / 'include'}", *sources, "-o", str(unfinished)),
                *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode or not unfinished.is_file():
            lines = [line for line in found.stderr.splitlines() if "error" in line] or found.stderr.splitlines()
            why = lines[0] if lines else "it said nothing" if found.returncode else "it wrote no library"
            raise UsageError(
                f"native: {shlex.join(compiler)} failed to compile the kernels ({why}); "
                f"name another compiler in $CXX (it has to know C++20), {LEAVE_OUT}"
            )
