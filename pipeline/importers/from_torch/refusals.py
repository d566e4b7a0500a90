"""Refuse programs of torch.export whose `Graph` would silently compute something else than the model.

Different weights or buffers may share bytes, while a Graph treats each as a tensor of its own. So a write to bytes that
two of them share is refused, and so is an `as_strided` that reads beyond its weight or buffer. Two tensors in one
storage that share no byte, such as the halves of a cache, may be written to.

A write to a view becomes a new value of the base tensor, computed with the inverse of each view between the write and
the base; torch's functionalization gets some inverses wrong (torch 2.13). The inverse of `unfold` writes zeros where
there is no window. The inverses of views that show an element several times (`expand`, an overlapping `unfold` or
`as_strided`) add up the values that are written to it, or pick one.

When it is traced on meta, an autocast region for the CPU casts nothing, so the Graph would have other dtypes than the
model has on the CPU.
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
from pipeline.importers.from_torch.tensors import extent, memory_of, overlap

SharedTensors = Mapping[str, tuple[str, torch.Tensor]]
"""{placeholder: (name in the model, tensor)} of the tensors that share a storage with another one."""


def refuse_unfaithful(program: ExportedProgram) -> None:
    """
    Raises:
        Unsupported: the program writes to bytes that two weights or buffers share, has an `as_strided` that reads
            outside of its weight or buffer, or has an autocast region for the CPU that was traced on meta.
    """
    _refuse_writes_to_shared_bytes(program)
    _refuse_as_strided_outside(program)
    _refuse_autocast_on_meta(program)


def refuse_lost_writes(program: ExportedProgram) -> None:
    """Check a program before torch functionalizes it; with functionalize=False writes stay, and nothing is lost.

    Raises:
        Unsupported: an op writes through an `unfold` with gaps, or through a view that shows an element several times.
    """
    for node in find_writing_calls(program):
        for target in arguments_of(node, written_arguments(node)):
            for view in find_views(target):
                if reason := _why_lost(view):
                    raise Unsupported(
                        f"{_describe(node)} writes through {view.name!r}, a "
                        f"view that {reason}, and torch's functionalization loses what such a write does to the rest: "
                        "write to slices or to a clone in its place, or extract with functionalize=False"
                    )


def _refuse_writes_to_shared_bytes(program: ExportedProgram) -> None:
    calls = list(find_writing_calls(program))
    shared = _find_shared(program) if calls else {}
    if not shared:
        return
    top = {node.name: node for node in program.graph.nodes}
    for node in calls:
        for argument in arguments_of(node, written_arguments(node)):
            names = _written_together(shared, find_roots(argument, top))
            if len(names) > 1:
                first, *others = names
                raise Unsupported(
                    f"{_describe(node)} writes to memory that {first!r} and {', '.join(map(repr, others))} share; "
                    "expected one tensor in it: register it once, or the very same tensor under both names, and take "
                    "views of it in forward"
                )


def _find_shared(program: ExportedProgram) -> SharedTensors:
    by_memory: dict[int, dict[str, tuple[str, torch.Tensor]]] = {}
    for name, target, tensor in held_tensors(program):
        if (memory := memory_of(tensor)) is not None:
            by_memory.setdefault(memory, {})[name] = target, tensor
    return {
        name: entry
        for entries in by_memory.values()
        if len({id(tensor) for _, tensor in entries.values()}) > 1
        for name, entry in entries.items()
    }


def _written_together(shared: SharedTensors, placeholders: Collection[str]) -> list[str]:
    """The names of all weights and buffers that change when the tensors of `placeholders` are written to, each tensor
    once."""
    found: dict[int, str] = {}
    for changed in (shared[name][1] for name in placeholders if name in shared):
        for name, tensor in shared.values():
            if tensor is changed or _share_bytes(changed, tensor):
                found.setdefault(id(tensor), name)
    return list(found.values())


def _share_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    begin, second_begin = (int(tensor.storage_offset()) * tensor.element_size() for tensor in (first, second))
    return memory_of(first) == memory_of(second) and overlap(first, second, second_begin - begin)


def _why_lost(node: Node) -> str:
    """What the view `node` does that makes torch lose a write through it; "" where torch keeps it."""
    shown = node.meta.get("val")
    if not isinstance(shown, torch.Tensor) or node.op == "placeholder":
        return ""
    if node.target is UNFOLD:
        whole = node.all_input_nodes[0].meta["val"]
        if not statically_known_true(shown.numel() >= whole.numel()):
            return "leaves elements out"
    return "shows one element in several places" if _overlaps(shown) else ""


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether two indices of `tensor` may address one element: with fixed sizes also in some cases where none do.

    With symbolic sizes or strides only a stride of 0 counts, on an axis whose size is not known to be 1.
    """
    axes = [
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if not statically_known_true(size == 1)
    ]
    if any(statically_known_true(stride == 0) for stride, _ in axes):
        return True
    if not all(isinstance(number, int) for axis in axes for number in axis):
        return False
    reach = 0  # the largest offset that the axes with smaller strides make
    for stride, size in sorted(axes):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def _refuse_as_strided_outside(program: ExportedProgram) -> None:
    names = {spec.arg.name: str(spec.target) for spec in program.graph_signature.input_specs if spec.target}
    stored = [node for node in program.graph.find_nodes(op="placeholder") if node.name in names]
    calls = (call for call in calls_in(program.graph_module) if str(call.target).startswith("aten.as_strided"))
    for node in calls:
        roots = [root for root in stored if memories_at(root) & memories_at(node)]
        if roots and not any(_reads_only(root, node) for root in roots):
            raise Unsupported(
                f"{_describe(node)} counts through memory of which {names[roots[0].name]!r} is a part only; expected a "
                "tensor that has its memory for itself: register a clone of it, or the whole"
            )


