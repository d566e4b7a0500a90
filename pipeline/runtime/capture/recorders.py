"""Recorders by device: each takes the same launches, and gives something that replays them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Protocol

from pipeline.runtime.capture.call_graphs import (
    LEAST_CALLS,
    SETTLING_RUNS,
    CallGraph,
    OperatorCall,
    UnreadableLaunchError,
    read_operator_calls,
)
from pipeline.runtime.capture.session import CaptureSession
from pipeline.runtime.devices import RecordedGraph
from pipeline.runtime.kernels import Launch


class Recording(Protocol):
    """Launches that were recorded once."""

    begun: int
    """How many of its launches the last replay began, where that one failed."""

    @property
    def reasons(self) -> Mapping[int, str]:
        """Why a launch is called from Python, by its number, where the others are not."""
        ...

    def replay(self) -> None:
        """Run all of them again, on the same operands."""
        ...


class Recorder(Protocol):
    """How one kind of device warms up and records."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Call `run` until nothing changes any more: storage, library handles, chosen algorithms."""
        ...

    def record(self, launches: Sequence[Launch]) -> Recording:
        """Record launches that were warmed up."""
        ...

    def settle(self, replay: Callable[[], None]) -> None:
        """Call `replay`, which replays all that was recorded, until nothing is compiled any more."""
        ...


class CallLoop:
    """Bound calls, replayed by a loop: kernels and arguments were resolved when they were bound."""

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = tuple(launches)
        self.begun = 0
        self.reasons: Mapping[int, str] = {}

    def replay(self) -> None:
        rest = iter(self._launches)
        try:
            for launch in rest:
                launch()
        except BaseException:
            self.begun = len(self._launches) - length_hint(rest)
            raise


class GraphedLoop:
    """Bound calls, of which those that are operators, several in a row, are walked by C++.

    Where a graph fails, its launches are called once more, one by one, to find the one to blame.
    """

    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = tuple(launches)
        self.begun = 0
        self.reasons: dict[int, str] = {}
        self._graphs: dict[int, tuple[int, CallGraph]] = {}
        """By the number of its first launch: the end, and the graph."""
        for first, last, calls in self._runs_of_operators():
            try:
                self._graphs[first] = last, CallGraph(calls)
            except UnreadableLaunchError as reason:
                self.reasons[first] = str(reason)
        self._pieces = self._join()

    def replay(self) -> None:
        rest = iter(self._pieces)
        try:
            for _, piece in rest:
                piece()
        except BaseException:
            first = self._pieces[len(self._pieces) - length_hint(rest) - 1][0]
            self._call_to_the_failing_one(first, self._graphs[first][0] if first in self._graphs else first)
            raise

    @property
    def has_graphs(self) -> bool:
        return bool(self._graphs)

    def drop_rewritten(self) -> None:
        """Drop each graph that the executor has rewritten: its launches are called one by one."""
        rewritten = [first for first, (_, graph) in self._graphs.items() if not graph.is_as_built()]
        self._drop(rewritten, "TorchScript rewrites the graph that begins here")

    def drop_all(self, error: Exception) -> None:
        """Call every launch one by one: a graph failed with `error`."""
        self._drop([*self._graphs], f"the graph that begins here failed: {next(reversed(str(error).splitlines()), '')}")

    def _drop(self, firsts: Sequence[int], reason: str) -> None:
        for first in firsts:
            del self._graphs[first]
            self.reasons[first] = reason
        self._pieces = self._join()

    def _call_to_the_failing_one(self, first: int, last: int) -> None:
        """Its error, which says what TorchScript's says without a trace of its interpreter."""
        self.begun = first + 1
        for at in range(first, last):
            self.begun = at + 1
            self._launches[at]()

    def _runs_of_operators(self) -> Iterator[tuple[int, int, list[OperatorCall]]]:
        """First, end and calls of each run of launches that is worth a graph."""
        first, calls = 0, list[OperatorCall]()
        for at, launch in enumerate((*self._launches, None)):
            try:
                if launch is not None:
                    calls += read_operator_calls(launch)
                    continue
            except UnreadableLaunchError as reason:
                self.reasons[at] = str(reason)
            if len(calls) >= LEAST_CALLS:
                yield first, at, calls
            first, calls = at + 1, []

    def _join(self) -> tuple[tuple[int, Launch], ...]:
        """The number of its first launch, and what to call, in order."""
        pieces, at = list[tuple[int, Launch]](), 0
        while at < len(self._launches):
            last, graph = self._graphs.get(at, (at + 1, None))
            pieces.append((at, self._launches[at] if graph is None else graph.run))
            at = last
        return tuple(pieces)


class LoopRecorder:
    """Records launches as bound calls."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, launches: Sequence[Launch]) -> Recording:
        return CallLoop(launches)

    def settle(self, replay: Callable[[], None]) -> None:
        """Nothing is left to do."""


class CpuRecorder(LoopRecorder):
    """Records launches as bound calls, and rows of operators among them as graphs that C++ walks."""

    def __init__(self) -> None:
        self._recorded: list[GraphedLoop] = []

    def record(self, launches: Sequence[Launch]) -> Recording:
        recording = GraphedLoop(launches)
        self._recorded.append(recording)
        return recording

    def settle(self, replay: Callable[[], None]) -> None:
        """Run the graphs until TorchScript has compiled them, and drop each graph whose calls it has rewritten."""
        try:
            for _ in range(SETTLING_RUNS if any(recording.has_graphs for recording in self._recorded) else 0):
                replay()
        except Exception as error:  # the loop of the warm-up had none
            for recording in self._recorded:
                recording.drop_all(error)
            replay()
        for recording in self._recorded:
            recording.drop_rewritten()


class GraphReplay:
    """Launches in a graph. The launches are kept, since their operands own the memory that the graph points at."""

    def __init__(self, graph: RecordedGraph, launches: Sequence[Launch]) -> None:
        self._launches, self.begun = tuple(launches), len(launches)
        self.replay = graph.replay
        self.reasons: Mapping[int, str] = {}


class GraphRecorder:
    """Records launches as graphs of the device; all graphs of a session share one pool of memory.

    Its rules are proven on `RecordingDevice`. On a CUDA device it is untested.
    """

    WARM_UPS = 3
    """As many as torch's own `make_graphed_callables` does: cuBLAS and cuDNN choose algorithms in the first ones."""

    def __init__(self, session: CaptureSession) -> None:
        self._session = session

    def warm_up(self, run: Callable[[], None]) -> None:
        """On a side stream, as a capture needs it."""
        with self._session.device.side_stream():
            for _ in range(self.WARM_UPS):
                run()

    def record(self, launches: Sequence[Launch]) -> GraphReplay:
        """
        Raises:
            GraphFailure: the device cannot record a launch.
        """
        return GraphReplay(self._session.record(launches), launches)

    def settle(self, replay: Callable[[], None]) -> None:
        """A graph is compiled when it is recorded."""


RECORDERS: Mapping[str, Callable[[CaptureSession], Recorder]] = {
    "loop": lambda _: LoopRecorder(),
    "cpu": lambda _: CpuRecorder(),
    "graph": GraphRecorder,
}
"""By `Device.recorder`."""
