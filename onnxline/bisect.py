"""`passes.bisect` at the front door: the search for the pass that broke a structure or a value."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from passes.bisect import *
else:
    __all__, __getattr__ = open_room("passes.bisect")
