"""A whole `onnxline run` against bare `torch.onnx.export` + `onnxsim.simplify(check_n=1)`, on the very same model.

    python -m benchmarks.run_vs_bare [--config CONFIG] [--repeats 3] [--markdown FILE]

Each side is a process of its own with a fresh folder; the order changes from repeat to repeat. Wall time includes the
start of Python and the imports. Memory is PSS summed over the process tree (RSS where the kernel does not tell PSS),
sampled, so a peak shorter than the interval may be missed. Linux only: it reads /proc.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import INTERVAL_S, kind_of_memory, machine, mib, run_child, versions_line
from passes.structures import STRUCTURES
from passes.weights.detached import read_model
from pipeline.config import RunConfig

SIDES = ("onnxline run", "bare")


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
                f"{repeat + 1}/{options.repeats} {side}: {sample.seconds:.1f} s, {mib(sample.peak_bytes)}", flush=True
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
            "onnxline run": ["-m", "onnxline", "run", str(config), "--out", str(out)],
            "bare": ["-m", "benchmarks.run_vs_bare", "--config", str(config), "--bare-into", str(out)],
        }
        child = run_child(arguments[side])
        model = read_model(out / "model.onnx")
        kept = len(STRUCTURES["qkv"].find(model).instances)
        return Sample(child.seconds, child.peak_bytes, len(model.proto.graph.node), kept)


def _markdown(config: Path, samples: dict[str, list[Sample]]) -> str:
    run, bare = (samples[side] for side in SIDES)
    left, right = (statistics.median(one.seconds for one in side) for side in (run, bare))
    high, low = (statistics.median(one.peak_bytes for one in side) for side in (run, bare))
    rows = [
        ("", *SIDES, "ratio"),
        ("---",) * 4,
        ("wall time, median", f"{left:.1f} s", f"{right:.1f} s", f"{left / right:.2f}"),
        ("wall time, all", _each(run), _each(bare), ""),
        ("peak memory, median", mib(high), mib(low), f"{high / low:.2f}"),
        ("nodes left", str(run[-1].nodes), str(bare[-1].nodes), ""),
        ("attention blocks with separate Q, K, V", str(run[-1].kept), str(bare[-1].kept), ""),
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    date = time.strftime("%Y-%m-%d")
    return (
        f"`python -m benchmarks.run_vs_bare --config {config} --repeats {len(run)}`, {date}\n\n{table}\n\n"
        f"Machine: {machine()}. Memory is {kind_of_memory()} over the process tree, sampled every "
        f"{INTERVAL_S * 1000:.0f} ms.\nVersions: {versions_line()}.\n"
    )


def _each(side: list[Sample]) -> str:
    return ", ".join(f"{one.seconds:.1f}" for one in side)


if __name__ == "__main__":
    main()
