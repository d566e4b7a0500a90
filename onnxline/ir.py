"""`pipeline.ir` at the front door: Graph, and its text and JSON; `onnxline.Builder` makes one by hand."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.ir import *
else:
    __all__, __getattr__ = open_room("pipeline.ir")
