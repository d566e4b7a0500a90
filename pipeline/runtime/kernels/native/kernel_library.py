"""The kernels in `sources/`: compile them once on this machine, load them, and launch them.

The library lies in `$XDG_CACHE_HOME/onnxline` (`~/.cache/onnxline`), under a name that says what it was made from:
sources, flags, compiler, torch and processor. A launch calls one operator of torch for each number of operands.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import stat
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Final

import torch

from passes.weights.files import replace_when_done
from pipeline.compiler import LEAVE_OUT, find_compiler
from pipeline.errors import UsageError
from pipeline.runtime.kernels.base import Attrs, Ins, Launch, Outs, OverloadCall, planned_threads

SOURCES = Path(__file__).with_name("sources")

FLAGS = (*("-std=c++20", "-O3", "-shared", "-fPIC"), *("-march=native", "-ffp-contract=fast", "-fno-math-errno"))


@cache
def load_library() -> NativeLibrary:
    """The kernels; they are compiled if this machine has not compiled them yet, which takes some 15 seconds.

    Raises:
        UsageError: no compiler is there, it fails, the folder for the library cannot be written or is not ours, or the
            process has loaded other kernels already.
    """
    path = build_library()
    if hasattr(torch.ops.onnxline, "call_1") and os.path.realpath(path) not in torch.ops.loaded_libraries:
        # The second one would register the operators of the first again, at which torch aborts the process.
        raise UsageError(f"native: this process has loaded other kernels than {path}; load these in a new process")
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
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onnxline"
    except RuntimeError as error:  # a user without a home
        raise UsageError(
            f"native: found no home folder; set XDG_CACHE_HOME to a folder of yours, {LEAVE_OUT}"
        ) from error
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"native: {folder} cannot be made ({error.strerror}); set XDG_CACHE_HOME to a folder that can, {LEAVE_OUT}"
        ) from error
    _refuse_foreign(folder)
    return folder


def _refuse_foreign(path: Path) -> None:
    """Raise UsageError where somebody else could have put code there, or a link to it, which would run here."""
    if not hasattr(os, "getuid"):
        return
    for found in (path.lstat(), path.stat()):
        is_open = found.st_mode & 0o022 and not stat.S_ISLNK(found.st_mode)
        if is_open or found.st_uid not in (os.getuid(), 0):
            raise UsageError(
                f"native: others can write to {path}, and code in it would be run; expected that only you can "
                f"(`chmod go-w`), or set XDG_CACHE_HOME to another folder"
            )


def _digest(compiler: Sequence[str]) -> str:
    version = _run([*compiler, "--version"]).stdout
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


ABANDONED_S: Final = 3600.0
"""Seconds after which an unfinished library is that of a build which was killed."""


def _compile(compiler: Sequence[str], path: Path) -> None:
    try:
        for left in path.parent.glob(".native-*.tmp"):
            if time.time() - left.stat().st_mtime > ABANDONED_S:  # by a build that was killed
                left.unlink(missing_ok=True)
        with replace_when_done(path) as unfinished:
            _compile_into(unfinished, compiler)
            unfinished.chmod(0o755)  # a umask may have left it open to a group
    except OSError as error:
        raise UsageError(
            f"native: {path} cannot be written ({error.strerror}); make room, or set XDG_CACHE_HOME to another folder, "
            f"{LEAVE_OUT}"
        ) from error


def _compile_into(path: Path, compiler: Sequence[str]) -> None:
    root = Path(torch.__file__).parent
    sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
    found = _run(
        [
            *(*compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"),
            *(f"-isystem{root / 'include'}", *sources, "-o", str(path)),
            *(f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"),
        ]
    )
    if found.returncode or not path.is_file():
        lines = [line for line in found.stderr.splitlines() if "error" in line] or found.stderr.splitlines()
        why = lines[0] if lines else "it said nothing" if found.returncode else "it wrote no library"
        raise _compiler_error(compiler, why)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run a compiler, whose messages are in English then."""
    english = {**os.environ, "LC_ALL": "C"}
    try:
        return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=english)
    except OSError as error:
        raise _compiler_error(command[:1], f"it cannot be run: {error.strerror}") from error


def _compiler_error(compiler: Sequence[str], why: str) -> UsageError:
    return UsageError(
        f"native: {shlex.join(compiler)} failed to compile the kernels ({why}); "
        f"name another compiler in $CXX (GCC 12, Clang 14, or a newer one), {LEAVE_OUT}"
    )


SHARED = 2**15
"""The count of elements at which torch shares them among its threads (`at::internal::GRAIN_SIZE`)."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The kernels, loaded. It stays loaded as long as the process lives, so addresses in launches stay right."""

    handle: ctypes.CDLL

    @property
    def panel(self) -> int:
        """Columns of a panel: two registers of elements."""
        return ctypes.c_int.in_dll(self.handle, "panel_columns").value

    @property
    def lanes(self) -> int:
        """Elements of a register."""
        return self.panel // 2

    def launch(
        self, kernel: str, outs: Sequence[torch.Tensor], ins: Sequence[torch.Tensor], settings: Sequence[float]
    ) -> Launch:
        """A launch that reads the addresses of its operands at each call, so these may be pointed elsewhere."""
        address = ctypes.cast(getattr(self.handle, kernel), ctypes.c_void_p).value
        overload = getattr(getattr(torch.ops.onnxline, f"call_{len(outs)}"), f"reads_{len(ins)}")
        return OverloadCall.bind(overload, address, _pack(settings), *outs, *ins)


NativeKernel = Callable[[NativeLibrary, Ins, Outs, Attrs], Launch | None]
"""As `kernels.base.Kernel`; None where the operands are none that the kernel takes."""


def _pack(settings: Sequence[float]) -> torch.Tensor:
    """Eight bytes for each number: an int as an integer, a float in double precision."""
    forms = "".join("d" if isinstance(number, float) else "q" for number in settings)
    return torch.frombuffer(bytearray(struct.pack(forms, *settings) or bytes(8)), dtype=torch.int64)


def has_native(launch: object) -> bool:
    """Whether `launch` calls a kernel in C++, alone or among other calls."""
    if isinstance(launch, OverloadCall):
        return launch.overload.namespace == "onnxline"
    parts = launch.args if isinstance(launch, partial) else launch if isinstance(launch, tuple) else ()
    return any(map(has_native, parts))


def are_floats(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take tensors like these: float32, with at least one number."""
    return all(tensor.dtype is torch.float32 and tensor.numel() > 0 for tensor in tensors)


def is_dense_like(out: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether `out` has the sizes of `x`, and lies without gaps.

    A graph may declare other sizes than a call has: then torch's kernel names the call, and ours would write elsewhere.
    """
    return out.shape == x.shape and out.is_contiguous()


def is_for_one_thread(out: torch.Tensor) -> bool:
    """Whether torch would not share the computation of `out`, number by number or row by row, among the threads that
    kernels are chosen for."""
    return planned_threads() == 1 or out.numel() < SHARED


def as_rows(tensor: torch.Tensor) -> torch.Tensor | None:
    """`tensor` as a matrix over the same memory whose rows lie without gaps; None where strides cannot say it."""
    if tensor.dim() == 0:
        return None
    try:
        rows = tensor.view(-1, tensor.shape[-1])
    except RuntimeError:
        return None
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else None
