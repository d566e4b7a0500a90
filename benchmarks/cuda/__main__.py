"""Runs the rows, each in a process of its own with a limit, until all are done or the time is up.

    benchmarks/cuda/run.sh [--rows NAME,…] [--minutes 8] [--out FOLDER] [--dry]

Writes FOLDER/NAME.json for each row, and FOLDER/rows.md, a table for benchmarks/RESULTS.md with the name of the card.
A row that this card has measured at this commit is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("results")

DRY_LIMIT = 5
"""A dry run is not measured, and may share its machine."""

ROW_EXIT_S = 10
"""Seconds that are left for a row to be worth a start."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run_row(options.one, dry=options.dry)))
        return 0
    from benchmarks.cuda.rows import ROWS

    wanted = [name for name in options.rows.split(",") if name] or list(ROWS)
    if unknown := [name for name in wanted if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    options.out.mkdir(parents=True, exist_ok=True)
    begun, commit = time.monotonic(), commit_of_tree()
    card = card_name(dry=options.dry)
    failed = 0
    for name in wanted:
        file = options.out / f"{name}.json"
        if is_measured(file, card, commit):
            print(f"{name}: measured already", flush=True)
            continue
        left = options.minutes * 60 - (time.monotonic() - begun)
        if left < ROW_EXIT_S:
            print(f"{name}: no time left", flush=True)
            continue
        limit_s = ROWS[name].limit_s * (DRY_LIMIT if options.dry else 1)
        found = start_row(name, min(limit_s, left), dry=options.dry)
        found |= {"row": name, "card": card, "commit": commit, "goal": ROWS[name].goal}
        file.write_text(json.dumps(found, indent=1) + "\n")
        failed += found["status"] != "ran"
        print(f"{name}: {found['status']}, {found['seconds']:.1f} s", flush=True)
        write_table(options.out, list(ROWS))
    return 1 if failed else 0


def run_row(name: str, *, dry: bool) -> dict[str, Any]:
    """In the process of the row: its figures, or the error that ended it."""
    from benchmarks.cuda.measure import Bench
    from benchmarks.cuda.rows import ROWS

    begun = time.monotonic()
    try:
        figures = ROWS[name].run(Bench.open(dry=dry))
    except Exception as error:  # whatever it is, it is the result of the row
        return {
            "status": "failed",
            "error": f"{type(error).__name__}: {error}",
            "trace": traceback.format_exc()[-4000:],
            "seconds": time.monotonic() - begun,
        }
    plain = {key: asdict(value) if is_dataclass(value) else value for key, value in figures.items()}  # type: ignore[arg-type]
    return {"status": "ran", "figures": plain, "seconds": time.monotonic() - begun, "torch": version_of_torch()}


def start_row(name: str, limit_s: float, *, dry: bool) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.cuda", "--one", name, *(["--dry"] if dry else [])]
    begun = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        lines = done.stdout.strip().splitlines()
        if done.returncode == 0 and lines:
            return dict(json.loads(lines[-1]))
        error = (done.stdout + done.stderr)[-4000:]
        status = f"exit {done.returncode}"
    except subprocess.TimeoutExpired as timeout:
        status, error = f"longer than {limit_s:.0f} s", str(timeout.stderr or b"")[-2000:]
    return {"status": status, "error": error, "seconds": time.monotonic() - begun}


def is_measured(file: Path, card: str, commit: str) -> bool:
    if not file.is_file():
        return False
    found = json.loads(file.read_text())
    return (found["status"], found["card"], found["commit"]) == ("ran", card, commit)


def write_table(folder: Path, names: list[str]) -> None:
    """rows.md: a line for each row that has a result."""
    lines = ["| row | card | status | figures | goal |", "| --- | --- | --- | --- | --- |"]
    for name in names:
        if (file := folder / f"{name}.json").is_file():
            found = json.loads(file.read_text())
            shown = "; ".join(f"{key} {show(value)}" for key, value in found.get("figures", {}).items())
            shown = shown or found.get("error", "").strip().replace("\n", " ")[-200:]
            lines.append(
                f"| {name} | {found['card']} | {found['status']} | {shown.replace('|', '/')} | {found['goal']} |"
            )
    (folder / "rows.md").write_text("\n".join(lines) + "\n")


def show(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['device_ms']:.3f} ms (host {value['host_us']:.1f} µs)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def card_name(*, dry: bool) -> str:
    from benchmarks.cuda.measure import Bench

    return Bench.open(dry=dry).card


def commit_of_tree() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", f"unknown, on {platform.node()}")


def version_of_torch() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main())
