"""Say which attention of a model has no separate Q, K and V, what would give it these, and what came nearest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from onnx import TensorProto

from passes.structures.projection import as_projection
from passes.structures.view import PASSING_OPS, GraphView
from passes.suggest import plural


@dataclass(frozen=True, slots=True)
class MergedProjection:
    """One product, which makes `value`, in place of several: `is_whole` if it makes all of Q, K and V, not just two."""

    value: str
    weight: TensorProto
    is_whole: bool

    def __str__(self) -> str:
        return f"{self.weight.name} ({'×'.join(str(dim) for dim in self.weight.dims)})"


def find_packed(view: GraphView) -> Iterator[MergedProjection]:
    """The matrices of onnxruntime's operators that project to Q, K and V by themselves."""
    for op in PACKED_OPS:
        for node in view.by_op.get(op, ()):
            weight = view.weight_behind(node.input[1]) if len(node.input) > 1 else None
            if weight is not None:
                yield MergedProjection(node.output[0], weight, True)


def describe_others(
    view: GraphView, apart: Sequence[str], merged: Sequence[MergedProjection], others: int
) -> tuple[str, str]:
    """A text on the attention blocks without separate projections, with the names of those that are `apart`, and what
    to do about it; the text is empty if all are apart.

    Args:
        others: how many attention blocks have neither three projections nor merged ones.
    """
    rest = _without_triple(merged, others)
    remedy = "put the step split-qkv into the recipe to take it apart" if merged else ""
    if not apart:
        return rest or _nearest(view), remedy
    if not rest:
        return "", ""
    return (
        f"{plural(len(apart), 'attention block')} with separate Q, K and V ({_join_names(apart)}), and {rest}",
        remedy,
    )


def _without_triple(merged: Sequence[MergedProjection], others: int) -> str:
    texts = []
    if merged:
        which = "Q, K and V" if all(projection.is_whole for projection in merged) else "Q, K and V, or two of them,"
        names = _join_names([str(projection) for projection in merged])
        texts.append(
            f"{plural(len(merged), 'attention block')} whose {which} are one matrix in the source already: {names}"
        )
    if others:
        texts.append(f"{plural(others, 'attention block')} whose Q, K and V were not traced back to three matrices")
    return "; ".join(texts)


def _nearest(view: GraphView) -> str:
    """What was looked for, and the products of one input, which Q, K and V would be."""
    softmaxes = len(view.by_op.get("Softmax", ()))
    found = f"no attention in a form that is looked for ({SOUGHT}; {softmaxes or 'no'} Softmax)"
    groups: dict[str, list[str]] = defaultdict(list)
    for node in view.own:
        projection = as_projection(view, node)
        if projection is not None:
            groups[view.behind(projection.data, PASSING_OPS)].append(projection.weight.name)
    most = max(groups.values(), key=len, default=[])
    return f"{found}; nearest: {len(most)} products of one input, with {_join_names(most)}" if len(most) > 1 else found


def _join_names(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


PACKED_OPS: Final = tuple(f"com.microsoft.{name}" for name in ("Attention", "QAttention"))

SOUGHT: Final = "weights made from Q and K that multiply V, or a state made from K and V that Q multiplies"
