"""A text through the parts of a folder: which part takes which tokens, and who holds the cache between two calls.

A `TextReader` cuts tokens into calls. `PartCalls` run them on a backend and keep the states: `CarriedStates` hand
arrays from call to call (a plan gets them filled up to a few lengths, `fill_up`), `BoundStates` give onnxruntime one
memory for a state before and after, and `PlannedStates` are the states of a plan, which replays write in place.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from passes.custom_ops.declarations import add_libraries
from passes.errors import StepFailed
from passes.graph.index import GraphIndex
from passes.weights.detached import read_model
from passes.weights.sessions import as_array, first_words, lacks_kernel, words_on
from pipeline.config import RunConfig, RuntimeConfig
from pipeline.errors import UsageError
from pipeline.parts.filling import fill_up
from pipeline.parts.slots import PAST_PREFIX, StateSlot, Step, state_slots
from pipeline.verify.backends import BACKENDS, Feeds, OnnxFile

MODELS: Final = "models"

LAYOUTS: Final = (("decoder",), ("prefill", "decode"))
"""The parts of a folder: over a cache that grows, and over one of fixed length."""


@dataclass(frozen=True)
class TextParts:
    """The parts of a text generation in a folder. `graphs` are without weights."""

    folder: Path
    graphs: Mapping[str, onnx.GraphProto]

    @staticmethod
    def of(folder: Path) -> TextParts:
        """Those that are in `folder`, or in `models` in it.

        Raises:
            UsageError: neither has them.
        """
        places = ((place, names) for place in (folder / MODELS, folder) for names in LAYOUTS)
        for place, names in places:
            files = {name: place / f"{name}.onnx" for name in names}
            if all(file.is_file() for file in files.values()):
                return TextParts(
                    place, {name: read_model(file, unread=True).proto.graph for name, file in files.items()}
                )
        if not folder.is_dir():
            raise UsageError(f"no folder {folder}; expected that of a run with model.task: text-generation")
        listing = " or ".join(" and ".join(f"{MODELS}/{name}.onnx" for name in names) for names in LAYOUTS)
        expected = "expected the folder of a run with model.task: text-generation"
        raise UsageError(f"{folder} has no {listing}; {_failure_of(folder) or expected}")

    def path(self, part: str) -> Path:
        return self.folder / f"{part}.onnx"

    def inputs(self, part: str) -> frozenset[str]:
        return frozenset(value.name for value in self.graphs[part].input)

    @cached_property
    def slots(self) -> tuple[StateSlot, ...]:
        return state_slots(next(iter(self.graphs.values())))

    @property
    def is_static(self) -> bool:
        return "decode" in self.graphs

    @cached_property
    def chunk(self) -> int:
        """The tokens that prefill takes at once."""
        tokens = next(value for value in self.graphs["prefill"].input if value.name == "input_ids")
        return tokens.type.tensor_type.shape.dim[1].dim_value

    @cached_property
    def length(self) -> int | None:
        """The tokens that the cache holds; None where there is no limit."""
        rows = (slot.shape[1 if len(slot.shape) == 3 else 2] for slot in self.slots if slot.grows)
        return next(rows, None) if self.is_static else None


def _failure_of(folder: Path) -> str:
    """How the run in a folder failed, as a part of a sentence; empty where there is none, or it ended well."""
    try:
        failure = json.loads((folder / "report.json").read_text(encoding="utf-8"))["failure"]
    except (OSError, ValueError, LookupError, TypeError):
        return ""
    return f"the run in it failed: {failure}" if failure else ""


class PartCalls(ABC):
    """Runs parts on a backend, and keeps their states from call to call."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the states before the first token."""

    @abstractmethod
    def call(self, part: str, feeds: Feeds) -> np.ndarray:
        """The logits, (1, tokens or 1, vocabulary); the states are those after these tokens then."""


