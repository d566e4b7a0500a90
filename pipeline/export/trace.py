"""torch module → ExportedProgram, with errors that name the module and the line; and what is rewritten in the program.

Before torch's exporter translates a program, checks of values are dropped, complex numbers are computed by their parts,
and scalars along a dim become vectors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import getitem
from typing import Any, Final, TypeVar

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from passes.suggest import plural
from pipeline.errors import SourceError
from pipeline.export.call_watch import shorten
from pipeline.export.source import TorchSource
from pipeline.export.transformers_defaults import is_switchable_experts, keep_triangular_systems
from pipeline.export.tree import input_tensors, named_leaves
from pipeline.export.user_code import advice_on_trace, first_line, module_frame
from pipeline.importers.from_torch.modules import every_tensor, preserve_module_state
from pipeline.importers.from_torch.operators import calls_in, line_of
from pipeline.importers.from_torch.tensors import copy_with_strides, memory_of


def drop_checks(program: ExportedProgram) -> tuple[str, ...]:
    """Remove, in place, the model's checks of its own values, and what is computed for them alone.

    Returns a note where there are any. A check has no result, and ONNX no operator that stops a run.
    """
    checks = [node for graph in _graphs(program) for node in graph.nodes if node.target in CHECKS]
    lines = dict.fromkeys(line_of(node) or "the model" for node in checks if _reads_values(node))
    for node in checks:
        _erase_unused(node)
    for module in program.graph_module.modules() if checks else ():
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()
    if not lines:
        return ()
    found = f"{plural(len(lines), 'check')} of values"
    return (f"the graph leaves out {found}, for which ONNX has no operator: {shorten(lines)}",)


def _reads_values(check: Node) -> bool:
    """Whether a check depends on values in a tensor; those of shapes and dtypes hold once they were traced."""
    if check.target in OF_TENSORS:
        return True
    pending, seen = list(check.all_input_nodes), set[Node]()
    while pending:
        node = pending.pop()
        if node.target in (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default):
            return True
        pending += [given for given in node.all_input_nodes if given not in seen]
        seen.add(node)
    return False


def _erase_unused(node: Node) -> None:
    """Erase `node`, and what nothing reads any more then."""
    given = node.all_input_nodes
    node.graph.erase_node(node)
    for source in given:
        if not source.users and source.op == "call_function" and not source.is_impure():
            _erase_unused(source)


OF_TENSORS: Final = frozenset({torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg})
CHECKS: Final = OF_TENSORS | {
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def move_complex_as_real(program: ExportedProgram) -> None:
    """Replace, in place, each operator of `MOVES` on a complex tensor by the same operator on its real view."""
    for graph in _graphs(program):
        for node in list(graph.nodes):
            move = MOVES.get(node.target) if node.op == "call_function" else None
            if move is not None and _is_complex(node.args[0]):
                _replace(graph, node, move)


def _graphs(program: ExportedProgram) -> list[Graph]:
    modules = program.graph_module.modules()
    return [module.graph for module in modules if isinstance(module, torch.fx.GraphModule)]


def _is_complex(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_complex() and not tensor.is_conj()  # no real view


def _replace(graph: Graph, node: Node, move: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]) -> None:
    source, *rest = node.args
    assert isinstance(source, Node)
    moved = move(source.meta["val"].ndim, tuple(rest))
    with graph.inserting_before(node):
        parts = graph.call_function(torch.ops.aten.view_as_real.default, (source,))
        result = graph.call_function(node.target, (parts, *moved))  # type: ignore[arg-type]
        whole = graph.call_function(torch.ops.aten.view_as_complex.default, (result,))
    for new, value in (
        (parts, torch.view_as_real(source.meta["val"])),
        (result, torch.view_as_real(node.meta["val"])),
        (whole, node.meta["val"]),
    ):
        new.meta = {**node.meta, "val": value}
    node.replace_all_uses_with(whole)
    graph.erase_node(node)


MOVES: Final[Mapping[Any, Callable[[int, tuple[Any, ...]], tuple[Any, ...]]]] = {
    torch.ops.aten.unsqueeze.default: lambda rank, rest: (rest[0] % (rank + 1),),
    torch.ops.aten.select.int: lambda rank, rest: (rest[0] % rank, *rest[1:]),
    torch.ops.aten.index_select.default: lambda rank, rest: (rest[0] % rank, *rest[1:]),
    torch.ops.aten.index.Tensor: lambda rank, rest: rest,
    torch.ops.aten.expand.default: lambda rank, rest: ([*rest[0], 2],),
    torch.ops.aten.repeat.default: lambda rank, rest: ([*rest[0], 1],),
}
"""Operator → from the complex tensor's rank and the other arguments, those for its parts."""


