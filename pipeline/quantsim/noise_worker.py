"""The noise of a small model, measured in a process of its own while the outputs are compared in this one.

Both take as long, and most of it is the opening of sessions, which keeps one core busy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from passes.errors import StepFailed
from passes.weights.detached import DetachedModel
from passes.worker.client import Worker, starts_by_fork
from passes.worker.platforms import available_cores
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.noise import Feeds, Noise, measure_noise, walk_noise

MOST_BYTES: Final = 2**22
"""Bytes of the model and its samples up to which that is done. A larger model spends its time in runs, which use all
cores, and two sessions at a time hold its values twice: a detector of 9 MiB on images of 320 × 320 took 497 MiB for
290, a classifier of 0.6 MiB 182 for 163."""


@contextmanager
def begin_noise(
    model: DetachedModel,
    encodings: Mapping[str, Encoding],
    tensors: Sequence[str],
    samples: Callable[[], Iterator[Feeds]],
    count: int,
    observer: Callable[[int], object],
    *,
    tuned: DetachedModel,
) -> Iterator[Callable[[], dict[str, Noise]]]:
    """Begin `measure_noise` where a fork can do it; gives what waits for its result, or else measures it then.

    Args:
        model: as the other arguments, for `measure_noise`.
        encodings: tensor → its scale and format.
        tensors: values of the model.
        samples: reads the inputs.
        count: how many samples there are at most.
        observer: called with the number of samples that are done, once the result is waited for.
        tuned: `model` with the numbers that are quantized.
    """

    def measure_here() -> dict[str, Noise]:
        return measure_noise(model, encodings, tensors, samples(), observer, tuned=tuned)

    if not starts_by_fork() or len(available_cores()) < 2 or _size(model, samples, count) > MOST_BYTES:
        yield measure_here
        return
    with Worker() as worker:
        ticket = worker.post(
            walk_noise, model=model, encodings=encodings, tensors=tensors, samples=[*samples()], tuned=tuned
        )

        def collect() -> dict[str, Noise]:
            try:
                while isinstance(found := worker.collect(ticket), int):
                    observer(found)
            except StepFailed:  # whatever happened to the worker: an error is to be that of this process
                return measure_here()
            return found

        yield collect


def _size(model: DetachedModel, samples: Callable[[], Iterator[Feeds]], count: int) -> int:
    first = next(samples(), {})
    return model.nbytes() + count * sum(array.nbytes for array in first.values())