class TextReader:
    """Reads a text token by token or in pieces, and says after each piece what comes next."""

    def __init__(self, parts: TextParts, calls: PartCalls) -> None:
        self._parts, self._calls, self._seen = parts, calls, 0

    def begin(self, count: int) -> None:
        """Begin a new text.

        Args:
            count: how many tokens will be read.

        Raises:
            UsageError: the cache does not hold them.
        """
        if self._parts.length is not None and count > self._parts.length:
            raise UsageError(
                f"the cache holds {self._parts.length} tokens, and the text has {count}: shorten the prompt, ask for "
                "fewer tokens, or export with a larger model.cache.length"
            )
        self._seen = 0
        self._calls.reset()

    def read(self, tokens: Sequence[int]) -> np.ndarray:
        """Read the next tokens.

        Returns:
            The logits after the last one, float32 (vocabulary,).
        """
        logits = np.zeros(0, np.float32)
        for part, piece in self._pieces(list(tokens)):
            outputs = self._calls.call(part, self._feeds(part, piece))
            place = len(piece) - 1 if part == "prefill" and outputs.shape[1] > 1 else -1
            logits = np.asarray(outputs[0, place], np.float32)
            self._seen += len(piece)
        return logits

    def _pieces(self, tokens: list[int]) -> Iterator[tuple[str, list[int]]]:
        """Part and tokens of each call. A chunk may be filled up with any tokens where states have a row for each."""
        parts = self._parts
        if not parts.is_static:
            yield "decoder", tokens
            return
        can_fill = all(slot.grows for slot in parts.slots)
        while tokens:
            is_chunk = len(tokens) >= parts.chunk or (can_fill and len(tokens) > 1)
            fits = parts.length is None or self._seen + parts.chunk <= parts.length
            count = parts.chunk if is_chunk and fits else 1
            yield "prefill" if is_chunk and fits else "decode", tokens[:count]
            del tokens[:count]

    def _feeds(self, part: str, tokens: list[int]) -> dict[str, np.ndarray]:
        count, seen = len(tokens), self._seen
        wanted = self._parts.chunk if part == "prefill" else count
        feeds = {
            "input_ids": np.array([tokens + [0] * (wanted - count)], np.int64),
            "attention_mask": np.ones((1, seen + count), np.int64),
            "position_ids": np.arange(seen, seen + count, dtype=np.int64)[None],
            "cache_position": np.arange(seen, seen + wanted, dtype=np.int64),
            "last_token": np.array([count - 1], np.int64),
        }
        return {name: array for name, array in feeds.items() if name in self._parts.inputs(part)}


class CarriedStates(PartCalls):
    """Arrays that come out of one call and go into the next, on any backend."""

    def __init__(self, parts: TextParts, open_step: Callable[[Path], Step]) -> None:
        self._slots = parts.slots
        self._steps = {part: open_step(parts.path(part)) for part in parts.graphs}
        self.reset()

    def reset(self) -> None:
        self.states = {slot.before: np.zeros(slot.shape, slot.dtype) for slot in self._slots}

    def call(self, part: str, feeds: Feeds) -> np.ndarray:
        outputs = self._steps[part]({**feeds, **self.states})
        self.states = {slot.before: outputs[slot.after] for slot in self._slots}
        return outputs["logits"]


class BoundStates(PartCalls):
    """Memory that onnxruntime reads and writes, with its own optimizations, as an application opens the files.

    A state that only one scatter reads has one memory for before and after, so that no call copies a cache; any other
    has two, which change places.

    Args:
        threads: of onnxruntime; 0: as many as it takes by itself.
    """

    def __init__(self, parts: TextParts, threads: int = 0) -> None:
        self._slots = parts.slots
        self._sessions = {part: _session(parts.path(part), threads) for part in parts.graphs}
        self._bindings = {part: session.io_binding() for part, session in self._sessions.items()}
        in_place = [_written_in_place(graph) for graph in parts.graphs.values()]
        self._in_place = frozenset.intersection(*in_place)
        self.reset()

    def reset(self) -> None:
        import onnxruntime

        def zeros(slot: StateSlot) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(slot.shape, slot.dtype))

        self._before = {slot.before: zeros(slot) for slot in self._slots}
        self._after = {
            slot.before: self._before[slot.before] if slot.before in self._in_place else zeros(slot)
            for slot in self._slots
        }

    def call(self, part: str, feeds: Feeds) -> np.ndarray:
        binding = self._bindings[part]
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        for slot in self._slots:
            binding.bind_ortvalue_input(slot.before, self._before[slot.before])
            binding.bind_ortvalue_output(slot.after, self._after[slot.before])
        binding.bind_output("logits")
        with _words_of_failure():
            self._sessions[part].run_with_iobinding(binding)
        logits = binding.get_outputs()[-1].numpy()
        self._before, self._after = self._after, self._before
        binding.clear_binding_outputs()
        return logits


def _written_in_place(graph: onnx.GraphProto) -> frozenset[str]:
    """The states that one scatter alone reads, which writes the rows of the new tokens into them."""
    index = GraphIndex(graph)

    def is_written(slot: StateSlot) -> bool:
        readers = [index.nodes[position] for position, _ in index.uses[slot.before]]
        return [node.op_type.startswith("Scatter") and node.output[0] == slot.after for node in readers] == [True]

    return frozenset(slot.before for slot in state_slots(graph) if is_written(slot))


