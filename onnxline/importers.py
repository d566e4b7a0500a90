"""`pipeline.importers` at the front door: an ONNX model → a Graph."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.importers import *
else:
    __all__, __getattr__ = open_room("pipeline.importers")
