"""A whole `onnxline run` against bare `torch.onnx.export` + `onnxsim.simplify(check_n=1)`, on the very same model.

    python benchmarks/run_vs_bare.py [--config CONFIG] [--repeats 3] [--markdown FILE]

Each side is a process of its own with a fresh folder; the order changes from repeat to repeat. Wall time includes the
start of Python and the imports. Memory is PSS summed over the process tree (RSS where the kernel does not tell PSS),
sampled, so a peak shorter than the interval may be missed. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from passes.structures import STRUCTURES
from passes.weights import read_model
from pipeline.config import RunConfig
from pipeline.versions import versions

SIDES = ("onnxline run", "bare")
INTERVAL_S = 0.05
LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one side. `kept` counts the attention blocks whose Q, K and V are apart in the file that it left."""

    seconds: float
    peak_bytes: int
    nodes: int
    kept: int


def main() -> None:
    options = _options()
    if options.bare_into:
        _bare(options.config, options.bare_into)
        return
    samples: dict[str, list[Sample]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats):
        for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
            sample = _measured(side, options.config)
            samples[side].append(sample)
            print(
                f"{repeat + 1}/{options.repeats} {side}: {sample.seconds:.1f} s, {_mib(sample.peak_bytes)}", flush=True
            )
    text = _markdown(options.config, samples)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.markdown}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/vit_base_keep_qkv.yaml"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path, default=Path("runs/benchmarks/run_vs_bare.md"))
    parser.add_argument("--bare-into", type=Path, help=argparse.SUPPRESS)  # how the bare child is started
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: expected 1 or more")
    return options


def _bare(path: Path, folder: Path) -> None:
    """What a user types who has no onnxline. Only the making of the model is ours, so that it is the same one."""
    import onnx
    import onnxsim
    import torch

    from pipeline.export.load import load_source
    from pipeline.export.source import TorchSource

    config = RunConfig.from_yaml(path)
    source = load_source(config.model)
    if not isinstance(source, TorchSource):
        raise SystemExit(f"{path} has an ONNX source; expected one that torch exports")
    torch.onnx.export(
        source.module,
        source.example.args,
        folder / "exported.onnx",
        kwargs=source.example.kwargs,
        dynamo=True,
        opset_version=config.export.opset,
    )
    model, equal = onnxsim.simplify(str(folder / "exported.onnx"), check_n=1)
    if not equal:
        raise SystemExit("onnxsim's own check failed")
    onnx.save(model, folder / "model.onnx")


def _measured(side: str, config: Path) -> Sample:
    with tempfile.TemporaryDirectory(prefix="onnxline-bench-") as folder:
        out = Path(folder, "out")
        out.mkdir()
        arguments = {
            "onnxline run": ["-m", "pipeline.cli", "run", str(config), "--out", str(out)],
            "bare": [__file__, "--config", str(config), "--bare-into", str(out)],
        }
        with Path(folder, "said").open("w+") as said:
            begun = time.perf_counter()
            child = subprocess.Popen([sys.executable, *arguments[side]], stdout=said, stderr=said, env=_environment())
            peak = 0
            try:
                while child.poll() is None:
                    peak = max(peak, _tree_bytes(child.pid))
                    time.sleep(INTERVAL_S)
                seconds = time.perf_counter() - begun
            finally:
                child.kill()
            if child.returncode != 0:
                said.seek(0)
                last = "\n".join(said.read().splitlines()[-LAST_LINES:])
                raise SystemExit(f"{side} ended with exit code {child.returncode}:\n{last}")
        model = read_model(out / "model.onnx")
        kept = len(STRUCTURES["qkv"].find(model).instances)
        return Sample(seconds, peak, len(model.proto.graph.node), kept)


def _environment() -> dict[str, str]:
    """The children import the same checkout as we do."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _tree_bytes(root: int) -> int:
    """Memory of `root` and everything below it. PSS counts a page that n processes share as 1/n in each."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children[_parent(entry)].append(int(entry.name))
    total, front = 0, [root]
    while front:
        pid = front.pop()
        total += _process_bytes(pid)
        front.extend(children[pid])
    return total


def _parent(process: Path) -> int:
    try:
        # The command's name is in parentheses and may hold anything; the parent is the second word behind it.
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):  # it has ended
        return -1


def _process_bytes(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) * 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _markdown(config: Path, samples: dict[str, list[Sample]]) -> str:
    run, bare = (samples[side] for side in SIDES)
    left, right = (statistics.median(one.seconds for one in side) for side in (run, bare))
    high, low = (statistics.median(one.peak_bytes for one in side) for side in (run, bare))
    rows = [
        ("", *SIDES, "ratio"),
        ("---",) * 4,
        ("wall time, median", f"{left:.1f} s", f"{right:.1f} s", f"{left / right:.2f}"),
        ("wall time, all", _each(run), _each(bare), ""),
        ("peak memory, median", _mib(high), _mib(low), f"{high / low:.2f}"),
        ("nodes left", str(run[-1].nodes), str(bare[-1].nodes), ""),
        ("attention blocks with separate Q, K, V", str(run[-1].kept), str(bare[-1].kept), ""),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    used = ", ".join(f"{name} {version}" for name, version in versions().items())
    date = time.strftime("%Y-%m-%d")
    return (
        f"`python benchmarks/run_vs_bare.py --config {config} --repeats {len(run)}`, {date}\n\n{table}\n\n"
        f"Machine: {_machine()}. Memory is {_kind_of_memory()} over the process tree, sampled every "
        f"{INTERVAL_S * 1000:.0f} ms.\nVersions: {used}.\n"
    )


def _each(side: list[Sample]) -> str:
    return ", ".join(f"{one.seconds:.1f}" for one in side)


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB"


def _kind_of_memory() -> str:
    return "PSS" if Path("/proc/self/smaps_rollup").exists() else "RSS"


def _machine() -> str:
    info = Path("/proc/cpuinfo").read_text()
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model or platform.machine()}, {os.cpu_count()} cores, {memory:.0f} GiB"


if __name__ == "__main__":
    main()
