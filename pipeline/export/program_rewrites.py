"""What is rewritten in a traced program before torch's exporter translates it, each time in place or to a new program.

drop_checks            checks of values are left out: ONNX has no operator that stops a run
decompose_complex      operators on complex tensors that the exporter lacks are computed by real and imaginary parts
move_complex_as_real   operators that only move elements act on the real view of a complex tensor
unsqueeze_scalars      operators along dim 0 of a scalar act on a vector of one element
cast_subtrahends       integers that are subtracted from a float number become floats first
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import getitem
from types import NotImplementedType
from typing import Any, Final

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from passes.graph.traversal import walk
from passes.suggest import plural
from pipeline.export.call_watch import shorten
from pipeline.importers.from_torch.operators import calls_in, line_of


def drop_checks(program: ExportedProgram) -> tuple[str, ...]:
    """Remove the model's checks, in place, and the nodes that only the checks read.

    A check has no result, and ONNX has no operator that stops a run.

    Returns:
        A note for the report that names the lines of the removed checks of values, if there were any.
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
    """Whether a check depends on elements of a tensor. A check of shapes or dtypes has been decided by the trace."""
    if check.target in TENSOR_CHECKS:
        return True
    reads = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
    return any(node.target in reads for node in walk(check.all_input_nodes, lambda node: node.all_input_nodes))


def _erase_unused(node: Node) -> None:
    """Erase `node`, and each node that nothing reads after that."""
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if not source.users and source.op == "call_function" and not source.is_impure():
            _erase_unused(source)


TENSOR_CHECKS: Final = frozenset({torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg})
CHECKS: Final = TENSOR_CHECKS | {
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
                _replace_by_move(graph, node, move)


def _graphs(program: ExportedProgram) -> list[Graph]:
    modules = program.graph_module.modules()
    return [module.graph for module in modules if isinstance(module, torch.fx.GraphModule)]


def _is_complex(value: Any) -> bool:
    tensor = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(tensor, torch.Tensor) and tensor.is_complex() and not tensor.is_conj()  # no real view


def _replace_by_move(graph: Graph, node: Node, move: Callable[[int, tuple[Any, ...]], tuple[Any, ...]]) -> None:
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
"""Operator → a function of (rank of the complex tensor, the other arguments) that gives the arguments for the real
view, which has one axis more at the end."""


def decompose_complex(program: ExportedProgram) -> ExportedProgram:
    """The program whose operators of `BY_PARTS` on complex tensors are computed by real and imaginary parts.

    Returns:
        A new program; `program` itself if it has no such operator on a complex tensor.
    """
    nodes = [node for graph in _graphs(program) for node in graph.nodes if node.target in BY_PARTS]
    values = [value.meta.get("val") for node in nodes for value in (node, *node.all_input_nodes)]
    if not any(isinstance(value, torch.Tensor) and value.is_complex() for value in values):
        return program
    return program.run_decompositions(dict(BY_PARTS))


def _angle(values: torch.Tensor) -> torch.Tensor | NotImplementedType:
    """The angle by `atan2`: torch's own translation gives -π, not π, for negative real values."""
    return torch.atan2(*reversed(_parts(values))) if values.is_complex() else NotImplemented


def _by_parts(
    compute: Callable[..., Sequence[torch.Tensor]],
    is_parted: Callable[[Any], bool] = lambda item: isinstance(item, torch.Tensor) and item.is_complex(),
) -> Callable[..., Any]:
    """A decomposition of an operator, for `run_decompositions`.

    Args:
        compute: takes (real part, imaginary part) of each operand, and returns the two parts of the result.
        is_parted: whether an operand has to be decomposed. A complex number of Python always has to be.
    """

    def decompose(*operands: Any) -> Any:
        if not any(isinstance(item, complex) or is_parted(item) for item in operands):
            return NotImplemented
        return torch.view_as_complex(torch.stack(list(compute(*map(_parts, operands))), -1))

    return decompose


def _parts(item: Any) -> Any:
    """(real part, imaginary part) of a tensor or a Python number."""
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
    torch.ops.aten.mul.Tensor: _by_parts(_multiply, lambda _: False),  # the exporter translates tensor × tensor itself
    torch.ops.aten.exp.default: _by_parts(lambda z: (z[0].exp() * z[1].cos(), z[0].exp() * z[1].sin())),
    torch.ops.aten.pow.Tensor_Scalar: _by_parts(_power),
    torch.ops.aten.where.self: _by_parts(
        lambda chosen, a, b: [torch.where(chosen[0], *pair) for pair in zip(a, b, strict=True)]
    ),
}
"""Operators that torch's exporter translates for real values alone; the inverse of a spectrogram needs them."""


