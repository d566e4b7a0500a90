"""Running an IR: everything is checked first, then the planned runtime runs it, or the plain reference beside it.

executor.py   all of it                                 checks.py             what does not fit
arguments.py  the caller's arguments as inputs          declared_results.py   nodes that say what they do not do
engines.py    planned runtime, reference, states        memory.py             shared by two, or counted through
"""

from pipeline.torch_ir.execute.executor import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
