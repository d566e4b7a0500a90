"""torch.export's program → Graph: one op for each aten call, as it was called.

program.py          the way in                          operators.py       an operator's facts, names of ops
region.py           a graph, its calls and bodies       tensors.py         what is known of a tensor
functionalize.py    writes become values                implicit_views.py  views that no schema tells
refusals.py         what a Graph would show otherwise   memory.py          which memory a tensor lies in
exported_program.py what a program holds                modules.py         the caller's modules
module_state.py     they stay as they were              layer_dedup/       equal layers are traced once
"""

from pipeline.importers.from_torch.functionalize import functionalize_program, mutates
from pipeline.importers.from_torch.program import from_torch

__all__ = ["from_torch", "functionalize_program", "mutates"]
