"""Matrix products."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node, direct, read_flag, read_number


def einsum(node: Node) -> None:
    node.emit("Einsum", node.operands(), {"equation": node.attributes.text("equation").replace(" ", "")})


IMPORTERS: dict[str, Importer] = {
    "Einsum": einsum,
    "Gemm": direct(
        alpha=read_number("alpha", 1.0),
        beta=read_number("beta", 1.0),
        trans_a=read_flag("transA"),
        trans_b=read_flag("transB"),
    ),
    "MatMul": direct(),
}
