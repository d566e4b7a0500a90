"""The kernel of row programs: one launch of Triton on a CUDA device, elsewhere operators of torch in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from pipeline.errors import Unsupported
from pipeline.ops import Kind
from pipeline.ops.row_programs import COMPARISONS, ROUNDINGS, Computed, Input, Operand, Program, read_program
from pipeline.runtime.kernels.base import Attrs, Ins, Kernel, Launch, Outs
from pipeline.runtime.kernels.cuda import has_triton, launch_row_program


def row_program(ins: Ins, outs: Outs, attrs: Attrs) -> Launch:
    program, out = read_program(attrs["program"]), outs[0]
    if out.is_cuda and out.numel():
        if not has_triton():
            raise Unsupported(
                "a row program on a GPU needs Triton, a compiler of C and the headers of Python, and one of them is "
                "not there: pip install 'onnxline[cuda]' and install gcc and python3-dev, or leave the fusion rows out"
            )
        return launch_row_program(program, ins, out)
    return partial(compute_into, program, ins, out)


def compute_into(program: Program, ins: Ins, out: torch.Tensor) -> None:
    """The form in torch: all instructions in float32, and the result is rounded at the end."""
    floats = [operand.expand(out.shape).to(torch.float32) for operand in ins]
    computed: list[torch.Tensor] = []
    for instruction in program:
        operands = [_find_operand(operand, floats, computed) for operand in instruction.operands]
        computed.append(TORCH[instruction.name](*operands))
    out.copy_(computed[-1])


def _find_operand(operand: Operand, ins: Ins, computed: list[torch.Tensor]) -> Any:
    match operand:
        case Input(number):
            return ins[number]
        case Computed(number):
            return computed[number]
        case _:
            return ins[0].new_full((), operand)


def _compare(function: Callable[..., torch.Tensor], a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return function(a, b).float()


def _round(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype).float()


def _rotate(rows: torch.Tensor) -> torch.Tensor:
    first, second = rows.chunk(2, -1)
    return torch.cat((-second, first), -1)


TORCH: Final[Mapping[str, Callable[..., torch.Tensor]]] = {
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "maximum", "minimum")},
    **{name: partial(_compare, getattr(torch, name)) for name in COMPARISONS},
    **{name: getattr(torch, name) for name in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "square")},
    **{name: getattr(torch, name) for name in ("sin", "cos", "erf", "tanh", "sigmoid", "relu")},
    **{name: partial(_round, getattr(torch, name)) for name in ROUNDINGS},
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "sum": lambda rows: rows.sum(-1, keepdim=True),
    "mean": lambda rows: rows.mean(-1, keepdim=True),
    "amax": lambda rows: rows.amax(-1, keepdim=True),
    "rotate": _rotate,
}  # fmt: skip
"""Instruction → its form in torch."""

KERNELS: dict[Kind, Kernel] = {Kind.RowProgram: row_program}