class PlannedStates(PartCalls):
    """States of the plans of all parts, which share them, their weights and one arena; each part is replayed."""

    def __init__(self, parts: TextParts, runtime: RuntimeConfig) -> None:
        from pipeline.importers import from_onnx
        from pipeline.ir import as_states
        from pipeline.lowering.fusion import fuse
        from pipeline.ops import emitter_of
        from pipeline.runtime import compile_graphs
        from pipeline.runtime.tensors import as_tensor

        self._slots = parts.slots
        pairs = {slot.before: slot.after for slot in self._slots}
        graphs = {part: from_onnx(parts.path(part), emitter_of=emitter_of, fallback=True) for part in parts.graphs}
        graphs = {part: as_states(fuse(graph, runtime.chosen_fusions), pairs) for part, graph in graphs.items()}
        self._entries = compile_graphs(graphs, native=runtime.native)
        self.reset()
        for part, graph in parts.graphs.items():  # before the first token, which should not wait for it
            self._entries.entry(part).capture({name: as_tensor(array) for name, array in zero_inputs(graph).items()})

    def reset(self) -> None:
        from pipeline.runtime.tensors import as_tensor

        self._entries.give_states({slot.before: as_tensor(np.zeros(slot.shape, slot.dtype)) for slot in self._slots})

    def call(self, part: str, feeds: Feeds) -> np.ndarray:
        from pipeline.runtime.tensors import as_tensor, to_numpy

        tensors = {name: as_tensor(array) for name, array in feeds.items()}
        return to_numpy(self._entries.entry(part).replay(tensors)["logits"])


def zero_inputs(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Zeros for each input of fixed sizes that is no state."""
    known = {value.name: value.type.tensor_type for value in graph.input if not value.name.startswith(PAST_PREFIX)}
    dtypes = {name: onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type) for name, tensor in known.items()}
    return {name: np.zeros([dim.dim_value for dim in tensor.shape.dim], dtypes[name]) for name, tensor in known.items()}


def open_calls(
    parts: TextParts, backend: str, runtime: RuntimeConfig | None = None, *, optimized: bool = True
) -> PartCalls:
    """The parts on a backend.

    Args:
        runtime: of the run, by default as it is in the folder.
        optimized: as an application runs them: on onnxruntime with its own optimizations, on plan with all fusions.

    Raises:
        UsageError: there is no such backend, or onnxruntime refuses a file.
    """
    refuse_unknown_backend(backend)
    if backend == "onnxruntime" and optimized and parts.is_static:
        return BoundStates(parts)
    if backend == "plan" and parts.is_static:
        return PlannedStates(parts, _with_fusions(runtime or _runtime_of(parts.folder), optimized=optimized))
    return CarriedStates(parts, step_opener(parts.folder, backend, runtime, optimized=optimized))


def refuse_unknown_backend(backend: str) -> None:
    """Raise UsageError when there is no such backend."""
    if backend not in BACKENDS:
        raise UsageError(f"backend: found {backend!r}, expected one of {', '.join(BACKENDS)}")


def backends_of(config: RunConfig) -> tuple[str, ...]:
    """The backends that a chain runs on: onnxruntime, and each that somebody named.

    Over a cache that grows `plan` makes a plan for every `ROWS` lengths, which takes a while for a large model.
    """
    return ("onnxruntime", *(name for name in config.runtime.backends or () if name != "onnxruntime"))


def step_opener(
    models: Path, backend: str, runtime: RuntimeConfig | None = None, *, optimized: bool = True
) -> Callable[[Path], Step]:
    """A file of a model → a call of it on a backend. Arguments and errors as for `open_calls`."""
    refuse_unknown_backend(backend)
    if backend == "onnxruntime" and optimized:
        return _open_step
    runtime = _with_fusions(runtime or _runtime_of(models), optimized=optimized)
    kind, fusions, native = BACKENDS[backend], runtime.chosen_fusions, runtime.native
    if backend != "plan":
        return lambda path: kind(OnnxFile(path), fusions, native=native).run
    import_module("pipeline.runtime")  # takes seconds, for which the first token should not wait

    def open_plan(path: Path) -> Step:
        return fill_up(kind(OnnxFile(path), fusions, native=native).run, read_model(path, unread=True).proto.graph)

    return open_plan


def _with_fusions(runtime: RuntimeConfig, *, optimized: bool) -> RuntimeConfig:
    return runtime.model_copy(update={"fusions": "all"}) if optimized else runtime


def _runtime_of(models: Path) -> RuntimeConfig:
    """The section `runtime` of the run that has written the folder; the defaults where there is no run."""
    file = models.parent / "run.yaml"
    return RunConfig.from_yaml(file).runtime if file.is_file() else RuntimeConfig()


def _session(path: Path, threads: int = 0) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # its errors are raised, in our words
    add_libraries(options)
    try:
        return onnxruntime.InferenceSession(str(path.resolve()), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common type of its own
        words = words_on(error, read_model(path, unread=True).proto)
        advice = (
            "; the backend plan may run it: --backend plan (backend='plan')" if lacks_kernel(StepFailed(words)) else ""
        )
        raise UsageError(f"onnxruntime does not open {path}: {words}{advice}") from error


@contextmanager
def _words_of_failure() -> Iterator[None]:
    """Errors of onnxruntime, which have no common type of its own, as `StepFailed`."""
    try:
        yield
    except Exception as error:
        raise StepFailed(f"onnxruntime stopped: {first_words(error)}") from error


def _open_step(path: Path) -> Step:
    session = _session(path)
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Feeds) -> dict[str, np.ndarray]:
        with _words_of_failure():
            results = session.run(names, dict(feeds))
        return {name: as_array(name, result) for name, result in zip(names, results, strict=True)}

    return run
