"""Matrix products."""

from __future__ import annotations

import torch

from pipeline.lowering import Kind
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Outs

__all__ = ["KERNELS"]


def matmul(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """A vector is a row on the left and a column on the right, as in numpy; torch's out= is unreliable for vectors."""
    del attrs
    (a, b), out = ins, outs[0]
    if b.dim() == 1:
        b, out = b.unsqueeze(1), out.unsqueeze(-1)
    if a.dim() == 1:
        a, out = a.unsqueeze(0), out.unsqueeze(-2)
    torch.matmul(a, b, out=out)


def gemm(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    """alpha · op(a) @ op(b) + beta · c, where c broadcasts to the product."""
    a = ins[0].t() if attrs["trans_a"] else ins[0]
    b = ins[1].t() if attrs["trans_b"] else ins[1]
    alpha, beta = _scalar(attrs["alpha"], outs[0]), _scalar(attrs["beta"], outs[0])
    if len(ins) == 3:
        torch.addmm(ins[2], a, b, alpha=alpha, beta=beta, out=outs[0])
        return
    torch.mm(a, b, out=outs[0])
    if alpha != 1:
        outs[0].mul_(alpha)


def einsum(ins: Ins, outs: Outs, attrs: Attrs) -> None:
    outs[0].copy_(torch.einsum(attrs["equation"], *ins))


def _scalar(value: float, like: torch.Tensor) -> float | int:
    """Torch takes no float factor for integer matrices; an integer product has a whole one."""
    return value if like.is_floating_point() else int(value)


KERNELS: dict[Kind, Kernel] = {Kind.MatMul: matmul, Kind.Gemm: gemm, Kind.Einsum: einsum}
