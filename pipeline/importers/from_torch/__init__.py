"""torch.export's program → Graph: one op for each aten call, as it was called.

`program.py` is the way in. `region.py` reads a graph, at the top or inside of a higher-order op; `arguments.py` a call;
`tensors.py` what is known of a value; `names.py` gives names; `bodies.py` lists the graphs of a program;
`functional.py` makes writes into values, with `copies.py` and `hidden.py` for what torch loses there.
"""

from pipeline.importers.from_torch.functional import functional, mutates
from pipeline.importers.from_torch.program import from_torch

__all__ = ["from_torch", "functional", "mutates"]