def unsqueeze_scalars(program: ExportedProgram) -> None:
    """Replace, in place, each operator along dim 0 of a scalar by the same operator on a vector of one element.

    torch accepts dim 0 of a scalar; most translations of the exporter do not.
    """
    with program.graph_module._set_replace_hook(program.graph_signature.get_replace_hook()):
        for node in [node for node in calls_in(program.graph_module) if _is_along_scalar(node)]:
            _unsqueeze_scalar(node)


def _is_along_scalar(node: Node) -> bool:
    """Whether `node` takes a dim of its only tensor, which is a scalar, and makes a new tensor."""
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


def _unsqueeze_scalar(node: Node) -> None:
    source, graph = node.all_input_nodes[0], node.graph
    target: Any = node.target
    vector = source.meta["val"].unsqueeze(0)
    made = target(vector, *node.args[1:], **node.kwargs)
    with graph.inserting_before(node):
        unsqueezed = graph.call_function(torch.ops.aten.unsqueeze.default, (source, 0))
        result = graph.call_function(target, (unsqueezed, *node.args[1:]), node.kwargs)
    unsqueezed.meta, result.meta = {**node.meta, "val": vector}, {**node.meta, "val": made}
    if isinstance(made, torch.Tensor):
        node.replace_all_uses_with(_squeeze(result))
    else:
        for part in [user for user in node.users if user.target is getitem]:
            part.args = (result, part.args[1])
            part.meta = {**part.meta, "val": made[part.args[1]]}  # type: ignore[index]
            scalar = _squeeze(part)
            part.replace_all_uses_with(scalar, delete_user_cb=lambda user, scalar=scalar: user is not scalar)
    graph.erase_node(node)


def _squeeze(node: Node) -> Node:
    """The scalar of a vector of one element; `node` itself if it is a scalar already."""
    value = node.meta["val"]
    if not value.ndim:
        return node
    with node.graph.inserting_after(node):
        scalar = node.graph.call_function(torch.ops.aten.squeeze.dim, (node, 0))
    scalar.meta = {**node.meta, "val": value.squeeze(0)}
    return scalar


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


REDUCTIONS: Final = frozenset({"amax", "amin", "cumprod", "cumsum", "prod", "std", "sum", "var"})


def copy_reduced_outputs(program: ExportedProgram) -> None:
    """Copy, in place, outputs in half precision that a reduction makes.

    torch.onnx 2.13 reduces these in float32 and casts the result back; the output is the value before the cast.
    """
    graph = program.graph_module.graph
    (end,) = graph.find_nodes(op="output")
    made = list(end.args[0])
    for place, (node, spec) in enumerate(zip(made, program.graph_signature.output_specs, strict=True)):
        target = node.target if isinstance(node, Node) else None
        if not isinstance(target, torch._ops.OpOverload) or target.overloadpacket.__name__ not in REDUCTIONS:
            continue
        if node.meta["val"].dtype in (torch.float16, torch.bfloat16):
            with graph.inserting_before(end):
                made[place] = graph.call_function(torch.ops.aten.clone.default, (node,))
            made[place].meta = dict(node.meta)
            spec.arg.name = made[place].name
    end.args = (tuple(made),)
