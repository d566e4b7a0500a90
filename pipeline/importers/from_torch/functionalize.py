"""Functionalize a program: without in-place operators, and with the new values of buffers and inputs as outputs.

torch functionalizes a program by running it again. It keeps the operators, with three exceptions:

- An operator that may return a view or a copy (`reshape`, `contiguous`, `to`, `chunk`, `dropout`) becomes the view or
  the copy that it returned in this trace, because a write through a view must reach the viewed tensor.
- `batch_norm` becomes another operator even where it writes nothing; we restore it.
- An `instance_norm` that writes is decomposed.

Copies that convert need care: `buffer.copy_(x)` where `x` has another dtype, shape or order in memory than the buffer.
Where the last write to a buffer is such a copy, `run_decompositions` replaces the copy by `x` (torch 2.13:
`_remove_unnecessary_copy_op_pass`), and later readers of the buffer get the wrong dtype, shape or order. So each such
copy writes to an alias of its target while torch runs the program again, and the aliases are removed afterwards.

Views that no schema declares need care too: `einsum("ij->ji", x)` shares the memory of `x`, and an idle dropout (one
that does not train, or has p = 0) returns `x`. torch treats the result of such an `einsum` as a new tensor, and lets
the dropout return a copy (torch 2.13), so a write to one of the two tensors no longer reaches the other. So we replace
such an operator by views that are declared, and an operator that returns its argument by that argument.

A body is a graph inside of an operator, such as a branch of `torch.cond`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from operator import getitem
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from pipeline.importers.from_torch.operators import (
    RUNNING,
    WHEN_TRAINING,
    calls_in,
    describe_operator,
    held_tensors,
    marks_vmap,
    recompile,
)
from pipeline.importers.from_torch.tensors import layout_text, memory_of


def mutates(program: ExportedProgram) -> bool:
    """Whether some op, in a body too, writes to one of its arguments."""
    return any(True for _ in find_writing_calls(program))


def find_writing_calls(program: ExportedProgram) -> Iterator[Node]:
    """The calls, in bodies too, that write to one of their arguments."""
    return (
        node
        for node in calls_in(program.graph_module)
        if isinstance(node.target, OpOverload) and written_arguments(node)
    )


def written_arguments(node: Node) -> frozenset[str]:
    """The names of the arguments that this call changes."""
    operator = describe_operator(node.target)
    return RUNNING if operator.kind in WHEN_TRAINING and updates_statistics(*node.args[3:6]) else operator.written


def arguments_of(node: Node, names: Collection[str]) -> list[Node]:
    """The nodes that `node`, a call of an operator, takes as the arguments `names`."""
    given = {**dict(zip(describe_operator(node.target).arguments, node.args, strict=False)), **node.kwargs}
    found: list[Node] = []
    map_arg([given[name] for name in names if name in given], found.append)
    return found


def functionalize_program(program: ExportedProgram) -> ExportedProgram:
    """Functionalize `program` with torch, without decomposing anything else; one that writes nothing is returned as is.

    The new value of a buffer or input becomes an output of the program (`BUFFER_MUTATION`), and reads after the write
    read that value. Calls inside of `torch.vmap`, which a trace only marks, become calls on whole batches.
    """
    if not (mutates(program) or any(marks_vmap(node.target) for node in calls_in(program.graph_module))):
        return program
    norm = next((node for node in calls_in(program.graph_module) if node.target in (BATCH_NORM, INSTANCE_NORM)), None)
    with warnings.catch_warnings():  # torch warns of its own way to copy the program
        warnings.filterwarnings("ignore", r".*LeafSpec", FutureWarning)
        found = _run_again(merge_names(program))
    if norm is not None:  # whether cuDNN is used is a setting of torch that all norms of a trace share
        for node in list(calls_in(found.graph_module)):
            if node.target is NO_TRAINING:
                _restore_batch_norm(node, cudnn=norm.args[8])
    return found


def _run_again(program: ExportedProgram) -> ExportedProgram:
    """Let torch run `program` again and functionalize it, prepared so that no copy or view gets lost."""
    changed = [
        argument for node in find_writing_calls(program) for argument in arguments_of(node, written_arguments(node))
    ]
    hidden, copies = hidden_views(calls_in(program.graph_module), changed), find_converting_copies(program)
    if hidden:
        program = replace_hidden_views(program, {node.name for node in hidden})
    if copies:
        program = with_aliases(program, copies)
    undeclared = [node for node in find_writing_calls(program) if node.target is INSTANCE_NORM]
    found = program.run_decompositions(decompositions([*hidden, *undeclared]))
    if copies:
        remove_aliases(found)
    return found


def merge_names(program: ExportedProgram) -> ExportedProgram:
    """Merge the placeholders of each stored tensor that is written to into that of its first name.

    A tensor that the model has under several names has a placeholder for each, and torch.export reads one of them. A
    write to that one has to reach the others, and torch cannot functionalize a program that has them (torch 2.13:
    `expected compiled_fn to be GraphModule`).
    """
    first_names = _first_names(program)
    if not first_names:
        return program
    module = _copy_graphs(program)
    nodes = {node.name: node for node in module.graph.find_nodes(op="placeholder")}
    for name, first in first_names.items():
        nodes[name].replace_all_uses_with(nodes[first])
        module.graph.erase_node(nodes[name])
    module.recompile()
    specs = [spec for spec in program.graph_signature.input_specs if spec.arg.name not in first_names]
    return program._update(module, replace(program.graph_signature, input_specs=specs))


def _copy_graphs(program: ExportedProgram) -> GraphModule:
    """A copy of the program's graphs. Its nodes keep their names: by itself torch.fx renames a placeholder `input`."""
    module = copy.deepcopy(program.graph_module)
    for copied, node in zip(module.graph.nodes, program.graph.nodes, strict=True):
        copied.name = node.name
    return module


