"""Does the simulation compute what ONNX's reference evaluator does? Node by node, on one batch of MiniLM.

    python -m benchmarks.quantsim_specification [--folder DIR]

As a whole the two differ: they sum the products of a matrix in another order, and a sum that lies at the edge between
two numbers of 16 bits goes to one or the other. So the evaluator computes each node from the very inputs that it has in
onnxruntime (optimizations off). Then QuantizeLinear, DequantizeLinear and what moves numbers are equal in every bit,
and the rest to the rounding of floats: a sum of n products to n times 2⁻²⁴ of the sum of their sizes, in whatever
order each of the two makes it. At last the evaluator runs the whole model once more, with onnxruntime's own result for
each node of the operators that round floats, one node at a time: then the two are equal in every bit of every
quantized tensor, so nothing but that rounding keeps them apart.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import onnx
from onnx import NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import detach_copy
from benchmarks.handoff.models import export_minilm
from benchmarks.handoff.ours import simulate
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel, attach, detach
from passes.weights.sessions import Session
from pipeline.quantsim.qdq import insert_qdq

OPSET: Final = 21

PRODUCTS: Final = frozenset({"Gemm", "MatMul"})

ROUNDED: Final = ("Gelu", "Gemm", "LayerNormalization", "MatMul", "Softmax", "Tanh")
"""Operators whose floats the two round in another order, or compute by another formula."""

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class ComparedNode:
    """A node whose results the evaluator computed again.

    error: of the results, in units of 2⁻²⁴, by which one float is rounded: of a product relative to the sum of the
        sizes of what it adds, of others relative to the largest number of the result.
    summed: how many products a result of MatMul or Gemm adds; 0 for others.
    """

    name: str
    op: str
    is_equal: bool
    error: float
    summed: int = 0


def compare_nodes(model: DetachedModel, sample: Arrays) -> Iterator[ComparedNode]:
    """Each node of `model` with the inputs that it has in onnxruntime, by the reference evaluator."""
    proto = attach(model)
    opsets = list(proto.opset_import)
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    computed = [name for node in proto.graph.node for name in node.output if name]
    values = constants | dict(sample) | dict(Session.of(model, computed).run(sample))
    for node in proto.graph.node:
        found = _evaluate(node, values, opsets)
        wanted = [values[name] for name in node.output if name]
        is_equal = all(np.array_equal(one, other) for one, other in zip(found, wanted, strict=True))
        error = max(_error(node, one, other, values) for one, other in zip(found, wanted, strict=True))
        summed = _factors(node, values)[0].shape[-1] if node.op_type in PRODUCTS else 0
        yield ComparedNode(node.name or node.output[0], node.op_type, is_equal, error, summed)


def _evaluate(node: NodeProto, values: Arrays, opsets: list[onnx.OperatorSetIdProto]) -> list[np.ndarray]:
    """The evaluator's results. It needs the types of a model to make a body of operators such as Gelu."""
    reads = dict.fromkeys(filter(None, node.input))
    inputs = [_info(name, values[name]) for name in reads]
    outputs = [_info(name, values[name]) for name in node.output if name]
    graph = helper.make_graph([node], "one", inputs, outputs)
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=10))
    return cast("list[Any]", ReferenceEvaluator(model).run(None, {name: values[name] for name in reads}))


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def _error(node: NodeProto, found: np.ndarray, wanted: np.ndarray, values: Arrays) -> float:
    if found.dtype.kind != "f" or not found.size:
        return 0.0 if np.array_equal(found, wanted) else np.inf
    apart = np.abs(found.astype(np.float64) - wanted)
    if node.op_type not in PRODUCTS:
        return float(apart.max() / (np.abs(wanted).max() or 1.0) / UNIT)
    left, right = _factors(node, values)
    sizes = np.abs(left.astype(np.float64)) @ np.abs(right.astype(np.float64))
    if len(node.input) > 2:
        sizes = sizes + np.abs(values[node.input[2]])
    return float((apart / np.maximum(sizes, np.finfo(np.float32).tiny)).max() / UNIT)


