"""Run an IR: check everything first, then run it on the planned runtime, or on the plain reference.

executor.py   the entry point                     checks.py   what is missing, wrong or does not fit
arguments.py  the caller's arguments as inputs    memory.py   shared memory, as_strided
engines.py    planned runtime, reference, states
"""

from pipeline.torch_ir.execute.executor import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
