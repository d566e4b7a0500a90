"""Running an IR: everything is checked first, then the planned runtime runs it, or the plain reference beside it.

feed.py     the caller's arguments as inputs            planned.py   a program for each set of sizes
states.py   what the model writes to                    sizes.py     against named dims
shared.py   memory that two tensors share               unspelled.py calls without their arguments
execute.py  all of it
"""

from pipeline.torch_ir.execute.execute import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
