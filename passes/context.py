"""Where passes run: the workers, and a folder for files that do not outlive the run."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any, Final

import numpy as np

from passes.load import memory_budget, seconds_to_run
from passes.weights.detached import DetachedModel
from passes.weights.sharing import WeightFile
from passes.worker.client import Worker
from passes.worker.platforms import check_limits

USER_CODE: Final = ("passes.recipe.user_code",)
"""What the worker for passes of the user's imports before it forks."""

BY_STRUCTURE: Final = "prove by structure alone: --proof structure (proof='structure', verify.proof: structure)"

PROOF_S: Final = 600.0
"""Seconds for one proof, where a pass has less: the model itself may take that long."""


@dataclass(frozen=True, slots=True)
class PassContext:
    """What a step may use: a worker process for native code, one for proofs, one for passes of the user's, and a folder
    for temporary files. `open_context` makes a context, and removes the folder at its end."""

    worker: Worker
    folder: Path
    proofs: Worker = field(default_factory=Worker)
    user_code: Worker = field(default_factory=lambda: Worker(preload=USER_CODE, alone=True))
    turn: RLock = field(default_factory=RLock)
    """Held during an optimization or a bisection: a worker answers one thread at a time, so threads take turns."""
    spill: WeightFile = field(init=False)
    cache: dict[str, Any] = field(default_factory=dict)
    """What a step leaves for the steps after it, under the name of its library; and the source of `draws`."""
    run_advice: str = BY_STRUCTURE
    """What messages advise where nothing can run the model; empty where no option helps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "spill", WeightFile(self.folder))

    def draws(self) -> Sequence[Mapping[str, np.ndarray]]:
        """The inputs on which the run in progress compares models; none where it runs none.

        It waits until the exported model has run on them.
        """
        return self.cache.get("draws", tuple)()

    @contextmanager
    def drawing(self, feeds: Callable[[], Sequence[Mapping[str, np.ndarray]]]) -> Iterator[None]:
        """Let steps see the inputs that `feeds` returns."""
        self.cache["draws"] = feeds
        try:
            yield
        finally:
            del self.cache["draws"]

    def start(self, imports: Sequence[Callable[[], object]] = ()) -> None:
        """Start the workers now, so that they are ready when they are called.

        Args:
            imports: functions that import libraries, such as `Step.import_library`, for the worker to call meanwhile.
        """
        self.proofs.start()
        self.worker.start()
        if imports:
            self.worker.post(import_libraries, functions=tuple(imports))


def import_libraries(functions: Sequence[Callable[[], object]]) -> None:
    """In the worker: import libraries before their steps are called, which say why one cannot be imported."""
    for function in functions:
        with suppress(Exception):
            function()


@contextmanager
def open_context(
    timeout_s: float = 600.0,
    memory_gib: float | None = None,
    folder: Path | None = None,
    run_advice: str = BY_STRUCTURE,
) -> Iterator[PassContext]:
    """The workers and a folder; nothing is started before it is needed.

    Args:
        timeout_s: seconds for one call of a pass.
        memory_gib: what each worker may allocate; see `worker_memory`.
        folder: where temporary files go; one of the system's by default, removed at the end.
        run_advice: what messages advise where nothing can run the model; empty where no option helps.
    """
    limit, proof_s = worker_memory(memory_gib), max(timeout_s, PROOF_S)
    with (
        tempfile.TemporaryDirectory(prefix="onnxline-", dir=folder) as path,
        # apart from the folder of the context, which passes of the user's are shown and may empty
        tempfile.TemporaryDirectory(prefix="onnxline-workers-", ignore_cleanup_errors=True) as files,
        Worker(timeout_s, limit, ("onnxoptimizer",), folder=files) as worker,
        Worker(proof_s, limit, ("passes.proof.runs", "passes.weights.sessions"), folder=files) as proofs,
        Worker(timeout_s, limit, USER_CODE, alone=True) as user_code,
    ):
        try:
            resolved = Path(path).resolve()  # a tool may work in another folder
            yield PassContext(worker, resolved, proofs, user_code, run_advice=run_advice)
        finally:
            for process in (worker, proofs, user_code):  # all at once: each takes 10 ms to give its memory back
                process.end()


@contextmanager
def open_local_context() -> Iterator[PassContext]:
    """A context in a process that already is a worker: its workers make each call right here."""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as path:
        yield PassContext(_LocalWorker(), Path(path).resolve(), _LocalWorker(), _LocalWorker())


class _LocalWorker(Worker):
    """Makes each call in the process of its caller."""

    def call(self, function: Callable[..., Any], /, *, within_s: float | None = None, **arguments: Any) -> Any:
        return function(**arguments)

    def begin(self, function: Callable[..., Any], /, **arguments: Any) -> Callable[[], Any]:
        return partial(function, **arguments)


@contextmanager
def limit_runs(
    context: PassContext, model: DetachedModel, draws: Sequence[Mapping[str, np.ndarray]] = ()
) -> Iterator[None]:
    """End a run of `model` in the proof worker that takes longer than its declared sizes explain: a Loop without an end
    would take all of the worker's time.

    A time limit above the default one was chosen by the user, and stays.

    Args:
        context: whose proof worker runs the model.
        model: the model that is run.
        draws: what it runs on, where that is known; by default what its inputs declare.
    """
    proofs, before = context.proofs, context.proofs.timeout_s
    if before <= PROOF_S:
        declared = (info.type.tensor_type.shape.dim for info in model.proto.graph.input)
        inputs = sum(4 * math.prod(max(dim.dim_value, 1) for dim in dims) for dims in declared)
        inputs = max(inputs, sum(array.nbytes for feeds in draws for array in feeds.values()))
        proofs.timeout_s = min(before, seconds_to_run(model.nbytes() + inputs))
    try:
        yield
    finally:
        proofs.timeout_s = before


def worker_memory(memory_gib: float | None) -> int:
    """The memory limit of one worker in bytes; 0 for no limit.

    By default nine tenths of the machine's memory, or of our own limit where that is less, so that a worker that asks
    for more dies alone.

    Raises:
        UsageError: no worker starts with so little.
    """
    if memory_gib is not None:
        check_limits(1.0, memory_gib)
        return int(min(memory_gib, 2**32) * 2**30)
    return memory_budget()
