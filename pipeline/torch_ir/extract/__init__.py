"""A module of torch → IR. Nothing of the caller's module is changed, and no weight is read.

extract.py     module, or a configuration's model → IR  stored.py       tied weights, non-persistent buffers
export.py      module → ExportedProgram                 conversions.py  nodes converted by the user's functions
convert.py     ExportedProgram → IR                     signature.py    how arguments and results nest
"""

from pipeline.torch_ir.extract.convert import convert_exported_program
from pipeline.torch_ir.extract.export import export_model
from pipeline.torch_ir.extract.extract import extract_ir

__all__ = ["convert_exported_program", "export_model", "extract_ir"]
