"""`pipeline.torch_ir` at the front door: IRs of torch programs, by the names and in the JSON of pytorch-ir."""

from typing import TYPE_CHECKING

from onnxline import open_room

if TYPE_CHECKING:
    from pipeline.torch_ir import *
else:
    __all__, __getattr__ = open_room("pipeline.torch_ir")
