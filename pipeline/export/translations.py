"""ONNX translations that torch's exporter lacks or has wrong: complex tensors, grouped products, `squeeze`, checks.

An operator of `translation_table` is found by name, since a library registers its own when it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from onnxscript import ir
from onnxscript.onnx_opset import opset18
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from passes.suggest import plural
from pipeline.export.call_watch import shorten
from pipeline.importers.from_torch.exported_program import line_of


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
    if not any(isinstance(value := node.meta.get("val"), torch.Tensor) and value.is_complex() for node in nodes):
        return program
    return program.run_decompositions(dict(BY_PARTS))


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
    torch.ops.aten.mul.Scalar: _by_parts(_multiply),
    torch.ops.aten.mul.Tensor: _by_parts(_multiply, lambda _: False),  # of tensors alone the exporter has it
    torch.ops.aten.exp.default: _by_parts(lambda z: (z[0].exp() * z[1].cos(), z[0].exp() * z[1].sin())),
    torch.ops.aten.pow.Tensor_Scalar: _by_parts(_power),
    torch.ops.aten.where.self: _by_parts(
        lambda chosen, a, b: [torch.where(chosen[0], *pair) for pair in zip(a, b, strict=True)]
    ),
}
"""Operators that torch's exporter has for real numbers alone, as in the inverse of a spectrogram."""


op: Final[Any] = opset18
"""Typed as Any: its annotations are for eager evaluation, and here it adds nodes to torch's graph."""


def translate_grouped_mm(
    mat_a: Any, mat_b: Any, offs: Any = None, bias: Any = None, out_dtype: int | None = None
) -> Any:
    """`aten._grouped_mm`: rows `offs[g - 1]:offs[g]` of `mat_a` (rows, k) by `mat_b[g]` (k, n).

    Rows behind the last group come out as zeros. Without `offs` both are stacks of matrices.
    """
    ranks = (len(mat_a.shape), len(mat_b.shape))
    if ranks == (3, 3) and offs is None:
        return _finish(op.MatMul(mat_a, mat_b), bias, out_dtype)
    groups = mat_b.shape[0]
    if ranks != (2, 3) or offs is None or not isinstance(groups, int):
        raise NotImplementedError(
            f"a grouped product of {ranks[0]}-D and {ranks[1]}-D has no form in ONNX; expected rows that are grouped, "
            "2-D, by a stack of matrices, 3-D, whose count is a number"
        )
    ends = _split(op.Cast(offs, to=ir.DataType.INT64.value), groups)
    first, axis = op.Constant(value_ints=[0]), op.Constant(value_ints=[0])
    products = []
    for begin, end, matrix in zip([first, *ends[:-1]], ends, _split(mat_b, groups), strict=True):
        products.append(op.MatMul(op.Slice(mat_a, begin, end, axis), op.Squeeze(matrix, axis)))
    rows, width = op.Shape(mat_a, start=0, end=1), op.Shape(mat_b, start=2, end=3)
    zero = op.CastLike(op.Constant(value_floats=[0.0]), mat_a)
    rest = op.Expand(zero, op.Concat(op.Sub(rows, ends[-1]), width, axis=0))
    return _finish(op.Concat(*products, rest, axis=0), bias, out_dtype)


def _split(value: Any, count: int) -> Sequence[Any]:
    return op.Split(value, axis=0, num_outputs=count) if count > 1 else [value]


def _finish(product: Any, bias: Any, out_dtype: int | None) -> Any:
    if bias is not None:  # torch 2.13 refuses one itself
        raise NotImplementedError("a grouped product with a bias has no form in ONNX; add the bias afterwards")
    return product if out_dtype in (None, -1) else op.Cast(product, to=out_dtype)


def translate_squeeze(self: Any, dim: int | Sequence[int] | None = None) -> Any:
    """`aten.squeeze`: a dim of another size than 1 stays, for which ONNX's Squeeze fails; so does an open dim, which
    torch.export takes for 2 or more."""
    shape = list(self.shape)
    dims = range(len(shape)) if dim is None else [dim] if isinstance(dim, int) else dim
    axes = sorted({axis % len(shape) for axis in dims}) if shape else []
    axes = [axis for axis in axes if shape[axis] == 1]
    return op.Squeeze(self, op.Constant(value_ints=axes)) if axes else op.Identity(self)


