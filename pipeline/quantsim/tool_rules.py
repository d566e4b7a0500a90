"""Which tensors the tools of a target round: rules that leave the others in float.

For `ort-cpu` onnxruntime's own quantizer is asked (`quantize_static` of onnxruntime 1.31). It marks tensors operator by
operator before it computes a scale, so it needs names, dtypes and the order of the nodes, and no weights.

For `tensorrt` the rules are those that NVIDIA writes down (docs.nvidia.com/deeplearning/tensorrt, Working with
Quantized Types, "Q/DQ Layer-Placement Recommendations"): what weighted operators read is rounded, and what is added to
their results from elsewhere; their results are not, nor what fuses with them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from onnx import NodeProto, TensorProto, helper

from passes.graph.index import GraphIndex
from passes.graph.op_facts import PRODUCTS
from passes.graph.traversal import walk
from passes.provenance.annotations import known_as, op_and_name
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import FLOAT, Precision
from pipeline.errors import UsageError
from pipeline.quantsim.placement import PlacementRule
from pipeline.quantsim.sites import Site


def follow_quantize_static(
    model: DetachedModel, sites: Sequence[Site], left_out: Collection[str]
) -> Iterator[PlacementRule]:
    """What quantize_static rounds by default, with the nodes `left_out` as `nodes_to_exclude`. A value that only moves
    elements goes with what it reads, and no other tensors share an encoding. The bias of a normalization has 32 bits
    there, and stays in float here."""
    from onnxruntime.quantization.qdq_quantizer import QDQQuantTensorType  # as below

    quantizer = _mark(model, sites, left_out)
    marked = quantizer.tensors_to_quantize
    biases = {site.tensor for site in sites if site.role == "bias"}.intersection(quantizer.bias_to_quantize)
    joined = {site.tensor for site in sites if len(site.shares) > 1}
    yield _leave(
        "quantize_static", "onnxruntime's quantize_static does not round it", marked.keys() | biases, joined, sites
    )
    weights = frozenset(
        site.tensor
        for site in sites
        if site.role == "constant"
        and site.tensor in marked
        and marked[site.tensor].tensor_type is QDQQuantTensorType.WEIGHT
    )
    if weights:
        yield PlacementRule("quantize_static: a weight there", WEIGHT, WEIGHT, weights)
    stacks = frozenset(site.tensor for site in sites if site.role == "weight" and _is_stack(model, site.tensor))
    if stacks:
        yield PlacementRule("ort-cpu: a stack of matrices", WEIGHT, tensors=stacks)


def _is_stack(model: DetachedModel, weight: str) -> bool:
    """Whether a MatMul reads a weight of three axes or more: onnxruntime 1.31 makes a QLinearMatMul of it, which takes
    no scale for each column of such a weight, as quantize_static writes it."""
    tensor, consumers = model.index.initializers.get(weight), model.index.consumers[weight]
    return tensor is not None and len(tensor.dims) > 2 and any(node.op_type == "MatMul" for node in consumers)


WEIGHT: Final = Precision(8, signed=True, symmetric=True)
"""Of a constant that is a weight to quantize_static and none here, such as the scale of a normalization."""


def follow_tensorrt(model: DetachedModel, sites: Sequence[Site], left_out: Collection[str]) -> Iterator[PlacementRule]:
    """What TensorRT's recommendations round, without the nodes `left_out`."""
    index = model.index
    nodes = [node for node in index.nodes if known_as(node) not in left_out]
    rounded = {name for node in nodes if node.op_type in PRODUCTS for name in node.input[:2]}
    for node in nodes:
        if node.op_type == "Add" and index.constants.keys().isdisjoint(node.input):
            products = [_is_product(name, index) for name in node.input]
            if all(products):
                rounded.add(node.input[_skip_of(node, index)])
            elif any(products):
                rounded.add(node.input[0 if products[1] else 1])
    yield _leave(
        "tensorrt", "TensorRT rounds what weighted operators read, and what is added to them", rounded, (), sites
    )


