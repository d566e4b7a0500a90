"""`pipeline.jobs` at the front door: many runs in processes of this machine, or on a Ray cluster."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.jobs import *
else:
    __all__, __getattr__ = open_room("pipeline.jobs")
