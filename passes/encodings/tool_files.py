"""Encodings as the files of other tools: TensorRT's calibration cache, and the recipe of ai-edge-quantizer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import numpy as np
from onnx import NodeProto

from passes.encodings.encoding import Encoding, Precision
from passes.errors import UsageError
from passes.graph.op_facts import attribute_of
from passes.provenance.annotations import module_path_of
from passes.weights.detached import DetachedModel

TENSORRT_HEADER: Final = "TRT-101500-EntropyCalibration2"
"""The first line of a cache: TensorRT's release (10.15) and the calibrator whose cache it is."""


def to_tensorrt_cache(encodings: Mapping[str, Encoding], parameters: Collection[str]) -> str:
    """A calibration cache of TensorRT: a scale for each activation, in hexadecimal, as the bits of a float32.

    TensorRT's 8 bits are symmetric, so the range of an asymmetric encoding grows to the larger of its two sides.
    Weights have no line: TensorRT reads their range from their elements. Source: caches that its calibrators write.

    Raises:
        UsageError: an activation has another number of bits than 8, or there is none.
    """
    activations = {name: encoding for name, encoding in encodings.items() if name not in parameters}
    wrong = next((name for name, encoding in activations.items() if not _is_byte(encoding.precision)), None)
    if wrong is not None:
        raise UsageError(f"encodings: {wrong!r} is {activations[wrong].precision}; TensorRT's cache holds 8 bits alone")
    if not activations:
        raise UsageError("encodings: found no encoding of an activation; TensorRT's cache holds no other encodings")
    lines = [TENSORRT_HEADER]
    for name, encoding in activations.items():
        precision, zero = encoding.precision, int(encoding.zero_point)
        reach = max(precision.highest - zero, zero - precision.lowest)
        scale = np.float32(float(encoding.scale) * reach / BYTE_HIGHEST)
        lines.append(f"{name}: {scale.view(np.uint32):08x}")
    return "\n".join(lines) + "\n"


BYTE_HIGHEST: Final = 127


def _is_byte(precision: Precision) -> bool:
    return precision.bits == 8 and not precision.float_type and precision.granularity == "tensor"


def to_ai_edge_recipe(encodings: Mapping[str, Encoding], model: DetachedModel) -> str:
    """A recipe of ai-edge-quantizer: the format of each kind of operator, and of those modules that differ from it.

    A recipe holds formats and no scales, which its own calibration measures. Operators are found in the TFLite file by
    the torch modules that their tensors are named after, and by the name of their result where no module is known.
    Source: ai_edge_quantizer 0.10, `recipe_manager.py`.

    Args:
        encodings: name of the tensor → its encoding.
        model: the float model of the encodings.

    Raises:
        UsageError: a format that ai-edge-quantizer lacks, or no operator has a quantized weight.
    """
    found = [(op, _scope_of(node), config) for node, op, config in _find_configs(encodings, model)]
    if not found:
        raise UsageError("encodings: no product or table has a quantized weight, so a recipe would be empty")
    rows: list[dict[str, Any]] = []
    for operation in dict.fromkeys(op for op, _, _ in found):
        usual = Counter(config for op, _, config in found if op == operation).most_common(1)[0][0]
        rows.append(_recipe_row(".*", operation, usual))
        own = {scope: config for op, scope, config in found if op == operation and config != usual}
        rows += [_recipe_row(f".*{re.escape(scope)}.*", operation, config) for scope, config in own.items()]
    return json.dumps(rows, indent=2) + "\n"


def _find_configs(encodings: Mapping[str, Encoding], model: DetachedModel) -> Iterator[tuple[NodeProto, str, str]]:
    stored = model.index.initializers
    for node in model.proto.graph.node:
        operation = OPERATIONS.get(node.op_type)
        weights = [name for name in node.input[: 1 if node.op_type == "Gather" else 2] if name in stored]
        if operation is None or not weights:
            continue
        if node.op_type == "Conv" and attribute_of(node, "group", 1) == stored[weights[0]].dims[0] != 1:
            operation = "DEPTHWISE_CONV_2D"
        weight = encodings.get(weights[0])
        data = next((encodings[name] for name in node.input if name in encodings and name not in stored), None)
        yield node, operation, "" if weight is None else json.dumps(_op_config(weights[0], weight, data))


OPERATIONS: Final = {
    "Conv": "CONV_2D",
    "ConvTranspose": "CONV_2D_TRANSPOSE",
    "Gemm": "FULLY_CONNECTED",
    "MatMul": "FULLY_CONNECTED",
    "Gather": "EMBEDDING_LOOKUP",
}


def _op_config(name: str, weight: Encoding, data: Encoding | None) -> dict[str, Any]:
    precision = weight.precision
    size = f"_{precision.block}" if precision.block else ""
    granularity = f"{WISE[precision.granularity]}{size}"
    if precision.bits not in (4, 8) or not precision.symmetric or size not in BLOCKS:
        raise UsageError(
            f"encodings: {name!r} is {precision}; ai-edge-quantizer takes symmetric weights of 4 or 8 bits with scales "
            "of the tensor, of channels, or of blocks of 32, 64, 128 or 256"
        )
    config: dict[str, Any] = {"weight_tensor_config": _tensor_config(precision.bits, True, granularity)}
    if data is not None:
        bits = data.precision.bits
        if bits not in (8, 16):
            raise UsageError(
                f"encodings: what reads {name!r} has {data.precision}; ai-edge-quantizer takes 8 or 16 bits"
            )
        config["activation_tensor_config"] = _tensor_config(bits, bits == 16, "TENSORWISE")
    return config | {
        "compute_precision": "FLOAT" if data is None else "INTEGER",
        "explicit_dequantize": data is None,
        "skip_checks": False,
        "min_weight_elements": 0,
    }


WISE: Final = {"tensor": "TENSORWISE", "channel": "CHANNELWISE", "block": "BLOCKWISE"}
BLOCKS: Final = ("", "_32", "_64", "_128", "_256")


def _tensor_config(bits: int, symmetric: bool, granularity: str) -> dict[str, Any]:
    return {"num_bits": bits, "symmetric": symmetric, "granularity": granularity, "dtype": "INT"}


def _recipe_row(regex: str, operation: str, config: str) -> dict[str, Any]:
    row = {"regex": regex, "operation": operation}
    if not config:
        return {**row, "algorithm_key": "no_quantize"}
    return {**row, "algorithm_key": "min_max_uniform_quantize", "op_config": json.loads(config)}


def _scope_of(node: NodeProto) -> str:
    place = module_path_of(node)
    return place.paths[-1] if place and place.paths else node.output[0]
