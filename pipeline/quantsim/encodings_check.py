"""A file of encodings against the model that a converter reads it with: `onnxline check --encodings FILE`.

A converter takes encodings by name. It calibrates by itself what has none, passes over names that it does not find, and
reads an entry in another dialect as it can: none of this is an error there, and each makes another model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from passes.encodings.aimet import WITHOUT_QUANTIZER, from_aimet, read_aimet
from passes.encodings.encoding import Encoding, fit_encodings, is_same_encoding, share_by_moves
from passes.errors import UsageError
from passes.graph.inference import FLOATS, float_tensors, types_of
from passes.suggest import nearest, plural
from passes.weights.detached import DetachedModel
from pipeline.config import QuantSimConfig
from pipeline.quantsim.placement import PlacedSite, place
from pipeline.quantsim.profiles import rules_of


@dataclass(frozen=True, slots=True)
class EncodingFault:
    """One fault: the tensor, what is wrong, and what happens or helps."""

    tensor: str
    what: str
    advice: str


@dataclass(frozen=True, slots=True)
class EncodingsReport:
    """What a converter would make of a file.

    missing: tensors that it calibrates by itself.
    unknown: names that it does not find.
    faults: entries that it reads otherwise than they are meant, or not at all.
    """

    version: str
    entries: int
    missing: tuple[EncodingFault, ...]
    unknown: tuple[EncodingFault, ...]
    faults: tuple[EncodingFault, ...]
    notes: tuple[str, ...]

    @property
    def is_complete(self) -> bool:
        return not (self.missing or self.unknown or self.faults)

    def lines(self) -> Iterator[str]:
        """Sentences: the notes, and under each title its tensors."""
        yield from (f"note: {note}" for note in self.notes)
        for title, found in (
            ("calibrated by the converter itself", self.missing),
            ("not found by the converter", self.unknown),
            ("read otherwise than meant", self.faults),
        ):
            if found:
                yield f"{title} ({plural(len(found), 'tensor')}):"
            yield from (f"  {fault.tensor}: {fault.what}; {fault.advice}" for fault in found)


def check_encodings(model: DetachedModel, path: Path, target: str) -> EncodingsReport:
    """Hold a file of AIMET's encodings against the model that it is for.

    Args:
        target: the profile whose rules say which tensors are quantized.

    Raises:
        UsageError: there is no such file, it is no JSON, or none of encodings.
    """
    rows = _read_rows(path)
    encodings: dict[str, Encoding] = {}
    faults: list[EncodingFault] = []
    for row in rows:
        try:
            encodings |= from_aimet(row.alone)
        except UsageError as error:
            faults.append(EncodingFault(row.name, str(error).removeprefix("encodings: "), WRITE_AGAIN))
        faults += _find_row_faults(row)
    faults += _find_double(rows)
    unknown = tuple(_find_unknown(model, encodings))
    known = {name: encodings[name] for name in encodings.keys() - {fault.tensor for fault in unknown}}
    fitted, misfits = _fit_each(known, model)
    faults += misfits
    faults += _find_section_faults(model, rows, encodings.keys() & known.keys())
    faults += _find_move_faults(model, fitted)
    missing = tuple(_find_missing(model, fitted, target))
    version = rows[0].alone["version"] if rows else read_aimet(path)[1]
    return EncodingsReport(version, len(rows), missing, unknown, tuple(faults), tuple(_notes(version)))


def _fit_each(
    encodings: Mapping[str, Encoding], model: DetachedModel
) -> tuple[dict[str, Encoding], list[EncodingFault]]:
    """The encodings that suit their tensors, and the others; all at once where all do."""
    try:
        return fit_encodings(encodings, model), []
    except UsageError as error:
        if len(encodings) == 1:
            name = next(iter(encodings))
            return {}, [EncodingFault(name, str(error).removeprefix("encodings: "), WRITE_AGAIN)]
    names = list(encodings)
    halves = [
        _fit_each({name: encodings[name] for name in part}, model)
        for part in (names[: len(names) // 2], names[len(names) // 2 :])
    ]
    return halves[0][0] | halves[1][0], halves[0][1] + halves[1][1]


WRITE_AGAIN: Final = "write it again with `onnxline encodings`"


@dataclass(frozen=True, slots=True)
class EncodingRow:
    """An entry of a file: its name, its section, its data, and a file that holds it alone."""

    name: str
    section: str
    data: Any
    alone: Mapping[str, Any]


def _read_rows(path: Path) -> list[EncodingRow]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        data = {}
    data = data if isinstance(data, dict) else {}
    version = data.get("version")
    sections = SECTIONS.get(str(version), ())
    if not sections or not all(isinstance(data.get(section), list | dict) for section in sections):
        read_aimet(path)  # says what is wrong with a file as a whole
    rows: list[EncodingRow] = []
    for section in sections:
        empty = {name: type(data[name])() for name in sections}
        entries = data[section].items() if isinstance(data[section], dict) else [(None, row) for row in data[section]]
        for key, row in entries:
            name = key if key is not None else row.get("name") if isinstance(row, Mapping) else None
            content = [row] if key is None else {key: row}
            rows.append(EncodingRow(str(name), section, row, {"version": version, **empty, section: content}))
    return rows


PARAMS, ACTIVATIONS, ONE = "param_encodings", "activation_encodings", "encodings"

SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "0.6.1": (ACTIVATIONS, PARAMS),
    "1.0.0": (ACTIVATIONS, PARAMS),
    "2.0.0": (ONE,),
    "2.1.0": (ONE,),
}


def _find_row_faults(row: EncodingRow) -> Iterator[EncodingFault]:
    """Numbers of one entry that contradict each other, by the rules of AIMET's files up to 1.0.0."""
    several = row.data if isinstance(row.data, list) else [row.data]
    for part in several:
        if row.section == ONE or not isinstance(part, Mapping):
            continue
        bits, offsets, scales = part.get("bw", part.get("bitwidth")), part.get("offset"), part.get("scale")
        offsets, scales = _as_numbers(offsets), _as_numbers(scales)
        if len(offsets) != len(scales):
            yield EncodingFault(row.name, f"has {len(scales)} scales and {len(offsets)} offsets", WRITE_AGAIN)
        if not isinstance(bits, int) or not offsets or not scales:
            continue
        symmetric = str(part.get("is_sym", part.get("is_symmetric"))) == "True"
        if symmetric and any(offset != -(2 ** (bits - 1)) for offset in offsets):
            yield EncodingFault(
                row.name,
                f"is symmetric and has the offset {offsets[0]}, expected {-(2 ** (bits - 1))}",
                "a converter that trusts is_sym drops the offset",
            )
        if any(offset > 0 for offset in offsets):
            yield EncodingFault(row.name, f"has the offset {max(offsets)}", "offsets are zero or less in this version")
        if "min" in part and scales[0] and abs(part["min"] - offsets[0] * scales[0]) > abs(scales[0]) / 2:
            yield EncodingFault(
                row.name,
                f"says the minimum {part['min']:g}, and its scale and offset say {offsets[0] * scales[0]:g}",
                "converters read one or the other",
            )
        if part.get("enc_type") == "PER_TENSOR" and len(scales) != 1:
            yield EncodingFault(row.name, f"is PER_TENSOR and has {len(scales)} scales", WRITE_AGAIN)
        return  # of the entries for channels the first stands for all


