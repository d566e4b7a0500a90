"""The passes `attention` and `small-attention`: softmax(query @ keyᵀ · scale + mask) @ value becomes one fused call.

`small-attention` is for the CPU and for few scores, which stay a value of the plan.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.ir.graph import Attr, Graph, Op, Role, TensorSpec
from pipeline.lowering.fusion.op_patterns import FLOATS, constant_number, match_attention, match_sum
from pipeline.lowering.fusion.rewrite import MOVES, Rewrite, only_user, producer

PRODUCTS = frozenset({"aten.matmul.default"})

SCALES = ("aten.mul.Tensor", "aten.div.Tensor")


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores that a softmax reads: query, key with its last two axes swapped, the scale, and the mask that is
    added."""

    query: int
    transposed_key: int
    scale: float
    mask: int | None


def fuse_attention(graph: Graph) -> Graph:
    """Replace two products, and the scaling, the mask and the softmax between them, by one op."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        axis = op.attrs.get("dim")
        spec = graph.values[op.outputs[0]].spec if op.outputs else None
        if op.kind != "aten.softmax.int" or axis not in (-1, 3):
            continue
        if spec is None or spec.rank != 4 or spec.dtype not in FLOATS:
            continue
        scores = _scores(graph, op.inputs[0])
        weights, zero_rows = _with_zero_rows(graph, op)
        after = only_user(graph, weights)
        if scores is None or after is None or after.kind not in PRODUCTS or after.inputs[0] != weights:
            continue
        if scores.mask is not None and not (zero_rows or _is_finite(graph, scores.mask)):
            continue  # softmax makes a row of -inf scores NaN, and the fused kernel makes it 0
        if _fits(graph, scores, after.inputs[1]):
            _put_attention(rewrite, after, scores)
    return rewrite.build()


def _put_attention(rewrite: Rewrite, after: Op, scores: Scores) -> None:
    """Replace `after`, the second product, by a fused kernel on `scores` and its other operand."""
    values, groups = rewrite.graph.values, _find_groups(rewrite.graph, scores, after.inputs[1])
    if groups is not None:
        _put_grouped(rewrite, after, scores, groups)
        return
    turned = values[scores.transposed_key]
    batch, heads, width, tokens = turned.spec.sizes
    key = rewrite.declare(f"{turned.name} transposed", TensorSpec((batch, heads, tokens, width), turned.spec.dtype))
    rewrite.replace(after, "aten.permute.default", [scores.transposed_key], [key], {"dims": (0, 1, 3, 2)})
    masks = [] if scores.mask is None else [scores.mask]
    put_fused(rewrite, after, [scores.query, key, after.inputs[1], *masks], scores.scale)


def put_fused(
    rewrite: Rewrite, op: Op, operands: Sequence[int], scale: float, *, causal: bool = False, backend: str = "auto"
) -> None:
    """Replace `op` by the fused kernel on query, key, value and, where there are four operands, the mask.

    The kernels store their result as (batch, tokens, heads, width), so that joining the heads needs no copy.
    """
    stored = declare_by_token(rewrite, op)
    attrs: dict[str, Attr] = {"scale": scale, "mask": len(operands) == 4, "causal": causal, "backend": backend}
    rewrite.replace(op, "ScaledDotProductAttention", operands, [stored], attrs)
    rewrite.replace(op, "aten.permute.default", [stored], op.outputs, {"dims": SWAP})


def declare_by_token(rewrite: Rewrite, op: Op) -> int:
    """The vid of a new value, the result of the attention `op` as kernels store it."""
    out = rewrite.graph.values[op.outputs[0]]
    spec = TensorSpec(tuple(out.spec.shape[axis] for axis in SWAP), out.spec.dtype)
    return rewrite.declare(f"{out.name} by token", spec)


@dataclass(frozen=True, slots=True)
class HeadGroups:
    """Key and value, (batch, groups, tokens, width), of which each head serves `size` heads of the query in a row."""

    key: int
    value: int
    size: int


def _find_groups(graph: Graph, scores: Scores, value: int) -> HeadGroups | None:
    """The key and value before their heads are repeated for the query; None where they are not repeated, or the mask
    differs by head."""
    if scores.mask is not None and graph.values[scores.mask].spec.sizes[1] != 1:
        return None
    heads = graph.values[scores.query].spec.sizes[:2]
    key = _without_repeats(graph, scores.transposed_key, heads, swapped=True)
    single = _without_repeats(graph, value, heads, swapped=False)
    if key is None or single is None:
        return None
    groups = [graph.values[vid].spec.sizes[1] for vid in (key, single)]
    return HeadGroups(key, single, heads[1] // groups[0]) if groups[0] == groups[1] else None


def _without_repeats(graph: Graph, vid: int, heads: tuple[int, ...], *, swapped: bool) -> int | None:
    """The x, (batch, groups, a, b), of which `vid` has each head several times in a row; None where there is none.

    swapped: whether `vid` has the last two axes of x in the other order.
    """
    op = producer(graph, vid)
    while op is not None and op.kind in ("aten.reshape.default", "aten.permute.default", "aten.transpose.int"):
        before, after = (graph.values[own].spec.shape for own in (op.inputs[0], op.outputs[0]))
        if op.kind != "aten.reshape.default":
            if not _swaps_last_axes(op, len(before)):
                return None
            swapped = not swapped
        elif before[-2:] != after[-2:]:
            return None
        op = producer(graph, op.inputs[0])
    added = producer(graph, op.inputs[0]) if op is not None and op.kind == "aten.expand.default" else None
    if op is None or added is None or added.kind not in ("aten.reshape.default", "aten.unsqueeze.default") or swapped:
        return None
    x, one, many = (graph.values[own].spec.shape for own in (added.inputs[0], *op.inputs, *op.outputs))
    if len(x) != 4 or one != (*x[:2], 1, *x[2:]) or many != (*x[:2], many[2], *x[2:]):
        return None
    return added.inputs[0] if heads == (x[0], x[1] * many[2]) else None  # type: ignore[operator]


def _swaps_last_axes(op: Op, rank: int) -> bool:
    """Whether a permutation or a transposition of `rank` axes leaves all but the last two where they are."""
    if op.kind == "aten.transpose.int":
        return {op.attrs[name] % rank for name in ("dim0", "dim1")} == {rank - 2, rank - 1}  # type: ignore[operator]
    return op.attrs["dims"] == (*range(rank - 2), rank - 1, rank - 2)


def _put_grouped(rewrite: Rewrite, after: Op, scores: Scores, groups: HeadGroups) -> None:
    """Attention in which the heads of a group are further tokens of one head, so that no key or value is repeated."""
    name, spec = rewrite.graph.values[after.outputs[0]].name, rewrite.spec(scores.query)
    batch, heads, tokens, width = spec.sizes
    together = (batch, heads // groups.size, groups.size * tokens)
    query = _reshape(rewrite, after, scores.query, (*together, width), f"{name} query by group")
    masks = []
    if scores.mask is not None:
        own, _, rows, keys = rewrite.spec(scores.mask).sizes
        mask = scores.mask
        if rows > 1:
            once = _reshape(rewrite, after, mask, (own, 1, 1, rows, keys), f"{name} mask")
            many = rewrite.declare(f"{name} masks", TensorSpec((own, 1, groups.size, rows, keys), spec.dtype))
            rewrite.replace(after, "aten.expand.default", [once], [many], {"size": rewrite.spec(many).shape})
            mask = _reshape(rewrite, after, many, (own, 1, groups.size * rows, keys), f"{name} mask by group")
        masks = [mask]
    wide = rewrite.spec(groups.value).sizes[3]
    stored = rewrite.declare(f"{name} by token", TensorSpec((batch, together[2], together[1], wide), spec.dtype))
    operands = [query, groups.key, groups.value, *masks]
    attrs: dict[str, Attr] = {"scale": scores.scale, "mask": bool(masks), "causal": False, "backend": "auto"}
    rewrite.replace(after, "ScaledDotProductAttention", operands, [stored], attrs)
    by_group = rewrite.declare(f"{name} by group", TensorSpec((*together, wide), spec.dtype))
    rewrite.replace(after, "aten.permute.default", [stored], [by_group], {"dims": SWAP})
    rewrite.replace(after, "aten.reshape.default", [by_group], after.outputs, {"shape": (batch, heads, tokens, wide)})


def _reshape(rewrite: Rewrite, after: Op, vid: int, shape: tuple[int, ...], name: str) -> int:
    result = rewrite.declare(name, TensorSpec(shape, rewrite.spec(vid).dtype))
    rewrite.replace(after, "aten.reshape.default", [vid], [result], {"shape": shape})
    return result


def _is_finite(graph: Graph, vid: int) -> bool:
    """Whether no element is infinite or NaN: a constant, a choice between such, and views of one."""
    op = producer(graph, vid)
    if op is None:
        is_known = graph.values[vid].role is Role.CONST and vid in graph.payloads
        return is_known and bool(np.isfinite(graph.payloads[vid].numpy()).all())
    if op.kind == "aten.where.self":
        return all(_is_finite(graph, operand) for operand in op.inputs[1:])
    return op.kind in MOVES and _is_finite(graph, op.inputs[0])


SWAP = (0, 2, 1, 3)
"""Swaps heads and tokens."""


def _fits(graph: Graph, scores: Scores, value: int) -> bool:
    """Whether query, key and value are of one batch, with one number of heads and one width."""
    specs = [graph.values[vid].spec for vid in (scores.query, scores.transposed_key, value)]
    if not all(spec.rank == 4 and spec.is_static for spec in specs):
        return False
    query, key, value_spec = (spec.sizes for spec in specs)
    if not (query[:2] == key[:2] == value_spec[:2] and query[3] == key[2] == value_spec[3]):
        return False
    if scores.mask is None:
        return True
    mask, wanted = graph.values[scores.mask].spec.sizes, (*query[:3], key[3])
    return len(mask) == 4 and all(own in (1, size) for own, size in zip(mask, wanted, strict=True))


def _scores(graph: Graph, vid: int) -> Scores | None:
    """The value `vid` as scaled scores with or without a mask; None if it is computed otherwise."""
    mask, scale = None, 1.0
    op = producer(graph, vid)
    both = match_sum(op) if op is not None and only_user(graph, vid) else None
    if both is not None:
        vid, mask = both
        if producer(graph, vid) is None or producer(graph, vid).kind not in (*PRODUCTS, *SCALES):  # type: ignore[union-attr]
            vid, mask = mask, vid
    vid, scale = _split_scale(graph, vid)
    op = producer(graph, vid)
    if op is None or op.kind not in PRODUCTS or only_user(graph, vid) is None:
        return None
    query, of_query = _split_scale(graph, op.inputs[0])
    key, of_key = _split_scale(graph, op.inputs[1])
    factor = scale * of_query * of_key
    return Scores(query, key, factor, mask) if math.isfinite(factor) else None


def _split_scale(graph: Graph, vid: int) -> tuple[int, float]:
    """The value that `vid` is a multiple of, and the constant factor; `vid` and 1 if it is no such multiple."""
    op = producer(graph, vid)
    if op is None or op.kind not in SCALES:
        return vid, 1.0
    other, is_product = op.attrs["other"], op.kind == SCALES[0]
    number = constant_number(graph, op.inputs[1]) if len(op.inputs) == 2 else other
    if isinstance(number, int | float) and graph.values[op.inputs[0]].spec == graph.values[vid].spec:
        return op.inputs[0], float(number) if is_product else 1 / number if number else math.nan
    number = constant_number(graph, op.inputs[0]) if len(op.inputs) == 2 else None
    if number is not None and is_product and graph.values[op.inputs[1]].spec == graph.values[vid].spec:
        return op.inputs[1], number
    return vid, 1.0


def _with_zero_rows(graph: Graph, softmax: Op) -> tuple[int, bool]:
    """The weights, and whether NaN rows become 0 by `Where(IsNaN(weights), 0, weights)`, as torch's exporter does."""
    weights = softmax.outputs[0]
    users = [graph.ops[oid] for oid in graph.values[weights].users]
    if [user.kind for user in users] != ["aten.ne.Tensor", "aten.where.self"] or weights in graph.outputs:
        return weights, False
    is_nan, where = users
    if (
        is_nan.inputs != (weights, weights)
        or where.inputs[0] != is_nan.outputs[0]
        or where.inputs[2] != weights
        or only_user(graph, is_nan.outputs[0]) is None
    ):
        return weights, False
    return (where.outputs[0], True) if constant_number(graph, where.inputs[1]) == 0 else (weights, False)


