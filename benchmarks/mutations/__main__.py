"""`python -m benchmarks.mutations FOLDER`: are the mutations that `make test-all` catches caught by `make test`, too?

The first call records into FOLDER which of the tests that `make test` leaves out come by which mutation; a later one
goes on where the last was stopped. Judged are the mutations that such a test comes by: for others the two are the same.
First the tests are run that lie where the mutated file does, then those left out.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from benchmarks.mutations.draw import draw_mutations
from benchmarks.mutations.judge import Judge
from benchmarks.mutations.record import collect_tests, copy_tree, read_recording, record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--workers", default="auto", help="processes of pytest while it records")
    options = parser.parse_args()
    root, folder = Path(__file__).resolve().parents[2], options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    mutations = draw_mutations(root, options.seed, options.count)
    tree = copy_tree(root, folder / "judged")
    kept = collect_tests(tree)
    if not (folder / "tests.json").is_file():
        left_out = collect_tests(tree, "--all") - kept
        record(root, folder, mutations, left_out, ["-n", options.workers, "--dist", "worksteal"])
    recording = read_recording(folder)
    results = folder / "results.txt"
    lines = results.read_text(encoding="utf-8").splitlines() if results.is_file() else []
    print(f"{len(mutations)} mutations, {len(recording.reached)} reached by a test that `make test` leaves out")
    judge = Judge(tree, recording, kept)
    done = {int(line.partition(" ")[0]) for line in lines}
    for number in sorted(recording.reached.keys() - done):
        ending, said = judge.judge(number, mutations[number])
        lines.append(f"{number} {ending.value} | {mutations[number]} | {said}")
        with results.open("a", encoding="utf-8") as file:
            file.write(f"{lines[-1]}\n")
        print(lines[-1], flush=True)
    print(Counter(line.partition(" ")[2].partition(" | ")[0] for line in lines))


if __name__ == "__main__":
    main()
