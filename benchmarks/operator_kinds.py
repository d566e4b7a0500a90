"""Which kinds of kernel the calls of torch's operators become, over all families.

    python -m benchmarks.operator_kinds [--family NAME]… [--first 60]

Traces each family (benchmarks/families/*.yaml), lowers it, and counts: the table has the operators with the most calls,
how many of these are of a kind of their own or free as views, and how many are of the kind Aten. Bodies count too.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator

from benchmarks.arena import family_graphs
from pipeline.ir.graph import Graph
from pipeline.ops import KINDS, Kind

NAMED = (Kind.Aten, Kind.HigherOrder)


def calls_in(graph: Graph) -> Iterator[tuple[str, Kind]]:
    """Operator and kind of each call, those of bodies included."""
    for op in graph.ops:
        if op.kernel is not None:
            yield op.kind, Kind(op.kernel.kind_id)
        for body in op.bodies:
            yield from calls_in(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", default=[])
    parser.add_argument("--first", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    calls: Counter[tuple[str, Kind]] = Counter()
    families = 0
    for _, graph in family_graphs(options.family):
        calls.update(calls_in(graph))
        families += 1
    by_operator: Counter[str] = Counter()
    for (operator, _), count in calls.items():
        by_operator[operator] += count
    total, named = calls.total(), sum(count for (_, kind), count in calls.items() if kind in NAMED)
    first = sum(count for _, count in by_operator.most_common(50)) / max(total, 1)
    print(f"{families} families, {total:,} calls of {len(by_operator)} operators; the first 50 are {first:.1%}")
    print(f"by name, through Aten or with bodies: {named:,} ({named / max(total, 1):.2%})\n")
    print("| operator | calls | views | a kind of its own | by name |\n| --- | --- | --- | --- | --- |")
    for operator, count in by_operator.most_common(options.first):
        kinds = {kind: number for (name, kind), number in calls.items() if name == operator}
        views = sum(number for kind, number in kinds.items() if KINDS[kind.name].view is not None)
        others = sum(number for kind, number in kinds.items() if kind in NAMED)
        print(f"| {operator} | {count:,} | {views:,} | {count - views - others:,} | {others:,} |")


if __name__ == "__main__":
    main()
