"""`pipeline.onnx_backend` at the front door: ONNX's own backend interface over the planned runtime."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.onnx_backend import *
else:
    __all__, __getattr__ = open_room("pipeline.onnx_backend")
