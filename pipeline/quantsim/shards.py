"""Weights of a model that fits nowhere, rounded shard by shard: each job reads and writes some of the weights.

The model refers to its weights in the files of a checkpoint. A job maps the weights of its shard one after the other,
and writes integers, scales and zero points to a file of its own (shard_files.py), so a process holds little more than
one weight. With data GPTQ rounds the weights of products (shard_data.py). A job that is done is not done again after
the run was killed (`pipeline.jobs`). What stays in float is copied.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import NodeProto, TensorProto, helper

from passes.encodings.from_qdq import choose_stems, dequantize_node, rename_values
from passes.graph.index import replace_entries
from passes.suggest import bytes_text, plural
from passes.weights.detached import UNREAD, DetachedModel
from passes.weights.files import replace_when_done
from passes.weights.mapped import find_file_range
from passes.weights.stand_ins import point_to
from pipeline.config import KEYS
from pipeline.errors import CheckFailed, UsageError
from pipeline.jobs import Job, JobExecutor, Outcome, run_jobs
from pipeline.quantsim.optimize import OptimizedLayer, OptimizedStep, find_weights
from pipeline.quantsim.optimizers import Gptq, Optimizer
from pipeline.quantsim.placement import PlacedSite, Placement
from pipeline.quantsim.qdq import check_opset
from pipeline.quantsim.shard_data import FittingData, PiecewiseRounding
from pipeline.quantsim.shard_files import WeightFormat, quantize_shard
from pipeline.workspace import key_of, stamp, versions

FOLDER: Final = "quantized"
"""Where the quantized model and its shards lie, in the folder of the run."""

TABLE: Final = "shards.jsonl"

MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What came of all shards. `worst` is the weight with the lowest ratio of signal to noise, and the ratio."""

    file: Path
    weights: int
    shards: int
    nbytes: int
    worst: tuple[str, float]
    seconds: float
    step: OptimizedStep | None = None
    """What GPTQ did, where it rounds the weights."""

    def __str__(self) -> str:
        name, ratio = self.worst
        return (
            f"{plural(self.weights, 'weight')} in {plural(self.shards, 'shard')}, {bytes_text(self.nbytes)}, "
            f"{self.seconds:.0f} s of jobs; torch has dequantized each element by its own means; the lowest ratio is "
            f"{ratio:.2f} dB, {name}"
        )


def why_not_in_shards(placement: Placement) -> str:
    """Why a placement is not one that weights alone decide; empty where it is."""
    for placed in placement.quantized_sites():
        if placed.site.role != "weight" or placed.precision is None:
            return f"{placed.site.tensor} is no weight, and its range needs runs of the model"
        precision = placed.precision
        is_plain = not precision.float_type and not precision.scale_type and precision.granularity != "tensor"
        if not is_plain or placed.site.channel_axis is None:
            return (
                f"{placed.site.tensor} is {precision}; expected integers by channel or in blocks, with scales in float"
            )
    return "" if placement.quantized_sites() else "no weight is quantized"


def quantize_in_shards(
    model: DetachedModel,
    path: Path,
    placement: Placement,
    folder: Path,
    shard_mib: int,
    executor: JobExecutor,
    observer: Callable[[int, int], object] = lambda *_: None,
    data: FittingData | None = None,
) -> ShardResult:
    """Round the weights of the file `path`, whose graph is `model`, and write the quantized model to `folder`.

    Args:
        shard_mib: how much of the float weights one job reads; a larger weight is a shard of its own.
        observer: called with how many jobs are done, of how many.
        data: what GPTQ rounds the weights of products by; without it all weights are rounded to the nearest.

    Raises:
        UsageError: weights alone do not decide the formats, or the opset lacks them.
        CheckFailed: a job failed; those that are done stay.
    """
    why = why_not_in_shards(placement)
    if why:
        raise UsageError(f"quantsim.shard_mib: {why}")
    if data and data.step.python:
        raise UsageError("quantsim.optimize: gptq: found python next to shard_mib, expected onnxline's own interpreter")
    if data and isinstance(data.step, Gptq) and data.step.mse:
        raise UsageError("quantsim.optimize: gptq: found mse next to shard_mib, expected the scales of ranges")
    check_opset(model.proto, placement.formats(), KEYS)
    formats = {placed.site.tensor: _format_of(placed) for placed in placement.quantized_sites()}
    folder.mkdir(parents=True, exist_ok=True)
    ranges = (find_file_range(weight.data) for weight in model.weights.values())
    files = sorted({found.path for found in ranges if found is not None})
    identity = [stamp(path), [(name, stamp(Path(name))) for name in files]]
    entries, left = find_weights(data.step, model, placement, formats, WEIGHT_TYPES) if data else ([], {})
    fitted = {entry["tensor"] for entry in entries}
    planned = [
        Job(
            key_of(identity, names, [asdict(formats[name]) for name in names if name in formats])[:16],
            quantize_shard,
            {
                "path": str(path),
                "names": names,
                "formats": [asdict(formats[name]) for name in names if name in formats],
                "file": str(folder / f"shard-{number:04}.data"),
            },
        )
        for number, names in enumerate(_split(model, formats, fitted, shard_mib * MIB))
    ]
    rounding = None
    if data and entries:
        rounding = PiecewiseRounding(model, path, identity, entries, formats, data, folder, shard_mib * MIB)
    done, count = 0, len(planned) + sum(len(step.jobs) for step in (rounding.steps if rounding else ()))

    def note(_: object) -> None:
        nonlocal done
        done += 1
        observer(done, count)

    outcomes = [*run_jobs(planned, executor, folder / TABLE, versions(), note, _has_file)]
    if rounding and all(outcome.value is not None for outcome in outcomes):
        outcomes += rounding.run(executor, folder / TABLE, note, _has_file, outcomes)
    failed = next((outcome for outcome in outcomes if outcome.value is None), None)
    if failed is not None:
        raise CheckFailed(f"quantsim.shard_mib: a shard failed, those that are done stay: {failed.why}")
    result = _assemble(model, formats, outcomes, folder)
    return replace(result, step=_describe_step(data.step, outcomes, entries, left)) if data else result


