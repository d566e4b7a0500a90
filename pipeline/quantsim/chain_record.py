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
from pipeline.parts.slots import PAST_PREFIX, Step
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
    *,
    holds_out: bool = False,
) -> ChainRecord:
    """Run the chain, and write calls of each part into files of `folder`, until there are as many as wanted.

    Args:
        chain: gives the subjects, and calls the parts.
        steps: part → its call in float.
        folder: for the files.
        wanted: part → how many calls are written.
        observers: part → what is called with the inputs of each call of it, also of those that are not written.
        progress: called after each subject, with its number and how many there are at most.
        holds_out: the subjects whose results are compared give no samples, and their calls have files apart. Then
            texts are also read at once, for algorithms that need many tokens.

    Raises:
        UsageError: there is no subject, or none but those that are held out, or the chain has not called a part.
    """
    subjects = list(islice(chain.subjects(), max(*wanted.values(), COMPARED) + COMPARED * holds_out))
    if not subjects:
        raise UsageError(f"{KEY}: found no {chain.noun} in the data, expected one at least: {chain.expected}")
    if holds_out and len(subjects) == 1:
        raise UsageError(
            f"{KEY}: found 1 sample, expected two at least: the steps of quantsim.optimize see one, and are judged on "
            "another"
        )
    held = min(COMPARED, -(-len(subjects) // 4)) if holds_out else 0
    recorder = _SampleWriter(steps, folder, wanted, observers)
    run, cases = chain.open({part: partial(recorder.call, part) for part in steps}), list[tuple[Any, ChainResult]]()
    for subject in subjects[: held or COMPARED]:
        cases.append((subject, run(subject, LENGTH, ())))  # without keeping a call: this says how many there are
    recorder.set_strides(len(cases))

    def read_whole(subject: Any, found: ChainResult, kind: str) -> None:
        if found.tokens and (whole := chain.extend(subject, found.tokens[:-1])) is not None:
            recorder.begin(0, kind)
            run(whole, 1, ())

    for number, subject in enumerate(subjects[:held]):
        recorder.begin(number, HELD)
        run(subject, LENGTH, ())
        read_whole(subject, cases[number][1], TEXT + HELD)
    for number, subject in enumerate(subjects[held:]):
        if recorder.is_full:
            break
        recorder.begin(number)
        found = run(subject, LENGTH, ())
        if holds_out:
            read_whole(subject, found, TEXT)
        progress(number + 1, len(subjects) - held)
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
        self._counts = {kind: dict.fromkeys(steps, 0) for kind in ("", HELD, TEXT, TEXT + HELD)}
        self.seen = dict.fromkeys(steps, 0)
        self._places = dict.fromkeys(steps, 0)
        self._strides: dict[str, int] = {}
        self._number, self._kind = 0, ""

    @property
    def counts(self) -> dict[str, int]:
        """Part → how many samples of it there are."""
        return self._counts[""]

    @property
    def is_full(self) -> bool:
        return all(found >= self._wanted[part] for part, found in self.counts.items())

    def set_strides(self, subjects: int) -> None:
        """Keep about `KEPT` calls of a part for a subject, by the calls that there were for `subjects` subjects."""
        self._strides = {part: max(1, calls // (subjects * KEPT)) for part, calls in self._places.items()}

    def begin(self, number: int, kind: str = "") -> None:
        """Begin the subject `number`; observers see the calls of samples alone."""
        self._number, self._kind, self._places = number, kind, dict.fromkeys(self._steps, 0)

    def call(self, part: str, feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        place, stride, counts = self._places[part], self._strides.get(part), self._counts[self._kind]
        is_chosen = stride and place % stride == self._number % stride
        if self._kind.startswith(TEXT):
            is_chosen = any(name.startswith(PAST_PREFIX) for name in feeds)
        if is_chosen and counts[part] < self._wanted[part]:
            arrays: dict[str, Any] = dict(feeds)
            file = self._folder / _file_name(part, self._kind, counts[part])
            np.savez_compressed(file, **arrays)  # much of a cache is zeros
            counts[part] += 1
        if self._strides and part in self._observers and not self._kind:
            self._observers[part](dict(feeds))
            self.seen[part] += 1
        self._places[part] += 1
        return self._steps[part](feeds)


HELD: Final = "held."
TEXT: Final = "text."
"""Kinds of calls that are no samples: those that are held out, and those of parts with a cache that read a text at
once. A mask hides later tokens there, which it does not where a decoder reads token by token; so these calls are for
algorithms that round weights, and no ranges are measured on them."""


def _file_name(part: str, kind: str, place: int) -> str:
    return f"{part}.{kind}{place:05}.npz"


class ChainSamples(Samples):
    """The calls of one part that `record` has written.

    Args:
        known: what tells other models from these.
        holds_out: whether calls are judged that are no samples, as `record` was asked for.
    """

    def __init__(
        self,
        settings: QuantSimConfig,
        chain: PartsChain,
        folder: Path,
        part: str,
        known: Sequence[object],
        *,
        holds_out: bool = False,
    ) -> None:
        super().__init__(settings, (), None)
        self._chain, self._folder, self._part, self._known = chain, folder, part, known
        self._holds_out = holds_out

    def first(self, count: int) -> Iterator[Feeds]:
        return self._read("", count)

    def evaluation(self, count: int) -> Iterator[Feeds]:
        return self._read(HELD * self._holds_out, count)

    def unseen(self, count: int) -> Iterator[Feeds]:
        return self.evaluation(count)  # steps of the run before see random draws, and no calls of the chain

    def fitting(self) -> Iterator[Feeds]:
        return self._read(self._kind_of_text(""), self.fitted)

    def layer_evaluation(self, count: int) -> Iterator[Feeds]:
        return self._read(self._kind_of_text(HELD), count)

    def _kind_of_text(self, kind: str) -> str:
        has_text = (self._folder / _file_name(self._part, TEXT + kind, 0)).is_file()
        return TEXT * has_text + kind

    def _read(self, kind: str, count: int) -> Iterator[Feeds]:
        for place in range(count):
            file = self._folder / _file_name(self._part, kind, place)
            if not file.is_file():
                return
            with np.load(file) as arrays:
                yield dict(arrays)

    def identity(self) -> list[object]:
        return [*self._chain.identity(), self._part, self._holds_out, *self._known]

    @property
    def may_change(self) -> bool:
        return self._chain.hands_over and super().may_change

    @property
    def note(self) -> str:
        if self.entries:
            return ""
        return (
            f"no calibration data is given, so the ranges are those of random {self._chain.noun}: scales and "
            f"noise say nothing of the model in use; give {KEY}, {self._chain.expected}"
        )
