"""Running an IR: everything is checked first, then the planned runtime runs it, or the plain reference beside it.

executor.py   all of it                                 checks.py             what does not fit
arguments.py  the caller's arguments as inputs          declared_results.py   nodes that say what they do not do
engines.py    planned runtime and reference             memory.py             shared by two, or counted through
states.py     what the model writes to
"""

from pipeline.torch_ir.execute.executor import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
