"""Running an IR: everything is checked first, then the planned runtime runs it, or the plain reference beside it.

execute.py     all of it                                feed.py       the caller's arguments as inputs
checked.py     what does not fit                        sizes.py      against named dims
planned.py     a program for each set of sizes          shared.py     memory that two tensors share
reference.py   op by op, with torch's operators         unspelled.py  calls without their arguments
states.py      what the model writes to                strided.py    tensors whose memory is counted through
"""

from pipeline.torch_ir.execute.execute import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
