"""Calls that draw numbers, each launch from a new generator with the op's seed, so that runs repeat.

A replay must not repeat: its steps have a further attribute `generator`, which goes on from launch to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from pipeline.runtime.devices import CPU
from pipeline.runtime.kernels.aten.call import AtenCall
from pipeline.runtime.kernels.base import Launch, Outs
from pipeline.runtime.own_random import DRAWS
from pipeline.runtime.torch_args import tensors_in


def launch_draw(generator: torch.Generator | None, call: AtenCall, outs: Outs) -> Launch:
    """`call` from `generator`, or from a new one at each launch."""
    draw = partial(DRAWN[call.kind], *call.args, **call.kwargs)
    return partial(_draw_into, outs, draw, generator, call.given["seed"])


def _draw_into(
    outs: Sequence[torch.Tensor], draw: Callable[..., Any], generator: torch.Generator | None, seed: int
) -> None:
    drawn = draw(generator=generator or CPU.generator(seed))
    for out, result in zip(outs, tensors_in(drawn), strict=True):
        out.copy_(result)


DRAWN: Final[Mapping[str, Callable[..., Any]]] = {
    f"onnxline.{schema.partition('(')[0]}.default": function for schema, function in DRAWS.items()
}
