"""Matrix products."""

from __future__ import annotations

from pipeline.importers.from_onnx.node import Importer, Node

__all__ = ["IMPORTERS"]


def matmul(node: Node) -> None:
    node.emit("MatMul", node.operands())


def gemm(node: Node) -> None:
    """alpha · a · b + beta · c, where a and b may be transposed, and c may be left out."""
    read = node.attributes
    attrs = {
        "alpha": read.number("alpha", 1.0),
        "beta": read.number("beta", 1.0),
        "trans_a": read.flag("transA"),
        "trans_b": read.flag("transB"),
    }
    node.emit("Gemm", node.operands(), attrs)


def einsum(node: Node) -> None:
    node.emit("Einsum", node.operands(), {"equation": node.attributes.text("equation").replace(" ", "")})


IMPORTERS: dict[str, Importer] = {"Einsum": einsum, "Gemm": gemm, "MatMul": matmul}
