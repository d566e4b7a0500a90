"""The inputs that ranges and noise are measured on: the user's own data, or random ones."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from passes.errors import PassError
from passes.optimize import FIRST_SIZE
from passes.proof.draws import InputSampler
from passes.suggest import plural
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.config import KEYS, QuantSimConfig, split_factory
from pipeline.errors import UsageError
from pipeline.export.source import InputSpec
from pipeline.verify.user_inputs import LISTS, input_files, raw_files, read_samples
from pipeline.workspace import stamp

KEY: Final = KEYS.data

Feeds = dict[str, np.ndarray]


class Samples:
    """The samples, read or drawn anew by each stage: they need not fit into memory together.

    Args:
        specs: the inputs of the final model, which the user's data has to fit.
        sampler: draws inputs where there is no data; None where the run drew none either.
        seen: how many of the first samples the steps of the run before may have seen.
        key: what messages call the data of the calibration.
    """

    def __init__(
        self,
        settings: QuantSimConfig,
        specs: tuple[InputSpec, ...],
        sampler: InputSampler | None,
        seen: int = 0,
        key: str = KEY,
    ) -> None:
        calibration, self._key = settings.calibration, key
        self.entries, self._args, self._seed = calibration.data, calibration.args, calibration.seed
        self._specs, self._sampler, self._metric = specs, sampler, settings.metric
        self.fitted = calibration.samples
        self._evaluated_from, self._seen = 0, seen

    def hold_out(self, count: int) -> int:
        """Keep the last samples, `count` of them or a quarter of what there is, from what is fitted to the data; those
        after the first `fitted`, where there are enough. Returns how many are held out.

        Raises:
            UsageError: there is one sample alone.
        """
        found = sum(1 for _ in self.first(self.fitted + count))
        if found < 2:
            raise UsageError(
                f"found {plural(found, 'sample')} in {self._key}, expected two at least: the steps see "
                "one, and are judged on another"
            )
        held = min(count, max(found - self.fitted, found // 4, 1))
        self.fitted = self._evaluated_from = found - held
        return held

    def evaluation(self, count: int) -> Iterator[Feeds]:
        """The first `count` of the samples that were held out; of all samples where none were."""
        return islice(self.first(self._evaluated_from + count), self._evaluated_from, None)

    def unseen(self, count: int) -> Iterator[Feeds]:
        """`count` samples that no step has seen, or fewer where there are no more."""
        start = max(self._evaluated_from, self._seen)
        return islice(self.first(start + count), start, None)

    def fitting(self) -> Iterator[Feeds]:
        """The samples that algorithms of `quantsim.optimize` see."""
        return self.first(self.fitted)

    def layer_evaluation(self, count: int) -> Iterator[Feeds]:
        """The samples that layers of these algorithms are judged on."""
        return self.evaluation(count)

    def of_metric(self, count: int) -> Iterator[Feeds]:
        """The samples of `quantsim.metric`, with their targets: its own data; without any, the evaluation samples of
        the calibration's data; without that, `count` draws.

        Raises:
            UsageError: the data cannot be read, or there is none, and the run drew none either.
        """
        metric = self._metric
        if metric is None or not (metric.data or self.entries):
            return self.evaluation(count)
        entries, args, key = self.entries, self._args, self._key
        if metric.data:
            entries, args, key = metric.data, metric.args, "quantsim.metric.data"
        samples = (feeds for _, feeds in read_samples(entries, self._specs, key, args, metric.target))
        start = 0 if metric.data else self._evaluated_from
        return islice(samples, start, None if metric.samples is None else start + metric.samples)

    def first(self, count: int) -> Iterator[Feeds]:
        """The first `count` samples, or fewer where there are no more.

        Raises:
            UsageError: the data cannot be read, or there is none, and the run drew none either.
        """
        if self.entries:
            targets = self._metric.target if self._metric and not self._metric.data else ()
            samples = read_samples(self.entries, self._specs, self._key, self._args, targets)
            named = {spec.name for spec in self._specs}
            inputs = ((label, {key: feeds[key] for key in feeds if key in named}) for label, feeds in samples)
            return islice((without_nan(*sample, self._key) for sample in inputs), count)
        if self._sampler is None:
            raise UsageError(
                f"found neither {self._key} nor draws of the run; expected one of them to measure ranges on"
            )
        return map(self._sampler.draw, range(self._seed, self._seed + count))

    def identity(self) -> list[object]:
        """What tells other data from this: the files with their sizes and times, also of loaders; or the sizes."""
        files: list[object] = []
        for name, file in input_files(self.entries, self._key):
            # a loader is in the file of `file.py:function`; for one of a module some path where no file is
            files.append((name, stamp(file or Path(split_factory(name, KEY)[0]))))
            if file is not None and file.suffix in LISTS:
                files += [stamp(raw) for sample in raw_files(file, self._key) for raw in sample.values()]
        return [*files, *sorted(self._sampler.sizes.items())] if self._sampler else [*files]

    @property
    def may_change(self) -> bool:
        """Whether other samples may come another time, which no file shows: a loader makes them."""
        return any(file is None for _, file in input_files(self.entries, self._key))

    @property
    def note(self) -> str:
        """What random samples mean; empty where the samples are data."""
        if self.entries:
            return ""
        sizes = self._sampler.sizes.items() if self._sampler else ()
        drawn = ", ".join(f"{dim or 'unnamed'}={size}" for dim, size in sizes)
        return (
            f"no calibration data is given, so the ranges are those of random inputs{drawn and f' ({drawn})'}: scales"
            f" and noise say nothing of the model in use; give {self._key}"
        )


def enlarge(sampler: InputSampler, model: DetachedModel, given: Collection[str]) -> InputSampler:
    """`sampler` with larger sizes for dims that were drawn as small as they could be, where `model` runs at them.

    An image of 2 × 2, or a sequence of 2, has other ranges than any in use. A first axis, which is a batch, stays.

    Args:
        given: dims whose sizes somebody gave.
    """
    leading = {dim for known in sampler.inputs for dim in known.shape[:1]}
    small = {dim for dim, size in sampler.sizes.items() if size <= FIRST_SIZE} - leading - set(given)
    session: Session | None = None
    for size in LARGER_SIZES if small else ():
        larger = replace(sampler, sizes={**sampler.sizes, **dict.fromkeys(small, size)})
        if sum(_elements(larger)) > MOST_ELEMENTS:
            continue
        try:
            session = session or Session.of(model)
            outputs = session.run(larger.draw(0), within_s=MOST_S)
        except PassError:
            continue
        if all(np.isfinite(array).all() for array in outputs.values() if array.dtype.kind == "f"):
            return larger
    return sampler


LARGER_SIZES: Final = (64, 32, 16)
MOST_ELEMENTS: Final = 2**17
"""Elements of all inputs of one sample; the activations of a model have many times as many."""

MOST_S: Final = 10.0
"""Seconds of a run; each sample takes several."""


def _elements(sampler: InputSampler) -> Iterator[int]:
    for known in sampler.inputs:
        yield math.prod(sampler.sizes[dim] if isinstance(dim, str) else dim for dim in known.shape)


def without_nan(label: str, feeds: Feeds, key: str = KEY) -> Feeds:
    """The sample, after a check for NaN: a range would be that of the other elements.

    Raises:
        UsageError: an array holds NaN.
    """
    for name, array in feeds.items():
        if array.dtype.kind == "f" and np.isnan(array).any():
            count = int(np.isnan(array).sum())
            raise UsageError(f"{key}: {label}: {name!r} holds NaN ({count} of {array.size} numbers)")
    return feeds