def keep_scores(graph: Graph) -> Graph:
    """Replace attention without a mask that has at most `SMALL` scores: the op of `fuse_attention`, and torch's own."""
    rewrite = Rewrite(graph)
    for op in graph.ops:
        whole = match_attention(op)
        if whole is not None:
            if whole.mask is not None or whole.causal or not _is_small(graph, (whole.query, whole.key, whole.value)):
                continue
            stored = declare_by_token(rewrite, op)
            _put_small(rewrite, op, (whole.query, whole.key, whole.value), stored, whole.scale_of(graph))
            rewrite.replace(op, "aten.permute.default", [stored], op.outputs, {"dims": SWAP})
        elif op.kind == "ScaledDotProductAttention" and not op.attrs["mask"] and not op.attrs["causal"]:
            query, key, value = op.inputs
            if _is_small(graph, (query, key, value)):
                _put_small(rewrite, op, (query, key, value), op.outputs[0], float(op.attrs["scale"]))  # type: ignore[arg-type]
    return rewrite.build()


def _put_small(rewrite: Rewrite, op: Op, operands: tuple[int, int, int], result: int, scale: float) -> None:
    """Replace `op` by the kernel for few scores; its second result is the scores, so that the plan stores them."""
    query, key = (rewrite.spec(vid).shape for vid in operands[:2])
    name = rewrite.graph.values[op.outputs[0]].name.removesuffix(" by token")
    scores = rewrite.declare(f"{name} scores", TensorSpec((*query[:3], key[2]), "float32"))
    rewrite.replace(op, "SmallAttention", operands, [result, scores], {"scale": scale})


def _is_small(graph: Graph, operands: tuple[int, int, int]) -> bool:
    """Whether the kernel for few scores takes this attention: static float32 of rank 4, at most `SMALL` scores."""
    specs = [graph.values[vid].spec for vid in operands]
    if not all(spec.rank == 4 and spec.is_static and spec.dtype == "float32" for spec in specs):
        return False
    query, key, value = (spec.sizes for spec in specs)
    fits = query[:2] == key[:2] and query[3] == key[3] == value[3] and key == value
    return fits and math.prod(query[:3]) * key[2] <= SMALL


SMALL = 2**15
"""The most scores (128 KiB of float32) for which products and softmax are faster than torch's kernel."""
