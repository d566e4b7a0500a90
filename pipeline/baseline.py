"""A baseline: the results of a run as a small text file to review and to keep in git.

The report of a run is converted to plain data, written to a file, and compared with a later run.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from passes.proof.numbers import DRAWN, Errors
from passes.run.result import PassRow, Status, StructureVerdict
from passes.visible import visible_data
from passes.weights.files import replace_when_done, write_errors
from pipeline.errors import UsageError
from pipeline.report import SOURCE, BackendReport, Mark, Report
from pipeline.workspace import make_folder

FORMAT_VERSION: Final = 1

Plain = dict[str, Any]

FOLDERS: Final = re.compile(r"(?<![\w.])/(?:[\w.+-]+/)+")
"""Folders in messages, which differ by machine and by run."""


def baseline_of(report: Report) -> Plain:
    """The baseline of a report as plain data: versions, the source, passes, structures, errors of the final model.

    Errors are rounded up to a power of ten, since their digits differ between machines.
    """
    if report.parts:
        versions = {name: _version(name, version) for name, version in report.versions.items()}
        parts = {name: _without(baseline_of(part), "format_version", "versions") for name, part in report.parts.items()}
        chain = {chain.backend: chain.result for chain in report.chain}
        return visible_data({"format_version": FORMAT_VERSION, "versions": versions, "parts": parts, "chain": chain})
    marks = {mark.row: mark for mark in report.marks}
    return visible_data(
        {
            "format_version": FORMAT_VERSION,
            "versions": {name: _version(name, version) for name, version in report.versions.items()},
            "source": _mark(marks[SOURCE]) if SOURCE in marks else {},
            "passes": {
                f"{place + 1:02} {row.name}": _row(row, marks.get(place)) for place, row in enumerate(report.passes)
            },
            "structures": _structures(report.structures),
            "backends": {backend.name: _backend(backend) for backend in report.runtime.backends}
            if report.runtime
            else {},
        }
    )


METRIC: Final = re.compile(r"(\S+), at (least|most) (\S+)")
"""The metric of a task, and the bound that a later run is held to."""


def _without(baseline: Plain, *keys: str) -> Plain:
    return {key: value for key, value in baseline.items() if key not in keys}


def _version(name: str, version: str) -> str:
    """A version without the part that names the machine it was built for."""
    plain = version.partition("+")[0]
    return ".".join(plain.split(".")[:2]) if name == "python" else plain


def _row(row: PassRow, mark: Mark | None) -> Plain | str:
    if row.status is Status.SKIPPED:
        return "skipped"
    reason = FOLDERS.sub("", row.reason)
    entry: Plain = {} if row.status is Status.RAN else {"status": str(row.status), "reason": reason}
    if row.status is Status.RAN and reason:
        entry["note"] = reason
    if row.changed:
        entry |= {"change": dict(row.diff), **(_mark(mark) if mark else {}), "errors": _errors(row.errors)}
    if row.lost:
        entry["lost"] = list(row.lost)
    return entry or "idle"


def _mark(mark: Mark) -> Plain:
    return {
        "nodes": sum(mark.ops.values()),
        "bytes": mark.nbytes,
        "fingerprint": mark.fingerprint,
        "ops": dict(mark.ops),
    }


def _structures(verdicts: tuple[StructureVerdict, ...]) -> Plain:
    structures: Plain = {}
    for kind, count in Counter(verdict.kind for verdict in verdicts).items():
        lost = {
            verdict.name: verdict.broken_by or "" for verdict in verdicts if verdict.kind == kind and not verdict.kept
        }
        structures[kind] = {"found": count, "kept": count - len(lost), **({"lost": lost} if lost else {})}
    return structures


def _backend(backend: BackendReport) -> Plain | str:
    shortfall = "" if backend.status == "differs" else FOLDERS.sub("", backend.shortfall)
    return shortfall or _errors(backend.errors)


def _errors(errors: Mapping[str, Errors]) -> Plain:
    return {name: "random" if error.judged_as == DRAWN else _band(error.max_abs) for name, error in errors.items()}


def _band(error: float) -> str:
    """`0`, or the power of ten that the error does not exceed."""
    if error == 0 or not math.isfinite(error):
        return f"{error:g}"
    return f"<= 1e{math.ceil(math.log10(error)):+03}"


HEAD: Final = (
    "# What `onnxline baseline accept` found. `onnxline baseline check` fails when any of it changes;\n"
    "# accept again what you have reviewed.\n"
)

SUFFIX: Final = ".baseline"

WIDTH: Final = 4096
"""Wide enough that no entry is split over lines."""


def baseline_file(config: Path) -> Path:
    """The default file of a baseline: `vit.baseline` for `vit.yaml`."""
    return config.with_suffix(SUFFIX)


def write_baseline(baseline: dict[str, Any], path: Path) -> None:
    """Write a baseline, first under another name, so that the file is never incomplete.

    Raises:
        UsageError: it cannot be written, or `path` is another kind of file.
    """
    check_place(path)
    body = yaml.safe_dump(baseline, sort_keys=False, allow_unicode=True, default_flow_style=None, width=WIDTH)
    with write_errors(path):
        make_folder(path.parent)
        with replace_when_done(path) as temporary:
            temporary.write_text(HEAD + body, encoding="utf-8")


def check_place(path: Path) -> None:
    """Refuse a place where no baseline can be written, before the run.

    Raises:
        UsageError: `path` is a folder, no baseline, or cannot be read.
    """
    if path.is_dir():
        raise UsageError(f"{path} is a folder; give a file with --file")
    try:
        is_other = path.is_file() and not path.read_bytes().startswith(HEAD.splitlines()[0].encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; give another --file") from None
    if is_other:
        raise UsageError(f"{path} is there already and is no baseline, so it is not written over; give another --file")


def read_baseline(path: Path, source: str = "CONFIG") -> dict[str, Any]:
    """Read a baseline; `source` is the configuration or model that a message tells to accept.

    Raises:
        UsageError: the file is missing, is no baseline, or has another format version.
    """
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"no baseline at {path}; make it with `onnxline baseline accept {source}`") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as a baseline: {' '.join(str(error).split())}") from error
    if not isinstance(data, dict) or "format_version" not in data:
        raise UsageError(f"{path} is not a baseline; make one with `onnxline baseline accept {source}`")
    if data["format_version"] != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format version {data['format_version']}, this release reads {FORMAT_VERSION}; accept it anew"
        )
    return data


FLOOR: Final = -9
"""The power of ten below which errors count as equal: less than a bit of a float32 near 1."""

SLACK: Final = 1
"""Powers of ten by which an error may differ from one machine to another."""


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each entry that differs; empty if none does.

    Errors within one power of ten count as equal.
    """
    return [f"{' › '.join(path)}: {_words(was)} → {_words(now)}" for path, was, now in _leaves((), before, after)]


def _leaves(path: tuple[str, ...], before: Any, after: Any) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            yield from _leaves((*path, str(key)), before.get(key, MISSING), after.get(key, MISSING))
    elif before != after and not _is_alike(before, after):
        yield path, before, after


def _is_alike(before: Any, after: Any) -> bool:
    known, found = (METRIC.fullmatch(str(entry)) for entry in (before, after))
    if known and found and known[2] == found[2]:  # the bound is that of the file, which people have reviewed
        return float(found[1]) >= float(known[3]) if known[2] == "least" else float(found[1]) <= float(known[3])
    powers = _power(before), _power(after)
    if None in powers:
        return False
    low, high = (max(power, FLOOR) for power in powers if power is not None)
    return abs(high - low) <= SLACK


def _power(text: Any) -> int | None:
    """The power of ten of an error written as `<= 1e-06`; `FLOOR` for 0, None for other values."""
    if text == "0":
        return FLOOR
    return int(text.removeprefix("<= 1e")) if isinstance(text, str) and text.startswith("<= 1e") else None


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(item)}" for key, item in value.items())
    return str(value)


MISSING: Final = "(nothing)"
