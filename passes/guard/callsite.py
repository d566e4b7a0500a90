"""Who called: the nearest place that is neither the optimizer's nor ours."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from passes.guard.doors import DOOR_FILE
from passes.guard.startup.after_import import LIBRARIES

__all__ = ["CallSite", "call_site"]

HERE = str(Path(__file__).parent)
STANDARD = sysconfig.get_path("stdlib")


@dataclass(frozen=True, slots=True)
class CallSite:
    file: str
    line: int
    caller: str


def call_site() -> CallSite:
    """The place of the call that is being intercepted.

    The standard library counts only if there is nothing else, as when a pool's thread calls the optimizer itself.
    """
    frames = list(_outside(sys._getframe(1)))
    best = next((frame for frame in frames if not _is_standard(frame.f_code.co_filename)), None)
    frame = best or (frames[0] if frames else sys._getframe(1))
    return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _outside(frame: FrameType | None) -> Iterator[FrameType]:
    roots = [HERE, *(path for name in LIBRARIES if name in sys.modules for path in sys.modules[name].__path__)]
    while frame is not None:
        file = frame.f_code.co_filename
        if file != DOOR_FILE and not any(file.startswith(f"{root}/") for root in roots):
            yield frame
        frame = frame.f_back


def _is_standard(file: str) -> bool:
    return file.startswith("<frozen ") or (file.startswith(f"{STANDARD}/") and "-packages/" not in file)
