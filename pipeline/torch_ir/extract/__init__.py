"""A module of torch → IR. Nothing of the caller's module is changed, and no weight is read.

extract.py     module, or a configuration's model → IR  stored.py       tied weights, non-persistent buffers
export.py      module → ExportedProgram                 conversions.py  nodes that the user's functions write down
convert.py     ExportedProgram → IR                     signature.py    what goes in and comes out
"""

from pipeline.torch_ir.extract.convert import convert_exported_program
from pipeline.torch_ir.extract.export import export_model
from pipeline.torch_ir.extract.extract import extract_ir

__all__ = ["convert_exported_program", "export_model", "extract_ir"]