WEIGHT_TYPES: Final = ("float32", "float16", "bfloat16")


def _describe_step(
    step: Optimizer, outcomes: Sequence[Outcome], entries: Sequence[Mapping[str, Any]], left: Mapping[str, str]
) -> OptimizedStep:
    products = {entry["tensor"]: entry["data"][0] for entry in entries}
    found = {name: row for outcome in outcomes for name, row in outcome.value.get("layers", {}).items()}
    rows = tuple(OptimizedLayer(products[name], name, *row) for name, row in found.items())
    status = "ran" if any(row.taken for row in rows) else "reverted"
    seconds = sum(outcome.seconds for outcome in outcomes if "layers" in outcome.value)
    return OptimizedStep(step.name, status, "", f"{step.module} {version(step.module)}", rows, left, None, seconds)


def _has_file(outcome: Outcome) -> bool:
    path = Path(outcome.value["file"])
    return path.is_file() and path.stat().st_size == outcome.value["nbytes"]


def _format_of(placed: PlacedSite) -> WeightFormat:
    site, precision = placed.site, placed.precision
    assert precision is not None and site.channel_axis is not None
    axis = site.summed_axis if precision.granularity == "block" else site.channel_axis
    assert axis is not None
    flags = precision.signed, precision.symmetric, precision.block
    return WeightFormat(site.tensor, precision.bits, *flags, axis, site.channel_axis)


def _split(
    model: DetachedModel, formats: Mapping[str, WeightFormat], others: Container[str], most: int
) -> Iterator[list[str]]:
    """The weights but `others` in order, as many together as have `most` bytes; small tensors stay in the model."""
    names: list[str] = []
    size = 0
    for tensor in model.proto.graph.initializer:
        if tensor.name in others or (tensor.name not in formats and model.weight(tensor) is None):
            continue
        own = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if names and size + own > most:
            yield names
            names, size = [], 0
        names.append(tensor.name)
        size += own
    if names:
        yield names


def _assemble(
    model: DetachedModel, formats: Mapping[str, WeightFormat], outcomes: Sequence[Outcome], folder: Path
) -> ShardResult:
    """Write the model that refers to the shards."""
    stems = choose_stems(model.proto.graph, formats)
    proto = model.copy_proto()
    graph = proto.graph
    small = [tensor for tensor in graph.initializer if tensor.name not in formats and model.weight(tensor) is None]
    replace_entries(graph.initializer, small)
    kept = [entry for entry in proto.metadata_props if entry.key != UNREAD]  # what is small may be read
    replace_entries(proto.metadata_props, kept)
    ratios: dict[str, float] = {}
    renamed: dict[str, str] = {}
    nodes: list[NodeProto] = []
    for outcome in outcomes:
        ratios |= outcome.value["ratios"]
        for place in outcome.value["places"]:
            name = f"{stems[place['name']]}_{place['kind']}" if place["kind"] else place["name"]
            tensor = TensorProto(name=name, data_type=place["type"], dims=place["dims"])
            point_to(tensor, Path(outcome.value["file"]).name, place["offset"], place["length"])
            graph.initializer.append(tensor)
    for name, form in formats.items():
        has_zero = not (form.symmetric and form.signed)
        node = dequantize_node(stems[name], form.precision, form.axis)
        if not has_zero:
            del node.input[2:]
        nodes.append(node)
        renamed[name] = node.output[0]
    for node in graph.node:
        rename_values(node, lambda name: renamed.get(name, name), reads_only=True)
    own = list(graph.node)
    replace_entries(graph.node, [*nodes, *own])
    file = folder / "model.onnx"
    with replace_when_done(file) as temporary:
        temporary.write_bytes(proto.SerializeToString())
    (folder / "ratios.json").write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    onnx.checker.check_model(str(file))
    worst = min(ratios.items(), key=lambda item: item[1])
    size = sum(outcome.value["nbytes"] for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return ShardResult(file, len(formats), len(outcomes), size, worst, seconds)
