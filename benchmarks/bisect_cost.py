"""How long does `onnxline bisect` take to find who merges Q, K and V of ViT-base, and how small is the model it leaves?

    python -m benchmarks.bisect_cost [--model ViT-base] [--repeats 3] [--markdown FILE]

Each row is a recipe on the exported model, asked with `--lost qkv`. Time is that of the whole command, imports and
reading included, and the median of the repeats. The smallest model is then given to the library in a plain call, and
has to lose its Q, K and V there.

The exported models are made at the first call, in runs/benchmarks/models/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx

from benchmarks.measure import machine, run_child, versions_line
from benchmarks.passes_cost import exported
from passes.structures import structure_of
from passes.weights.detached import detach

RECIPES: Final = ("fold_constants,default", "default,onnxsim", "default")
"""torch exports a weight and a Transpose after it, which onnxoptimizer's fuse_qkv cannot read: so `default` alone
merges nothing, and does when constants are folded before."""

FOLDER: Final = Path("runs/benchmarks")


@dataclass(frozen=True, slots=True)
class Row:
    """`told` is the command's JSON; `seconds` those of each repeat; `plain` whether the plain call shows it."""

    recipe: str
    told: Mapping[str, Any]
    seconds: tuple[float, ...]
    plain: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="ViT-base")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path, default=FOLDER / "bisect.md")
    options = parser.parse_args()
    path, rows = exported(options.model), []
    for recipe in RECIPES:
        rows.append(_row(recipe, path, options.repeats))
        print(rows[-1], flush=True)
    text = _markdown(rows, options.model, options.repeats)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.markdown}")


def _row(recipe: str, path: Path, repeats: int) -> Row:
    code = "import sys; from pipeline.cli import app; sys.exit((app(standalone_mode=False) or 0) > 1)"
    seconds, told, plain = [], {}, ""
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        small = Path(folder, "small.onnx")
        command = ["bisect", str(path), "--recipe", recipe, "--lost", "qkv", "--json", "--out", str(small)]
        for _ in range(repeats):
            child = run_child(["-c", code, *command], memory=False)
            told = json.loads(child.said)
            seconds.append(child.seconds)
        if told["found"]:
            plain = "lost" if _loses(told["culprit"]["name"], small) else "STILL THERE"
    return Row(recipe, told, tuple(seconds), plain)


def _loses(name: str, small: Path) -> bool:
    """Whether a plain call of the library loses what is found in the smallest model."""
    structure = structure_of("qkv")
    assert structure is not None
    library, _, inner = name.rpartition("/")
    made = PLAIN[library](small, inner)
    return bool(structure.find_lost(structure.find(detach(onnx.load(small))).instances, detach(made)))


def _onnxoptimizer(small: Path, name: str) -> onnx.ModelProto:
    import onnxoptimizer

    return onnxoptimizer.optimize(onnx.load(small), [name])


def _onnxsim(small: Path, name: str) -> onnx.ModelProto:
    import onnxsim

    return onnxsim.simplify(onnx.load(small))[0]


PLAIN: Final[Mapping[str, Callable[[Path, str], onnx.ModelProto]]] = {"": _onnxoptimizer, "onnxsim": _onnxsim}


def _markdown(rows: list[Row], model: str, repeats: int) -> str:
    lines = [
        "| recipe | culprit | pass runs | until it is named | whole command | smallest model | plain call |",
        "| --- " * 7 + "|",
    ]
    for row in rows:
        told, small = row.told, row.told["smallest"]
        name = told["culprit"]["name"] if told["found"] else "none: nothing is lost"
        size = f"{small['nodes']} nodes, {small['runs']} more runs, {small['seconds']:.1f} s" if small else ""
        each = ", ".join(f"{one:.1f}" for one in row.seconds)
        lines.append(
            f"| {row.recipe} | {name} | {told['runs']} | {told['seconds']:.1f} s "
            f"| {statistics.median(row.seconds):.1f} s ({each}) | {size} | {row.plain} |"
        )
    table, date = "\n".join(lines), time.strftime("%Y-%m-%d")
    return (
        f"`python -m benchmarks.bisect_cost --model {model} --repeats {repeats}`, {date}\n\n{table}\n\n"
        f"Machine: {machine()}. Versions: {versions_line()}.\n"
    )


if __name__ == "__main__":
    main()
