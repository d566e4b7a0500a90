"""`pipeline.runtime` at the front door: programs that run a plan, capture it and replay it."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.runtime import *
else:
    __all__, __getattr__ = open_room("pipeline.runtime")
