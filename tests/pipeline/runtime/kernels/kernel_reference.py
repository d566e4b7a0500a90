"""One kernel against a reference that is not ours: ONNX's evaluator, or onnxruntime without its graph optimizations.

A `Case` says the same call twice: as an op of the IR, and as a single ONNX node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from pipeline.importers.from_onnx import from_onnx
from pipeline.ir.graph import Graph, TensorSpec
from pipeline.lowering import with_kernels
from pipeline.ops import KINDS, GraphBuilder
from pipeline.ops.aten import CALL_KINDS

TOLERANCE: Mapping[str, float] = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
"""Absolute and relative. Both sides round after every step, in orders of their own, over sums of up to a few hundred
terms: some tens of ulps (float32 1.2e-7, float16 1e-3, bfloat16 8e-3). Other dtypes have to be equal."""

OPSET = 24

OWN_KINDS = frozenset(row.kind.name for row in KINDS.values() if row.kind not in CALL_KINDS)
"""The kinds of ops that are no calls of torch."""


@dataclass(frozen=True)
class Case:
    """`kind(*inputs, **attrs)` in the IR; `op(*inputs, *extra, **node)` in ONNX, where a None in `extra` is a gap."""

    kind: str
    inputs: Sequence[np.ndarray]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    node: Mapping[str, Any] = field(default_factory=dict)
    op: str = ""
    extra: Sequence[np.ndarray | None] = ()
    gap: int | None = None
    """A place among the ONNX node's inputs that is left out."""
    outputs: int = 1
    opset: int = OPSET
    by_ort: bool = False
    """Where ONNX's own evaluator is wrong or lacks the operator."""
    note: str = ""

    def __str__(self) -> str:
        shapes = "_".join("x".join(map(str, array.shape)) or "scalar" for array in self.inputs)
        words = [self.kind, str(self.inputs[0].dtype), shapes, *(f"{key}={value}" for key, value in self.attrs.items())]
        return "-".join([*words, self.note] if self.note else words).replace(" ", "")


def expected(case: Case) -> list[np.ndarray]:
    """What the reference computes."""
    arrays = arrays_of(case)
    model = model_of(case)
    if case.by_ort:
        return _by_ort(model, arrays)
    return [np.asarray(array) for array in ReferenceEvaluator(model).run(None, arrays)]


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """The inputs of the ONNX node by name."""
    return {f"in{at}": array for at, array in enumerate((*case.inputs, *case.extra)) if array is not None}


def model_of(case: Case, results: Sequence[np.ndarray] = (), through_tmp: Sequence[int] = ()) -> onnx.ModelProto:
    """The case as a model of one ONNX node, and of copies of the inputs at the positions of `through_tmp`.

    With `results` the inputs of `extra` are initializers, as an importer needs them.
    """
    arrays = arrays_of(case)
    names = [f"in{at}" for at in range(len(case.inputs) + len(case.extra))]
    if case.gap is not None:
        names.insert(case.gap, "")
    node = helper.make_node(
        case.op or case.kind,
        [f"tmp{at}" if at in through_tmp else name if name in arrays else "" for at, name in enumerate(names)],
        [f"out{at}" for at in range(case.outputs)],
        **case.node,
    )
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    outs = [helper.make_empty_tensor_value_info(f"out{at}") for at in range(case.outputs)]
    fixed = list(arrays)[len(case.inputs) :] if results else []
    stored = [numpy_helper.from_array(arrays[name], name) for name in fixed]
    copies = []
    for at in through_tmp:
        stored.append(numpy_helper.from_array(np.ones(arrays[f"in{at}"].ndim, np.int64), f"repeats{at}"))
        copies.append(helper.make_node("Tile", [f"in{at}", f"repeats{at}"], [f"tmp{at}"]))
    graph = helper.make_graph(
        [*copies, node], "one", [info for info in infos if info.name not in fixed], outs, initializer=stored
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", case.opset)], ir_version=10)


def graph_of(case: Case, results: Sequence[np.ndarray], *, through_tmp: Sequence[int] = ()) -> Graph:
    """The case as a Graph; the inputs at the positions of `through_tmp` are copied to a tmp value first.

    An operator that has no kind of its own comes through the importer of ONNX models.
    """
    if case.kind not in OWN_KINDS:
        return with_kernels(from_onnx(model_of(case, results, through_tmp)))
    builder = GraphBuilder("one")
    vids = [builder.input(f"in{at}", spec_of(array)) for at, array in enumerate(case.inputs)]
    for at in through_tmp:
        spec = builder.spec(vids[at])
        (vids[at],) = builder.emit(
            "aten.repeat.default", [vids[at]], [(f"tmp{at}", spec)], {"repeats": (1,) * spec.rank}
        )
    outs = [(f"out{at}", spec_of(array)) for at, array in enumerate(results)]
    return builder.build(builder.emit(case.kind, vids, outs, case.attrs))


def assert_close(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    tolerance = TOLERANCE.get(str(wanted.dtype), 0)
    np.testing.assert_allclose(actual, wanted, atol=tolerance, rtol=tolerance)


def spec_of(array: np.ndarray) -> TensorSpec:
    return TensorSpec(array.shape, str(array.dtype))


def rand(*shape: int, dtype: str = "float32", low: float = -2, high: float = 2) -> np.ndarray:
    """Uniform, and the same numbers for the same arguments."""
    seed = [len(shape), *shape, int(high * 8) % 97]
    return np.asarray(np.random.default_rng(seed).uniform(low, high, shape)).astype(dtype)


def ints(*shape: int, dtype: str = "int64", low: int = -9, high: int = 10) -> np.ndarray:
    """Integers from `low` to `high` - 1."""
    return np.asarray(np.random.default_rng([len(shape), *shape, high]).integers(low, high, shape)).astype(dtype)


def _by_ort(model: onnx.ModelProto, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [np.asarray(array) for array in session.run(None, dict(arrays))]
