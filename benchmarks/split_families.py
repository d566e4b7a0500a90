"""`split-qkv` and `split-gate-up` on every family whose source has a merged matrix, against the weights of the source.

    python -m benchmarks.split_families [--family NAME]… [--markdown FILE]

Each family (benchmarks/families/*.yaml) is made with random weights, exported, and run through the recipe
[onnxscript, default, split-qkv, split-gate-up] with Q, K and V kept, each change proven. Then the initializers of the
final model are compared with those of the export: every channel of a merged matrix has to be in one of its parts, bit
for bit. This shares no code with the passes. Exits 1 when a product is still merged, or a weight is not bit-equal.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.families.detect import Exported, export_family
from benchmarks.families.table import Family, families
from passes.context import PassContext, open_context
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.provenance.annotations import annotations_of
from passes.recipe.recipe import steps_of
from passes.rewrites.split_merged import find_merged_gates, find_merged_qkv
from passes.run.result import PassRun
from passes.run.runner import run_passes
from passes.structures.view import GraphView
from passes.weights.detached import DetachedModel

RECIPE = ("onnxscript", "default", "split-qkv", "split-gate-up")
MERGED = ("fused in the source", "are one matrix", "one latent matrix")
"""What the table says of the rows in which several of Q, K and V are one matrix."""
GATED = ("phi3", "modernbert", "glm", "glm4", "granitemoeshared", "granitemoehybrid", "llama4_text")
"""Rows whose MLP has one matrix for the gate and for what is gated; not those whose experts are chosen by data."""
OUTPUT = Path("runs/benchmarks/split_families.md")


@dataclass(frozen=True, slots=True)
class SplitRow:
    """One family: products with several of Q, K and V, or a gate and its value, before and after; triples after."""

    family: str
    merged: int
    gates: int
    left: int
    triples: int
    lost: int
    parts: int
    unequal: tuple[str, ...]
    error: float
    trouble: tuple[str, ...]

    @property
    def is_right(self) -> bool:
        return not (self.left or self.lost or self.unequal or self.trouble) and self.merged + self.gates > 0

    def markdown(self) -> str:
        equal = "yes" if not self.unequal else f"no: {', '.join(self.unequal)}"
        said = "; ".join(self.trouble)
        numbers = f"{self.merged} | {self.gates} | {self.left} | {self.triples}"
        return f"| {self.family} | {numbers} | {self.parts} | {equal} | {self.error:.1e} | {said} |"


HEADER = """| family | Q/K/V merged | gate/up merged | merged after | triples after | parts | bit-equal | max error | |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def main() -> None:
    table = families()
    options = _options(list(table))
    rows: list[SplitRow] = []
    with open_context() as context:
        for name in options.family or [name for name, one in table.items() if _is_merged(one)]:
            rows.append(_measure(table[name], context))
            print(rows[-1].markdown(), flush=True)
    text = "\n".join([HEADER, *(row.markdown() for row in rows)])
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(f"{text}\n", encoding="utf-8")
    wrong = [row.family for row in rows if not row.is_right]
    print(f"wrong: {', '.join(wrong)}" if wrong else f"all {len(rows)} right")
    sys.exit(1 if wrong else 0)


def _options(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", choices=names, metavar="NAME")
    parser.add_argument("--markdown", type=Path, default=OUTPUT)
    return parser.parse_args()


def _is_merged(family: Family) -> bool:
    return any(words in family.without for words in MERGED) or family.name in GATED


def _measure(family: Family, context: PassContext) -> SplitRow:
    exported = export_family(family)
    run = run_passes(
        exported.model,
        steps_of(RECIPE),
        Policy(keep=("qkv",)),
        NumericProver.of_itself(exported.feeds, context),
        context,
    )
    before, after = GraphView(exported.model), GraphView(run.model)
    parts = list(_parts(run.model))
    splits = [row for row in run.rows if row.name.startswith("split-")]
    left = find_merged_qkv(after), find_merged_gates(after)
    return SplitRow(
        family.name,
        len(find_merged_qkv(before)),
        len(find_merged_gates(before)),
        sum(map(len, left)),
        len(run.structures),
        sum(not one.kept for one in run.structures),
        len(parts),
        tuple(_unequal(exported, run)),
        max((error.max_abs for row in splits for error in row.errors.values()), default=0.0),
        tuple(f"{row.name}: {row.status} {row.reason}" for row in splits if row.reason or row.status != "ran"),
    )


def _parts(model: DetachedModel) -> Iterator[tuple[str, str, np.ndarray]]:
    """The source's weight, the name, and the numbers of each matrix that is a part of another one."""
    for tensor in model.proto.graph.initializer:
        marks = annotations_of(tensor)
        if any(entry.key == "onnxline.part" for entry in tensor.metadata_props) and len(tensor.dims) > 1:
            yield marks.replaced[0], tensor.name, model.array(tensor)


def _unequal(exported: Exported, run: PassRun) -> Iterator[str]:
    """The merged matrices of the source whose channels are not those of their parts, each once and bit for bit."""
    stored = {tensor.name: exported.model.array(tensor) for tensor in exported.model.proto.graph.initializer}
    found: dict[str, list[np.ndarray]] = defaultdict(list)
    for source, _, array in _parts(run.model):
        found[source].append(array)
    for source, parts in found.items():
        if not any(_is_partition(stored[source], parts, way) for way in _ways(stored[source].ndim)):
            yield source


def _ways(rank: int) -> Iterator[tuple[int, int]]:
    """The axis of the channels in the source and in a part, which may be transposed."""
    yield from ((one, other) for one in range(rank) for other in range(rank))


def _is_partition(whole: np.ndarray, parts: list[np.ndarray], way: tuple[int, int]) -> bool:
    return Counter(_slices(whole, way[0])) == Counter(one for part in parts for one in _slices(part, way[1]))


def _slices(array: np.ndarray, axis: int) -> list[bytes]:
    return [np.ascontiguousarray(one).tobytes() for one in np.moveaxis(array, axis, 0)]


if __name__ == "__main__":
    main()
