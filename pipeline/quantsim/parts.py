"""The simulation of a run in parts: calls of real prompts as samples, one set of ranges, the chain of quantized parts.

Each part is simulated as a model by itself, on the calls that it gets while prompts go through the chain: `decode`
reads the cache that `prefill` and `decode` have written. A value that both parts compute alike has one range, so one
scale: a weight, and the keys and values of a cache before and after.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import save_together
from pipeline.config import QuantSimConfig, RunConfig
from pipeline.errors import UsageError
from pipeline.events import Observer
from pipeline.export.source import InputSpec
from pipeline.parts import PartsResult
from pipeline.parts.generate import read_settings
from pipeline.parts.sessions import CarriedStates, PartCalls, TextParts, TextReader, open_calls
from pipeline.quantsim.calibration import MeasuredRanges
from pipeline.quantsim.report import page_data
from pipeline.quantsim.samples import KEY, Feeds, Samples
from pipeline.quantsim.stages import QuantSimResult, Simulation
from pipeline.stages.report import ENCODINGS, QUANTIZED_MODEL, save_quantization, write_page
from pipeline.stages.source import leaves_unread, why_not_compared
from pipeline.verify.user_inputs import read_samples
from pipeline.workspace import Workspace

TOKENS: Final = 32
"""New tokens of a text that is compared."""

DECODED: Final = 4
"""Calls of `decode` that are taken of each prompt."""

PROMPT: Final = 12
"""Tokens of a random prompt."""

COMPARED: Final = 2
"""Prompts of which the texts are compared."""

QUANTIZED: Final = "quantized"
"""The folder of the quantized parts, with what an application reads next to them."""


@dataclass(frozen=True, slots=True)
class ChainNoise:
    """The quantized parts one after the other, against those in float.

    equal: of `tokens` greedy tokens, those that are equal while the quantized parts read the text of the float ones.
    sqnr_db: of the logits of all these tokens.
    """

    tokens: int
    equal: int
    sqnr_db: float

    @property
    def sentence(self) -> str:
        ratio = "exact" if math.isinf(self.sqnr_db) else f"{self.sqnr_db:.2f} dB"
        return f"chain: {self.equal} of {self.tokens} tokens are those of the parts in float, logits {ratio}"


@dataclass(frozen=True, repr=False)
class PartsQuantSimResult(QuantSimResult):
    """The simulations of all parts; `report` is that of the first one.

    chain: None where nothing is run.
    """

    parts: Mapping[str, QuantSimResult] = field(default_factory=dict)
    chain: ChainNoise | None = None

    def __repr__(self) -> str:
        lines = [f"part {name}: {result!r}" for name, result in self.parts.items()]
        return "\n".join(["PartsQuantSimResult", *lines, *([self.chain.sentence] if self.chain else [])])


class Prompts:
    """The prompts of `quantsim.calibration.data`, rows of an array `input_ids`; or random ones."""

    def __init__(self, settings: QuantSimConfig, vocabulary: int) -> None:
        self._calibration, self._vocabulary = settings.calibration, vocabulary

    def __iter__(self) -> Iterator[list[int]]:
        data, seed = self._calibration.data, self._calibration.seed
        if not data:
            generator = np.random.default_rng(seed)
            while True:
                yield generator.integers(0, self._vocabulary, PROMPT).tolist()
        spec = InputSpec("input_ids", ("batch", "length"), "int64", 0, self._vocabulary)
        for label, feeds in read_samples(data, (spec,), KEY, self._calibration.args):
            for row in feeds["input_ids"].tolist():
                if wrong := [token for token in row if not 0 <= token < self._vocabulary]:
                    raise UsageError(
                        f"{KEY}: {label}: found the token {wrong[0]}, expected 0 to {self._vocabulary - 1}"
                    )
                yield row


class _Recorded(PartCalls):
    """Calls of a chain, of which those of one part are kept."""

    def __init__(self, calls: CarriedStates, part: str) -> None:
        self._calls, self._part = calls, part
        self.kept: list[Feeds] = []

    def reset(self) -> None:
        self._calls.reset()

    def call(self, part: str, feeds: Mapping[str, np.ndarray]) -> np.ndarray:
        if part == self._part:
            self.kept.append({**feeds, **self._calls.states})
        return self._calls.call(part, feeds)


class ChainSamples(Samples):
    """The calls of one part while prompts go through the chain of the parts in float."""

    def __init__(self, settings: QuantSimConfig, parts: TextParts, part: str, prompts: Prompts) -> None:
        super().__init__(settings, (), None)
        self._parts, self._part, self._prompts = parts, part, prompts

    def first(self, count: int) -> Iterator[Feeds]:
        calls = open_calls(self._parts, "onnxruntime", optimized=False)
        assert isinstance(calls, CarriedStates)
        recorded = _Recorded(calls, self._part)
        reader = TextReader(self._parts, recorded)
        for prompt in self._prompts:
            room = self._parts.length or len(prompt) + DECODED
            recorded.kept.clear()
            for _ in read_text(reader, prompt[:room], min(DECODED, room - len(prompt[:room])) + 1):
                pass
            yield from recorded.kept[:count]
            count -= len(recorded.kept)
            if count <= 0:
                return

    def identity(self) -> list[object]:
        return [*super().identity(), self._part, DECODED, PROMPT]

    @property
    def note(self) -> str:
        if self.entries:
            return ""
        return (
            "quantsim: no calibration data is given, so the ranges are those of random prompts: scales and noise say "
            f"nothing of the model in use; give {KEY}, files with an array input_ids"
        )


def read_text(
    reader: TextReader, prompt: Sequence[int], count: int, text: Sequence[int] = ()
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield `count` greedy tokens and the logits that each was chosen from; the parts read `text` in their place."""
    reader.begin(len(prompt) + count - 1)
    new = list(prompt)
    for place in range(count):
        logits = reader.read(new)
        token = int(logits.argmax())
        yield token, logits
        new = [text[place] if text else token]


