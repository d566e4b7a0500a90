"""A module of torch → IR. Nothing of the caller's module is changed, and no weight is read.

extract.py  module, program, or a configuration's model → IR   conversions.py  nodes converted by the user's functions
export.py   module → ExportedProgram                           stored.py       tied weights, non-persistent buffers
"""

from pipeline.torch_ir.extract.export import export_model
from pipeline.torch_ir.extract.extract import convert_exported_program, extract_ir

__all__ = ["convert_exported_program", "export_model", "extract_ir"]
