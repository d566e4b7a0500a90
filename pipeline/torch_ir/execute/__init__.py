"""Running an IR: everything is checked first, then the planned runtime runs it, or the plain reference beside it.

execute.py     all of it                                feed.py       the caller's arguments as inputs
engines.py     which of the two runs it                 checked.py    what does not fit
planned.py     a program for each set of sizes          sizes.py      against named dims
reference.py   op by op, with torch's operators         shared.py     memory that two tensors share
states.py      what the model writes to                 strided.py    tensors whose memory is counted through
declared.py    nodes that say what they do not do       unspelled.py  calls without their arguments
"""

from pipeline.torch_ir.execute.execute import IRExecutor, execute_ir

__all__ = ["IRExecutor", "execute_ir"]
