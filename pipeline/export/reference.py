"""What torch computes: the reference that every later stage is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pipeline.errors import OnnxlineError, SourceError
from pipeline.export.arrays import to_numpy, to_torch
from pipeline.export.blame import first_line, module_frame
from pipeline.export.quiet import quiet
from pipeline.export.source import TorchSource
from pipeline.export.tree import call, input_tensors, output_tensors, refill

__all__ = ["run_torch"]

SEED = 0
"""A module that draws numbers draws the same ones in each run; the user's own generator stays where it is."""


def run_torch(source: TorchSource, feeds: Mapping[str, np.ndarray | torch.Tensor]) -> dict[str, np.ndarray]:
    """Run the module in eval mode, without gradients.

    Args:
        feeds: one array for every name in `source.inputs`; they are copied, so the module may write into them.

    Returns:
        One array for every name in `source.outputs`, in that order; bfloat16 as ml_dtypes' dtype.

    Raises:
        SourceError: a feed is missing, or the module raises.
    """
    empty = next((name for name, parameter in source.module.named_parameters() if parameter.is_meta), None)
    if empty is not None:
        raise SourceError(
            f"the module has no value for {empty!r}, which is on the meta device; load its weights in the factory, or "
            "prove by structure (export.weights: referenced, verify.proof: structure)"
        )
    own = list(input_tensors(source.module, source.example))  # the module's names; the source may have others
    tensors = {}
    for name, spec in zip(own, source.inputs, strict=True):
        if spec.name not in feeds:
            raise SourceError(f"no value for the input {spec.name!r}; found {', '.join(feeds) or 'none'}")
        value = feeds[spec.name]
        tensors[name] = value if isinstance(value, torch.Tensor) else to_torch(value)
    example = refill(source.module, source.example, tensors)
    source.module.eval()
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            outputs = output_tensors(call(source.module, example))
    except OnnxlineError:
        raise
    except Exception as error:  # the user's forward may raise anything
        where = module_frame(error, source.module)
        place = f" in module {where[0]!r} ({where[1]})" if where else ""
        shapes = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in tensors.items())
        raise SourceError(f"the model raises{place} on {shapes}: {first_line(error)}") from error
    return {name: to_numpy(tensor) for name, tensor in zip(source.outputs, outputs.values(), strict=True)}
