"""`pipeline.quantsim` at the front door: quantization simulation of the final model of a run."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.quantsim import *
else:
    __all__, __getattr__ = open_room("pipeline.quantsim")
