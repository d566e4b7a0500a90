"""Run an IR: check everything first, then run it on the planned runtime, or on the plain reference.

executor.py   the entry point, the engine         checks.py   what is missing, wrong or does not fit; shared memory
arguments.py  the caller's arguments as inputs
"""

from pipeline.torch_ir.execute.executor import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
