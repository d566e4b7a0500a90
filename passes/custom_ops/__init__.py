"""Operators that no runtime knows, declared by the user: shape inference, a reference in numpy, perhaps a library.

operator.py      what one operator is, and how a node of it is inferred and computed
declarations.py  the files that declare operators: named once, loaded where they are needed
"""

from passes.custom_ops.declarations import declare_ops, declared_ops
from passes.custom_ops.operator import ArrayType, CustomOp
