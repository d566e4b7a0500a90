"""Matrix products as calls of torch."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node, call
from pipeline.ir.graph import Attr, TensorSpec


def gemm(node: Node) -> None:
    """alpha · op(a) @ op(b) + beta · c, where c broadcasts to the product."""
    read = node.attributes
    trans_a, trans_b = read.flag("transA"), read.flag("transB")
    alpha, beta = (fit_factor(node, read.number(name, 1.0)) for name in ("alpha", "beta"))
    a, b, *c = node.operands()
    columns = node.output().shape[1:]
    if alpha == beta == 1 and not trans_a and trans_b and (not c or node.vid_spec(c[0]).shape == columns):
        node.emit("aten.linear.default", [a, b, *c])
        return
    a, b = (turn(node, a) if trans_a else a), (turn(node, b) if trans_b else b)
    if c:
        scales: dict[str, Attr] = {name: item for name, item in (("beta", beta), ("alpha", alpha)) if item != 1}
        node.emit("aten.addmm.default", [*c, a, b], scales)
    elif alpha == 1:
        node.emit("aten.mm.default", [a, b])
    else:
        product = node.step("aten.mm.default", [a, b], node.output())
        node.emit("aten.mul.Tensor", [product], {"other": alpha})


def turn(node: Node, vid: int) -> int:
    """The transposed matrix."""
    spec = node.vid_spec(vid)
    return node.step("aten.t.default", [vid], TensorSpec(spec.shape[::-1], spec.dtype))


def fit_factor(node: Node, factor: float) -> float | int:
    """`factor` as torch takes it: an integer for matrices of integers."""
    return factor if "float" in node.output().dtype else int(factor)


def einsum(node: Node) -> None:
    equation = node.attributes.text("equation").replace(" ", "")
    node.emit("aten.einsum.default", node.operands(), {"equation": equation})


IMPORTERS: dict[str, Importer] = {"Einsum": einsum, "Gemm": gemm, "MatMul": call("aten.matmul.default")}
