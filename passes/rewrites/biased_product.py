"""A product of rows by a stored matrix, and the bias that an Add brings: one Gemm where the rows are a matrix.

Where the rows have more axes, a Gemm stands between two Reshapes; `flat_rows` says where that pays.
"""

from __future__ import annotations

from onnx import NodeProto

from passes.graph.op_facts import ONNX_DOMAINS
from passes.rewrites.canonical_norm import is_feature_vector
from passes.rewrites.rewriter import Rewriter, is_float
from passes.suggest import plural


def find_bias(rewriter: Rewriter, product: NodeProto) -> tuple[NodeProto, str] | None:
    """The Add that alone reads a product with a stored matrix, and the stored vector that it adds to each row.

    Args:
        rewriter: the graph.
        product: any node.

    Returns:
        The Add and the name of the vector; None for a node that is no such product, or has no bias.
    """
    name = product.output[0]
    if product.op_type != "MatMul" or product.domain not in ONNX_DOMAINS or rewriter.is_shared(name):
        return None
    sums = [node for node in rewriter.consumers[name] if node.op_type == "Add" and node.domain in ONNX_DOMAINS]
    rank, weight = len(rewriter.shape(name) or ()), rewriter.constant(product.input[1])
    if not rank or not sums or weight is None or weight.ndim != 2:
        return None
    (bias,) = [read for read in sums[0].input if read != name]
    vector = rewriter.constant(bias)
    is_bias = vector is not None and is_float(vector) and is_feature_vector(vector, rank, weight.shape[1])
    return (sums[0], bias) if is_bias else None


def join_biases(rewriter: Rewriter) -> bool:
    """Write each product of matrices and its bias as one Gemm; whether any is."""
    before = rewriter.changes
    for product in rewriter.by_op("MatMul"):
        found = find_bias(rewriter, product)
        if found is not None and len(rewriter.shape(product.input[0]) or ()) == 2:
            end, bias = found
            gemm = rewriter.add("Gemm", [*product.input, bias], end, rewriter.shape(end.output[0]))
            rewriter.replace(end.output[0], gemm)
    return rewriter.changes > before


def why_apart(rewriter: Rewriter) -> str:
    """How many products of rows stay apart from their bias, and why; empty where none does."""
    names = [node.output[0] for node in rewriter.by_op("MatMul") if find_bias(rewriter, node)]
    fixed = [name for name in names if rewriter.fixed_shape(name)]
    costly = f"{plural(len(fixed), 'product')} apart from the bias: a Gemm would need more Reshapes than it saves nodes"
    unknown = f"{plural(len(names) - len(fixed), 'product')} apart from the bias: sizes are open"
    return "; ".join([costly] * bool(fixed) + [unknown] * (len(fixed) < len(names)))