def decompose_complex(program: ExportedProgram) -> ExportedProgram:
    """The program with operators of `BY_PARTS` on complex tensors computed by their parts; itself where none is."""
    nodes = [node for graph in _graphs(program) for node in graph.nodes if node.target in BY_PARTS]
    values = [given.meta.get("val") for node in nodes for given in (node, *node.all_input_nodes)]
    if not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return program
    return program.run_decompositions(dict(BY_PARTS))


def _angle(numbers: torch.Tensor) -> Any:
    """By `atan2`: torch's own form in ONNX turns negative real numbers to -π."""
    return torch.atan2(*reversed(_parts(numbers))) if numbers.is_complex() else NotImplemented


def _by_parts(
    compute: Callable[..., Sequence[torch.Tensor]],
    is_parted: Callable[[Any], bool] = lambda item: isinstance(item, torch.Tensor) and item.is_complex(),
) -> Callable[..., Any]:
    """A decomposition: from real and imaginary part of each operand to those of the result.

    Args:
        is_parted: whether an operand makes it necessary; a complex number of Python does in any case.
    """

    def decompose(*operands: Any) -> Any:
        if not any(isinstance(item, complex) or is_parted(item) for item in operands):
            return NotImplemented
        return torch.view_as_complex(torch.stack(list(compute(*map(_parts, operands))), -1))

    return decompose


def _parts(item: Any) -> Any:
    if isinstance(item, torch.Tensor):
        return (
            torch.view_as_real(item.resolve_conj()).unbind(-1) if item.is_complex() else (item, torch.zeros_like(item))
        )
    return (complex(item).real, complex(item).imag)


def _multiply(left: Any, right: Any) -> Any:
    return left[0] * right[0] - left[1] * right[1], left[0] * right[1] + left[1] * right[0]


def _power(base: Any, exponent: Any) -> Any:
    if exponent != (2.0, 0.0):
        raise NotImplementedError("a power of complex numbers has a form in ONNX for squares alone")
    return _multiply(base, base)


BY_PARTS: Final[Mapping[Any, Callable[..., Any]]] = {
    torch.ops.aten.angle.default: _angle,
    torch.ops.aten.mul.Scalar: _by_parts(_multiply),
    torch.ops.aten.mul.Tensor: _by_parts(_multiply, lambda _: False),  # of tensors alone the exporter has it
    torch.ops.aten.exp.default: _by_parts(lambda z: (z[0].exp() * z[1].cos(), z[0].exp() * z[1].sin())),
    torch.ops.aten.pow.Tensor_Scalar: _by_parts(_power),
    torch.ops.aten.where.self: _by_parts(
        lambda chosen, a, b: [torch.where(chosen[0], *pair) for pair in zip(a, b, strict=True)]
    ),
}
"""Operators that torch's exporter has for real numbers alone, as in the inverse of a spectrogram."""


def raise_scalars(program: ExportedProgram) -> None:
    """Replace, in place, each operator along dim 0 of a scalar by the same operator on a vector of one element.

    torch takes a scalar for such a vector, and the exporter's forms of most operators do not.
    """
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in [node for node in calls_in(program.graph_module) if _is_along_scalar(node)]:
            _raise_scalar(node)


