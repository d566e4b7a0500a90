"""Finds the line of the user's code and the module that raised an error, from its traceback."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def innermost_line(error: BaseException, own: str = "") -> str:
    """`file:line: code` of the innermost frame of the user's code.

    The user's code is below the folder `own`; else any that is not installed; else that of a library, torch last. Empty
    where no frame qualifies, as for the import of a missing module.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    frames = traceback.StackSummary.extract(traceback.walk_tb(error.__traceback__), lookup_lines=False)
    frames = [frame for frame in frames if not frame.filename.startswith((*OURS, "<"))]
    kinds: tuple[Callable[[str], bool], ...] = (
        lambda file: bool(own) and file.startswith(own) and not _is_installed(file.removeprefix(own)),
        is_user_code,
        lambda file: not file.startswith(STDLIB) or (_is_installed(file) and "-packages/torch/" not in file),
        lambda file: not file.startswith(STDLIB) or _is_installed(file),
    )
    for is_own in kinds:
        for frame in reversed(frames):
            if is_own(frame.filename):
                return f"{frame.filename}:{frame.lineno}" + (f": {frame.line}" if frame.line else "")
    return ""


def is_user_code(file: str) -> bool:
    """Whether a file belongs neither to an installed library, nor to Python, nor to onnxline."""
    return not _is_installed(file) and not file.startswith((*STDLIB, *OURS))


def _is_installed(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def module_frame(error: BaseException, module: nn.Module) -> tuple[str, str] | None:
    """The path of the innermost of the submodules whose own code raised, and the innermost line of the user's code.

    torch's own layers count, since `self.proj` with the wrong width is best named by its path; its line is that of
    the call.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    raised_in = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and frame.f_code.co_name not in DISPATCH:
            raised_in = paths[id(owner)] or type(module).__name__
    return None if raised_in is None else (raised_in, innermost_line(error))


def where_raised(error: BaseException, module: nn.Module) -> str:
    """` in module 'layers.0' (file:line: code)`; empty where no submodule raised."""
    frame = module_frame(error, module)
    return f" in module {frame[0]!r} ({frame[1]})" if frame else ""


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its message: `KeyError: 'x'`."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def advice_on_type(error: BaseException) -> str | None:
    """Advice for a class that torch.export cannot flatten, if `error` names one; None otherwise.

    We do not register the class ourselves: the process shares the table, and a second entry by the user would fail.
    """
    match = UNKNOWN.search(str(error))
    if match is None:
        return None
    name = match["name"].rpartition(".")[2]
    return (
        f"{match['name']} is no type that torch can take apart: where it is a dataclass, call "
        f"torch.export.register_dataclass({name}) once before; of another class, give its tensors in tuples, lists "
        "and dicts, or enter it by torch.utils._pytree.register_pytree_node"
    )


UNKNOWN = re.compile(r"(?:Found|Unsupported input type) <class '(?P<name>[^']+)'>")
"""The wording of torch.export for results and for arguments (torch 2.11 to 2.13)."""

# Frames of nn.Module around forward, in every call.
DISPATCH = {"_call_impl", "_wrapped_call_impl"}

OURS = tuple(f"{Path(__file__).parents[2] / name}/" for name in ("passes", "pipeline"))
STDLIB = tuple(f"{path}/" for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name)))
