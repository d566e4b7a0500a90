"""Shapes of one node's outputs, by ONNX's own inference, from the specs and the small constants that it reads."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper, shape_inference

from pipeline.errors import SourceError
from pipeline.importers.from_onnx.dtypes import dtype_name, element_type
from pipeline.ir.spec import Dim, TensorSpec

__all__ = ["declared", "infer"]


def infer(
    node: onnx.NodeProto, opset: int, specs: Mapping[str, TensorSpec], constants: Mapping[str, np.ndarray]
) -> dict[str, TensorSpec]:
    """Specs of the outputs of `node`, as far as they are known; a size may be missing its number.

    A model of one node is made and inferred (0.1 ms): the values of `constants` decide shapes exactly, where a whole
    model's data propagation gives up at Range, Slice or a bound dimension.

    Raises:
        SourceError: ONNX finds that the node cannot be.
    """
    types = {name: helper.make_tensor_type_proto(element_type(spec.dtype), spec.shape) for name, spec in specs.items()}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_value_info(name, kind) for name, kind in types.items() if name not in constants],
        [onnx.ValueInfoProto(name=name) for name in node.output if name],
        [numpy_helper.from_array(np.asarray(array, order="C"), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    try:
        inferred = shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)
    except shape_inference.InferenceError as error:
        inputs = ", ".join(f"{name!r}: {spec.dtype}{list(spec.shape)}" for name, spec in specs.items())
        raise SourceError(
            f"node {node.name!r} ({node.op_type}) cannot read ({inputs}): {error}; "
            "check the model with onnx.checker.check_model(…, full_check=True), and the sizes given as dims"
        ) from error
    found = {value.name: declared(value, {}) for value in inferred.graph.output}
    return {name: spec for name, spec in found.items() if spec is not None}


def declared(value: onnx.ValueInfoProto, dims: Mapping[str, int]) -> TensorSpec | None:
    """What a ValueInfoProto says of a tensor, named sizes bound by `dims`; None where it says too little.

    A size without a number or a name is the name "?".
    """
    if not value.type.HasField("tensor_type") or not value.type.tensor_type.elem_type:
        return None
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return None
    sizes: list[Dim] = []
    for dim in tensor.shape.dim:
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        sizes.append(dim.dim_value if known else dims.get(dim.dim_param, dim.dim_param or "?"))
    return TensorSpec(tuple(sizes), dtype_name(tensor.elem_type, f"value {value.name!r}"))
