"""ONNX's own evaluator, for what onnxruntime has no kernel for: with the user's operators, and a Loop of ours.

The Loop of onnx 1.23 joins the items of a scan output along their first axis and not along a new one, never enters a
body where the condition is left out, and stops where no turn is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ValueInfoProto, helper
from onnx.inliner import inline_local_functions

from passes.custom_ops.operator import CustomOp

if TYPE_CHECKING:
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun


def open_evaluator(proto: onnx.ModelProto, ops: Iterable[CustomOp] = ()) -> ReferenceEvaluator:
    """An evaluator of a model in which the references of `ops` compute their nodes.

    Raises:
        Exception: of many types, where the evaluator lacks an operator or the model is wrong.
    """
    from onnx.reference import ReferenceEvaluator  # a tenth of a second, which most models do not need

    if proto.functions:
        proto = inline_local_functions(proto)  # the evaluator hands new operators to bodies, and not to functions
    return ReferenceEvaluator(proto, new_ops=[*map(_adapt, ops), _loop()])


def _adapt(op: CustomOp) -> type[OpRun]:
    """A custom operator as the evaluator takes it."""
    from onnx.reference.op_run import OpRun

    def _run(self: OpRun, *inputs: Any, **_: Any) -> tuple[np.ndarray, ...]:
        return tuple(op.run(self.onnx_node, inputs))

    return type(op.name, (OpRun,), {"op_domain": op.domain, "_run": _run})


@cache
def _loop() -> type[OpRun]:
    from onnx.reference.ops.op_loop import Loop as Base

    class Loop(Base):  # the evaluator finds the operator by the name of the class
        """The Loop of ONNX's standard, in turns: the body reads the number, the condition and what is carried."""

        body: ReferenceEvaluator  # the base sets both, by the names of attributes
        _run_body: Callable[..., Sequence[Any]]

        def _run(
            self, most: Any, condition: Any, *carried: Any, context: Any = None, attributes: Any = None, **given: Any
        ) -> tuple[Any, ...]:
            scanned: list[list[np.ndarray]] = [[] for _ in range(self.K)]
            goes_on, turn, bindings = condition is None or bool(condition), 0, given.get("bindings")
            while goes_on and (most is None or turn < most):
                fed = zip(self.body.input_names, (np.array(turn), np.array(goes_on), *carried), strict=True)
                results = self._run_body({**(context or {}), **dict(fed)}, attributes=attributes, bindings=bindings)
                goes_on, carried, turn = bool(results[0]), tuple(results[1 : 1 + self.N]), turn + 1
                for items, item in zip(scanned, results[1 + self.N :], strict=True):
                    items.append(item)
            declared = self.body.proto_.output[1 + self.N :]
            stacks = [
                np.stack(items) if items else _stack_none(kind) for items, kind in zip(scanned, declared, strict=True)
            ]
            return self._check_and_fix_outputs((*carried, *stacks))

    return Loop


def _stack_none(declared: ValueInfoProto) -> np.ndarray:
    """A scan output after no turn; an axis of unknown size has the size 0, as in onnxruntime."""
    kind = declared.type.tensor_type
    sizes: Sequence[int] = [dim.dim_value for dim in kind.shape.dim]
    return np.empty((0, *sizes), helper.tensor_dtype_to_np_dtype(kind.elem_type))