def _translate_extreme(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """`aten.amax` or `aten.amin`: without dims over all of them; a scalar is its own, also along dim 0."""

    def translate(self: Any, dim: int | Sequence[int] = (), keepdim: bool = False) -> Any:
        if not self.shape:
            return op.Identity(self)
        dims = [dim] if isinstance(dim, int) else list(dim)
        axes = [op.Constant(value_ints=dims)] if dims else []
        return reduce(self, *axes, keepdims=int(keepdim))

    return translate


def translate_prod(self: Any, dim: int, keepdim: bool = False, dtype: int | None = None) -> Any:
    """`aten.prod.dim_int`: integers and bools are counted in int64."""
    kind = dtype if dtype not in (None, -1) else None if self.dtype.is_floating_point() else ir.DataType.INT64.value
    factors = self if kind is None else op.Cast(self, to=kind)
    axis = op.Constant(value_ints=[dim])
    return op.ReduceProd(factors, axis, keepdims=int(keepdim)) if self.shape else op.Identity(factors)


def _translate_truth(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """`aten.any.dim` or `aten.all.dim`; a scalar is its own truth along dim 0."""

    def translate(self: Any, dim: int, keepdim: bool = False) -> Any:
        truth = op.Cast(self, to=ir.DataType.BOOL.value)
        if not self.shape:
            return truth
        found = reduce(op.Cast(truth, to=ir.DataType.INT32.value), op.Constant(value_ints=[dim]), keepdims=int(keepdim))
        return op.Cast(found, to=ir.DataType.BOOL.value)

    return translate


def translate_topk(self: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """`aten.topk`, which takes a scalar for a vector of one element."""
    axes = op.Constant(value_ints=[0])
    count = op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, op.Constant(value_ints=[1]))
    if self.shape:
        return op.TopK(self, count, axis=dim, largest=int(largest), sorted=int(sorted))
    values, indices = op.TopK(op.Unsqueeze(self, axes), count, axis=0, largest=int(largest), sorted=int(sorted))
    return op.Squeeze(values, axes), op.Squeeze(indices, axes)


def translate_kthvalue(self: Any, k: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.kthvalue`: of equal elements the index may be another."""
    return _take_kth(self, k, dim, keepdim) if self.shape else (op.Identity(self), op.Constant(value_int=0))


def _take_kth(self: Any, k: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """The last of the k least elements along `dim`."""
    last = op.Constant(value_ints=[-1])
    count = op.Constant(value_ints=[k]) if isinstance(k, int) else op.Reshape(k, last)
    pair = op.TopK(self, count, axis=dim, largest=0)
    pair = [op.Slice(part, last, op.Constant(value_ints=[2**62]), op.Constant(value_ints=[dim])) for part in pair]
    values, indices = pair if keepdim else [op.Squeeze(part, op.Constant(value_ints=[dim])) for part in pair]
    return values, indices


def translate_median(self: Any, dim: int, keepdim: bool = False) -> tuple[Any, Any]:
    """`aten.median.dim`: the lower one of two in the middle."""
    size = self.shape[dim] if self.shape else 1
    if isinstance(size, int):
        return translate_kthvalue(self, (size + 1) // 2, dim, keepdim)
    axis = dim % len(self.shape)
    size = op.Add(op.Shape(self, start=axis, end=axis + 1), op.Constant(value_ints=[1]))
    return translate_kthvalue(self, op.Div(size, op.Constant(value_ints=[2])), dim, keepdim)


def translate_median_of_all(self: Any) -> Any:
    """`aten.median`."""
    half = op.Div(op.Add(op.Size(self), op.Constant(value_int=1)), op.Constant(value_int=2))
    return _take_kth(op.Reshape(self, op.Constant(value_ints=[-1])), half, 0)[0]


def translate_nonzero(self: Any) -> Any:
    """`aten.nonzero`: a scalar has no index, so that as many empty ones as it is true come of it."""
    if self.shape:
        return op.Transpose(op.NonZero(self), perm=[1, 0])
    zero, one = op.Constant(value_ints=[0]), op.Constant(value_ints=[1])
    return op.Slice(op.Transpose(op.NonZero(op.Reshape(self, one)), perm=[1, 0]), zero, zero, one)


def translate_cumprod(self: Any, dim: int, dtype: int | None = None) -> Any:
    """`aten.cumprod`: in each step, times what stands 1, 2, 4 … places before."""
    product = self if dtype in (None, -1) else op.Cast(self, to=dtype)
    size = self.shape[dim] if self.shape else 1
    if not isinstance(size, int):
        raise NotImplementedError("a cumulative product along an open dim has no form in ONNX; expected a fixed size")
    axis, one = op.Constant(value_ints=[dim]), op.CastLike(op.Constant(value_float=1.0), product)
    for places in (2**step for step in range(max(size - 1, 0).bit_length())):
        product = op.Mul(product, op.Pad(product, op.Constant(value_ints=[places, -places]), one, axis))
    return op.Identity(product)


def translate_unfold_backward(grad_in: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
    """`aten.unfold_backward`, the sum of frames that overlap, as `istft` needs it: torch's own form has indices of 32
    bits, which ONNX's ScatterND does not take."""
    rank = len(grad_in.shape) - 1
    axis = dim % rank
    whole = [*range(axis + 1), rank, *range(axis + 1, rank)]  # frames and places in a frame side by side
    one = op.Constant(value_ints=[1])
    frames = op.Range(
        op.Constant(value_int=0), op.Squeeze(op.Shape(grad_in, start=axis, end=axis + 1)), op.Constant(value_int=1)
    )
    starts = op.Unsqueeze(op.Mul(frames, op.Constant(value_int=step)), one)
    places = op.Reshape(op.Add(starts, op.Constant(value_ints=list(range(size)))), op.Constant(value_ints=[-1]))
    shape = [
        op.Shape(grad_in, start=0, end=axis),
        op.Constant(value_ints=[-1]),
        op.Shape(grad_in, start=axis + 1, end=rank),
    ]
    values = op.Reshape(op.Transpose(grad_in, perm=whole), op.Concat(*shape, axis=0), allowzero=1)
    column = op.Reshape(places, op.Constant(value_ints=[-1, *[1] * (rank - 1 - axis)]))
    sizes = input_sizes
    if isinstance(sizes, Sequence):
        parts = [
            op.Constant(value_ints=[part]) if isinstance(part, int) else op.Reshape(part, op.Constant(value_ints=[1]))
            for part in sizes
        ]
        sizes = op.Concat(*parts, axis=0)
    zeros = op.Expand(op.CastLike(op.Constant(value_floats=[0.0]), grad_in), sizes)
    return op.ScatterElements(zeros, op.Expand(column, op.Shape(values)), values, axis=axis, reduction="add")


EXTREMES: Final[Mapping[str, Callable[..., Any]]] = {
    "aten.amax.default": _translate_extreme(op.ReduceMax),
    "aten.amin.default": _translate_extreme(op.ReduceMin),
    "aten.topk.default": translate_topk,
    "aten.any.dim": _translate_truth(op.ReduceMax),
    "aten.all.dim": _translate_truth(op.ReduceMin),
    "aten.prod.dim_int": translate_prod,
}

SQUEEZE: Final[Mapping[str, Callable[..., Any]]] = {
    f"aten.squeeze.{overload}": translate_squeeze for overload in ("default", "dim", "dims")
}

GROUPED_MM: Final[Mapping[str, Callable[..., Any]]] = {
    "aten._grouped_mm.default": translate_grouped_mm,
    "transformers.grouped_mm_fallback.default": translate_grouped_mm,
}


def translation_table() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Operator → translation, for the operators that are registered in this process."""
    rows = ((_operator(name), translate) for name, translate in TRANSLATIONS.items())
    return {operator: translate for operator, translate in rows if operator is not None}


def _operator(name: str) -> Any:
    """`aten._grouped_mm.default` of `torch.ops`; None where no library has registered it."""
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


TRANSLATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    **GROUPED_MM,
    **SQUEEZE,
    **EXTREMES,
    "aten.unfold_backward.default": translate_unfold_backward,
    "aten.kthvalue.default": translate_kthvalue,
    "aten.median.default": translate_median_of_all,
    "aten.median.dim": translate_median,
    "aten.nonzero.default": translate_nonzero,
    "aten.cumprod.default": translate_cumprod,
}