def _as_numbers(item: object) -> list[float]:
    """A number, or a list of numbers; nothing where it is something else, which the reader of the file has named."""
    items = item if isinstance(item, list) else [item]
    numbers: list[float] = [number for number in items if isinstance(number, int | float)]
    return numbers if len(numbers) == len(items) else []


def _find_double(rows: Iterable[EncodingRow]) -> Iterator[EncodingFault]:
    for name, count in Counter(row.name for row in rows).items():
        if count > 1:
            yield EncodingFault(name, f"has {count} entries", "a converter takes one of them")


def _find_unknown(model: DetachedModel, encodings: Mapping[str, Encoding]) -> Iterator[EncodingFault]:
    graph = model.proto.graph
    stored = {tensor.name: tensor.data_type in FLOATS for tensor in graph.initializer}
    known = float_tensors(model.proto) | {name for name, is_float in stored.items() if is_float}
    every = set(types_of(model.proto)) | stored.keys() | model.index.producers.keys()
    nodes = {node.name for node in graph.node if node.name}
    for name in encodings:
        if name in known:
            continue
        what = "is no tensor of the model"
        if name in every:
            what = "is a tensor of another type than floats"
        elif name in nodes:
            what = "is the name of a node; encodings are for tensors"
        yield EncodingFault(name, what, f"it is passed over{nearest(name, known)}")


def _find_section_faults(
    model: DetachedModel, rows: Iterable[EncodingRow], known: Collection[str]
) -> Iterator[EncodingFault]:
    stored = model.index.initializers
    for row in rows:
        if row.name not in known or row.section == ONE:
            continue
        if (row.section == PARAMS) != (row.name in stored):
            right = PARAMS if row.name in stored else ACTIVATIONS
            yield EncodingFault(
                row.name, f"is listed in {row.section}", f"it belongs to {right}, and is not found here"
            )


def _find_move_faults(model: DetachedModel, fitted: Mapping[str, Encoding]) -> Iterator[EncodingFault]:
    """Results of what only moves numbers, whose encoding differs from what it reads: then numbers are rounded twice."""
    for node in model.proto.graph.node:
        if node.op_type not in WITHOUT_QUANTIZER or not node.input:
            continue
        source = fitted.get(node.input[0])
        for name in node.output:
            encoding = fitted.get(name)
            if encoding is not None and source is not None and not is_same_encoding(source, encoding):
                yield EncodingFault(
                    name,
                    f"has another encoding than {node.input[0]}, whose elements {node.op_type} moves",
                    "a converter rounds them twice; AIMET's strict loader refuses it",
                )


def _find_missing(model: DetachedModel, fitted: Mapping[str, Encoding], target: str) -> Iterator[EncodingFault]:
    placement = place(model, rules_of(QuantSimConfig(profile=target), model))  # pyright: ignore[reportArgumentType]
    known = set(share_by_moves(model.proto.graph, fitted))
    groups = {placed.site.group for placed in placement.sites if placed.site.tensor in known}
    sites = (placed.site for placed in placement.sites)
    known |= {site.tensor for site in sites if site.role != "weight" and site.group in groups}
    for placed in placement.quantized_sites():
        site = placed.site
        if site.tensor in known or _is_derived(placed, known):
            continue
        where = f"{site.op or 'an input'}{f' of {site.modules[-1]}' if site.modules and site.modules[-1] else ''}"
        yield EncodingFault(site.tensor, f"{site.role}, {where}", f"expected {placed.precision}")


def _is_derived(placed: PlacedSite, known: Collection[str]) -> bool:
    """Whether a converter computes the encoding of a bias from those of its factors."""
    factors = placed.site.bias_of
    return factors is not None and all(name in known for name in factors)


def _notes(version: str) -> Iterator[str]:
    if version != "0.6.1":
        yield f"version {version}: QNN's --custom_io reads 0.6.1 alone; quantsim.encodings: 0.6.1 writes that"
    if version in ("2.0.0", "2.1.0"):
        yield f"version {version}: QNN takes it with --use_quantize_v2 alone"
