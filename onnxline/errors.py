"""`pipeline.errors` at the front door: the errors that a caller may catch, each with its exit code."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.errors import *
else:
    __all__, __getattr__ = open_room("pipeline.errors")
