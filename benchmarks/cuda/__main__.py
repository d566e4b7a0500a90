"""Runs the rows, each in a process of its own with a limit, until all are done or the time is up.

    benchmarks/cuda/run.sh [--rows NAME,…] [--minutes 8] [--out FOLDER] [--dry]

Writes FOLDER/results.json after each row, and FOLDER/rows.md, a table for benchmarks/RESULTS.md with the name of the
card: two files, since some machines give back few. A row that this card has measured with these sources, by FOLDER or
by benchmarks/cuda/results, is not run again, and one that failed there comes after the others. A row that is ended
or fails keeps the figures that it had by then. Why a row failed is printed, and results.json has the traces. SIGTERM
ends the row that is measured, writes its figures, and begins no other row.

While a row is measured, the process of the next one imports what it needs, and then waits for its turn.

Most of a row's time is that of the peer's compiler. So while the checks run, torch.compile fills its caches for the
rows that come, several at a time; what it measures meanwhile is deleted, since the rows are to measure it alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

FOLDER = Path(__file__).with_name("results")

DRY_LIMIT = 5
"""A dry run is not measured, and may share its machine."""

DRY_CARD = "dry run on the CPU"

ROW_EXIT_S = 10
"""Seconds that are left for a row to be worth a start."""

CHECKS_S = 180
"""Seconds after the begin of a run up to which checks and warm-ups have their turn; figures have the rest."""

WARM_UPS_S = 120
"""Seconds after which no warm-up begins."""

AT_ONCE = 6
"""Checks and warm-ups at a time."""

COMPILERS = 4
"""Processes of torch.compile for each row. torch itself would start one for each core, just before it is measured."""

CACHE = Path(tempfile.gettempdir()) / "onnxline-cuda-inductor"

CARD_S = 90
"""Seconds for torch to name the card; its first import from a cold disk may take most of them."""

SAID = 300
"""Characters of an error that are printed."""

KILL_S = 5
"""Seconds for a process to be gone after it was killed."""

POLL_S = 0.02
"""Seconds between two looks at whether a row has ended."""


@dataclass
class RunEnd:
    """A flag and no Event, whose lock a handler of a signal could find held by its own thread."""

    is_asked: bool = False
    """Whether somebody has asked the run to end."""


END: Final = RunEnd()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default="")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
        import benchmarks.cuda.rows  # noqa: F401 - the imports take seconds, before the turn of the row

        if sys.stdin.readline():  # at its end there is no run any more
            print(json.dumps(run_row(options.one, dry=options.dry, warms=options.warm)), flush=True)
        os._exit(0)  # what compilers have started may wait for ever at the end of Python
    END.is_asked = False
    before = signal.signal(signal.SIGTERM, lambda *_: setattr(END, "is_asked", True))
    try:
        return run_rows(parser, options)
    finally:
        signal.signal(signal.SIGTERM, before)


def run_rows(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Run the rows that are wanted and not measured yet; returns the exit code."""
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        named = pool.submit(card_name, dry=options.dry)
        from benchmarks.cuda.rows import ROWS  # which takes some of the minutes

    wanted = [name for name in options.rows.split(",") if name] or list(ROWS)
    if unknown := [name for name in wanted if name not in ROWS]:
        parser.error(f"no row {unknown[0]!r}; rows: {', '.join(ROWS)}")
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} is no folder to write to: {error}")
    try:
        origin = {"card": named.result(), "sources": digest_of_sources()}
    except LookupError as error:
        parser.error(str(error))
    results = read_results(FOLDER) | read_results(options.out)
    statuses = {name: found["status"] for name, found in results.items() if origin.items() <= found.items()}
    measured = [name for name in wanted if statuses.get(name) == "ran"]
    for name in measured:
        say(f"{name}: measured already")
    todo = [name for name in wanted if name not in statuses]
    todo += [name for name in wanted if name in statuses and name not in measured]
    checks = [name for name in todo if name.startswith("check-")]

    compiled = [name for name in todo if ROWS[name].is_compiled]

    def left(until_s: float) -> float:
        if END.is_asked:
            return 0.0
        return (until_s if not options.dry else options.minutes * 60) - (time.monotonic() - begun)

    def start(name: str, process: RowProcess | None = None) -> tuple[str, dict[str, Any] | None]:
        limit_s = ROWS[name].limit_s * (DRY_LIMIT if options.dry else 1)
        limit_s = min(limit_s, left(options.minutes * 60), *([left(CHECKS_S)] if name in checks else []))
        if limit_s < ROW_EXIT_S:
            return name, None
        return name, start_row(name, limit_s, dry=options.dry, process=process)

    def warm_up(name: str) -> None:
        if left(WARM_UPS_S) >= ROW_EXIT_S:
            found = start_row(name, left(CHECKS_S), dry=options.dry, warms=True)
            say(f"{name}: compiled in {found['seconds']:.1f} s{why_failed(found)}")

    def start_figures(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
        """One after the other; the process of each begins while the one before it is measured."""
        with ExitStack() as processes:
            waiting: RowProcess | None = None
            for name, following in zip_longest(names, names[1:]):
                own, waiting = waiting, None
                if following and left(options.minutes * 60) >= ROW_EXIT_S:
                    with suppress(OSError):
                        waiting = RowProcess.of_row(following, dry=options.dry)
                        processes.callback(waiting.end)
                yield start(name, own)

    def start_all() -> Iterator[tuple[str, dict[str, Any] | None]]:
        """Checks and warm-ups side by side, since nothing is measured there; figures one after the other."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            started = [pool.submit(start, name) for name in checks]
            warmed = [pool.submit(warm_up, name) for name in compiled]
            yield from (done.result() for done in as_completed(started))
            for done in warmed:
                done.result()
        for found in CACHE.rglob("*.best_config"):
            found.unlink(missing_ok=True)
        yield from start_figures([name for name in todo if name not in checks])

    failed = 0
    for name, found in start_all():
        if found is None:
            say(f"{name}: no time left")
            continue
        results[name] = {**found, **origin, "goal": ROWS[name].goal}
        failed += found["status"] != "ran"
        try:
            write_results(options.out, {name: results[name] for name in ROWS if name in results})
        except OSError as error:  # the other rows count all the same
            say(f"{name}: its result is not written: {error}: {json.dumps(found)}")
        say(f"{name}: {found['status']}, {found['seconds']:.1f} s{why_failed(found)}")
    if failed:
        say(f"{failed} rows failed; their traces are in {options.out / 'results.json'}")
    return 1 if failed else 0


def say(line: str) -> None:
    """Print `line`. Where nobody reads any more, the run goes on, and prints nothing more."""
    try:
        print(line, flush=True)
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def why_failed(found: Mapping[str, Any]) -> str:
    """What the error of a row says in short, after a colon; empty where the row ran."""
    if found["status"] == "ran":
        return ""
    error = str(found.get("error", "")).strip()
    return f": {error[:SAID] if found['status'] == 'failed' else error[-SAID:]}"


def end_with_parent(parent: int) -> None:
    """End this process and all that it has started once its run is gone: the card is for others then."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


def run_row(name: str, *, dry: bool, warms: bool = False) -> dict[str, Any]:
    """In the process of the row: its figures, or the error that ended it."""
    from benchmarks.cuda.measure import Bench
    from benchmarks.cuda.rows import ROWS

    begun = time.monotonic()
    found: dict[str, Any] = {"status": "ran"}
    try:
        show = lambda figures: print(json.dumps({"figures": plain(figures)}), flush=True)  # noqa: E731
        bench = replace(Bench.open(dry=dry, show=show), warms=warms)
        found["figures"] = plain(ROWS[name].run(bench))
    except Exception as error:  # whatever it is, it is the result of the row
        trace = traceback.format_exc()[-4000:]
        found = {"status": "failed", "error": f"{type(error).__name__}: {error}"[:4000], "trace": trace}
    return {**found, "seconds": time.monotonic() - begun, "torch": version_of_torch()}


def plain(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {key: asdict(value) if is_dataclass(value) else value for key, value in figures.items()}  # type: ignore[arg-type]


def start_row(
    name: str, limit_s: float, *, dry: bool, warms: bool = False, process: RowProcess | None = None
) -> dict[str, Any]:
    """
    Args:
        name: that of the row.
        limit_s: seconds after which it is ended.
        dry: whether it runs without a card.
        warms: whether it only lets the peer's compiler fill its caches.
        process: its process, if that has begun.
    """
    try:
        process = process or RowProcess.of_row(name, dry=dry, warms=warms)
    except OSError as error:  # the machine has no memory for it now
        return {"status": "failed", "error": f"no process: {error}", "seconds": 0.0}
    return read_row(*process.finish(limit_s), limit_s)


class RowProcess:
    """A process that waits for a line before it does its work.

    It writes to files: a pipe stays open as long as a process of a compiler has it, whoever is ended.

    Args:
        command: what is run.
        variables: are added to those of the environment.
    """

    def __init__(self, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})) -> None:
        self._out, self._errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdout=self._out,
            stderr=self._errors,
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **variables},
        )

    @classmethod
    def of_row(cls, name: str, *, dry: bool, warms: bool = False) -> RowProcess:
        """The process of a row; see `start_row`."""
        command = [sys.executable, "-m", "benchmarks.cuda", "--one", name, *["--dry"] * dry, *["--warm"] * warms]
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(CACHE), "TRITON_CACHE_DIR": str(CACHE / "triton")}
        return cls(command, {**variables, "TORCHINDUCTOR_COMPILE_THREADS": str(COMPILERS)})

    def finish(self, limit_s: float) -> tuple[int | None, str, str, float]:
        """Let it work: exit code (None after the limit, or if the run is to end), stdout, stderr and seconds; see
        `end`."""
        begun = time.monotonic()
        assert self._process.stdin is not None
        try:
            with suppress(OSError):  # it has ended before its turn
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
            while (code := self._process.poll()) is None and not END.is_asked and time.monotonic() - begun < limit_s:
                time.sleep(POLL_S)
        finally:
            texts = self.end()
        return code, *texts, time.monotonic() - begun

    def end(self) -> tuple[str, str]:
        """What it has written to stdout and stderr. No process of it lives on."""
        if self._out.closed:
            return "", ""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_S)  # a process in the driver may not end at once
        assert self._process.stdin is not None
        with suppress(OSError):  # what it has not read
            self._process.stdin.close()
        with self._out, self._errors:
            out, errors = ((file.seek(0), file.read())[1] for file in (self._out, self._errors))
        return out, errors


