"""Thousands of broken files at each door, in a process that may hang or die: a table of how they ended."""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.fuzz.mutations import BrokenFile, broken_files

HANG_S = 60.0
MEMORY_BYTES = 6 * 2**30
"""What the process at the doors may allocate: what asks for more dies, and not the machine."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How one file ended: `ok`, `refused`, `failed`, `uncaught`, `hang` or `death`, with the words."""

    file: BrokenFile
    kind: str
    words: str
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--doors", default="from_onnx,optimize,diff,run")
    parser.add_argument("--files", type=int, default=3185)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=15)
    parser.add_argument("--keep", type=Path, help="a folder for the files that ended badly, with the words")
    parser.add_argument("--words", action="store_true", help="write what each file ended with")
    chosen = parser.parse_args()
    print(f"| door | clean ({chosen.files:,} files, seed {chosen.seed}) | uncaught | process died | ", end="")
    print(f"hang over {HANG_S:g} s | minutes |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    for door in chosen.doors.split(","):
        counts: collections.Counter[str] = collections.Counter()
        begin = time.monotonic()
        for ending in endings(door, chosen.files, chosen.seed, chosen.first):
            counts[ending.kind] += 1
            bad = ending.kind in ("uncaught", "hang", "death")
            if bad or chosen.words:
                last = ending.words.strip().splitlines()[-1][:300] if ending.words.strip() else ""
                file = ending.file
                print(
                    f"{door} {file.index} {file.seed_model} [{file.how}] {ending.kind} {ending.seconds:.1f}s: {last}",
                    flush=True,
                )
            if bad and chosen.keep:
                chosen.keep.mkdir(parents=True, exist_ok=True)
                stem = chosen.keep / f"{door}-{ending.file.index}"
                stem.with_suffix(".onnx").write_bytes(ending.file.content)
                stem.with_suffix(".txt").write_text(ending.words)
        clean = counts["ok"] + counts["refused"] + counts["failed"]
        minutes = (time.monotonic() - begin) / 60
        print(
            f"| `{door}` | {clean:,} ({counts['ok']:,} accepted) | {counts['uncaught']} | {counts['death']} | "
            f"{counts['hang']} | {minutes:.1f} |",
            flush=True,
        )


def endings(door: str, count: int, seed: int, first: int) -> Iterator[Ending]:
    """What became of each file, in order; the process at the door is started anew when it hangs or dies."""
    context = multiprocessing.get_context("spawn")
    ours = process = None
    for file in broken_files(count, seed, first):
        if process is None or ours is None:
            ours, theirs = context.Pipe()
            process = context.Process(target=_at_the_door, args=(door, theirs))
            process.start()
            theirs.close()
            ours.recv()
        begin = time.monotonic()
        ours.send((file.content, file.seed_model))
        try:
            kind, words = ours.recv() if ours.poll(HANG_S) else ("hang", "")
        except EOFError:
            process.join()
            kind, words = "death", f"exit code {process.exitcode}"
        yield Ending(file, kind, words, time.monotonic() - begin)
        if kind in ("hang", "death"):
            process.kill()
            process.join()
            ours.close()
            process = None
    if process is not None and ours is not None:
        ours.close()
        process.join()


def _at_the_door(door: str, pipe: Connection) -> None:
    from benchmarks.fuzz.doors import Doors, UncaughtError

    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with Doors.open() as doors:
        pipe.send("ready")
        while True:
            try:
                content, seed_model = pipe.recv()
            except EOFError:
                return
            try:
                words = doors.knock(door, content, seed_model)
                pipe.send((words.partition(":")[0], words))
            except UncaughtError as error:
                pipe.send(("uncaught", str(error)))
