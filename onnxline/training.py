"""`pipeline.training` at the front door: train steps that are recorded, captured and replayed."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.training import *
else:
    __all__, __getattr__ = open_room("pipeline.training")
