"""How fast onnxruntime runs what the default recipe leaves of each family, against plain torch.onnx.export + onnxsim.

    python -m benchmarks.clean_latency [--family NAME]… [--seconds 600] [--rounds 40] [--markdown FILE]

Both models of a family have the same weights and run on the same inputs, bound once (IOBinding), on one thread, with
onnxruntime's own optimizations as they come. They take turns of `SLICE_S` in one process, and every other round turns
the order around; time is that of the processor, so that a busy machine slows both alike. The ratio of a family is the
median over rounds of plain by ours: above 1, ours is faster. What is known is written down at once. Exits 1 where ours
is slower than 0.95 × in a family, or in the median.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime
import torch
from pydantic import TypeAdapter

from benchmarks.families.table import UNSEEN, families
from benchmarks.measure import machine, versions_line
from benchmarks.node_counts import CALL_S, DIT, export_plain, source_of
from passes.context import PassContext, open_context
from passes.errors import PassError
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe import TORCH_RECIPE
from passes.recipe.recipe import steps_of
from passes.run.runner import run_passes
from passes.weights.detached import read_model
from passes.weights.files import write_model
from pipeline.config import ExportConfig
from pipeline.errors import OnnxlineError
from pipeline.export import export_onnx
from pipeline.export.source import draw_inputs

FOLDER: Final = Path("runs/benchmarks/clean_latency")
SLICE_S: Final = 0.01
"""Seconds of one turn: a model whose run is shorter runs several times."""

LEAST: Final = 0.95
"""The ratio that no family may be below."""


@dataclass(frozen=True, slots=True)
class Latency:
    """One family: nodes and median microseconds of plain and ours, the median of their ratio; or why it has none."""

    nodes: tuple[int, int] = (0, 0)
    microseconds: tuple[float, float] = (0.0, 0.0)
    ratio: float = 0.0
    failure: str = ""


def main() -> None:
    options = _options()
    begun = time.perf_counter()
    rows: dict[str, Latency] = {}
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open_context(CALL_S) as context:
        for name in options.family or [DIT, *families(), *families(UNSEEN)]:
            path = FOLDER / f"{name}.json"
            if not path.exists():
                if time.perf_counter() - begun > options.seconds:
                    continue
                path.write_bytes(FORM.dump_json(_measure(name, context, options.rounds)))
                print(f"{name}: {path.read_text(encoding='utf-8')}", flush=True)
            rows[name] = FORM.validate_json(path.read_bytes())
    ratios = [row.ratio for row in rows.values() if row.ratio]
    median, slow = statistics.median(ratios), [name for name, row in rows.items() if 0 < row.ratio < LEAST]
    options.markdown.write_text(_markdown(rows), encoding="utf-8")
    print(
        f"{len(ratios)} families, median {median:.3f}; below {LEAST}: {', '.join(slow) or 'none'}; {options.markdown}"
    )
    sys.exit(1 if slow or median < 1 else 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", action="append", choices=[DIT, *families(), *families(UNSEEN)], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no family after this time")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--markdown", type=Path, default=FOLDER.with_suffix(".md"))
    return parser.parse_args()


def _measure(name: str, context: PassContext, rounds: int) -> Latency:
    with tempfile.TemporaryDirectory(prefix="onnxline-latency-") as written:
        folder = Path(written)
        try:
            source = source_of(name)
            feeds = draw_inputs(source.inputs, {}, 0)
            plain = export_plain(source, folder, context)
            export_onnx(source, ExportConfig(), folder / "exported.onnx")
            model, prover = read_model(folder / "exported.onnx"), NumericProver.of_itself([feeds], context)
            run = run_passes(model, steps_of(TORCH_RECIPE), Policy(), prover, context)
            write_model(run.model, folder / "ours.onnx")
            return _compare(plain, folder / "ours.onnx", feeds, rounds)
        except (OnnxlineError, PassError, RuntimeError) as error:  # torch's exporter raises subclasses of the last
            return Latency(failure=f"{type(error).__name__}: {' '.join(str(error).split())}"[:160])
        finally:
            torch._dynamo.reset()


def _compare(plain: Path, ours: Path, feeds: Mapping[str, np.ndarray], rounds: int) -> Latency:
    sides = [_BoundModel(path, feeds) for path in (plain, ours)]
    for side in sides:
        side.choose_repeats()
    times: list[list[float]] = [[], []]
    for number in range(rounds):
        for position in (0, 1) if number % 2 == 0 else (1, 0):
            times[position].append(sides[position].run())
    ratio = statistics.median(before / after for before, after in zip(*times, strict=True))
    nodes = (len(onnx.load(path, load_external_data=False).graph.node) for path in (plain, ours))
    before, after = (statistics.median(side) * 1e6 for side in times)
    return Latency((next(nodes), next(nodes)), (before, after), ratio)


class _BoundModel:
    """A session on one thread, whose inputs and outputs are bound once."""

    def __init__(self, path: Path, feeds: Mapping[str, np.ndarray]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 4
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._binding = self._session.io_binding()
        for entry in self._session.get_inputs():
            self._binding.bind_ortvalue_input(entry.name, onnxruntime.OrtValue.ortvalue_from_numpy(feeds[entry.name]))
        for entry in self._session.get_outputs():
            self._binding.bind_output(entry.name)
        self._repeats = 1

    def choose_repeats(self) -> None:
        """Run for a while, and take as many runs a turn as last `SLICE_S`."""
        once = min(self.run() for _ in range(10))
        self._repeats = max(1, round(SLICE_S / max(once, 1e-6)))

    def run(self) -> float:
        """Seconds of the processor for one run, over one turn."""
        begun = time.process_time()
        for _ in range(self._repeats):
            self._session.run_with_iobinding(self._binding)
        return (time.process_time() - begun) / self._repeats


def _markdown(rows: Mapping[str, Latency]) -> str:
    lines: list[Sequence[str]] = [("family", "nodes", "plain + onnxsim", "ours", "ratio"), ("---",) * 5]
    for name, row in rows.items():
        if row.failure:
            lines.append((name, "", "", "", row.failure.replace("|", "/")))
            continue
        (had, has), (before, after) = row.nodes, row.microseconds
        lines.append((name, f"{had} → {has}", f"{before:.0f} µs", f"{after:.0f} µs", f"{row.ratio:.3f}"))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{time.strftime('%Y-%m-%d')}\n\n{table}\n\nMachine: {machine()}. Versions: {versions_line()}.\n"


FORM: Final = TypeAdapter(Latency)


if __name__ == "__main__":
    main()
