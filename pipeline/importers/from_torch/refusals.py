"""Refuse programs whose Graph would silently compute something else than the model.

Different weights or buffers may share bytes, while a Graph treats each as a tensor of its own. (The two halves of one
cache share a storage, but no bytes.) So a write to one of them is refused, and so is an `as_strided` that reads beyond
the tensor it is applied to.

A write to a view becomes a new value of the base tensor, computed with the inverse of each view between them; torch's
functionalization gets some inverses wrong (torch 2.13). The inverse of `unfold` writes zeros where there is no window;
those of `expand` and of an overlapping `as_strided` add up, or pick one of, the values written to one element.

An autocast region for the CPU casts nothing when it is traced on meta, so the graph would have other dtypes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pipeline.errors import Unsupported
from pipeline.importers.from_torch.functionalize import (
    arguments_of,
    find_roots,
    find_views,
    find_writing_calls,
    memories_at,
    written_arguments,
)
from pipeline.importers.from_torch.operators import bodies_of, calls_in, held_tensors, line_of
from pipeline.importers.from_torch.tensors import extent, meet, memory_of

Held = Mapping[str, tuple[str, torch.Tensor]]
"""{placeholder: (name in the model, tensor)} of the tensors that share a storage with another one."""


def refuse_unfaithful(program: ExportedProgram) -> None:
    """
    Raises:
        Unsupported: it writes to a tensor that has bytes in common with another, an `as_strided` leaves a stored
            tensor, or an autocast region that casts for the CPU was traced on meta.
    """
    _refuse_written_in_two(program)
    _refuse_counting_beyond(program)
    _refuse_idle_autocast(program)


def refuse_lost_writes(program: ExportedProgram) -> None:
    """Check a program before it is functionalized.

    Raises:
        Unsupported: an op writes through a view that leaves elements out, or that shows one of them several times.
    """
    for node in find_writing_calls(program):
        for target in arguments_of(node, written_arguments(node)):
            for view in find_views(target):
                if reason := _loses(view):
                    raise Unsupported(
                        f"{_describe(node)} writes through {view.name!r}, a "
                        f"view that {reason}, and torch's functionalization loses what such a write does to the rest: "
                        "write to slices or to a clone in its place, or extract with functionalize=False"
                    )


def _refuse_written_in_two(program: ExportedProgram) -> None:
    calls = list(find_writing_calls(program))
    held = _sharing(program) if calls else {}
    if not held:
        return
    top = {node.name: node for node in program.graph.nodes}
    for node in calls:
        for argument in arguments_of(node, written_arguments(node)):
            first, *others = _written_together(held, find_roots(argument, top)) or [""]
            if others:
                raise Unsupported(
                    f"{_describe(node)} writes to memory that {first!r} and {', '.join(map(repr, others))} share; "
                    "expected one tensor in it: register it once, or the very same tensor under both names, and take "
                    "views of it in forward"
                )


def _sharing(program: ExportedProgram) -> Held:
    held: dict[str, tuple[str, torch.Tensor]] = {}
    tensors: dict[int, set[int]] = {}
    for name, target, tensor in held_tensors(program):
        if (memory := memory_of(tensor)) is not None:
            held[name] = target, tensor
            tensors.setdefault(memory, set()).add(id(tensor))
    return {name: one for name, one in held.items() if len(tensors[memory_of(one[1]) or 0]) > 1}


def _written_together(held: Held, placeholders: Collection[str]) -> list[str]:
    """The names of the different tensors that a write to those of the `placeholders` changes."""
    found: dict[int, str] = {}
    for changed in (held[name][1] for name in placeholders if name in held):
        for name, tensor in held.values():
            if tensor is changed or _share_bytes(changed, tensor):
                found.setdefault(id(tensor), name)
    return list(found.values())


def _share_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = (int(tensor.storage_offset()) * tensor.element_size() for tensor in (one, other))
    return memory_of(one) == memory_of(other) and meet(one, other, second - first)


def _loses(node: Node) -> str:
    """Why a write through the view `node` would be lost; "" where it would not."""
    shown = node.meta.get("val")
    if not isinstance(shown, torch.Tensor) or node.op == "placeholder":
        return ""
    if node.target is UNFOLD:
        whole = node.all_input_nodes[0].meta["val"]
        if not statically_known_true(shown.numel() >= whole.numel()):
            return "leaves elements out"
    return "shows one element in several places" if _overlaps(shown) else ""


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices of `tensor` may address one element; symbolic sizes are taken to be more than 1."""
    axes = [
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if not statically_known_true(size == 1)
    ]
    if any(statically_known_true(stride == 0) for stride, _ in axes):
        return True
    if not all(isinstance(number, int) for axis in axes for number in axis):
        return False
    reach = 0
    for stride, size in sorted(axes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _refuse_counting_beyond(program: ExportedProgram) -> None:
    held = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    stored = [node for node in program.graph.find_nodes(op="placeholder") if node.name in held]
    calls = (call for call in calls_in(program.graph_module) if str(call.target).startswith("aten.as_strided"))
    for node in calls:
        roots = [root for root in stored if memories_at(root) & memories_at(node)]
        if roots and not any(_holds(root, node) for root in roots):
            raise Unsupported(
                f"{_describe(node)} counts through memory of which {held[roots[0].name]!r} is a part only; expected a "
                "tensor that has its memory for itself: register a clone of it, or the whole"
            )


def _holds(root: Node, node: Node) -> bool:
    """Whether `node` reads only bytes of `root`; assumed where sizes are symbols."""
    whole, shown = root.meta["val"], node.meta["val"]
    numbers = (*shown.shape, *shown.stride(), shown.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return True
    counted_from_storage = len(node.args) > 3 and node.args[3] is not None
    if counted_from_storage and whole.storage_offset():
        return False
    begin, first = (tensor.storage_offset() * tensor.element_size() for tensor in (whole, shown))
    return begin <= first and first + extent(shown) <= begin + extent(whole)


def _refuse_idle_autocast(program: ExportedProgram) -> None:
    for module in bodies_of(program.graph_module):
        for region in module.graph.find_nodes(op="call_function", target=AUTOCAST):
            device, _, enabled, _, wrapped = region.args[:5]
            if enabled and device == "cpu" and any(map(_on_meta, region.all_input_nodes)):
                raise Unsupported(
                    f"autocast at {_first_line(module, wrapped)} casts nothing on meta, so the graph would have "
                    "other dtypes than the model has on the CPU; expected a model on the CPU: trace it there, with "
                    "strict=False"
                )


def _on_meta(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_meta


def _first_line(module: GraphModule, region: object) -> str:
    """The line of the first call inside of a region."""
    body = module.get_submodule(str(region.target)) if isinstance(region, Node) else None
    nodes = body.graph.nodes if isinstance(body, GraphModule) else ()
    return next(filter(None, map(line_of, nodes)), "a line that is not known")


def _describe(node: Node) -> str:
    return f"node {node.name!r} ({line_of(node) or 'no line is known'})"


UNFOLD = torch.ops.aten.unfold.default
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