def _factors(node: NodeProto, values: Arrays) -> tuple[np.ndarray, np.ndarray]:
    turned = {entry.name: entry.i for entry in node.attribute}
    left, right = values[node.input[0]], values[node.input[1]]
    return (left.T if turned.get("transA") else left), (right.T if turned.get("transB") else right)


UNIT: Final = 2.0**-24


def count_moved_steps(
    model: DetachedModel, sample: Arrays, operators: Sequence[type[OpRun]] = ()
) -> tuple[str, int, int, int]:
    """The whole model by both: the first quantized tensor that differs, how many of its numbers do, by how many steps
    at most, and how many there are. No name, and the count of tensors at the end, where none does.

    Args:
        operators: take the place of the evaluator's own.
    """
    proto = attach(model)
    numbers = [node.output[0] for node in proto.graph.node if node.op_type == "QuantizeLinear"]
    found = Session.of(model, numbers).run(sample)
    del proto.graph.output[:]
    proto.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in numbers)
    evaluator = ReferenceEvaluator(onnx.shape_inference.infer_shapes(proto), new_ops=[*operators])
    expected = cast("list[Any]", evaluator.run(None, dict(sample)))
    for name, wanted in zip(numbers, expected, strict=True):
        apart = np.abs(found[name].astype(np.int64) - wanted.astype(np.int64))
        if apart.any():
            return name, int((apart > 0).sum()), int(apart.max()), apart.size
    return "", 0, 0, len(numbers)


def operators_of_onnxruntime(opsets: Sequence[onnx.OperatorSetIdProto]) -> list[type[OpRun]]:
    """Each operator of `ROUNDED` as the evaluator takes it: a session of onnxruntime with that one node."""

    def run(self: OpRun, *inputs: Any, **_: object) -> tuple[Any, ...]:
        node = self.onnx_node
        values = dict(zip(node.input, inputs, strict=True))
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "one", [_info(name, values[name]) for name in values if name], outputs)
        found = Session.of(detach(helper.make_model(graph, opset_imports=opsets, ir_version=10))).run(values)
        return tuple(found[name] for name in node.output)

    return [type(op, (OpRun,), {"op_domain": "", "_run": run}) for op in ROUNDED]


def show_agreement(model: DetachedModel, sample: Arrays) -> None:
    """A row for each operator."""
    rows: dict[str, list[ComparedNode]] = {}
    for node in compare_nodes(model, sample):
        rows.setdefault(node.op, []).append(node)
    print("| operator | nodes | equal in every bit | greatest error, in 2⁻²⁴ | products in a sum |")
    print("| --- | --- | --- | --- | --- |")
    for op, nodes in sorted(rows.items()):
        summed = max(node.summed for node in nodes)
        equal = sum(node.is_equal for node in nodes)
        worst = max(node.error for node in nodes)
        print(f"| {op} | {len(nodes)} | {equal} | {worst:.2f} | {summed or ''} |", flush=True)
    for title, operators in (
        ("the whole model", []),
        (f"the whole model, {', '.join(ROUNDED)} by onnxruntime", operators_of_onnxruntime(model.proto.opset_import)),
    ):
        name, count, steps, size = count_moved_steps(model, sample, operators)
        where = f"{name}, {count} of {size} numbers by at most {steps} step(s)" if name else f"none of {size}"
        print(f"\n{title}: the first quantized tensor that differs is {where}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    chosen = parser.parse_args()
    model = detach_copy(onnx.load(export_minilm(OPSET, chosen.folder, prepared=True)))
    sample = minilm.evaluation_samples()[0]
    encodings = simulate(model, minilm.calibration_samples(), [sample]).encodings
    print(f"{machine()}; {versions_line()}\n")
    show_agreement(insert_qdq(model, encodings), sample)


if __name__ == "__main__":
    main()
