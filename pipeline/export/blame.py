"""Who raised: the line of the user's code and the module in which it happened, read off a traceback."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

__all__ = ["advice_on_type", "call_frames", "first_line", "last_frame", "module_frame"]


def last_frame(error: BaseException) -> str:
    """`file:line` of the frame that raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "no traceback"


def module_frame(error: BaseException, module: nn.Module) -> tuple[str, str] | None:
    """(module path, file:line) of the innermost frame that runs a method of one of the submodules' own code.

    torch's own layers count, since `self.proj` with the wrong width is best named by its path.
    """
    paths = {id(child): path for path, child in module.named_modules()}
    found = None
    for frame, line in call_frames(error):
        owner = frame.f_locals.get("self")
        if id(owner) in paths and frame.f_code.co_name not in DISPATCH:
            found = (paths[id(owner)] or type(module).__name__, f"{frame.f_code.co_filename}:{line}")
    return found


def call_frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """(frame, line) of the calls that led to `error`, outermost first."""
    step = error.__traceback__
    while step is not None:
        yield step.tb_frame, step.tb_lineno
        step = step.tb_next


def first_line(error: BaseException) -> str:
    """`KeyError: 'x'`: the type and the first sentence of what was said."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def advice_on_type(error: BaseException) -> str | None:
    """What to do about a class that torch.export cannot take apart, if `error` is about one; it may not say the module.

    Nobody enters it unasked: the table is the process's, and the user's own entry would then be the second.
    """
    found = UNKNOWN.search(str(error))
    if found is None:
        return None
    name = found["name"].rpartition(".")[2]
    return (
        f"{found['name']} is no type that torch can take apart: where it is a dataclass, call "
        f"torch.export.register_dataclass({name}) once before; of another class, give its tensors in tuples, lists "
        "and dicts, or enter it by torch.utils._pytree.register_pytree_node"
    )


UNKNOWN = re.compile(r"(?:Found|Unsupported input type) <class '(?P<name>[^']+)'>")
"""As torch.export says it of results and of arguments (torch 2.11 to 2.13)."""

# nn.Module's machinery around forward, which every call goes through.
DISPATCH = {"_call_impl", "_wrapped_call_impl"}
