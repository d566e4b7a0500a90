"""Operators of families that a target does not take, before and after the recipe of `check --target NAME --fix`.

    python -m benchmarks.target_fixes [--target qnn-htp] [--family NAME]… [--markdown FILE]

Each family (benchmarks/families/*.yaml, and a small DiT of diffusers) is exported with random weights and goes
through the default recipe; then the command writes and proves its recipe, which is run once more on the model. Exits 1
where an operator outside the table is left, or a step was reverted.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

import passes
from benchmarks.families.table import families
from benchmarks.measure import machine, versions_line
from benchmarks.node_counts import DIT, source_of
from passes.context import PassContext, open_context
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe import TORCH_RECIPE
from passes.recipe.recipe import steps_of
from passes.run.runner import run_passes
from passes.weights.detached import DetachedModel, read_model
from passes.weights.files import write_model
from pipeline.commands.run import write_fix
from pipeline.config import ExportConfig, read_recipe
from pipeline.export import export_onnx
from pipeline.export.source import draw_inputs
from pipeline.quantsim.profiles import TARGETS, TargetTable, load_target
from pipeline.quantsim.target_check import UNKNOWN, Obstruction, check_target

TWELVE: Final = (
    *("vit", "deit", "swin", "convnext", "segformer", "dit", "bert", "t5", "whisper", "gpt2", "llama", "gemma2"),
)
HEAD: Final = "| family | operators outside the table | recipe | left | other reasons left | max abs error |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="qnn-htp", choices=TARGETS)
    parser.add_argument("--family", action="append", choices=[DIT, *families()], metavar="NAME")
    parser.add_argument("--markdown", type=Path, default=Path("runs/benchmarks/target_fixes.md"))
    options = parser.parse_args()
    lines, failed = [HEAD, "| --- " * 6 + "|"], False
    with open_context() as context:
        for name in options.family or TWELVE:
            line, ok = _row(name, load_target(options.target), context)
            failed = failed or not ok
            lines.append(line)
            print(line, flush=True)
            torch._dynamo.reset()
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text("\n".join([*lines, "", f"Machine: {machine()}. {versions_line()}.", ""]))
    sys.exit(failed)


def _row(name: str, table: TargetTable, context: PassContext) -> tuple[str, bool]:
    with tempfile.TemporaryDirectory(prefix="onnxline-targets-") as folder:
        path, recipe = Path(folder, "model.onnx"), Path(folder, "recipe.yaml")
        source = source_of(name)
        export_onnx(source, ExportConfig(), path)
        feeds = [draw_inputs(source.inputs, {}, 0)]
        prover = NumericProver.of_itself(feeds, context)
        model = run_passes(read_model(path), steps_of(TORCH_RECIPE), Policy(), prover, context).model
        before = check_target(model, table).obstructions
        if not before:
            return f"| {name} | | none needed | 0 | | |", True
        write_model(model, path)
        with contextlib.redirect_stdout(io.StringIO()):
            write_fix(str(path), table, before, recipe, Path(folder, "refused"))
        if not recipe.exists():
            return f"| {name} | {_listed(before)} | none helps | {_listed(before)} | | |", False
        run = passes.optimize(path, read_recipe([str(recipe)]), feeds=feeds, context=context)
        return _said(name, before, run.model, table, [row.name for row in run.rows if row.changed], run)


def _said(
    name: str,
    before: tuple[Obstruction, ...],
    model: DetachedModel,
    table: TargetTable,
    steps: list[str],
    run: passes.PassRun,
) -> tuple[str, bool]:
    left = check_target(model, table).obstructions
    outside = [found for found in left if found.reason == UNKNOWN]
    error = max((errors.max_abs for row in run.rows for errors in row.errors.values()), default=0.0)
    others = ", ".join(found.what for found in left if found.reason != UNKNOWN)
    reverted = "; ".join(f"{row.name} {row.status}" for row in run.reverted)
    ok = not outside and not run.reverted
    cells = (name, _listed(before), ", ".join(steps), len(outside), "; ".join(filter(None, (others, reverted))), error)
    return f"| {' | '.join(map(str, cells[:-1]))} | {error:.1e} |", ok


def _listed(found: tuple[Obstruction, ...]) -> str:
    return ", ".join(f"{len(item.places)} {item.what}" for item in found if item.reason == UNKNOWN)


if __name__ == "__main__":
    main()