def _is_along_scalar(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    source = node.args[0] if node.args else None
    if schema is None or not isinstance(source, Node) or node.all_input_nodes != [source]:
        return False
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    given = {**defaults, **dict(zip(defaults, node.args, strict=False)), **node.kwargs}
    tensor = source.meta.get("val")
    is_view = any(result.alias_info is not None for result in schema.returns)
    has_dim = given.get("dim") not in (None, [])
    return has_dim and not is_view and isinstance(tensor, torch.Tensor) and not tensor.ndim


def _raise_scalar(node: Node) -> None:
    source, graph = node.all_input_nodes[0], node.graph
    target: Any = node.target
    names = [argument.name for argument in target._schema.arguments]
    args = [False if name == "keepdim" else item for name, item in zip(names, node.args, strict=False)]
    kwargs = {name: False if name == "keepdim" else item for name, item in node.kwargs.items()}
    vector = source.meta["val"].unsqueeze(0)
    made = target(vector, *args[1:], **kwargs)
    with graph.inserting_before(node):
        raised = graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
        result = graph.call_function(target, (raised, *args[1:]), kwargs)
    raised.meta, result.meta = {**node.meta, "val": vector}, {**node.meta, "val": made}
    if isinstance(made, torch.Tensor):
        node.replace_all_uses_with(_lower(result))
    else:
        for part in [user for user in node.users if user.target is getitem]:
            part.args = (result, part.args[1])
            part.meta = {**part.meta, "val": made[part.args[1]]}  # type: ignore[index]
            lowered = _lower(part)
            part.replace_all_uses_with(lowered, delete_user_cb=lambda user, lowered=lowered: user is not lowered)
    graph.erase_node(node)


def _lower(node: Node) -> Node:
    """A scalar in place of a vector of one element."""
    value = node.meta["val"]
    if not value.ndim:
        return node
    with node.graph.inserting_after(node):
        lowered = node.graph.call_function(torch.ops.aten.squeeze.dim, (node, 0))
    lowered.meta = {**node.meta, "val": value.squeeze(0)}
    return lowered


T = TypeVar("T")


def cast_subtrahends(program: ExportedProgram) -> None:
    """Cast, in place, integers that are subtracted from a float number, as in `1.0 - mask`, to the type of the result.

    torch.onnx 2.13 casts them itself, and finds no form of the subtraction then.
    """
    for node in calls_in(program.graph_module):
        if node.target is torch.ops.aten.rsub.Scalar:
            source, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
            if source.dtype != made.dtype:
                with node.graph.inserting_before(node):
                    cast = node.graph.call_function(
                        torch.ops.aten._to_copy.default, node.args[:1], {"dtype": made.dtype}
                    )
                cast.meta = {**node.meta, "val": source.to(made.dtype)}
                node.replace_input_with(node.args[0], cast)  # type: ignore[arg-type]


def separate_memory(module: nn.Module, arguments: T) -> T:
    """Copy each tensor of `arguments` that shares memory with an earlier one or with a weight; strides are kept.

    Returns `arguments` itself where no tensor does.
    """
    memories = [memory for leaf in pytree.tree_leaves(arguments) if (memory := memory_of(leaf)) is not None]
    weights = {memory_of(tensor) for tensor in every_tensor(module)} if memories else set()
    if len(set(memories)) == len(memories) and weights.isdisjoint(memories):
        return arguments
    seen = set(weights)

    def copy_if_shared(leaf: Any) -> Any:
        memory = memory_of(leaf)
        if memory is None or memory not in seen:
            seen.add(memory)
            return leaf
        return copy_with_strides(leaf)

    return pytree.tree_map(copy_if_shared, arguments)


def trace_module(source: TorchSource) -> tuple[ExportedProgram, tuple[str, ...]]:
    """Trace the module on its example, with every named dim left open; the model's checks of values are left out.

    Returns the program, and notes.

    Raises:
        SourceError: torch.export cannot trace the module.
    """
    args, kwargs = separate_memory(source.module, (source.example.args, source.example.kwargs))
    try:
        with preserve_module_state(source.module), keep_triangular_systems(source.module):
            program = torch.export.export(
                source.module,
                args,
                kwargs,
                dynamic_shapes=_dynamic_shapes(source),
                strict=False,
                # Deferred, `reshape(2, 4)` on a dim of 2 would become an assertion, which ONNX forgets: a graph that
                # calls its batch dynamic and computes with 2. As a guard it makes the dim constant, and `name_dims`
                # says so.
                prefer_deferred_runtime_asserts_over_guards=False,
            )
    except Exception as error:  # a user's forward and torch's tracer may raise anything
        where = module_frame(error, source.module)
        failed = dict(source.module.named_modules()).get(where[0]) if where else None
        place = f" in module {where[0]!r}\n  at {where[1]}" if where else ""
        advice = _advice(error, failed)
        raise SourceError(
            f"torch.export cannot trace the model{place}\n  {first_line(error)}\n  what to try: {advice}"
        ) from error
    return program, drop_checks(program)


def _dynamic_shapes(source: TorchSource) -> dict[str, Any] | None:
    """The tree of the arguments with {axis: AUTO} in place of every tensor.

    AUTO and not a named Dim: a named one is refused as soon as the model bounds it (a table of positions, a stride),
    though the graph would be dynamic. Dims that AUTO silently makes constant are found by `name_dims`.
    """
    specs = dict(zip(input_tensors(source.module, source.example), source.own_inputs, strict=True))
    if not any(isinstance(dim, str) for spec in source.own_inputs for dim in spec.shape):
        return None
    axes = (
        {axis: torch.export.Dim.AUTO for axis, dim in enumerate(specs[name].shape) if isinstance(dim, str)}
        if isinstance(leaf, torch.Tensor)
        else None
        for name, leaf in named_leaves(source.module, source.example)
    )
    args = _in_place_of_leaves(source.example.args, axes)
    kwargs = _in_place_of_leaves(source.example.kwargs, axes)
    # torch wants one mapping by parameter name: positional ones take theirs from the signature.
    return dict(inspect.signature(source.module.forward).bind_partial(*args, **kwargs).arguments)


def _in_place_of_leaves(tree: Any, leaves: Iterator[Any]) -> Any:
    """The tree with the next of `leaves` at each leaf, in the order of flattening.

    torch wants a plain list where the example has a registered type, such as a cache.
    """
    kind = type(tree)
    if kind is dict:
        return {key: _in_place_of_leaves(child, leaves) for key, child in tree.items()}
    if kind in (tuple, list):
        return kind(_in_place_of_leaves(child, leaves) for child in tree)
    registered = pytree.SUPPORTED_NODES.get(kind)
    if registered is not None:
        return [_in_place_of_leaves(child, leaves) for child in registered.flatten_fn(tree)[0]]
    return next(leaves)


def _advice(error: Exception, failed: nn.Module | None) -> str:
    """What to try; `failed` is the module whose code raised, if known."""
    said = f"{type(error).__name__} {error}"
    if failed is not None and DATA_DEPENDENT.search(said) and is_switchable_experts(failed):
        return (
            "this way of computing the experts loops over those that were hit; set experts_implementation to "
            "batched_mm or grouped_mm in the model's configuration"
        )
    return advice_on_trace(error) or next((advice for word, advice in ADVICE if word.search(said)), ADVICE_ON_ANY)


DATA_DEPENDENT = re.compile("data-dependent|DataDependent")

ADVICE = (
    (
        DATA_DEPENDENT,
        "an `if`, a loop or a size depends on values in a tensor: use torch.where, torch.cond or a fixed size; where "
        "an input decides it, as a grid of image patches does, hold its value in a module around the model",
    ),
    (
        re.compile("Couldn't swap"),
        "forward moves or converts the module's own weights (`self.proj.to(...)`): do that in the constructor",
    ),
    (
        re.compile("Must provide a tree_name"),
        "name the input in forward's signature: torch 2.13 fails on dynamic ones in **kwargs",
    ),
)

ADVICE_ON_ANY = "make torch.export.export(module, args, kwargs) work on its own, or export a submodule"