def _first_names(program: ExportedProgram) -> dict[str, str]:
    """{further placeholder of a stored tensor that is written to: the first placeholder of that tensor}."""
    placeholders: dict[int, list[str]] = {}
    for name, _, tensor in held_tensors(program):
        placeholders.setdefault(id(tensor), []).append(name)
    groups = [names for names in placeholders.values() if len(names) > 1]
    if not groups:
        return {}
    top = {node.name: node for node in program.graph.nodes}
    written = {
        root
        for node in find_writing_calls(program)
        for argument in arguments_of(node, written_arguments(node))
        for root in find_roots(argument, top)
    }
    return {name: first for first, *others in groups if not written.isdisjoint((first, *others)) for name in others}


def find_roots(node: Node, top: Mapping[str, Node]) -> set[str]:
    """The placeholders that `node` is a view of, as operators declare it, or as storages in the trace show it.

    Some operators, such as `einsum`, return views without declaring them; a program that was saved and loaded no longer
    has the storages. An `as_strided` may be a view of every tensor in its storage.
    """
    found: set[str] = set()
    pending = [node]
    for viewed in pending:  # which grows meanwhile
        if viewed.op == "placeholder":
            viewed = top.get(viewed.name, viewed)  # a body's placeholder has the name of the outer node
        if viewed.op == "placeholder" and viewed.name in top:
            found.add(viewed.name)
        elif viewed.op == "placeholder" or viewed.target is AS_STRIDED:
            found |= {name for name, other in top.items() if memories_at(viewed) & memories_at(other)}
        pending += (source for source in _sources_of_view(viewed) if source not in pending)
    return found


def find_views(node: Node) -> Iterator[Node]:
    """`node`, what it is a view of, and so on."""
    pending = [node]
    for view in pending:  # which grows meanwhile
        yield view
        if view.op != "placeholder":
            pending += (source for source in _sources_of_view(view) if source not in pending)


def _sources_of_view(node: Node) -> list[Node]:
    """The nodes that `node` is or may be a view of: by its schema, or because they share a storage."""
    if node.target is getitem:
        return node.all_input_nodes
    declared = arguments_of(node, describe_operator(node.target).viewed) if isinstance(node.target, OpOverload) else []
    return declared or [operand for operand in node.all_input_nodes if memories_at(node) & memories_at(operand)]


def updates_statistics(mean: object, variance: object, training: object) -> bool:
    """Whether a norm with these arguments updates its running statistics."""
    return bool(training) and (mean is not None or variance is not None)


def _restore_batch_norm(node: Node, *, cudnn: Any) -> None:
    """Restore `batch_norm` in place of `node`; a node of which more than the first of three results is read stays."""
    reads = list(node.users)
    if any(read.target is not getitem or read.args[1] != 0 for read in reads):
        return
    *tensors, momentum, eps = node.args
    with node.graph.inserting_before(node):
        norm = node.graph.call_function(BATCH_NORM, (*tensors, False, momentum, eps, cudnn))
    norm.meta = {**node.meta, "val": node.meta["val"][0]}
    for read in reads:
        read.replace_all_uses_with(norm)
        node.graph.erase_node(read)
    node.graph.erase_node(node)


BATCH_NORM = torch.ops.aten.batch_norm.default
AS_STRIDED = torch.ops.aten.as_strided.default
INSTANCE_NORM = torch.ops.aten.instance_norm.default
"""torch keeps it whole, and its schema does not declare that it writes; its decomposition does so (torch 2.13)."""
NO_TRAINING = torch.ops.aten._native_batch_norm_legit_no_training.default
"""What `batch_norm` becomes where it does not train: (input, weight, bias, mean, variance, momentum, eps)."""


def find_converting_copies(program: ExportedProgram) -> list[str]:
    """The names of the `copy_` nodes whose source has another dtype, shape or strides than their target, in bodies too
    (torch inlines bodies into the graph around them).
    """
    return [node.name for node in calls_in(program.graph_module) if node.target is COPY and _converts(node)]


