"""Products of two operands, whatever operator spells them: which axis of the result comes from which operand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Final, Literal

from onnx import NodeProto, helper

from passes.structures.view import GraphView, op_of

__all__ = ["OPERAND_PLACES", "Product", "Side", "is_join", "product_of"]

Side = Literal[0, 1]
"""The left or the right operand."""


@dataclass(frozen=True, slots=True)
class Product:
    """`node` multiplies two operands; each axis has a letter, as in Einsum.

    Axes that a term does not list stand before its letters, and are the same in all terms. Axes are counted from the
    end: -1 is the last.
    """

    node: NodeProto
    operands: tuple[str, str]
    terms: tuple[str, str]
    out: str

    @property
    def value(self) -> str:
        return self.node.output[0]

    def contracted(self, side: Side) -> int | None:
        """The axis of an operand that is summed over."""
        both = [letter for letter in self.terms[0] if letter in self.terms[1] and letter not in self.out]
        return _place(self.terms[side], both[-1]) if both else None

    def free(self, side: Side) -> int | None:
        """The axis of an operand that the result has from it alone, the last of several."""
        other = self.terms[1 - side]
        alone = [letter for letter in self.terms[side] if letter not in other and letter in self.out]
        return _place(self.terms[side], alone[-1]) if alone else None

    def sources(self, axis: int | None) -> tuple[tuple[Side, int | None], ...]:
        """The operands that have the `axis` of the result, each with the axis that it is there; all if it is not known.

        An axis of both operands is one of the stacked matrices that are multiplied pairwise.
        """
        if axis is None:
            return ((0, None), (1, None))
        if -axis > len(self.out):
            return ((0, axis), (1, axis))
        letter = self.out[axis]
        found: list[tuple[Side, int | None]] = []
        for side in SIDES:
            if letter in self.terms[side]:
                found.append((side, _place(self.terms[side], letter)))
        return tuple(found)


def product_of(view: GraphView, node: NodeProto) -> Product | None:
    """`node` as a product of two operands; None if it is something else, or sums over the axes of more of them."""
    places = OPERAND_PLACES.get(op_of(node))
    if places is None or len(node.input) <= max(places):
        return None
    operands = (node.input[places[0]], node.input[places[1]])
    if not all(operands):
        return None
    if node.op_type == "Einsum":
        return _einsum(node)
    if "Conv" in node.op_type:
        dims = view.dims(operands[1])
        if dims is None or not 3 <= len(dims) <= 5:
            return None
        places_out = "xyz"[: len(dims) - 2]
        return Product(node, operands, (f"bc{places_out}", f"oc{'uvw'[: len(places_out)]}"), f"bo{places_out}")
    turned = {one.name: one.i for one in node.attribute if one.name in ("transA", "transB")}
    left, right = ("km" if turned.get("transA") else "mk"), ("nk" if turned.get("transB") else "kn")
    return Product(node, operands, (left, "nkz" if node.op_type == "MatMulNBits" else right), "mn")


def is_join(view: GraphView, product: Product) -> bool:
    """Whether both operands are computed. A product with a constant is a projection, or mixes heads."""
    return view.folded.isdisjoint(product.operands)


def _einsum(node: NodeProto) -> Product | None:
    """The two operands of an Einsum that share an axis which is summed over; others are factors (linear attention)."""
    (equation,) = [helper.get_attribute_value(one).decode() for one in node.attribute if one.name == "equation"]
    sides, arrow, out = re.sub(r"\s", "", equation).partition("->")
    if not arrow:
        letters = sides.replace(".", "").replace(",", "")
        out = "".join(sorted(letter for letter in letters if letters.count(letter) == 1))
    # Letters before an ellipsis stand at places that are not known, and are none of a product of heads.
    *terms, result = (term.rpartition("...")[2] for term in (*sides.split(","), out))
    pairs = [
        (one, other)
        for one, other in combinations(range(len(terms)), 2)
        if len(terms) == 2 or set(terms[one]).intersection(terms[other]).difference(result)
    ]
    if len(pairs) != 1 or len(terms) != len(node.input):
        return None
    (one, other) = pairs[0]
    return Product(node, (node.input[one], node.input[other]), (terms[one], terms[other]), result)


def _place(term: str, letter: str) -> int:
    return term.rindex(letter) - len(term)


SIDES: Final[tuple[Side, Side]] = (0, 1)

OPERAND_PLACES: Final[Mapping[str, tuple[int, int]]] = {
    **dict.fromkeys(("MatMul", "Gemm", "Einsum", "Conv", "MatMulInteger", "ConvInteger"), (0, 1)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv"), (0, 3)),
    **dict.fromkeys((f"com.microsoft.{name}" for name in ("FusedMatMul", "FusedGemm", "FusedConv")), (0, 1)),
    **dict.fromkeys((f"com.microsoft.{name}" for name in ("MatMulIntegerToFloat", "DynamicQuantizeMatMul")), (0, 1)),
    **dict.fromkeys(("com.microsoft.MatMulNBits", "com.microsoft.TransposeMatMul"), (0, 1)),
    "com.microsoft.QGemm": (0, 3),
}
"""Op → the places of its two operands among its inputs."""