def compare_chains(before: TextParts, after: TextParts, prompts: Sequence[Sequence[int]]) -> ChainNoise:
    """Read the same texts by the parts in float and by the quantized ones."""
    first, second = (TextReader(parts, open_calls(parts, "onnxruntime", optimized=False)) for parts in (before, after))
    tokens, equal, signal, noise = 0, 0, 0.0, 0.0
    for prompt in prompts:
        count = min(TOKENS, (before.length or len(prompt) + TOKENS) + 1 - len(prompt))
        wanted = list(read_text(first, prompt, count))
        found = read_text(second, prompt, count, [token for token, _ in wanted])
        for (token, row), (other, changed) in zip(wanted, found, strict=True):
            tokens, equal = tokens + 1, equal + (token == other)
            signal += float(np.square(row, dtype=np.float64).sum())
            noise += float(np.square(row.astype(np.float64) - changed).sum())
    return ChainNoise(tokens, equal, 10 * math.log10(signal / noise) if noise else math.inf)


def simulate_parts(config: RunConfig, before: PartsResult, notes: Sequence[str], show: Observer) -> PartsQuantSimResult:
    """Simulate all parts of a run that ended well.

    Raises:
        UsageError, CheckFailed: as for `QuantSim.run`.
    """
    why, parts = why_not_compared(config), TextParts.of(before.folder)
    vocabulary = read_settings(parts.folder).get("vocab_size") or 2
    found: dict[str, QuantSimResult] = {}
    simulations: dict[str, tuple[Simulation, ChainSamples]] = {}
    models: dict[str, DetachedModel] = {}
    known, shared = MeasuredRanges(0, {}), frozenset[str]()
    with ExitStack() as stack:
        for name, result in before.parts.items():
            settings = config.of_part(name).quantsim or QuantSimConfig()
            if settings.optimize:
                raise UsageError(
                    "quantsim.optimize: found steps for a run in parts, each of which would get other weights by them; "
                    "leave them out, or name one part: --set model.part=decode"
                )
            workspace = Workspace(result.folder)
            stack.enter_context(workspace.acquire())
            models[name] = read_model(result.model, unread=bool(why) and leaves_unread(config))
            simulation = Simulation(models[name], settings, workspace, show, notes)
            if why:
                found[name] = simulation.place_only(why)
                continue
            prompts = Prompts(settings, vocabulary)
            simulations[name] = simulation, ChainSamples(settings, parts, name, prompts)
            first, *_ = models.values()
            shared = _shared_values(first, models[name])
            simulation.begin(simulations[name][1], _narrow(known, shared))
            known = simulation.measured or known
        for name, (simulation, samples) in simulations.items():
            if simulation.measured is not None:
                simulation.measured = _widen(simulation.measured, known, shared)
            found[name] = simulation.finish(samples)
            report, part, workspace = found[name].report, before.parts[name], Workspace(before.parts[name].folder)
            save_quantization(page_data(report), part.report, workspace)
            write_page(part.report, part.optimize.pictures, workspace)
    first = next(iter(found.values()))
    if why:
        return PartsQuantSimResult(before.folder, first.report, (), found)
    chain = _write_chain(parts, found, Prompts(config.quantsim or QuantSimConfig(), vocabulary), before.folder)
    return PartsQuantSimResult(before.folder, first.report, (ENCODINGS, QUANTIZED), found, chain)


