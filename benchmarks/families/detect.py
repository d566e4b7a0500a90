"""Export a family, and compare the triples that the finder sees with those that torch ran."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.families.table import Family
from benchmarks.families.truth import Triple, triples_that_ran
from passes.structures import STRUCTURES, Instance
from passes.weights.detached import DetachedModel, read_model
from pipeline.config import ExportConfig
from pipeline.export import TorchSource, export_onnx, load_source
from pipeline.export.source import draw_inputs

QKV = STRUCTURES["qkv"]
NOISE = 0.1
"""Standard deviation of what is added to biases and to the factors of norms."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A family in ONNX, unoptimized; inputs to compare on; and what torch's module tree says of it."""

    model: DetachedModel
    feeds: tuple[Mapping[str, np.ndarray], ...]
    truth: tuple[Triple, ...]


@dataclass(frozen=True, slots=True)
class Detection:
    """`expected` instances by torch's module tree, `found` by the finder; `missed` are torch's modules that it did not
    see, `invented` what it saw where torch has nothing, `lost` what its checker misses before anything has happened."""

    expected: int
    found: int
    missed: tuple[str, ...]
    invented: tuple[str, ...]
    lost: tuple[str, ...]
    instead: str

    @property
    def right(self) -> bool:
        return not (self.missed or self.invented or self.lost)


def export_family(family: Family, draws: int = 1) -> Exported:
    """Make the model and export it as `onnxline run` does.

    Raises:
        OnnxlineError: the class cannot be made, traced or translated.
    """
    source = load_source(family.section())
    assert isinstance(source, TorchSource)
    stir(source.module)
    truth = triples_that_ran(source, family.no_softmax)
    with tempfile.TemporaryDirectory(prefix="onnxline-family-") as folder:
        path = Path(folder) / "model.onnx"
        export_onnx(source, ExportConfig(), path)
        model = read_model(path)
    torch._dynamo.reset()  # it would hold on to every model it has seen
    feeds = tuple(draw_inputs(source.inputs, {}, seed) for seed in range(draws))
    return Exported(model, feeds, truth)


def stir(module: nn.Module) -> None:
    """Draw every parameter: transformers begins biases with 0 and the factors of norms with 1 (MobileViT: 0), which
    optimizers drop, and matrices so small that little of the input is left after a few layers."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.add_(noise / math.sqrt(parameter.numel() / len(parameter)))
            elif name.endswith("weight"):
                parameter.copy_(1 + NOISE * noise)
            else:
                parameter.add_(NOISE * noise)


def detect(exported: Exported) -> Detection:
    """Each instance's three weights have to be those of one attention module, in their roles, byte for byte."""
    found = QKV.find(exported.model)
    wanted = Counter({triple: triple.times for triple in exported.truth})
    seen: Counter[Triple] = Counter()
    invented = []
    for instance in found.instances:
        triple = next((one for one in wanted if _is(instance, one)), None)
        if triple is None or seen[triple] == wanted[triple]:
            invented.append(f"{instance.name}: {', '.join(weight.name for weight in instance.weights)}")
        else:
            seen[triple] += 1
    return Detection(
        wanted.total(),
        len(found.instances),
        tuple(triple.module for triple in (wanted - seen).elements()),
        tuple(invented),
        tuple(QKV.find_lost(found.instances, exported.model)),
        found.instead,
    )


def _is(instance: Instance, triple: Triple) -> bool:
    kept: Sequence[frozenset[str]] = [weight.digests for weight in instance.weights]
    return len(kept) == 3 and all(digest in digests for digest, digests in zip(triple.digests, kept, strict=True))
