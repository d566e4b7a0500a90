"""Weights of a model that fits nowhere, rounded shard by shard: each job reads and writes some of the weights.

The model refers to its weights in the files of a checkpoint. A job maps the weights of its shard one after the other,
rounds them in slices of channels, and writes integers, scales and zero points to a file of its own; so a process holds
little more than one weight. A job that is done is not done again after the run was killed (`pipeline.jobs`). What stays
in float is copied. Each product is proven by itself: torch dequantizes and multiplies by its own means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from passes.encodings.encoding import Encoding, Precision
from passes.graph.index import replace_entries
from passes.suggest import bytes_text, plural
from passes.weights.detached import UNREAD, DetachedModel, read_model
from passes.weights.files import replace_when_done
from passes.weights.mapped import find_file_range
from passes.weights.stand_ins import point_to
from pipeline.errors import CheckFailed, UsageError
from pipeline.jobs import Job, LocalProcesses, Outcome, run_jobs
from pipeline.quantsim.encodings import encode_weight, quantize
from pipeline.quantsim.placement import PlacedSite, Placement
from pipeline.quantsim.qdq import check_opset, choose_stems, dequantize_node, rename_values
from pipeline.quantsim.sites import store_constants
from pipeline.workspace import key_of, stamp, versions

FOLDER: Final = "quantized"
"""Where the quantized model and its shards lie, in the folder of the run."""

TABLE: Final = "shards.jsonl"

SLICE: Final = 2**22
"""Elements that are rounded at once."""

PROVEN_CHANNELS: Final = 256
"""Channels of each weight whose product torch computes, from the first one."""

ALIGNMENT: Final = 4096

MIB: Final = 2**20


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How one weight is stored; `axis` is that of its channels or blocks."""

    name: str
    bits: int
    signed: bool
    symmetric: bool
    block: int
    axis: int
    channel_axis: int

    @property
    def precision(self) -> Precision:
        granularity = "block" if self.block else "channel"
        return Precision(self.bits, self.signed, self.symmetric, granularity, self.block)


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What came of all shards. `worst` is the weight with the lowest ratio of signal to noise, and the ratio."""

    file: Path
    weights: int
    shards: int
    nbytes: int
    worst: tuple[str, float]
    seconds: float

    def __str__(self) -> str:
        name, ratio = self.worst
        return (
            f"{plural(self.weights, 'weight')} in {plural(self.shards, 'shard')}, {bytes_text(self.nbytes)}, "
            f"{self.seconds:.0f} s of jobs; torch has computed a part of each product by its own means; the lowest "
            f"ratio is {ratio:.2f} dB, {name}"
        )


def why_not_in_shards(placement: Placement) -> str:
    """Why a placement is not one that weights alone decide; empty where it is."""
    for placed in placement.quantized():
        if placed.site.role != "weight" or placed.precision is None:
            return f"{placed.site.tensor} is no weight, and its range needs runs of the model"
        if placed.precision.float_type or placed.precision.granularity == "tensor" or placed.site.channel_axis is None:
            return f"{placed.site.tensor} is {placed.precision}; expected integers by channel or in blocks"
    return "" if placement.quantized() else "no weight is quantized"


def quantize_in_shards(
    model: DetachedModel,
    path: Path,
    placement: Placement,
    folder: Path,
    shard_mib: int,
    jobs: int | None,
    observer: Callable[[int, int], object] = lambda *_: None,
) -> ShardResult:
    """Round the weights of the file `path`, whose graph is `model`, and write the quantized model to `folder`.

    Args:
        shard_mib: how much of the float weights one job reads; a larger weight is a shard of its own.
        jobs: processes at a time; as many as the cores allow by default.

    Raises:
        UsageError: weights alone do not decide the formats, or the opset lacks them.
        CheckFailed: a job failed; those that are done stay.
    """
    why = why_not_in_shards(placement)
    if why:
        raise UsageError(f"quantsim.shard_mib: {why}")
    check_opset(model.proto, placement.formats())
    formats = {placed.site.tensor: _format_of(placed) for placed in placement.quantized()}
    folder.mkdir(parents=True, exist_ok=True)
    ranges = (find_file_range(weight.data) for weight in model.weights.values())
    files = sorted({found.path for found in ranges if found is not None})
    identity = [stamp(path), [(name, stamp(Path(name))) for name in files]]
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
        for number, names in enumerate(_split(model, formats, shard_mib * MIB))
    ]
    done = 0

    def note(_: object) -> None:
        nonlocal done
        done += 1
        observer(done, len(planned))

    outcomes = run_jobs(planned, LocalProcesses(jobs), folder / TABLE, versions(), note, _has_file)
    failed = next((outcome for outcome in outcomes if outcome.value is None), None)
    if failed is not None:
        raise CheckFailed(f"quantsim.shard_mib: a shard failed, those that are done stay: {failed.why}")
    return _assemble(model, formats, outcomes, folder)


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


def _split(model: DetachedModel, formats: Mapping[str, WeightFormat], most: int) -> Iterator[list[str]]:
    """The weights in order, as many together as have `most` bytes; small tensors stay in the model."""
    names: list[str] = []
    size = 0
    for tensor in model.proto.graph.initializer:
        if tensor.name not in formats and model.weight(tensor) is None:
            continue
        own = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
        if names and size + own > most:
            yield names
            names, size = [], 0
        names.append(tensor.name)
        size += own
    if names:
        yield names


def quantize_shard(path: str, names: Sequence[str], formats: Sequence[Mapping[str, Any]], file: str) -> dict[str, Any]:
    """The job of one shard: write its tensors to `file`.

    Returns:
        The places of all tensors in the file, and the ratio of signal to noise of each weight, in dB.
    """
    model = store_constants(read_model(Path(path), unread=True))
    known = {str(entry["name"]): WeightFormat(**entry) for entry in formats}
    places: list[dict[str, Any]] = []
    ratios: dict[str, float] = {}
    with replace_when_done(Path(file)) as temporary, temporary.open("wb") as out:

        def write(name: str, kind: str, array: np.ndarray, data_type: int, dims: Sequence[int]) -> None:
            out.write(b"\0" * (-out.tell() % ALIGNMENT))
            place = {"name": name, "kind": kind, "type": data_type, "dims": [*dims], "offset": out.tell()}
            out.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            places.append({**place, "length": out.tell() - place["offset"]})

        for name in names:
            tensor = model.index.initializers[name]
            array = model.array(tensor)
            if name not in known:
                write(name, "", array, tensor.data_type, tensor.dims)
                continue
            precision = known[name].precision
            integers, scales, zeros, ratios[name] = _round(array, known[name])
            _prove(array, integers, scales, zeros, known[name])
            kind = getattr(TensorProto, precision.onnx_name)
            write(name, "quantized", _pack(integers, precision), kind, array.shape)
            write(name, "scale", scales, tensor.data_type, scales.shape)
            if not precision.symmetric or not precision.signed:
                write(name, "zero_point", _pack(zeros, precision), kind, scales.shape)
    return {"file": file, "nbytes": Path(file).stat().st_size, "places": places, "ratios": ratios}


def _pack(array: np.ndarray, precision: Precision) -> np.ndarray:
    """Integers as ONNX stores them: two of 4 bits in a byte, the first one low."""
    if precision.stored_bits != 4:
        return array
    flat = np.append(array.reshape(-1), np.zeros(array.size % 2, array.dtype)).view(np.uint8)
    return (flat[::2] & 15) | (flat[1::2] << 4)


def _round(array: np.ndarray, form: WeightFormat) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Integers, scales in the type of the weight, zero points, and the ratio in dB; slice by slice of the channels."""
    precision, channel = form.precision, form.channel_axis
    dtype = np.dtype(f"{'i' if precision.signed else 'u'}{max(precision.stored_bits, 8) // 8}")
    integers = np.empty(array.shape, dtype)
    step = max(1, SLICE * array.shape[channel] // max(array.size, 1))
    scales, zeros = [], []
    signal = noise = 0.0
    for start in range(0, array.shape[channel], step):
        place = tuple(slice(start, start + step) if axis == channel else slice(None) for axis in range(array.ndim))
        part = array[place].astype(np.float32)
        if not np.isfinite(part).all():
            raise UsageError(f"quantsim: the stored tensor {form.name!r} holds infinity or NaN, which has no scale")
        found = encode_weight(part, precision, form.axis)
        rounded = found.scale.astype(array.dtype)  # the scale that is stored decides the integers; none is smaller
        short = rounded.astype(np.float32) < found.scale
        rounded[short] = np.nextafter(rounded[short], np.asarray(np.inf, array.dtype))
        encoding = Encoding(precision, rounded.astype(np.float32), found.zero_point, form.axis)
        numbers = quantize(part, encoding)
        integers[place] = numbers
        steps, middle = (encoding.spread(part, values) for values in (encoding.scale, encoding.zero_point))
        difference = (numbers - middle) * steps - part
        signal += float(np.square(part, dtype=np.float64).sum())
        noise += float(np.square(difference, dtype=np.float64).sum())
        scales.append(rounded)
        zeros.append(encoding.zero_point.astype(dtype))
    along = channel if form.block else 0
    ratio = 10 * math.log10(signal / noise) if signal and noise else math.inf
    return integers, np.concatenate(scales, along), np.concatenate(zeros, along), ratio


def _prove(array: np.ndarray, integers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, form: WeightFormat) -> None:
    """Hold the first channels against torch: no element is off by more than half a step, nor a product by more.

    Raises:
        CheckFailed: it is not so.
    """
    import torch

    def pick(values: np.ndarray) -> torch.Tensor:
        axis = form.channel_axis if values.ndim > 1 else 0
        return torch.from_numpy(
            np.take(values, range(min(PROVEN_CHANNELS, values.shape[axis])), axis).astype(np.float32)
        )

    weight, numbers = pick(array), pick(integers)
    steps, middle = pick(scales), pick(zeros)
    if form.block:
        size = weight.shape[form.axis]
        steps, middle = (
            part.repeat_interleave(form.block, form.axis).narrow(form.axis, 0, size) for part in (steps, middle)
        )
    else:
        shape = [-1 if axis == form.axis else 1 for axis in range(weight.ndim)]
        steps, middle = steps.reshape(shape), middle.reshape(shape)
    dequantized = (numbers - middle) * steps
    excess = ((dequantized - weight).abs() - steps * HALF_STEP).max().item()
    matrix, other, reach = (
        part.movedim(form.channel_axis, 0).flatten(1)
        for part in (weight, dequantized, steps.expand_as(weight) * HALF_STEP)
    )
    rows = torch.randn(4, matrix.shape[1], generator=torch.Generator().manual_seed(0))
    moved = (rows @ other.T - rows @ matrix.T).abs()
    allowed = rows.abs() @ reach.T + PRODUCT_ROUNDING * rows.abs() @ matrix.abs().T
    if excess > 0 or bool((moved > allowed).any()):
        raise CheckFailed(f"{form.name}: torch finds it {excess:.3g} further off than half a step; report it as a bug")


HALF_STEP: Final = 0.502
"""Half a step, and what a scale of 16 bits and the clipping of the outermost value may add."""

PRODUCT_ROUNDING: Final = 1e-5


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
    del graph.node[:]
    graph.node.extend([*nodes, *own])
    file = folder / "model.onnx"
    with replace_when_done(file) as temporary:
        temporary.write_bytes(proto.SerializeToString())
    (folder / "ratios.json").write_text(json.dumps(ratios, indent=1) + "\n", encoding="utf-8")
    onnx.checker.check_model(str(file))
    worst = min(ratios.items(), key=lambda item: item[1])
    size = sum(outcome.value["nbytes"] for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    return ShardResult(file, len(formats), len(outcomes), size, worst, seconds)
