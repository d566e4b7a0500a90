"""The pass `rows`: operators that work row by row become one row program (`pipeline.ops.row_programs`).

A program begins at an op whose result is read outside, and takes in each producer whose result nothing else reads. So a
program has one result, and no value is computed twice.
"""

from __future__ import annotations

from typing import Final

from pipeline.ir.graph import Attr, Graph, Op, TensorSpec
from pipeline.lowering.fusion.op_patterns import FLOATS
from pipeline.lowering.fusion.rewrite import Rewrite
from pipeline.lowering.fusion.row_operators import MOST_OPERANDS, TRANSLATIONS, RowChain
from pipeline.lowering.memory_order import memory_order
from pipeline.ops.row_programs import Computed, Input, Instruction, write_program


def fuse_rows(graph: Graph) -> Graph:
    """The pass `rows`; a single operator other than a normalisation is left as it is."""
    rewrite = Rewrite(graph)
    taken: set[int] = set()
    for op in reversed(graph.ops):
        if op.oid in taken or not _can_end(graph, op):
            continue
        value = graph.values[op.outputs[0]]
        chain, order = RowChain(graph, value.spec, TRANSLATIONS), memory_order(value)
        last = chain.take(op)
        is_result = last == Computed(len(chain.instructions) - 1)
        is_alone = len(chain.ops) < 2 and op.kind not in NORMS
        if not is_result or is_alone or len(chain.inputs) > MOST_OPERANDS:
            continue
        numbers = _order_operands(chain)
        if not numbers:
            continue
        taken.update(chain.ops)
        _put_program(rewrite, op, chain, numbers, order)
    return rewrite.build()


NORMS: Final = ("aten.layer_norm.default", "aten.rms_norm.default")
"""Torch has no `out=` for them, so that each result would be copied."""


def _can_end(graph: Graph, op: Op) -> bool:
    """Whether the result of `op` can be that of a program: rows lie in one piece, in a dtype of `FLOATS`."""
    if op.kind not in TRANSLATIONS:
        return False
    value = graph.values[op.outputs[0]]
    is_stored = value.spec.is_static and value.spec.rank > 0 and value.spec.numel > 0
    order = memory_order(value)
    return is_stored and value.spec.dtype in FLOATS and (order is None or order[-1] == value.spec.rank - 1)


def _in_memory_order(rewrite: Rewrite, op: Op, inputs: list[int], order: tuple[int, ...]) -> list[int]:
    """The operands with their axes in the order in which the result of `op` lies in memory: views, before `op`."""
    found: list[int] = []
    for vid in inputs:
        spec, name = rewrite.spec(vid), rewrite.graph.values[vid].name
        full = (1,) * (len(order) - spec.rank) + spec.shape
        if all(size == 1 for size in full[:-1]):  # one row for all
            found.append(vid)
            continue
        if spec.rank < len(order):
            source = rewrite.declare(f"{name} with all axes", TensorSpec(full, spec.dtype))
            rewrite.replace(op, "aten.reshape.default", [vid], [source], {"shape": full})
            vid = source
        shape = tuple(full[axis] for axis in order)
        found.append(rewrite.declare(f"{name} as stored", TensorSpec(shape, spec.dtype)))
        rewrite.replace(op, "aten.permute.default", [vid], found[-1:], {"dims": order})
    return found


def _put_program(rewrite: Rewrite, op: Op, chain: RowChain, numbers: list[int], order: tuple[int, ...] | None) -> None:
    """The program in the place of `op`, between views where the result lies in another order than that of its axes."""
    inputs = chain.inputs if order is None else _in_memory_order(rewrite, op, chain.inputs, order)
    program, operands = _renumber(chain.instructions, numbers), [inputs[number] for number in numbers]
    attrs: dict[str, Attr] = {"program": write_program(program)}
    if order is None:
        rewrite.replace(op, "RowProgram", operands, op.outputs, attrs)
        return
    shape = tuple(chain.space.shape[axis] for axis in order)
    stored = rewrite.declare(
        f"{chain.graph.values[op.outputs[0]].name} as stored", TensorSpec(shape, chain.space.dtype)
    )
    rewrite.replace(op, "RowProgram", operands, [stored], attrs)
    back = tuple(order.index(axis) for axis in range(len(order)))
    rewrite.replace(op, "aten.permute.default", [stored], op.outputs, {"dims": back})


def _order_operands(chain: RowChain) -> list[int]:
    """The numbers of the operands in an order in which the result may be written over the first one: a float of its
    shape and dtype, or of another shape. Empty where each operand is rotated or of bools, or where there is none."""
    rotated = {part.operands[0] for part in chain.instructions if part.name == "rotate"}

    def rank(number: int) -> tuple[bool, bool, bool]:
        spec = chain.graph.values[chain.inputs[number]].spec
        return Input(number) in rotated, spec.dtype not in FLOATS, spec.shape != chain.space.shape

    order = sorted(range(len(chain.inputs)), key=rank)
    return order if order and not any(rank(order[0])[:2]) else []


def _renumber(program: list[Instruction], order: list[int]) -> list[Instruction]:
    """The program on operands that are called in another order."""
    moved = {Input(old): Input(new) for new, old in enumerate(order)}
    return [
        Instruction(
            part.name, tuple(moved[operand] if isinstance(operand, Input) else operand for operand in part.operands)
        )
        for part in program
    ]
