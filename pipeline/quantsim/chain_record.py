"""The calls that the parts of a chain get: these are the samples of each part.

The chain is run with the parts in float. Ranges are measured on all calls, and some are kept for what else is measured:
decode reads the cache that prefill and decode have written, a decoder the states of its encoder, a denoiser the latents
at the time steps of its scheduler, a VAE the latents that come out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from passes.suggest import plural
from pipeline.config import QuantSimConfig
from pipeline.errors import UsageError
from pipeline.parts.sessions import Step
from pipeline.quantsim.chains import LENGTH, ChainResult, PartsChain
from pipeline.quantsim.samples import KEY, Feeds, Samples

KEPT: Final = 4
"""About how many calls of a part are kept for one subject: all steps of a denoiser, and a few of a decoder over its
whole text, at other places for each subject, as a cache has other values after many tokens than after few."""

COMPARED: Final = 2
"""Subjects whose results are compared."""


@dataclass(frozen=True, slots=True, eq=False)
class ChainRecord:
    """What a chain has done in float.

    counts: part → how many calls of it lie in the folder. seen: part → how many calls its observer has seen.
    cases: the first subjects with their results.
    """

    counts: Mapping[str, int]
    seen: Mapping[str, int]
    cases: tuple[tuple[Any, ChainResult], ...]


def record(
    chain: PartsChain,
    steps: Mapping[str, Step],
    folder: Path,
    wanted: Mapping[str, int],
    observers: Mapping[str, Callable[[Feeds], object]] = MappingProxyType({}),
    progress: Callable[[int, int], object] = lambda *_: None,
) -> ChainRecord:
    """Run the chain, and write calls of each part into files of `folder`, until there are as many as wanted.

    Args:
        chain: gives the subjects, and calls the parts.
        steps: part → its call in float.
        folder: for the files.
        wanted: part → how many calls are written.
        observers: part → what is called with the inputs of each call of it, also of those that are not written.
        progress: called after each subject, with its number and how many there are at most.

    Raises:
        UsageError: there is no subject, or the chain has not called a part.
    """
    subjects = list(islice(chain.subjects(), max(*wanted.values(), COMPARED)))
    if not subjects:
        raise UsageError(f"{KEY}: found no {chain.noun} in the data, expected one at least: {chain.expected}")
    recorder = _SampleWriter(steps, folder, wanted, observers)
    run, cases = chain.open({part: partial(recorder.call, part) for part in steps}), list[tuple[Any, ChainResult]]()
    for subject in subjects[:COMPARED]:
        cases.append((subject, run(subject, LENGTH, ())))  # without keeping a call: this says how many there are
    recorder.begin(0)
    for number, subject in enumerate(subjects):
        if recorder.is_full:
            break
        run(subject, LENGTH, ())
        recorder.begin(number + 1)
        progress(number + 1, len(subjects))
    missing = next((part for part, found in recorder.counts.items() if not found), None)
    if missing is not None:
        raise UsageError(
            f"{KEY}: {plural(len(subjects), 'sample')} gave no call of the part {missing}, so its ranges are not "
            "known; a call of prefill takes a prompt of a whole chunk, and one of vision an image"
        )
    return ChainRecord(recorder.counts, recorder.seen, tuple(cases))


class _SampleWriter:
    """Calls the steps of a chain, and writes every `stride`th call of a part, beginning one later for each subject.

    Observers see all calls: a call of a decoder is one token, and a few dozen tokens have narrower ranges than texts.
    """

    def __init__(
        self,
        steps: Mapping[str, Step],
        folder: Path,
        wanted: Mapping[str, int],
        observers: Mapping[str, Callable[[Feeds], object]],
    ) -> None:
        self._steps, self._folder, self._wanted, self._observers = steps, folder, wanted, observers
        self.counts, self.seen = dict.fromkeys(steps, 0), dict.fromkeys(steps, 0)
        self._places = dict.fromkeys(steps, 0)
        self._strides: dict[str, int] = {}
        self._number = 0

    @property
    def is_full(self) -> bool:
        return all(found >= self._wanted[part] for part, found in self.counts.items())

    def begin(self, number: int) -> None:
        """Begin the subject `number`; the calls of a part that there were for those before it say the strides."""
        if not number:
            self._strides = {part: max(1, calls // (COMPARED * KEPT)) for part, calls in self._places.items()}
        self._number, self._places = number, dict.fromkeys(self._steps, 0)

    def call(self, part: str, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        place, stride, count = self._places[part], self._strides.get(part), self.counts[part]
        if stride and place % stride == self._number % stride and count < self._wanted[part]:
            arrays: dict[str, Any] = dict(feeds)
            np.savez_compressed(self._folder / _file_name(part, count), **arrays)  # much of a cache is zeros
            self.counts[part] += 1
        if self._strides and part in self._observers:
            self._observers[part](dict(feeds))
            self.seen[part] += 1
        self._places[part] += 1
        return self._steps[part](feeds)


def _file_name(part: str, place: int) -> str:
    return f"{part}.{place:05}.npz"


class ChainSamples(Samples):
    """The calls of one part that `record` has written.

    Args:
        known: what tells other models from these.
    """

    def __init__(
        self, settings: QuantSimConfig, chain: PartsChain, folder: Path, part: str, known: Sequence[object]
    ) -> None:
        super().__init__(settings, (), None)
        self._chain, self._folder, self._part, self._known = chain, folder, part, known

    def first(self, count: int) -> Iterator[Feeds]:
        for place in range(count):
            file = self._folder / _file_name(self._part, place)
            if not file.is_file():
                return
            with np.load(file) as arrays:
                yield dict(arrays)

    def identity(self) -> list[object]:
        return [*self._chain.identity(), self._part, *self._known]

    @property
    def may_change(self) -> bool:
        return self._chain.hands_over and super().may_change

    @property
    def note(self) -> str:
        if self.entries:
            return ""
        return (
            f"quantsim: no calibration data is given, so the ranges are those of random {self._chain.noun}: scales and "
            f"noise say nothing of the model in use; give {KEY}, {self._chain.expected}"
        )
