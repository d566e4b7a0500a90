"""Calls of which nobody knows which tensor is which argument.

pytorch-ir writes tensors down in a row, and so did we once; an operator's schema says which is which. Where the module
that defines an operator of the user's own had not been imported when the file was read, there was no schema to ask.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from pipeline.ir import Graph, InputRef, Op
from pipeline.ir.graph import parts
from pipeline.runtime.torch_args import find_operator
from pipeline.torch_ir.errors import ExecutionError

__all__ = ["refuse_unspelled", "unspelled"]


def unspelled(graph: Graph, own: Container[str]) -> list[Op]:
    """Ops, in bodies too, that read tensors and give them to no argument; all but those with an executor in `own`."""
    return [
        *(op for op in graph.ops if op.inputs and op.kind not in own and not _gives_tensors(op)),
        *(op for outer in graph.ops for body in outer.bodies for op in unspelled(body, own)),
    ]


def refuse_unspelled(ops: Sequence[Op]) -> None:
    """
    Raises:
        SourceError: torch has no such operator.
        ExecutionError: it has one by now.
    """
    for op in ops:
        find_operator(op.kind)
        raise ExecutionError(
            f"node {op.name!r}: {op.kind} was not there when the IR was read, so nobody knows which tensor is which "
            "argument: import the module that defines it first, then load the IR"
        )


def _gives_tensors(op: Op) -> bool:
    return any(type(part) is InputRef for item in op.attrs.values() for part in parts(item))
