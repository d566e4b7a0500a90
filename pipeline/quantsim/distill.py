"""`distill`: the integers and the scales of all weights, fitted to the outputs of the float model by gradients.

Other steps look at the error of one layer. Here errors of layers can make up for each other, since the loss is the
noise of the model's outputs as a part of their signal. Weights are rounded in each forward pass, and gradients go
straight through the rounding, also to the scales ("Learned Step Size Quantization", Esser et al., 2020; here the
logarithms of the scales are learned, at a rate of their own). The gradients are torch's, and so are the steps: Adam,
whose rate falls by a half wave of the cosine.

torch computes the nodes between the weights and the outputs, and holds all of their results for a sample. What else
these nodes read comes from a run of onnxruntime, with the float outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from passes.suggest import bytes_text
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from passes.worker.platforms import memory_limit
from pipeline.errors import Unsupported
from pipeline.quantsim.encodings import Encoding, dequantize_integers, quantize
from pipeline.quantsim.gradients import find_gradient_nodes
from pipeline.quantsim.optimizers import Distill
from pipeline.quantsim.torch_nodes import TorchNodes, read_stored
from pipeline.runtime.tensors import as_tensor, to_numpy

HALF: Final = 0.5
"""How far beyond the format an element still has a gradient."""

SCALE_RATE: Final = 0.1
"""The rate of the scales as a part of that of the weights."""

ARRAYS: Final = 9
"""Arrays of float32 of the size of each weight at least: as it is rounded, in steps of its scale, quantized, with what
the gradients need of that, and three for Adam. Blocks have one more, and an allocator that keeps freed memory up to
five."""


@dataclass(frozen=True, slots=True)
class LearnedWeight:
    """A weight whose integers and scales gradients reach.

    latent: in steps of the scale; its nearest integers are those of the weight.
    growth: the logarithm of each scale over its first.
    """

    encoding: Encoding
    latent: Tensor
    growth: Tensor

    @classmethod
    def begin(cls, array: np.ndarray, encoding: Encoding) -> LearnedWeight:
        """With the integers of `array`, so that an element turns only after steps in one direction."""
        latent, growth = quantize(array, encoding).astype(np.float32), np.zeros(encoding.scale.shape, np.float32)
        return cls(encoding, as_tensor(latent).requires_grad_(), as_tensor(growth).requires_grad_())

    def round(self) -> Tensor:
        """The integers, as floats."""
        precision = self.encoding.precision
        return self.latent.round().clamp(precision.lowest, precision.highest)

    def scales(self) -> Tensor:
        return as_tensor(self.encoding.scale.astype(np.float32)) * self.growth.exp()

    def compute(self) -> Tensor:
        """The weight as it is quantized. Elements beyond the format have no gradient."""
        precision = self.encoding.precision
        latent = self.latent.clamp(precision.lowest - HALF, precision.highest + HALF)
        integers = latent + (self.round() - latent).detach()
        zero = as_tensor(self.encoding.zero_point.astype(np.float32))
        return (integers - self._spread(zero)) * self._spread(self.scales())

    def _spread(self, values: Tensor) -> Tensor:
        """`Encoding.spread` by torch."""
        encoding, shape = self.encoding, self.latent.shape
        if encoding.axis is None:
            return values
        if encoding.precision.granularity == "block":
            repeated = values.repeat_interleave(encoding.precision.block, encoding.axis)
            return repeated.narrow(encoding.axis, 0, shape[encoding.axis])
        return values.reshape([-1 if axis == encoding.axis else 1 for axis in range(len(shape))])

    def finish(self) -> tuple[Encoding, np.ndarray]:
        """The encoding, and the float32 values that rounding to nearest turns into the integers."""
        with torch.no_grad():
            encoding = replace(self.encoding, scale=to_numpy(self.scales()))
            return encoding, dequantize_integers(to_numpy(self.round()), encoding)


def distill(
    model: DetachedModel,
    rounded: DetachedModel,
    encodings: Mapping[str, Encoding],
    samples: Sequence[Path],
    step: Distill,
    observer: Callable[[int], object] = lambda _: None,
) -> tuple[dict[str, Encoding], dict[str, np.ndarray]]:
    """Fit the weights that have `encodings` to the outputs of `model`.

    Args:
        rounded: `model` with the weights as they are rounded now, and what else the steps before have chosen.
        samples: files of arrays by input name.
        observer: called at each iteration with how many are done.

    Returns:
        Weight → its encoding, and its float32 numbers, which are multiples of its scales.

    Raises:
        Unsupported: an operator on the way to the outputs has no gradient, or none that is finite; or the memory of the
            machine does not suffice.
    """
    stored = rounded.index.initializers
    need, limit = ARRAYS * sum(4 * math.prod(stored[name].dims) for name in encodings), memory_limit()
    if need > limit:
        raise Unsupported(
            f"it holds {ARRAYS} arrays of the size of each weight, {bytes_text(need)}, and this machine has "
            f"{bytes_text(limit)} of memory"
        )
    weights = {name: LearnedWeight.begin(rounded.array(stored[name]), known) for name, known in encodings.items()}
    nodes, _, outputs = find_gradient_nodes(model, weights.keys())
    others = {name: entry for name, entry in read_stored(rounded).items() if name not in weights}
    student = TorchNodes(nodes, model.proto.opset_import, outputs, others)
    session = Session.of(model, sorted(set(student.reads) - weights.keys() - {*model.index.inputs}))
    groups = [
        {"params": [weight.latent for weight in weights.values()], "lr": step.rate},
        {"params": [weight.growth for weight in weights.values()], "lr": SCALE_RATE * step.rate},
    ]
    descent = torch.optim.Adam(groups)
    slowing = torch.optim.lr_scheduler.CosineAnnealingLR(descent, step.iterations)
    draw = np.random.default_rng(step.seed)
    order: list[int] = []
    for done in range(step.iterations):
        observer(done)
        order = order or draw.permutation(len(samples)).tolist()
        with np.load(samples[order.pop()]) as archive:
            sample = dict(archive)
        expected = {**sample, **session.run(sample)}
        values = {name: as_tensor(expected[name]) for name in student.reads if name not in weights}
        made = student.compute(values | {name: weight.compute() for name, weight in weights.items()})
        losses = [_noise(made[name], as_tensor(expected[name])) for name in outputs if expected[name].any()]
        descent.zero_grad()
        if losses:  # zeros have no ratio
            torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
        descent.step()
        slowing.step()
    finished = {name: weight.finish() for name, weight in weights.items()}
    if not all(np.isfinite(array).all() for _, array in finished.values()):
        raise Unsupported("an output or a gradient of the model is not finite, so nothing leads to better weights")
    return {name: found[0] for name, found in finished.items()}, {name: found[1] for name, found in finished.items()}


def _noise(found: Tensor, expected: Tensor) -> Tensor:
    """The noise of an output as a part of its signal."""
    found, expected = found.double(), expected.double()  # squares overflow in 16 bits
    return (found - expected).square().sum() / expected.square().sum().clamp_min(torch.finfo(torch.float64).tiny)
