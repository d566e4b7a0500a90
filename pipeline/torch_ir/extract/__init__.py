"""A module of torch → IR. Nothing of the caller's module is changed, and no weight is read.

extract.py     module → IR                              names.py        names that torch.export drops
export.py      module → ExportedProgram                 tied.py         one weight for all names of a tensor
convert.py     ExportedProgram → IR                     shared.py       memory of two tensors, written to
signature.py   what goes in and comes out               buffers.py      what no checkpoint has, computed again
meta.py        nothing has been loaded                  registered.py   nodes that functions of the user's write down
source.py      the model as the configuration gives it  strided.py      what counts beyond a tensor's memory
autocast.py    regions that cast nothing where traced
"""

from pipeline.torch_ir.extract.convert import convert_exported_program
from pipeline.torch_ir.extract.export import export_model
from pipeline.torch_ir.extract.extract import extract_ir

__all__ = ["convert_exported_program", "export_model", "extract_ir"]
