"""A module of torch → IR. Nothing of the caller's module is changed, and no weight is read.

extract.py   all of it                                  tied.py      one weight for all names of a tensor
meta.py      nothing has been loaded                    buffers.py   what no checkpoint has, computed again
names.py     names that torch.export drops              convert.py   nodes that functions of the user's write down
source.py    the model as the configuration gives it    shared.py    memory of two tensors, written to
"""

from pipeline.torch_ir.extract.extract import convert_exported_program, export_model, extract_ir

__all__ = ["convert_exported_program", "export_model", "extract_ir"]
