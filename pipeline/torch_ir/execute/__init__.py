"""Run an IR: check everything first, then run it on the planned runtime, or on the plain reference.

executor.py   the entry point                           checks.py             what is missing or does not fit
arguments.py  the caller's arguments as inputs          declared_results.py   nodes that declare wrong results
engines.py    planned runtime, reference, states        memory.py             shared memory, as_strided
"""

from pipeline.torch_ir.execute.executor import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
