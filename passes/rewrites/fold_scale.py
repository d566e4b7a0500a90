"""Fold numbers that multiply a value: several around one product into one, or into the weight of a product.

torch scales Q and Kᵀ each by the root of the scale. A product of matrices is linear in both operands, and moving
elements does not change them, so all numbers around one product are one number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.context import PassContext
from passes.errors import PolicyError
from passes.graph.op_facts import LAYOUT_OPS, input_of
from passes.rewrites.rewriter import Array, Rewriter, RewriteStep, is_float
from passes.step import PassResult
from passes.suggest import say_count

UNITS: Final = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0, "Max": -math.inf, "Min": math.inf}
"""Operator → the number that changes nothing."""


@dataclass(frozen=True, slots=True)
class FoldScale(RewriteStep, name="fold-scale", reads="values"):
    """Fold scalar factors around one product into one factor, or into a weight, and remove sums with zeros. Products
    with ones and bounds at infinity are removed too.

    Args:
        into: `product` leaves one factor around each product of two computed values; `weight` puts the factor into the
            weight and the bias of the product that makes the value, where no other value depends on them.
    """

    into: str = "product"

    def why_not(self, ops: Set[str]) -> str:
        return "" if ops & UNITS.keys() else "nothing is scaled"

    def check(self, context: PassContext) -> None:
        if self.into not in PLACES:
            raise PolicyError(f"pass {self.name!r}: into is {self.into!r}; expected {' or '.join(PLACES)}")

    def rewrite(self, rewriter: Rewriter) -> PassResult:
        folder = ScaleFolder(rewriter)
        folder.remove_units()
        folder.fold_chains()
        folder.fold_around_products()
        if self.into == "weight":
            folder.fold_into_weights()
        none = "no two factors belong to one product"
        none += ", and none follows a stored weight alone" if self.into == "weight" else ""
        units = say_count(folder.units, "operator", "without effect removed")
        return rewriter.result(units, say_count(folder.folded, "factor", "folded"), default=none)


PLACES: Final = ("product", "weight")


@dataclass(frozen=True, slots=True)
class _Factor:
    """A node that multiplies the value at input `data` by a number."""

    node: NodeProto
    data: int
    number: float


@dataclass(slots=True)
class ScaleFolder:
    """Folds the factors of one graph."""

    rewriter: Rewriter
    units: int = 0
    folded: int = 0

    def remove_units(self) -> None:
        """Remove sums with zeros, products with ones and bounds at infinity, whose result has the shape of the other
        operand: the dims are known, or a single number meets a value of its rank or a higher one.

        jax writes a maximum with -inf before each softmax.

        A product with ones may be the scale of a norm that somebody keeps.
        """
        for node in self.rewriter.by_op(*UNITS):
            if node.op_type == "Mul" and self.rewriter.is_kept(node.output[0]):
                continue
            if len(node.input) != 2:
                continue  # a Max of more values
            places = (1,) if node.op_type in ("Sub", "Div") else (1, 0)
            for position in places:
                data, unit = node.input[1 - position], self.rewriter.constant(node.input[position])
                shape = self.rewriter.shape(data)
                if unit is None or shape is None or not is_float(unit) or not (unit == UNITS[node.op_type]).all():
                    continue
                is_known = None not in shape and shape == self.rewriter.shape(node.output[0])
                if is_known or (unit.size == 1 and unit.ndim <= len(shape)):
                    self.rewriter.replace(node.output[0], data)
                    self.units += 1
                    break

    def fold_chains(self) -> None:
        """Fold a factor into the factor before it, with operators between that only move elements."""
        for node in self.rewriter.by_op("Mul", "Div"):
            factor = self._factor_of(node)
            before = None if factor is None else self._factor_before(node.input[factor.data])
            if factor is not None and before is not None:
                first = before.node.output[0]
                self._gather([before, factor], [first, *self._values_between(first, factor.node)])

    def fold_around_products(self) -> None:
        """Leave one factor of those of a product's operands and of its result."""
        for product in self.rewriter.by_op("MatMul"):
            factors, after = self._factors_around(product)
            if len(factors) + len(after) > 1 and factors:
                rescaled = [*self._operands_between(factors, product), factors[0].node.output[0]]
                self._gather([*factors, *after], [*rescaled, *product.output[: len(after)]])

    def move_to_result(self, product: NodeProto) -> None:
        """Multiply the result of a product by the factors of its operands, in one node.

        In float16 the factors stay on the operands, since the product could overflow without them.
        """
        rewriter, result = self.rewriter, product.output[0]
        factors, after = self._factors_around(product)
        is_plain = not factors and all(factor.node.op_type == "Mul" for factor in after)
        if is_plain or (factors and rewriter.dtype(result) == TensorProto.FLOAT16):
            return
        factors += after
        with np.errstate(over="ignore", under="ignore"):
            number = math.prod(factor.number for factor in factors)
            array = np.array(number, helper.tensor_dtype_to_np_dtype(rewriter.dtype(result)))
        if not array or not np.isfinite(array.astype(np.float64)):
            return
        self._rename(self._operands_between(factors, product))
        for factor in factors:
            self._drop(factor)
        copy = rewriter.add_copy(product, product.input, rewriter.shape(result))
        scale = rewriter.constant_of(array, f"{result}/scale")
        rewriter.replace(product.output[0], rewriter.add("Mul", [copy, scale], product, rewriter.shape(result)))

    def fold_into_weights(self) -> None:
        """Put each factor into the product with a weight that makes its operand, and into the bias."""
        for node in self.rewriter.by_op("Mul", "Div"):
            factor = self._factor_of(node)
            steps = None if factor is None else self._weights_before(node.input[factor.data])
            if factor is None or not steps:
                continue
            scaled = [(step, position, self._scale(step.input[position], factor.number)) for step, position in steps]
            if all(array is not None for _, _, array in scaled):
                for step, position, array in scaled:
                    assert array is not None
                    self.rewriter.set_input(
                        step, position, self.rewriter.constant_of(array, f"{step.input[position]}_scaled")
                    )
                first = steps[-1][0].output[0]
                self._rename([first, *self._values_between(first, factor.node)])
                self._drop(factor)

    def _factors_around(self, product: NodeProto) -> tuple[list[_Factor], list[_Factor]]:
        """The factors of the operands of a product, and that of its result, if it has one."""
        before, after = map(self._factor_before, product.input), self._factor_after(product.output[0])
        return [factor for factor in before if factor is not None], [after] if after is not None else []

    def _gather(self, factors: Sequence[_Factor], rescaled: Iterable[str]) -> None:
        """Multiply by the numbers of all factors at the first; the values that this rescales get other names."""
        if self._set_number(factors[0], math.prod(factor.number for factor in factors)):
            self._rename(rescaled)
            for factor in factors[1:]:
                self._drop(factor)

    def _operands_between(self, factors: Sequence[_Factor], product: NodeProto) -> list[str]:
        """The values between the factors of its operands and a product."""
        before = [factor for factor in factors if product.output[0] not in factor.node.input]
        return [name for factor in before for name in self._values_between(factor.node.output[0], product)]

    def _values_between(self, name: str, end: NodeProto) -> list[str]:
        """The values computed from `name`, which has one consumer as each of them has, up to the operand of `end`."""
        names = []
        while (consumer := self.rewriter.consumers[name][0]) is not end:
            name = consumer.output[0]
            names.append(name)
        return names

    def _rename(self, names: Iterable[str]) -> None:
        """Give values other names that are scaled by another number now: a name stands for one value."""
        for name in names:
            if name in self.rewriter.producers:
                self.rewriter.rename(name, name)

    def _factor_of(self, node: NodeProto) -> _Factor | None:
        for position in (1, 0) if node.op_type == "Mul" else (1,):
            number = self.rewriter.scalar(node.input[position])
            if number is None or self.rewriter.constant(node.input[1 - position]) is not None:
                continue
            rank, own = (self.rewriter.shape(name) for name in (node.input[1 - position], node.input[position]))
            if not math.isfinite(number) or number == 0 or rank is None or own is None or len(own) > len(rank):
                return None
            return _Factor(node, 1 - position, 1 / number if node.op_type == "Div" else number)
        return None

    def _factor_before(self, name: str) -> _Factor | None:
        """The factor that makes `name`, perhaps with layout operators between; nothing else reads what is between."""
        while (node := self.rewriter.own_producer(name)) is not None:
            if node.op_type in ("Mul", "Div") and not node.domain:
                return self._factor_of(node)
            if node.op_type not in LAYOUT_OPS or node.domain:
                return None
            name = node.input[0]
        return None

    def _factor_after(self, name: str) -> _Factor | None:
        if self.rewriter.is_shared(name) or not self.rewriter.consumers[name]:
            return None
        (node,) = self.rewriter.consumers[name]
        is_factor = node.op_type in ("Mul", "Div") and not node.domain
        factor = self._factor_of(node) if is_factor else None
        return factor if factor is not None and node.input[factor.data] == name else None

    def _weights_before(self, name: str) -> list[tuple[NodeProto, int]] | None:
        """The product with a weight that makes `name`, and the sum with a bias, each with the input to scale."""
        steps: list[tuple[NodeProto, int]] = []
        while (node := self.rewriter.own_producer(name)) is not None:
            stored = [position for position in (0, 1) if self._is_weight(input_of(node, position))]
            if node.op_type in LAYOUT_OPS and not node.domain:
                name = node.input[0]
            elif node.op_type == "Add" and len(stored) == 1:
                steps.append((node, stored[0]))
                name = node.input[1 - stored[0]]
            elif node.op_type in ("MatMul", "Gemm", "Conv") and not node.domain and stored == [1]:
                has_bias = node.op_type != "MatMul" and input_of(node, 2)
                if has_bias and not self._is_weight(input_of(node, 2)):
                    return None
                return [*steps, (node, 1), *([(node, 2)] if has_bias else [])]
            else:
                return None
        return None

    def _is_weight(self, name: str) -> bool:
        return name in self.rewriter.stored and self.rewriter.constant(name) is not None

    def _scale(self, name: str, number: float) -> Array | None:
        """A stored tensor times a number; None where its dtype cannot hold the result."""
        array = self.rewriter.constant(name)
        if array is None or not is_float(array):
            return None
        with np.errstate(over="ignore", under="ignore"):
            scaled = (array.astype(np.float64) * number).astype(array.dtype)
        return scaled if np.isfinite(scaled.astype(np.float64)).all() else None

    def _set_number(self, factor: _Factor, number: float) -> bool:
        """Let a node multiply by another number; false where the dtype cannot hold the number."""
        rewriter, node = self.rewriter, factor.node
        array = rewriter.constant(node.input[1 - factor.data])
        assert array is not None
        stored = 1 / number if node.op_type == "Div" else number
        with np.errstate(over="ignore", under="ignore"):
            scaled = np.full_like(array, stored)
        if not scaled.all() or not np.isfinite(scaled.astype(np.float64)).all():
            return False
        if number == 1.0:
            self._drop(factor)
            return True
        rewriter.set_input(node, 1 - factor.data, rewriter.constant_of(scaled, f"{node.output[0]}/scale"))
        return True

    def _drop(self, factor: _Factor) -> None:
        self.rewriter.replace(factor.node.output[0], factor.node.input[factor.data])
        self.folded += 1
