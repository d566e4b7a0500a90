"""`pipeline.export.parts.pair` at the front door: prefill and decode graphs with a cache of fixed length."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.export.parts.pair import *
else:
    __all__, __getattr__ = open_room("pipeline.export.parts.pair")