def read_row(code: int | None, out: str, errors: str, seconds: float, limit_s: float) -> dict[str, Any]:
    """The result that a row wrote; the figures that it had by then, where it did not come to its end."""
    written = [found for line in out.splitlines() if (found := read_line(line))]
    figures = next((found["figures"] for found in reversed(written) if "figures" in found), {})
    if code == 0 and written and "status" in written[-1]:
        return {"figures": figures, **written[-1]}
    ended = "ended with the run" if END.is_asked else f"longer than {limit_s:.0f} s"
    status = ended if code is None else f"exit {code}"
    return {"status": status, "figures": figures, "error": (out + errors)[-4000:], "seconds": seconds}


def read_line(line: str) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return {}


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """What earlier runs found, by row; nothing where the file is damaged, and no entry that is no result."""
    try:
        found = read_line((folder / "results.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return {name: result for name, result in found.items() if is_result(result)}


def is_result(found: object) -> bool:
    """Whether `found` has what a line of a table needs."""
    if not isinstance(found, dict) or not isinstance(found.get("figures", {}), dict):
        return False
    return all(isinstance(found.get(key), str) for key in ("status", "card", "goal"))


def write_results(folder: Path, results: Mapping[str, Mapping[str, Any]]) -> None:
    """results.json, and rows.md with a line for each row that has a result."""
    write_whole(folder / "results.json", json.dumps(results, indent=1) + "\n")
    lines = ["| row | card | status | figures | goal |", "| --- | --- | --- | --- | --- |"]
    for name, found in results.items():
        shown = [f"{key} {show(value)}" for key, value in found.get("figures", {}).items()]
        if found["status"] != "ran":
            shown.append(str(found.get("error", "")).strip()[-200:])
        cells = (name, found["card"], found["status"], "; ".join(shown), found["goal"])
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    write_whole(folder / "rows.md", "\n".join(lines) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Under another name first, so that a run that is ended leaves no half of a file."""
    whole = file.with_suffix(".new")
    whole.write_text(text)
    whole.replace(file)


def show(value: Any) -> str:
    match value:
        case {"device_ms": int() | float() as device, "host_us": int() | float() as host}:
            return f"{device:.3f} ms (host {host:.1f} µs)"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def card_name(*, dry: bool) -> str:
    """Asked of another process: this one has no memory on the card, and no driver can hold it up.

    Raises:
        LookupError: torch sees no card, or the run is to end.
    """
    if dry:
        return DRY_CARD
    command = [sys.executable, "-c", "import torch; print(torch.cuda.get_device_name())"]
    code, out, errors, _ = RowProcess(command).finish(CARD_S)
    if code is None and END.is_asked:
        raise LookupError("the run was asked to end before torch had named the card")
    if code != 0:
        *_, last = ["", *errors.splitlines()]
        raise LookupError(
            f"no card: {last or f'torch did not name one within {CARD_S} s'}; "
            "take a machine with an NVIDIA GPU and its driver, or --dry"
        )
    return out.strip().splitlines()[-1]


def digest_of_sources() -> str:
    """A digest of the sources that are measured, and of the sources that measure.

    It takes the place of a commit: a commit of results changes no source, and a tree may have no git.
    """
    digest = hashlib.sha256()
    for folder in ("pipeline", "passes", "benchmarks/cuda", "tests/pipeline/runtime/kernels/aten"):
        for file in sorted(Path(folder).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def version_of_torch() -> str:
    import torch

    return torch.__version__


if __name__ == "__main__":
    sys.exit(main())
