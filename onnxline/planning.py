"""`pipeline.planning` at the front door: execution plans, memory maps, and the file plan.bin."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.planning import *
else:
    __all__, __getattr__ = open_room("pipeline.planning")
