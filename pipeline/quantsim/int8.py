"""`onnxline.to_int8`: quantize an ONNX model by the rules of a target, prove that the result runs, and say how far its
outputs are from those in float. It is `QuantSim` without its run, its artifacts and its noise of each tensor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
import onnx

from passes.context import PassContext, open_context
from passes.errors import check_arguments, is_number
from passes.graph.inference import start_process
from passes.graph.op_facts import RANDOM_OPS, opset_of
from passes.graph.traversal import every_node
from passes.model.signature import describe_lost_training, fill_in_outputs
from passes.optimize import optimize, read_source
from passes.policy.policy import check_lists
from passes.proof.draws import InputSampler
from passes.run.result import PassRow, Status
from passes.suggest import bytes_text, is_named, join_first, plural
from passes.visible import Table, TableResult
from passes.weights.detached import DetachedModel, attach
from passes.weights.files import save, write_errors
from pipeline.config import CalibrationConfig, FormatsConfig, ModelConfig, OptionNames, QuantSimConfig, VerifyConfig
from pipeline.config.quantsim import FLOAT, ProfileName
from pipeline.errors import CheckFailed, UsageError
from pipeline.events import Event, Note
from pipeline.export.load import describe_onnx
from pipeline.export.source import InputSpec, OnnxSource
from pipeline.quantsim.encodings import Encoding
from pipeline.quantsim.hidden_values import refuse_quantized_activations
from pipeline.quantsim.noise import describe_ratio
from pipeline.quantsim.placement import SELECTORS, Placement
from pipeline.quantsim.preparation import find_conversion, find_untie, inline_layers
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.quantizer import ModelQuantizer
from pipeline.quantsim.range_notes import describe_limited_biases
from pipeline.quantsim.samples import Feeds, Samples, enlarge, without_nan
from pipeline.quantsim.simulation import DeviceLike, OutputNoise
from pipeline.quantsim.weight_sizes import weight_bytes
from pipeline.verify.references import compute_references, plan_draws
from pipeline.verify.user_inputs import check_feeds, input_files

OPTIONS: Final = OptionNames(
    data="data",
    encodings="encodings",
    rules="keep",
    in_float="keep {}",
    step="apply {0} first (onnxline optimize MODEL -o OUT --recipe {0})",
    numbers="give data like that in use",
    sizes="give data of sizes that fit",
)
"""The words of messages: `quantsim` has other names for what is set here."""


@dataclass(frozen=True, repr=False)
class Int8Result(TableResult):
    """A quantized model, and what its quantization does to the outputs.

    Args:
        model: with QuantizeLinear and DequantizeLinear.
        placement: the format of each tensor, or why it stays in float.
        encodings: tensor → its scale and zero point.
        outputs: how far each output is from that in float, by ONNX's specification.
        device: the same by onnxruntime with its optimizations, as a session runs the model by default.
        steps: what prepared the model, such as a conversion to another opset; each is proven.
        bytes: of the constants, in float and quantized.
        samples: on how many samples ranges were measured.
        compared: on how many samples outputs were compared.
        notes: sentences on what a user should know.
    """

    model: DetachedModel
    placement: Placement
    encodings: Mapping[str, Encoding]
    outputs: Mapping[str, OutputNoise]
    device: DeviceLike
    steps: tuple[PassRow, ...]
    bytes: tuple[int, int]
    samples: int
    compared: int
    notes: tuple[str, ...]

    def to_proto(self) -> onnx.ModelProto:
        """The quantized model as one message.

        Raises:
            ModelError: it has more than 2 GiB; `save` it.
        """
        return attach(self.model)

    def save(self, path: str | Path) -> None:
        """Write the quantized model; a file that is there stays until the new one is complete.

        Args:
            path: the file; above 100 MB the weights go to a file next to it.

        Raises:
            UsageError: it cannot be written.
        """
        with write_errors(path):
            save(self.model, Path(path))

    def tables(self) -> Iterator[Table]:
        quantized, left = self.placement.quantized_sites(), self.placement.left_in_float()
        before, after = map(bytes_text, self.bytes)
        rows = [
            ("tensors", f"{len(quantized)} of {len(self.placement.sites)} are quantized"),
            ("constants", f"{before} → {after}"),
            ("ranges", f"of {plural(self.samples, 'sample')}" if self.samples else "of a file"),
        ]
        for row in self.steps:
            rows.append((row.name, f"{row.nodes_before} → {plural(row.nodes_after, 'node')}, {_error_of(row)}"))
        yield Table("to-int8", rows)
        counts = Counter((str(placed.precision), placed.site.role == "weight") for placed in quantized)
        formats = dict.fromkeys(name for name, _ in counts)
        cells = [(name, str(counts[name, True]), str(counts[name, False])) for name in formats]
        yield Table("formats", cells, ("format", "weights", "others"))
        reasons = Counter(placed.reason for placed in left)
        first = {placed.reason: placed.site.tensor for placed in reversed(left)}
        counted = reasons.most_common(MOST_REASONS)
        most = [(reason, str(count), first[reason]) for reason, count in counted]
        rest = len(reasons) - len(most)
        most += [(plural(rest, "more reason"), str(len(left) - sum(int(row[1]) for row in most)), "")] if rest else []
        yield Table("in float", most, ("why", "tensors", "such as"))
        yield Table(
            f"outputs, compared on {plural(self.compared, 'sample')}",
            [(name, *self._output_cells(name)) for name in self.outputs],
            ("output", "SQNR", "max error", "SQNR with onnxruntime's optimizations"),
        )
        yield Table("notes", [(note,) for note in self.notes])

    def _output_cells(self, name: str) -> tuple[str, str, str]:
        noise, device = self.outputs[name], self.device.outputs.get(name)
        optimized = describe_ratio(device.sqnr_db) if device else "not run"
        return describe_ratio(noise.sqnr_db), f"{noise.max_abs:.1e}", optimized


MOST_REASONS: Final = 6

PROVING: Final = 2
"""Samples on which a step of the preparation is proven within a tolerance; the result is compared with the source on
all."""


def _error_of(row: PassRow) -> str:
    worst = max((errors.max_abs for errors in row.errors.values()), default=None)
    return "equal by structure" if worst is None else f"max error {worst:.1e}"


def to_int8(
    model: onnx.ModelProto | str | Path | DetachedModel,
    data: str | Path | Sequence[str | Path] = (),
    *,
    feeds: Sequence[Mapping[str, np.ndarray]] = (),
    samples: int = 32,
    profile: ProfileName = "ort-cpu",
    keep: Sequence[str] = (),
    encodings: str | Path | None = None,
    seed: int = 0,
    timeout_s: float = 600.0,
) -> Int8Result:
    """Quantize a model by the rules of a target, with the ranges that its values have on samples.

    Args:
        model: a path, an `onnx.ModelProto` or a DetachedModel, in float32.
        data: files of samples (.npz, .npy, .pt), folders and globs of such files, and loaders (`file.py:function`).
        feeds: samples as arrays by input, in place of `data`. Without both samples are drawn at random.
        samples: how many are taken at most.
        profile: the target: ort-cpu, qnn-htp, qnn-htp-w4a16, tensorrt or weight-only.
        keep: nodes, operators, globs of them, or selectors as `quantsim.rules` has them (`tensor:NAME`,
            `module:GLOB`), whose weights and results stay in float.
        encodings: a file of AIMET's encodings of the model, whose scales are taken in place of measured ones.
        seed: of the samples that are drawn.
        timeout_s: seconds that a step of the preparation may take.

    Returns:
        the Int8Result: `model` is the quantized model; `save` writes it.

    Raises:
        UsageError, PassError: something that was given is wrong, or nothing of the model can be quantized.
        CheckFailed: a step of the preparation failed, or onnxruntime does not run the quantized model.

    Example:
        >>> import onnxline
        >>> result = onnxline.to_int8("model.onnx", samples=8)
        >>> result.save("model.int8.onnx")
        >>> list(result.outputs)
        ['y']
    """
    listed = [data] if isinstance(data, str | Path) else data
    is_listed = isinstance(listed, Sequence) and all(isinstance(entry, str | Path) for entry in listed)
    entries = tuple(map(str, listed)) if is_listed else ()
    profiles = get_args(ProfileName)
    check_lists(keep=keep, feeds=feeds)
    check_arguments(
        ("data", data, is_listed, "a path, or a list of paths"),
        ("feeds", feeds, all(isinstance(arrays, Mapping) for arrays in feeds), "a mapping of arrays for each sample"),
        ("timeout_s", timeout_s, is_number(timeout_s) and timeout_s > 0, "seconds above 0"),
        ("samples", samples, type(samples) is int and samples > 0, "an integer of 1 or more"),
        ("seed", seed, type(seed) is int and seed >= 0, "an integer of 0 or more"),
        ("profile", profile, profile in profiles, f"one of {', '.join(profiles)}"),
        ("feeds", feeds, not (entries and feeds), "none next to data, which has samples too"),
    )
    input_files(entries, OPTIONS.data)  # a missing file is named before a model is read
    notes: list[str] = []
    with open_context(timeout_s, run_advice="") as context:
        start_process()  # a fork of this process, before onnxruntime starts threads here
        source = fill_in_outputs(read_source(model, context))  # as a run does
        refuse_quantized_activations(source, OPTIONS)
        flat, inlined = _inline_functions(source)
        settings = QuantSimConfig(
            profile=profile,
            rules=_find_rules(keep, flat),
            calibration=CalibrationConfig(data=entries, samples=samples, seed=seed),
            encodings_from=None if encodings is None else str(encodings),
        )
        own = ModelConfig(onnx=str(model) if isinstance(model, str | Path) else "model.onnx")
        described = describe_onnx(source.proto, Path(str(own.onnx)), None, source)
        known = _ArraySamples(settings, described.inputs, feeds) if feeds else _samples_of(settings, described)
        proving, sampler = [*known.first(PROVING)] if entries or feeds else [], None
        if not proving or source.has_layers():
            references = compute_references(described, plan_draws(described, own, VerifyConfig()), context, OPTIONS)
            proving, sampler = [dict(draw.feeds) for draw in references.draws], references.sampler
        prepared, steps = _prepare(flat, settings, proving, context, notes)
    prepared, more = inline_layers(prepared, sampler)
    if sampler is not None and not (entries or feeds):
        known = _samples_of(settings, described, enlarge(sampler, prepared, ()))
    return _quantize(source, prepared, settings, known, steps, [*inlined, *notes, *more])


def _samples_of(settings: QuantSimConfig, source: OnnxSource, sampler: InputSampler | None = None) -> Samples:
    return Samples(settings, source.inputs, sampler, key=OPTIONS.data)


class _ArraySamples(Samples):
    """Samples that the caller has as arrays."""

    def __init__(
        self, settings: QuantSimConfig, specs: tuple[InputSpec, ...], arrays: Sequence[Mapping[str, np.ndarray]]
    ) -> None:
        super().__init__(settings, specs, None, key=OPTIONS.data)
        self._arrays = arrays

    @property
    def note(self) -> str:
        return ""

    def first(self, count: int) -> Iterator[Feeds]:
        for index, arrays in enumerate(self._arrays[:count]):
            label = f"feeds[{index}]"
            yield without_nan(label, check_feeds(label, arrays, self._specs, self._key, may_be_empty=True), self._key)


def _find_rules(keep: Sequence[str], model: DetachedModel) -> dict[str, FormatsConfig]:
    """The rules that leave in float what `keep` names.

    Raises:
        PolicyError: an entry is no selector, and names no node and no operator.
    """
    if not keep:
        return {}
    from passes.rewrites.half_precision import refuse_unknown  # loads its proof

    whole, selectors = model.without_functions(), list[str]()
    nodes = whole.proto.graph.node
    for entry in keep:
        kind, _, pattern = entry.partition(":")
        if kind in SELECTORS and pattern:
            selectors.append(entry)
            continue
        refuse_unknown("to-int8", [entry], whole)
        for kind, names in (("op", {node.op_type for node in nodes}), ("node", {node.name for node in nodes})):
            selectors += [f"{kind}:{entry}"] * any(is_named(name, entry) for name in names)
    return {selector: FormatsConfig(weights=FLOAT, activations=FLOAT) for selector in selectors}


def _inline_functions(model: DetachedModel) -> tuple[DetachedModel, tuple[str, ...]]:
    """The model with the bodies of its functions in place of their calls, which would stay in float; a sentence on it.
    Equal layers stay: they are proven together, and `inline_layers` inlines them."""
    count = len(model.proto.functions)
    if not count or model.has_layers():
        return model, ()
    return model.without_functions(), (f"{plural(count, 'function')} {'is' if count == 1 else 'are'} inlined",)


def _prepare(
    model: DetachedModel, settings: QuantSimConfig, feeds: Sequence[Feeds], context: PassContext, notes: list[str]
) -> tuple[DetachedModel, tuple[PassRow, ...]]:
    """The model after the steps that the formats need, proven on `feeds`, with a row for each.

    Raises:
        CheckFailed: a step failed, or its result differs.
    """
    conversion, why = find_conversion(settings, opset_of(model.proto))
    recipe = [*conversion, *find_untie(settings)]
    if not recipe:
        return model, ()
    run = optimize(model, recipe, feeds=feeds, context=context)
    for row in run.rows:
        if row.status is not Status.RAN:
            raise CheckFailed(f"to-int8: {row.name} {row.status}: {row.reason}")
    if run.invalid:
        raise CheckFailed(f"to-int8: the result of {run.rows[-1].name} is not valid ONNX: {run.invalid}")
    notes += [why] * bool(why)
    return run.model, tuple(row for row in run.rows if row.changed)


def _quantize(
    source: DetachedModel,
    model: DetachedModel,
    settings: QuantSimConfig,
    samples: Samples,
    steps: tuple[PassRow, ...],
    notes: list[str],
) -> Int8Result:
    """Quantize a `model` that was prepared from `source`, and compare its outputs with those of the source.

    Raises:
        UsageError: nothing can be quantized. CheckFailed: onnxruntime does not run the result.
    """

    def note(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    quantizer = ModelQuantizer(model, settings, note, names=OPTIONS)
    quantizer.begin()
    if not quantizer.placement.quantized_sites():
        reasons = Counter(placed.reason for placed in quantizer.placement.left_in_float())
        why = ", ".join(f"{plural(count, 'tensor')}: {reason}" for reason, count in reasons.most_common(MOST_REASONS))
        said = f"{settings.profile} quantizes no tensor of the model ({why or 'it has no floats'})"
        raise UsageError("; ".join((f"to-int8: {said}", *notes)))
    quantizer.find_ranges(samples)
    ranges = quantizer.ranges(quantizer.placement) if quantizer.needs_ranges else {}
    placement, encodings, more = quantizer.encode(ranges)
    quantized = insert_qdq(quantizer.model, encodings)
    outputs, device = quantizer.simulate(quantized, samples, source)
    if device.not_run and settings.profile == "ort-cpu":
        raise CheckFailed(f"to-int8: onnxruntime runs the result only without its optimizations: {device.not_run}")
    more = (
        *filter(None, [describe_lost_training(source, quantized)]),
        *_describe_outputs(quantizer.model, outputs),
        *placement.notes(),
        *more,
        *describe_limited_biases(encodings, quantizer.model, OPTIONS),
        *device.notes(),
    )
    sizes = weight_bytes(quantizer.model, placement)
    counts = quantizer.measured_samples, quantizer.compared
    return Int8Result(quantized, placement, encodings, outputs, device, steps, sizes, *counts, (*notes, *more))


SPREAD_DB: Final = 250.0
"""Above every ratio of 10^9 values in float32 of one size, the noise of which is one rounding of one value."""


def _describe_outputs(model: DetachedModel, outputs: Mapping[str, OutputNoise]) -> Iterator[str]:
    """What the ratios of the outputs do not say."""
    graph = model.proto.graph
    if silent := [output.name for output in graph.output if output.name not in outputs]:
        names = join_first(silent, MOST_REASONS)
        yield f"outputs without elements, or of other types than float16, float32 and float64, have no ratio: {names}"
    for name, noise in outputs.items():
        if math.isnan(noise.max_abs):
            yield f"{name} is infinite or NaN on a sample, so its ratio says nothing; {OPTIONS.numbers}"
        elif SPREAD_DB < noise.sqnr_db < math.inf:
            yield (
                f"{name} has a value on a sample that is far above all others, so its ratio, which is that of this "
                f"value, says nothing; {OPTIONS.numbers}"
            )
    if drawn := sorted({node.op_type for node in every_node(graph) if node.op_type in RANDOM_OPS - {"Dropout"}}):
        yield f"{', '.join(drawn)} give other numbers in each run, so ratios of outputs that depend on them say nothing"
