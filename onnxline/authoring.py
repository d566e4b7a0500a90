"""`pipeline.authoring` at the front door: models written by hand, and their training."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.authoring import *
else:
    __all__, __getattr__ = open_room("pipeline.authoring")
