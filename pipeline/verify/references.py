"""The outputs that everything else is judged by: torch's, or for an ONNX source that file's on onnxruntime."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from passes.errors import StepFailed
from passes.model.digests import digest_of
from passes.model.weights import read_model
from passes.proof.prove import Reference
from pipeline.config import ModelConfig, VerifyConfig
from pipeline.errors import SourceMistake
from pipeline.export.inputs import draw_inputs, named_dims
from pipeline.export.source import Source, TorchSource
from pipeline.verify.runners import Runner, onnxruntime_runner, torch_runner

__all__ = ["Draw", "compute_references", "outputs_digest", "plan_draws"]


EXACT: Final = "OUSbiu"
"""Kinds of numpy dtypes that hold neither NaN nor infinity."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One comparison: a seed, and a size for every named dim."""

    seed: int
    sizes: Mapping[str, int]

    @property
    def label(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.sizes.items())
        return f"draw {self.seed}" + (f" ({sizes})" if sizes else "")


def plan_draws(source: Source, model: ModelConfig, verify: VerifyConfig) -> tuple[Draw, ...]:
    """`verify.draws` draws at the first size of each named dim, and one at each further size."""
    dims = {name: model.sizes(name) for name in named_dims(source.inputs)}
    first = {name: sizes[0] for name, sizes in dims.items()}
    draws = [Draw(verify.seed + index, first) for index in range(verify.draws)]
    for index in range(1, max((len(sizes) for sizes in dims.values()), default=1)):
        sizes = {name: sizes[min(index, len(sizes) - 1)] for name, sizes in dims.items()}
        draws.append(Draw(verify.seed + verify.draws + index - 1, sizes))
    return tuple(draws)


def compute_references(source: Source, draws: tuple[Draw, ...]) -> list[Reference]:
    """Run the reference on every draw.

    Raises:
        SourceMistake: it does not run, or an output holds NaN or nothing is finite, so that nothing can be compared.
    """
    try:
        runner = _runner(source)
        return [_reference(runner, source, draw) for draw in draws]
    except StepFailed as error:
        raise SourceMistake(f"the ONNX file does not run as it is: {error}") from error


def outputs_digest(references: Sequence[Reference]) -> str:
    """A digest of what the reference computes, for keys: it sees also what no file of the model tells."""
    digest = hashlib.blake2b(digest_size=16)
    for reference in references:
        for name, array in (*reference.feeds.items(), *reference.outputs.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(repr(array.tolist()).encode() if array.dtype == object else digest_of(array).encode())
    return digest.hexdigest()


def _reference(runner: Runner, source: Source, draw: Draw) -> Reference:
    feeds = draw_inputs(source.inputs, draw.sizes, draw.seed)
    outputs = runner(feeds)
    for name, array in outputs.items():
        if _has_nan(array):
            raise SourceMistake(
                f"output {name!r} of the reference holds NaN on {draw.label}, so nothing can be compared with it; "
                "check the weights and the ranges of the inputs"
            )
    filled = [array for array in outputs.values() if array.size]
    if filled and not any(_has_finite(array) for array in filled):
        raise SourceMistake(
            f"no output of the reference holds a finite number on {draw.label}, so nothing can be compared with it; "
            "check the weights and the ranges of the inputs"
        )
    return Reference(feeds, outputs, draw.label)


def _runner(source: Source) -> Runner:
    if isinstance(source, TorchSource):
        return torch_runner(source)
    return onnxruntime_runner(read_model(source.path))


def _has_nan(array: np.ndarray) -> bool:
    return array.dtype.kind not in EXACT and bool(np.isnan(_widened(array)).any())


def _has_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in EXACT or bool(np.isfinite(_widened(array)).any())


def _widened(array: np.ndarray) -> np.ndarray:
    """As numpy's own dtype: it may not know what the small ones of `ml_dtypes` mean."""
    return array if array.dtype.kind == "c" else array.astype(np.float64, copy=False)
