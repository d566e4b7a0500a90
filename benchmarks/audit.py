"""How long an audit of the default sets over ONNX's node tests takes, and whether it finds what is known.

    python -m benchmarks.audit [--jobs 2] [--out FOLDER] [--markdown FILE]

Runs `onnxline audit --cases 'node/*'` as a process of its own, in a fresh folder; then that on the planted models,
which bring two passes down that no node test does. Wanted: under 20 minutes on 2 cores. What onnxoptimizer 0.4.2 and
onnxsim 0.8.1 are known to do stands in `KNOWN`; of other releases the numbers are shown and not judged.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.measure import machine, run_child, versions_line
from passes.advisories import AuditTable, tables_in

WANTED_S: Final = 20 * 60.0


@dataclass(frozen=True, slots=True)
class Known:
    """`count` cases of which `distribution` is known to do `kind`, by the passes whose names begin with `name`."""

    distribution: str
    name: str
    kind: str
    count: int
    where: str
    what: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="keep the tables here; in a folder that is removed by default")
    parser.add_argument("--markdown", type=Path, default=Path("runs/benchmarks/audit.md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder)
        seconds = {source: _audit(source, out / source, options.jobs) for source in ("node", "planted")}
        tables = {source: tables_in(out / source) for source in seconds}
    text = _markdown(seconds, tables, options.jobs)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(f"{text}\nwritten to {options.markdown}")


def _audit(source: str, out: Path, jobs: int) -> float:
    """Seconds of wall time, reproducers included."""
    words = ["audit", "--cases", f"{source}/*", "--out", str(out), "--jobs", str(jobs)]
    return run_child(["-m", "onnxline", *words], memory=False).seconds


def _markdown(seconds: dict[str, float], tables: dict[str, Sequence[AuditTable]], jobs: int) -> str:
    node = tables["node"]
    lines = [
        f"`python -m benchmarks.audit --jobs {jobs}`, {time.strftime('%Y-%m-%d')}",
        "",
        f"{sum(node[0].cases.values())} node tests, all libraries: {seconds['node']:.0f} s of wall time "
        f"(wanted: under {WANTED_S:.0f} s).",
        "",
        "| known | wanted | found |",
        "| --- | --- | --- |",
        *(f"| {one.what} | {one.count} | {_found(one, tables[one.where])} |" for one in KNOWN),
        "",
        f"Machine: {machine()}. Versions: {versions_line()}.",
    ]
    return "\n".join(lines) + "\n"


def _found(one: Known, tables: Sequence[AuditTable]) -> int:
    entries = [entry for table in tables if table.distribution == one.distribution for entry in table.entries]
    return sum(entry.count for entry in entries if entry.kind == one.kind and entry.name.startswith(one.name))


KNOWN: Final = (
    Known("onnxoptimizer", "eliminate_shape_op", "crashed", 1, "node", "SIGSEGV of eliminate_shape_op"),
    Known("onnxoptimizer", "eliminate_if", "crashed", 1, "planted", "SIGSEGV on an If that hands out an initializer"),
    Known("onnxoptimizer", "eliminate_consecutive", "wrong", 2, "node", "wrong results of idempotent ops"),
    Known("onnxoptimizer", "nop", "invalid", 29, "node", "invalid results: types of sequences and optionals lost"),
    Known("onnxoptimizer", "fuse_qkv", "raised", 1, "planted", "assertion of fuse_qkv on a shared graph input"),
    Known("onnxsim", "onnxsim", "raised", 34, "node", "models on which onnxsim raises"),
)


if __name__ == "__main__":
    main()
