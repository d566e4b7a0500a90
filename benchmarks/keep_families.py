"""`keep: qkv` over the attention families of `transformers`, through every optimizer, against torch's module tree.

    python -m benchmarks.keep_families [--family NAME]… [--optimizer NAME]… [--markdown FILE]

Each family (benchmarks/families/*.yaml) is made with random weights and exported. The finder's triples are compared
with those that torch ran; then each optimizer runs three times: freely, with Q, K and V kept, and with its merging
passes skipped by name. What is known is written down at once, so a run that was stopped goes on where it ended.
Exits 1 when a bound is broken.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.families.detect import detect, export_family
from benchmarks.families.measure import OPTIMIZERS, measure
from benchmarks.families.record import Record, Records
from benchmarks.families.report import breaches, markdown
from benchmarks.families.table import Family, families
from passes.context import PassContext, open_context
from pipeline.errors import OnnxlineError

FOLDER = Path("runs/benchmarks")
CALL_S = 60.0
"""Seconds for one call of an optimizer, which takes one or two; onnxsim does not end on VITS."""


def main() -> None:
    options = _options()
    table = families()
    chosen = [table[name] for name in options.family or table]
    optimizers = tuple(options.optimizer or OPTIMIZERS)
    records = Records(FOLDER / "keep_families")
    rows: list[tuple[Family, Record]] = []
    with open_context(CALL_S) as context:
        for index, family in enumerate(chosen):
            record = _measured(family, optimizers, records, context)
            rows.append((family, record))
            print(f"{index + 1}/{len(chosen)} {family.name}: {_said(family, record)}", flush=True)
    _write(markdown(rows, optimizers, _command(options)), options.markdown)
    broken = breaches(rows)
    print("\n".join(f"BROKEN {one}" for one in broken) or "every bound holds")
    sys.exit(1 if broken else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", choices=list(families()), metavar="NAME")
    parser.add_argument("--optimizer", action="append", choices=list(OPTIMIZERS))
    parser.add_argument("--markdown", type=Path, default=FOLDER / "keep_families.md")
    return parser.parse_args()


def _command(options: argparse.Namespace) -> str:
    chosen = [f" --family {name}" for name in options.family or ()]
    chosen += [f" --optimizer {name}" for name in options.optimizer or ()]
    return f"python -m benchmarks.keep_families{''.join(chosen)}"


def _measured(family: Family, optimizers: Sequence[str], records: Records, context: PassContext) -> Record:
    """What is known of `family`, after finding out what was not."""
    record = records.read(family)
    lacking = record.lacks(tuple(optimizers))
    if record.is_known and not lacking:
        return record
    begun = time.perf_counter()
    try:
        exported = export_family(family)
    except OnnxlineError as error:
        record = Record(record.key, time.perf_counter() - begun, why_not=_in_a_line(error))
        records.write(family, record)
        return record
    if record.detection is None:
        record = Record(record.key, time.perf_counter() - begun, detection=detect(exported))
        records.write(family, record)
    for name in record.lacks(tuple(optimizers)):
        begun = time.perf_counter()
        outcome = measure(family, exported, OPTIMIZERS[name], context)
        record = record.with_outcome(name, outcome, time.perf_counter() - begun)
        records.write(family, record)
    return record


def _in_a_line(error: OnnxlineError) -> str:
    """What it says, but not where this machine has its libraries."""
    return re.sub(r"\S*/site-packages/", "", " ".join(str(error).split()))


def _said(family: Family, record: Record) -> str:
    if record.detection is None:
        return f"does not export ({record.seconds:.0f} s)"
    lost = [f"{name} {one.freely.lost} → {one.kept.lost}, {one.extra:+.1f}" for name, one in record.outcomes.items()]
    wrong = "".join(f" BROKEN {one}" for one in breaches([(family, record)]))
    found = f"{record.detection.found} of {record.detection.expected}"
    return f"{found}; {'; '.join(lost) or 'nothing to keep'} ({record.seconds:.0f} s){wrong}"


def _write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {path}")


if __name__ == "__main__":
    main()
