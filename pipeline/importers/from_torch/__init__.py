"""torch.export's program → Graph: one op for each aten call, as it was called.

program.py          the entry point                     operators.py       facts of a program and its operators
region.py           a graph, its calls and bodies       tensors.py         specs, strides, bytes and memory of tensors
functionalize.py    writes become values                modules.py         the caller's modules, left unchanged
refusals.py         programs that would go wrong        layer_dedup/       equal layers are traced once
"""

from pipeline.importers.from_torch.functionalize import functionalize_program, mutates
from pipeline.importers.from_torch.program import from_torch
