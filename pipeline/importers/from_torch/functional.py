"""Writes become values: a program without in-place ops, whose updates of buffers and inputs are among its outputs."""

from __future__ import annotations

from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pipeline.importers.from_torch.operators import WHEN_TRAINING, operator_of

__all__ = ["functional", "mutates"]


def mutates(program: ExportedProgram) -> bool:
    """Whether some op, in a body too, writes to one of its arguments."""
    return any(
        writes(node)
        for module in program.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if node.op == "call_function" and isinstance(node.target, OpOverload)
    )


def functional(program: ExportedProgram) -> ExportedProgram:
    """`program` itself where nothing is written, else as torch functionalizes it, without decomposing anything else.

    What is written to a buffer or to an input is an output of the program then (`BUFFER_MUTATION`); a value that was
    read after the write reads the new one.
    """
    return program.run_decompositions({}) if mutates(program) else program


def writes(node: Node) -> bool:
    """Whether this call changes one of its arguments."""
    operator = operator_of(node.target)
    return operator.writes or (operator.kind in WHEN_TRAINING and trains(*node.args[3:6]))


def trains(mean: object, variance: object, training: object) -> bool:
    return bool(training) and (mean is not None or variance is not None)
