"""What quantized parts do to the result of their chain: all together, each part, and each layer of each part.

A chain of quantized parts reads the tokens of the chain in float, so that its logits are compared token by token; of a
pipeline the images are compared. What one part adds is measured by a chain in which it alone is quantized. How that
divides among its layers is the estimate of the part's simulation, of its own outputs (noise.py): so a table over all
parts costs one chain for each of them, and none for a layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from passes.errors import StepFailed
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.errors import CheckFailed
from pipeline.parts.slots import Step
from pipeline.quantsim.chains import LENGTH, ChainResult, PartsChain
from pipeline.quantsim.noise import describe_ratio, noise_power, sqnr_db
from pipeline.quantsim.report import LAYER_TITLES, QuantSimReport, layer_cells, layer_lines


@dataclass(frozen=True, slots=True)
class ChainNoise:
    """Some parts quantized, against all in float.

    measured: what `sqnr_db` is the ratio of.
    tokens, equal: greedy tokens that were compared, and those that are equal; 0 where the chain writes none.
    """

    measured: str
    sqnr_db: float
    tokens: int = 0
    equal: int = 0

    @property
    def agreement(self) -> float:
        """The part of the tokens that is equal."""
        return self.equal / self.tokens if self.tokens else math.nan

    @property
    def sentence(self) -> str:
        ratio = f"{self.measured} {describe_ratio(self.sqnr_db)}"
        if not self.tokens:
            return f"chain: {ratio} against the parts in float"
        return f"chain: {self.equal} of {self.tokens} tokens are those of the parts in float, {ratio}"


class ChainJudge:
    """Compares chains with quantized parts with the chain of the parts in float.

    Args:
        steps: of all parts in float.
        cases: subjects, and what comes out for them in float.
    """

    def __init__(self, chain: PartsChain, steps: Mapping[str, Step], cases: Sequence[tuple[Any, ChainResult]]) -> None:
        self._chain, self._steps, self._cases = chain, steps, cases

    @property
    def subjects(self) -> int:
        return len(self._cases)

    def compare(self, quantized: Mapping[str, DetachedModel]) -> ChainNoise:
        """The noise of the chain in which the parts `quantized` are.

        Raises:
            CheckFailed: onnxruntime does not run one of them.
        """
        signal, noise, tokens, equal = 0.0, 0.0, 0, 0
        try:
            steps = {part: Session.of(model).run for part, model in quantized.items()}
            run = self._chain.open({**self._steps, **steps})
            for subject, wanted in self._cases:
                found = run(subject, LENGTH, wanted.tokens)
                tokens += len(wanted.tokens)
                equal += sum(a == b for a, b in zip(wanted.tokens, found.tokens, strict=True))
                values = wanted.values.astype(np.float64)
                signal += float(np.square(values).sum())
                noise += float(np.square(values - found.values).sum())
        except StepFailed as failure:
            raise CheckFailed(f"the quantized parts do not run on onnxruntime: {failure}") from failure
        return ChainNoise(self._chain.measured, sqnr_db(signal, noise), tokens, equal)


@dataclass(frozen=True, slots=True)
class ChainLayer:
    """A layer of a part, by its output: the ratio in the chain's result if the layer alone were quantized, and its
    share of what all layers of all parts do to that result. `role` is that in a structure, such as `qkv layer.0 q`."""

    part: str
    layer: str
    op: str
    module: str
    role: str
    sqnr_db: float
    share: float


@dataclass(frozen=True, slots=True)
class QuantizedChain:
    """The chain of all quantized parts.

    parts: what each part alone does.
    layers: those of all parts, worst first.
    notes: why a part has no layer there.
    """

    noise: ChainNoise
    parts: Mapping[str, ChainNoise]
    layers: tuple[ChainLayer, ...]
    notes: tuple[str, ...] = ()

    def lines(self, most: int | None) -> Iterator[str]:
        """The table over all parts, of the `most` worst layers; and a line for each part."""
        yield from layer_lines(TITLES, self.rows, most)
        yield from self.sentences()
        yield self.noise.sentence

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """The table, by `TITLES`."""
        return tuple(
            (row.part, *layer_cells(row.layer, row.role or row.op, row.module, row.sqnr_db, row.share))
            for row in self.layers
        )

    def ratios_of(self, part: str) -> dict[str, float]:
        """Layer of a part → its ratio in dB."""
        return {row.layer: row.sqnr_db for row in self.layers if row.part == part}

    def sentences(self) -> Iterator[str]:
        """Why a part has no row, and what each part does alone."""
        yield from self.notes
        for name, noise in self.parts.items():
            yield f"chain with {name} alone quantized: {noise.measured} {describe_ratio(noise.sqnr_db)}"


TITLES: Final = ("part", *LAYER_TITLES)


def rate_chain(
    judge: ChainJudge, quantized: Mapping[str, DetachedModel], reports: Mapping[str, QuantSimReport]
) -> QuantizedChain:
    """Measure the chain and each part of it, and give each layer its share.

    Args:
        quantized: all parts.
        reports: of their simulations, with the estimates of layers.
    """
    whole = judge.compare(quantized)
    alone = {name: judge.compare({name: model}) for name, model in quantized.items()} if len(quantized) > 1 else {}
    layers: list[ChainLayer] = []
    notes: list[str] = []
    for name, report in reports.items():
        if report.not_estimated:
            notes.append(f"part {name} has no row: {report.not_estimated}")
        ratio = alone.get(name, whole).sqnr_db
        if math.isinf(ratio) and ratio > 0 and report.layers:
            notes.append(f"part {name} does nothing to the {whole.measured} of the chain")
        layers += (
            ChainLayer(name, row.layer, row.op, row.module, row.part, _ratio_of(row.share, ratio), row.share)
            for row in report.layers
        )
    powers = [noise_power(row.sqnr_db) for row in layers]
    total = sum(powers) or 1.0
    shared = (
        ChainLayer(row.part, row.layer, row.op, row.module, row.role, row.sqnr_db, power / total)
        for row, power in zip(layers, powers, strict=True)
    )
    return QuantizedChain(whole, alone, tuple(sorted(shared, key=lambda row: row.sqnr_db)), tuple(notes))


def _ratio_of(share: float, ratio: float) -> float:
    """The ratio in dB of a share of the noise that has `ratio`."""
    return ratio - 10 * math.log10(share) if share > 0 else math.inf
