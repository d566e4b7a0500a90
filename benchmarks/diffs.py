"""Does a diff see what is there, and nothing else? On the model of each shipped configuration, before the passes.

    python -m benchmarks.diffs [--config FILE]… [--seeds 4] [--markdown FILE]

Empty has to be the diff of a model with itself under other names, with its nodes in another order, and written and
read again. Then single changes are planted (`benchmarks/planted.py`): an attribute, a value of a weight, an edge, an
operator. Each has to be found, with the name of its node, and the table says how often it is the only entry.

The exported models are made at the first call, in runs/benchmarks/diffs/. A configuration whose checkpoint is missing,
as that of a training which has not run, or of a run in parts is left out, and a line says so.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.measure import machine, run_child, versions_line
from benchmarks.planted import PLANTS, Planted, plant, renamed, reordered
from passes.diff import Diff, compare_models, diff_text
from passes.weights.detached import DetachedModel, detach, read_model
from passes.weights.files import save
from pipeline.config import RunConfig, locate_checkpoint
from pipeline.errors import SourceError

FOLDER: Final = Path("runs/benchmarks/diffs")

EXPORT: Final = """
import sys
from pathlib import Path

from passes.custom_ops import declare_ops
from passes.weights.detached import read_model
from passes.weights.files import save
from pipeline.config import RunConfig
from pipeline.export import export_onnx, load_source
from pipeline.export.source import OnnxSource

config, path = RunConfig.from_yaml(sys.argv[1]), Path(sys.argv[2])
with declare_ops(config.custom_ops):
    source = load_source(config.model)
    if isinstance(source, OnnxSource):
        save(read_model(source.path), path)
    else:
        export_onnx(source, config.export).save(path)
"""


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one model. `missed` are sentences for who looks into it."""

    name: str
    nodes: int
    empty: int
    asked_empty: int
    found: int
    exact: int
    planted: int
    seconds: float
    missed: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", action="append", type=Path)
    parser.add_argument("--seeds", type=int, default=4, help="changes of each kind for each model")
    parser.add_argument("--markdown", type=Path, default=FOLDER.parent / "diffs.md")
    options = parser.parse_args()
    rows = []
    for config in options.config or sorted(Path("configs").glob("*.yaml")):
        try:
            check_checkpoint(config)
        except SourceError as error:
            print(f"{config.stem} is left out: {error}", flush=True)
            continue
        if RunConfig.from_yaml(config).model.part_names:
            print(f"{config.stem} is left out: it is a run in parts, each of which has a model", flush=True)
            continue
        rows.append(_row(config, options.seeds))
        print(rows[-1], flush=True)
    text = _markdown(rows, options.seeds)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.markdown}")


def check_checkpoint(config: Path) -> None:
    """
    Raises:
        SourceError: the configuration names a checkpoint that is not there.
    """
    checkpoint = RunConfig.from_yaml(config).checkpoint
    if checkpoint is not None:
        locate_checkpoint(checkpoint)


def _row(config: Path, seeds: int) -> Row:
    model = read_model(_exported(config))
    begun = time.perf_counter()
    nothing = list(_nothing(model))
    missed = [f"{what}: {diff_text(diff)}" for what, diff in nothing if not diff.is_empty]
    found = exact = count = 0
    for kind in PLANTS:
        for seed in range(seeds):
            planted = plant(kind, model.proto, seed, model.array)
            if planted is None:
                continue
            diff = compare_models(model, detach(planted.model, known=model.weights))
            count += 1
            found += names_it(diff, planted)
            exact += len(list(diff.entries())) == 1
            if not names_it(diff, planted):
                missed.append(f"{kind} {planted.where} {planted.what}: {diff_text(diff)}")
    seconds = (time.perf_counter() - begun) / (count + len(nothing))
    empty = sum(diff.is_empty for _, diff in nothing)
    nodes = len(model.proto.graph.node)
    return Row(config.stem, nodes, empty, len(nothing), found, exact, count, seconds, tuple(missed))


def _nothing(model: DetachedModel) -> Iterator[tuple[str, Diff]]:
    """What is no difference, and the diff."""
    other, _ = renamed(model.proto, 0)
    yield "renamed", compare_models(model, model.with_proto(other))
    other = reordered(model.proto, 0)
    yield "reordered", compare_models(model, model.with_proto(other))
    yield "both", compare_models(model, model.with_proto(renamed(other, 1)[0]))
    with tempfile.TemporaryDirectory(prefix="onnxline-") as folder:
        save(model, Path(folder, "model.onnx"))
        yield "saved", compare_models(model, read_model(Path(folder, "model.onnx")))


def names_it(diff: Diff, planted: Planted) -> bool:
    """Whether the diff tells what was planted, and where."""
    where, what = planted.where, planted.what
    if planted.kind == "attribute":
        return any((one.node.name, one.attribute) == (where, what) for one in diff.attributes)
    if planted.kind == "weight":
        return any(one.name == where and bool(one.before and one.after) for one in diff.initializers)
    if planted.kind == "edge":
        return any((one.node.name, str(one.position)) == (where, what) for one in diff.rewired)
    return any((one.name, one.op) == (where, what) for one in diff.added)


def _exported(config: Path) -> Path:
    """The model as the passes would get it; exported by a child, so that torch is not in our memory."""
    path = FOLDER / f"{config.stem}.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        run_child(["-c", EXPORT, str(config), str(path)], memory=False)
    return path


def _markdown(rows: list[Row], seeds: int) -> str:
    lines = ["| model | nodes | empty diffs | planted, found | the only entry | a diff takes |", "| --- " * 6 + "|"]
    lines += [
        f"| {row.name} | {row.nodes} | {row.empty} of {row.asked_empty} | {row.found} of {row.planted} "
        f"| {row.exact} | {row.seconds * 1000:.0f} ms |"
        for row in rows
    ]
    total = [sum(getattr(row, what) for row in rows) for what in ("empty", "asked_empty", "found", "planted", "exact")]
    lines.append(f"| all | | {total[0]} of {total[1]} | {total[2]} of {total[3]} | {total[4]} | |")
    table = "\n".join(lines)
    date = time.strftime("%Y-%m-%d")
    return (
        f"`python -m benchmarks.diffs --seeds {seeds}`, {date}\n\n{table}\n\n"
        f"Machine: {machine()}. Versions: {versions_line()}.\n"
    )


if __name__ == "__main__":
    main()
