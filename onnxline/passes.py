"""`passes` at the front door: the pass run on an ONNX model, guards and provenance; needs no torch."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from passes import *
else:
    __all__, __getattr__ = open_room("passes")