def _skip_of(add: NodeProto, index: GraphIndex) -> int:
    """Which operand of a sum of two products skips: the one with fewer nodes of its own before it, as in ModelOpt, or
    else the first. The other product takes it along."""

    def before(name: str) -> Sequence[str]:
        node = index.producer(name)
        return () if node is None else node.input

    first, second = (frozenset(walk([name], before)) for name in add.input)
    return 1 if len(second - first) < len(first - second) else 0


def _is_product(name: str, index: GraphIndex) -> bool:
    """Whether `name` comes from a weighted operator, through a BatchNormalization or not, and is read once."""
    node: NodeProto | None = index.producer(name)
    if node is not None and node.op_type == "BatchNormalization" and len(index.consumers[name]) == 1:
        name = node.input[0]
        node = index.producer(name)
    return node is not None and node.op_type in PRODUCTS and len(index.consumers[name]) == 1


def _leave(
    name: str, reason: str, rounded: Collection[str], apart: Collection[str], sites: Sequence[Site]
) -> PlacementRule:
    """A rule that leaves in float all but `rounded` and what only moves their numbers.

    Args:
        name: what the report calls the rule.
        reason: why a tensor stays in float.
        rounded: the tensors that the tool rounds.
        apart: tensors that share no encoding with what they read.
    """
    whole = frozenset(rounded)
    alone = {
        site.tensor
        for site in sites
        if site.tensor in apart or (site.tensor in whole and site.shares and not whole.issuperset(site.shares))
    }
    left = frozenset(
        site.tensor
        for site in sites
        if not whole.intersection((site.tensor, *site.moved_to)) and not (site.moves and site.tensor not in alone)
    )
    return PlacementRule(name, FLOAT, FLOAT, left, reason=reason, apart=frozenset(alone))


def _mark(model: DetachedModel, sites: Sequence[Site], left_out: Collection[str]) -> Any:
    """onnxruntime's quantizer after it has gone through all nodes but those `left_out`."""
    from onnxruntime.quantization import CalibrationMethod, QuantType  # a tenth of a second, which tables do without
    from onnxruntime.quantization.calibrate import TensorData, TensorsData
    from onnxruntime.quantization.qdq_quantizer import QDQQuantizer
    from onnxruntime.quantization.registry import CreateQDQQuantizer, QDQRegistry, QLinearOpsRegistry

    proto = model.copy_proto()
    named = {info.name for info in (*proto.graph.input, *proto.graph.output)}
    floats = [site.tensor for site in sites if site.role in ("input", "activation") and site.dtype == "float32"]
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(
        helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in floats if name not in named
    )
    anything = TensorData(lowest=np.float32(-1), highest=np.float32(1))
    measured = {*floats, *model.index.producers}  # it sets the range of each Softmax, whatever its dtype
    ranges = TensorsData(CalibrationMethod.MinMax, dict.fromkeys(sorted(measured), anything))
    operators = sorted({*QLinearOpsRegistry, *QDQRegistry})  # those that quantize_static takes where none are named
    with _without_warnings():
        quantizer = QDQQuantizer(proto, True, False, QuantType.QInt8, QuantType.QUInt8, ranges, [], [], operators, {})
        for node in quantizer.model.nodes():
            if known_as(node) in left_out or not quantizer.should_quantize_node(node):
                continue
            try:
                CreateQDQQuantizer(quantizer, node).quantize()
            except KeyError as error:  # onnxruntime 1.31: a Relu or Clip of a weight, of which it has no range
                if node.input[0] not in model.index.initializers:
                    raise
                raise UsageError(
                    f"onnxruntime's quantizer does not take {op_and_name(node)} of the stored tensor "
                    f"{node.input[0]!r}; compute it once and for all: onnxline optimize MODEL -o OUT"
                ) from error
    return quantizer


@contextmanager
def _without_warnings() -> Iterator[None]:
    """onnxruntime's quantizer writes warnings of scales, which are not used here, to the log of the whole process."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