def _reads_only(root: Node, node: Node) -> bool:
    """Whether the as_strided `node` reads only bytes of `root`, in the program and in the Graph; assumed where sizes
    are symbols."""
    whole, shown = root.meta["val"], node.meta["val"]
    numbers = (*shown.shape, *shown.stride(), shown.storage_offset())
    if not all(isinstance(number, int) for number in numbers):
        return True
    # Such an offset counts from the start of the storage, where a tensor of a Graph does not begin.
    counted_from_storage = len(node.args) > 3 and node.args[3] is not None
    if counted_from_storage and whole.storage_offset():
        return False
    begin, first = (tensor.storage_offset() * tensor.element_size() for tensor in (whole, shown))
    return begin <= first and first + extent(shown) <= begin + extent(whole)


def _refuse_autocast_on_meta(program: ExportedProgram) -> None:
    for module in bodies_of(program.graph_module):
        for region in module.graph.find_nodes(op="call_function", target=AUTOCAST):
            device, _, enabled, _, wrapped = region.args[:5]
            if enabled and device == "cpu" and any(map(_on_meta, region.all_input_nodes)):
                raise Unsupported(
                    f"autocast at {_first_line(module, wrapped)} casts nothing on meta, so the graph would have "
                    "other dtypes than the model has on the CPU; expected a model on the CPU: move the model and its "
                    "inputs there, and trace with strict=False"
                )


def _on_meta(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_meta


def _first_line(module: GraphModule, region: object) -> str:
    """The line in the source of the first node of an autocast region whose line is known."""
    body = module.get_submodule(str(region.target)) if isinstance(region, Node) else None
    nodes = body.graph.nodes if isinstance(body, GraphModule) else ()
    return next(filter(None, map(line_of, nodes)), "a line that is not known")


def _describe(node: Node) -> str:
    return f"node {node.name!r} ({line_of(node) or 'no line is known'})"


UNFOLD = torch.ops.aten.unfold.default
AUTOCAST = torch.ops.higher_order.wrap_with_autocast
