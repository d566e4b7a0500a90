"""What benchmarks of models in parts share: the table with a row for each family, and a timed run of one family."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import machine, versions_line
from pipeline import Pipeline, RunConfig
from pipeline.parts import PartsResult

Row = Callable[[str, Path], Iterator[str]]
"""The cells of a family after its name; the folder is empty, and is removed when the row is written."""


def print_table(text: str | None, families: Collection[str], heads: str, row: Row) -> None:
    """Print a table of the families that `--families` names, all by default.

    Args:
        text: the docstring of the benchmark, whose first paragraph is its help.
        heads: the heads of the columns with bars between, the family's first.
    """
    parser = argparse.ArgumentParser(description=(text or "").partition("\n\n")[0])
    parser.add_argument("--families", nargs="+", choices=list(families), default=list(families))
    chosen = parser.parse_args()
    print(f"{machine()}; {versions_line()}\n")
    print(f"| {heads} |")
    print("| --- " * (heads.count("|") + 1) + "|")
    for family in chosen.families:
        with tempfile.TemporaryDirectory() as folder:
            print(f"| {family} | {' | '.join(row(family, Path(folder)))} |", flush=True)


def run_in_parts(settings: Mapping[str, Any], family: str, folder: Path) -> tuple[PartsResult, str, str]:
    """Run a configuration; returns the result, how many structures were kept, and the seconds that the run took."""
    begun = time.perf_counter()
    result = Pipeline(RunConfig.from_mapping(settings, title=family), folder / "run").run()
    assert isinstance(result, PartsResult)
    kept = sum(verdict.kept for verdict in result.structures)
    structures = f"{kept} of {len(result.structures)}" if result.structures else "none in the source"
    return result, structures, f"{time.perf_counter() - begun:.0f} s"
