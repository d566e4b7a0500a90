"""The product of a mixture of experts: each group of rows by a matrix of its own.

It becomes one MatMul for each group, on rows that are cut out at run time: what a group costs depends on its rows, and
every matrix stays a weight of its own. In one batched MatMul each row would need a copy of its matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnxscript import ir
from onnxscript.onnx_opset import opset18

__all__ = ["GROUPED_MM"]

op: Final[Any] = opset18
"""Its hints are those of eager evaluation; here it adds nodes to torch's graph."""


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


GROUPED_MM: Final[Mapping[str, Callable[..., Any]]] = {
    "aten._grouped_mm.default": translate_grouped_mm,
    "transformers.grouped_mm_fallback.default": translate_grouped_mm,
}