def _write_chain(parts: TextParts, found: Mapping[str, QuantSimResult], prompts: Prompts, folder: Path) -> ChainNoise:
    """Write the quantized parts over one file of weights, and their encodings as one file; compare the chains."""
    target = folder / QUANTIZED
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(parts.folder, target, ignore=shutil.ignore_patterns("*.onnx", "*.data"))
    models = {target / f"{name}.onnx": read_model(result.folder / QUANTIZED_MODEL) for name, result in found.items()}
    save_together(models, target / "weights.data")
    texts = [json.loads((result.folder / ENCODINGS).read_text(encoding="utf-8")) for result in found.values()]
    (folder / ENCODINGS).write_text(json.dumps(_join_encodings(texts), indent=2) + "\n", encoding="utf-8")
    chosen = [prompt for prompt, _ in zip(prompts, range(COMPARED), strict=False)]
    return compare_chains(parts, TextParts.of(target), chosen)


def _join_encodings(texts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One file of AIMET's for all parts: the encodings of the first one, and those that others have besides."""
    joined: dict[str, Any] = {}
    for text in texts:
        for key, entries in text.items():
            if isinstance(entries, list):
                names = {entry["name"] for entry in joined.setdefault(key, [])}
                joined[key] += [entry for entry in entries if entry["name"] not in names]
            elif isinstance(entries, dict):
                joined[key] = {**entries, **joined.get(key, {})}
            else:
                joined[key] = entries
    return joined


def _shared_values(first: DetachedModel, second: DetachedModel) -> frozenset[str]:
    """The values that two parts have in common: inputs of one name, and results of one operator over equal weights."""
    known, other = _identities(first), _identities(second)
    return frozenset(name for name, identity in known.items() if other.get(name) == identity)


def _identities(model: DetachedModel) -> dict[str, tuple[object, ...]]:
    stored = model.index.initializers
    found: dict[str, tuple[object, ...]] = {value.name: () for value in model.proto.graph.input}
    for node in model.proto.graph.node:
        weights = tuple(model.digest(stored[name]) if name in stored else None for name in node.input)
        for place, name in enumerate(node.output):
            found[name] = (node.domain, node.op_type, place, len(weights), *filter(None, weights[:2]))
    return found


def _narrow(measured: MeasuredRanges, names: frozenset[str]) -> MeasuredRanges:
    """What was measured of `names`, to be measured further."""
    return MeasuredRanges(
        0,
        {name: limits for name, limits in measured.limits.items() if name in names},
        {name: histogram for name, histogram in measured.histograms.items() if name in names},
    )


def _widen(measured: MeasuredRanges, later: MeasuredRanges, names: frozenset[str]) -> MeasuredRanges:
    """`measured`, in which `names` have what was measured of them in the end."""
    shared = _narrow(later, names)
    return replace(
        measured,
        limits={name: shared.limits.get(name, limits) for name, limits in measured.limits.items()},
        histograms={name: shared.histograms.get(name, counts) for name, counts in measured.histograms.items()},
    )