def with_aliases(program: ExportedProgram, copies: list[str]) -> ExportedProgram:
    """A copy of `program` in which the nodes `copies` write to an alias of their target."""
    module = _copy_graphs(program)
    for node in list(calls_in(module)):
        if node.target is COPY and node.name in copies:
            target = node.all_input_nodes[0]
            with node.graph.inserting_before(node):
                alias = node.graph.call_function(ALIAS, (target,))
            alias.meta = dict(target.meta)
            node.update_arg(0, alias)
    recompile(module)
    return program._update(module, program.graph_signature)


def remove_aliases(program: ExportedProgram) -> None:
    """Remove the aliases from the functionalized `program`: each is replaced by its argument."""
    module = program.graph_module
    with module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in [node for node in calls_in(module) if node.target is ALIAS]:
            node.replace_all_uses_with(node.all_input_nodes[0])
            node.graph.erase_node(node)
    recompile(module)


def _converts(node: Node) -> bool:
    target, given = (operand.meta.get("val") if isinstance(operand, Node) else None for operand in node.args[:2])
    if not isinstance(target, torch.Tensor) or not isinstance(given, torch.Tensor):
        return False
    return target.dtype != given.dtype or layout_text(target) != layout_text(given)


COPY = torch.ops.aten.copy_.default
ALIAS = torch.ops.aten.alias.default


def hidden_views(calls: Iterable[Node], changed: Iterable[Node]) -> list[Node]:
    """Those of `calls` that return an undeclared view of memory in which the result of one of the nodes `changed` lies.

    An idle dropout is always among them: torch would make it a copy.
    """
    memories = frozenset[int]().union(*map(memories_at, changed))
    return [
        node
        for node in calls
        if _is_idle_dropout(node) or (memories & memories_at(node) and _returns_hidden_view(node))
    ]


def decompositions(nodes: Iterable[Node]) -> dict[Any, Callable[..., Any]]:
    """torch's decompositions of the operators of these calls, but not of an idle dropout.

    `replace_hidden_views` has replaced that by its argument. An operator without a decomposition is left as it is.
    """
    operators = {node.target for node in nodes if not _is_idle_dropout(node)}
    known = torch.export.default_decompositions() if operators else {}
    return {operator: known[operator] for operator in operators if operator in known}


def replace_hidden_views(program: ExportedProgram, names: Collection[str]) -> ExportedProgram:
    """A copy of `program` in which the nodes `names`, if they return their argument, are replaced by it, and otherwise
    call the equivalent operator that declares its views, if there is one (DECLARED)."""
    module, signature = _copy_graphs(program), copy.deepcopy(program.graph_signature)
    with module._set_replace_hook(signature.get_replace_hook()):
        for node in [node for node in calls_in(module) if node.name in names]:
            if isinstance(node.target, OpOverload):
                node.target = DECLARED.get(node.target, node.target)
            same = next(
                (source for source in node.all_input_nodes if _is_idle_dropout(node) or _is_identity(node, source)),
                None,
            )
            if same is not None:
                node.replace_all_uses_with(same)
                node.graph.erase_node(node)
    recompile(module)
    return program._update(module, signature)


def memories_at(node: Node) -> frozenset[int]:
    """The storages of the results of `node` in the trace; a program that was saved and loaded does not know them."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return frozenset(memory for leaf in leaves if (memory := memory_of(leaf)) is not None)


def _is_idle_dropout(node: Node) -> bool:
    return node.target is DROPOUT and not (node.args[1] and node.args[2])


def _is_identity(node: Node, given: Node) -> bool:
    tensor, base = node.meta.get("val"), given.meta.get("val")
    if not isinstance(tensor, torch.Tensor) or not isinstance(base, torch.Tensor):
        return False
    return memories_at(node) == memories_at(given) != frozenset() and _view_facts(tensor) == _view_facts(base)


def _view_facts(tensor: torch.Tensor) -> tuple[str, ...]:
    """The facts that decide how a tensor reads its memory: dtype, conjugation, sign, offset, sizes and strides."""
    return *map(str, (tensor.dtype, tensor.is_conj(), tensor.is_neg(), tensor.storage_offset())), *layout_text(tensor)


def _returns_hidden_view(node: Node) -> bool:
    if not isinstance(node.target, OpOverload) or describe_operator(node.target).viewed:
        return False
    return any(memories_at(node) & memories_at(given) for given in node.all_input_nodes)


DROPOUT = torch.ops.aten.dropout.default
"""(input, p, train)"""

DECLARED = {
    torch.ops.aten.unsafe_split.Tensor: torch.ops.aten.split.Tensor,
    torch.ops.aten.unsafe_split_with_sizes.default: torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.unsafe_chunk.default: torch.ops.aten.chunk.default,
}
"""{operator whose schema hides that it returns views: the equivalent operator that declares them}"""
