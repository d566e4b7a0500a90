"""`python -m benchmarks.mutations FOLDER`: which of 400 mutations of the product do the tests catch?

A copy of the tree holds all mutations, which sleep. `make test` runs there once, and it is recorded which test reaches
which mutation. Then they are judged one by one, in an order that a seed draws, so that a part of them is a fair sample.
With `--all` the tests that only `make test-all` runs judge the mutations that `make test` does not catch.
A later call goes on where the last was stopped.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from benchmarks.mutations.draw import Mutation, draw_mutations
from benchmarks.mutations.judge import judge, plan_tests, read_results
from benchmarks.mutations.record import collect_tests, copy_tree, plant, read_recording, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--workers", default="0", help="processes of pytest while it records")
    parser.add_argument("--all", action="store_true", help="judge by the tests that `make test` leaves out, too")
    options = parser.parse_args()
    root, folder = Path(__file__).resolve().parents[2], options.folder.resolve()
    mutations = draw_mutations(root, options.seed, options.count)
    drawn, known = "".join(f"{mutation}\n" for mutation in mutations), folder / "mutations.txt"
    if not known.is_file():
        plant(copy_tree(root, folder / "tree"), mutations)
        known.write_text(drawn, encoding="utf-8")
    if known.read_text(encoding="utf-8") != drawn:
        parser.error(f"{folder} holds other mutations, of another commit or seed; name another folder")
    kept = collect_tests(folder / "tree")
    words = ["-n", options.workers, "--dist", "worksteal"]
    order = random.Random(options.seed).sample(range(len(mutations)), len(mutations))
    said = _judge(folder, "make_test", mutations, order, kept, words)
    if options.all:
        left_out = collect_tests(folder / "tree", "--all") - kept
        order = [number for number in order if not said.get(number)]
        said |= _judge(folder, "test_all", mutations, order, left_out, [*words, "--all"])
    endings = [_ending(said.get(number), kept) for number in range(len(mutations))]
    for number, mutation in enumerate(mutations):
        print(f"{mutation} | {endings[number]} | {said.get(number, '')}")
    print(Counter(endings))


def _judge(
    folder: Path, name: str, mutations: list[Mutation], order: list[int], tests: Collection[str], words: list[str]
) -> dict[int, str]:
    """What the test of `tests` says that catches a mutation; "" where all that reach its place pass."""
    if not (folder / name).is_dir():
        record(folder / "tree", folder / f"{name}.part", tests, words)
        (folder / f"{name}.part").rename(folder / name)
    recording, results = read_recording(folder / name), folder / f"{name}.txt"
    plan = {number: plan_tests(recording, number, mutations[number]) for number in order if number in recording.reached}
    judge(folder / "tree", plan, results, recording.early)
    return read_results(results)


def _ending(said: str | None, kept: Collection[str]) -> str:
    if said is None:
        return "reached by none"
    if not said:
        return "caught by none"
    return "caught by make test" if said.partition("\t")[0] in kept else "caught by make test-all alone"


if __name__ == "__main__":
    main()
