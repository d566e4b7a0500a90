"""An `as_strided` of a weight or buffer that shows more than it: the IR has each by itself, and nothing around it."""

from __future__ import annotations

from torch.export import ExportedProgram
from torch.fx import Node

from pipeline.importers.from_torch.bodies import calls_in
from pipeline.importers.from_torch.hidden import memories_at
from pipeline.importers.from_torch.memory import extent
from pipeline.importers.from_torch.place import line_of
from pipeline.torch_ir.errors import ConversionError

__all__ = ["refuse_counting_beyond"]


def refuse_counting_beyond(program: ExportedProgram) -> None:
    """
    Raises:
        ConversionError: an `as_strided` leaves a stored tensor, or counts from the begin of memory that it is within.
    """
    held = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    stored = [node for node in program.graph.find_nodes(op="placeholder") if node.name in held]
    for node in (one for one in calls_in(program.graph_module) if str(one.target).startswith("aten.as_strided")):
        roots = [one for one in stored if memories_at(one) & memories_at(node)]
        if roots and not any(_holds(root, node) for root in roots):
            raise ConversionError(
                f"node {node.name!r} ({line_of(node) or 'no line is known'}) counts through memory of which "
                f"{held[roots[0].name]!r} is a part only; expected a tensor that has its memory for itself: "
                "register a clone of it, or the whole"
            )


def _holds(root: Node, node: Node) -> bool:
    """Whether all that `node` shows are bytes of `root`, as far as that is known; sizes that are symbols are not."""
    whole, shown = root.meta["val"], node.meta["val"]
    numbers = (*shown.shape, *shown.stride(), shown.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return True
    counted_from_storage = len(node.args) > 3 and node.args[3] is not None
    if counted_from_storage and whole.storage_offset():
        return False
    begin, first = (one.storage_offset() * one.element_size() for one in (whole, shown))
    return begin <= first and first + extent(shown) <= begin + extent(whole)
