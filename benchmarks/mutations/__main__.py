"""`python -m benchmarks.mutations FOLDER`: which of 400 mutations of the product do the tests catch?

A copy of the tree holds all mutations, which sleep. `make test` runs there once, and it is recorded which test reaches
which mutation. Then they are judged one by one, in an order that a seed draws, so that a part of them is a fair sample.
With `--all` the tests that only `make test-all` runs judge the mutations that `make test` does not catch.
With `--rooms` only the tests that mirror the folders of the mutations are run, which suits a small `--count` `--below`.
A later call goes on where the last was stopped.

`--again EARLIER --commit COMMIT` finds the mutations that `make test` caught in the call at COMMIT with the folder
EARLIER, in today's tree. The tests that caught them are run; the tests of their rooms judge what these do not catch.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path

from benchmarks.mutations.again import choose_tests, extract_commit, find_again
from benchmarks.mutations.draw import PACKAGES, Mutation, draw_mutations
from benchmarks.mutations.judge import judge, plan_tests, read_results, tests_of_rooms
from benchmarks.mutations.record import collect_tests, copy_tree, plant, read_recording, record


def main() -> None:
    options = _options()
    root, folder = Path(__file__).resolve().parents[2], options.folder.resolve()
    draw = partial(draw_mutations, seed=options.seed, count=options.count, below=options.below)
    caught: dict[Mutation, str] = {}
    if options.again is None:
        mutations = draw(root)
    else:
        results = read_results(options.again / "make_test.txt")
        before = extract_commit(root, options.commit, folder / "before")
        drawn_before = {mutation: results.get(number, "") for number, mutation in enumerate(draw(before))}
        found = find_again(before, root, [mutation for mutation, said in drawn_before.items() if said])
        caught = {again: drawn_before[mutation].partition("\t")[0] for mutation, again in found.items()}
        mutations = list(caught)
        for mutation in drawn_before:
            if drawn_before[mutation] and mutation not in found:
                print(f"{mutation} | its lines have changed")
    _plant(folder, root, mutations)

    kept = collect_tests(folder / "tree")
    words = ["-n", options.workers, "--dist", "worksteal"]
    order = random.Random(options.seed).sample(range(len(mutations)), len(mutations))
    said: dict[int, str] = {}
    if caught:
        said |= _judge(folder, "again", mutations, order, choose_tests(caught, kept), words)
        order = [number for number in order if not said.get(number)]
    tests = tests_of_rooms([mutations[number].file for number in order], kept) if caught or options.rooms else kept
    said |= _judge(folder, "make_test", mutations, order, tests, words)
    if options.all:
        left_out = collect_tests(folder / "tree", "--all") - kept
        order = [number for number in order if not said.get(number)]
        said |= _judge(folder, "test_all", mutations, order, left_out, [*words, "--all"])
    endings = [_ending(said.get(number), kept) for number in range(len(mutations))]
    for number, mutation in enumerate(mutations):
        print(f"{mutation} | {endings[number]} | {said.get(number, '')}")
    print(Counter(endings))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--below", nargs="+", default=PACKAGES, metavar="FOLDER", help="what to draw from")
    parser.add_argument("--rooms", action="store_true", help="judge by the tests that mirror the mutations' folders")
    parser.add_argument("--workers", default="0", help="processes of pytest while it records")
    parser.add_argument("--all", action="store_true", help="judge by the tests that `make test` leaves out, too")
    parser.add_argument("--again", type=Path, metavar="EARLIER", help="the folder of a call at an earlier commit")
    parser.add_argument("--commit", help="the commit of that call")
    options = parser.parse_args()
    if (options.again is None) != (options.commit is None):
        parser.error("--again and --commit go together")
    return options


def _plant(folder: Path, root: Path, mutations: list[Mutation]) -> None:
    """Make the copy of the tree in which `mutations` sleep, if no earlier call has made it."""
    drawn, known = "".join(f"{mutation}\n" for mutation in mutations), folder / "mutations.txt"
    if not known.is_file():
        plant(copy_tree(root, folder / "tree"), mutations)
        known.write_text(drawn, encoding="utf-8")
    if known.read_text(encoding="utf-8") != drawn:
        raise SystemExit(f"{folder} holds other mutations, of another commit or seed; name another folder")


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
