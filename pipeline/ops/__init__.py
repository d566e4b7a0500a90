"""The table of operators: a row for each kind of kernel, by family, and the codec of attributes.

A row says all that lowering, the planner and a reader of plans know of an operator: number, attribute schema, checks,
the operands that it may overwrite, whether it is a view. Nothing here imports torch or onnx.
"""

from pipeline.ops.attrs import pack, unpack
from pipeline.ops.kinds import Kind
from pipeline.ops.layout import Layout
from pipeline.ops.tables import KINDS, GraphBuilder, emitter_of, wrong_schema
