"""What proof after every pass costs: time against onnxsim and against a plain loop over onnxoptimizer, and memory.

    python -m benchmarks.passes_cost [--model NAME]… [--repeats 3] [--no-loop] [--markdown FILE]

Every side is a process of its own that reads the same exported file. Time is that of the call, libraries imported (for
onnxline, in its workers too); that of the whole process, imports and all, stands next to it. Memory is taken in a run
of its own. Each side compares on one draw.

    onnxline   passes.optimize(path, recipe=["default"], keep=["qkv?"]): each pass alone; after each change the op
               counts, the structure check and the numeric check, and the whole final model once more
    onnxsim    onnxsim.simplify(path, check_n=1), and nothing else
    loop       onnxoptimizer.optimize(model, [name]) for the same passes, with a session and a comparison after each
    libraries  the same with recipe=["onnxscript", "default", "onnxsim"]
    stage      the same with the default recipe of a torch model, ["onnxscript", "default", "onnxsim", "clean"]

The exported models are made at the first call, in runs/benchmarks/models/.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Child, kind_of_memory, machine, mib, run_child, versions_line
from passes.recipe import TORCH_RECIPE

MODELS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "ViT-base": ("vit_base_keep_qkv", ()),
    "BERT-base": ("bert_base", ()),
    "GPT-2": ("gpt2", ()),
    "Llama 2-layer": ("llama_2layer", ()),
    "Llama 6 GB": (
        "llama_2layer",
        ("model.transformers.config.num_hidden_layers=6", "model.transformers.config.vocab_size=40000"),
    ),
}
"""Name → shipped configuration, and the settings that are changed in it."""

ONLY_MEMORY: Final = "Llama 6 GB"
NO_LOOP: Final = frozenset({"Llama 2-layer", ONLY_MEMORY})
"""Over protobuf's 2 GiB: onnxoptimizer cannot take them."""

FOLDER: Final = Path("runs/benchmarks")


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one side: seconds of the call and of the process, and what the side tells of itself."""

    seconds: float
    process_s: float
    told: Mapping[str, Any]


Samples = dict[tuple[str, str], list[Sample]]
"""By model and side."""

Peaks = dict[tuple[str, str], int]
"""Peak bytes of the process tree, by model and side."""


def main() -> None:
    options = _options()
    if options.side:
        print(json.dumps(SIDES[options.side](options.path)))
        return
    samples: Samples = {}
    peaks: Peaks = {}
    for name in options.model or MODELS:
        path = exported(name)
        for repeat in range(options.repeats):
            for side in _sides(name, repeat, loop=not options.no_loop):
                sample = _timed(side, path)
                samples.setdefault((name, side), []).append(sample)
                print(f"{name} {side}: {sample.seconds:.2f} s {dict(sample.told)}", flush=True)
        for side in ("stage",) if name == ONLY_MEMORY else ("onnxline", "stage", "onnxsim"):
            peaks[name, side] = _child(side, path, memory=True).peak_bytes
            print(f"{name} {side}: {mib(peaks[name, side])}", flush=True)
    text = _markdown(samples, peaks, options)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text(text, encoding="utf-8")
    print(f"\n{text}\nwritten to {options.markdown}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-loop", action="store_true", help="leave out the loop, which takes minutes")
    parser.add_argument("--markdown", type=Path, default=FOLDER / "passes_cost.md")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)  # how the children are started
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _sides(name: str, repeat: int, *, loop: bool) -> list[str]:
    """Which sides are timed, in an order that turns around; once is enough for the loop."""
    if name == ONLY_MEMORY:
        return []
    sides = [
        "onnxline",
        "libraries",
        "stage",
        "onnxsim",
        *(["loop"] if loop and repeat == 0 and name not in NO_LOOP else []),
    ]
    return sides if repeat % 2 == 0 else sides[::-1]


def _timed(side: str, path: Path) -> Sample:
    child = _child(side, path, memory=False)
    told = json.loads(child.said.strip().splitlines()[-1])
    return Sample(told.pop("seconds"), child.seconds, told)


def _child(side: str, path: Path, *, memory: bool) -> Child:
    return run_child(["-m", "benchmarks.passes_cost", "--side", side, "--path", str(path)], memory=memory)


def exported(name: str) -> Path:
    """The exported model, made by a child so that torch is not in our memory."""
    path = FOLDER / "models" / f"{name.replace(' ', '_')}.onnx"
    if not path.exists():
        config, overrides = MODELS[name]
        code = (
            "import sys; from pathlib import Path; from pipeline.config import RunConfig; "
            "from pipeline.export import export_onnx, load_source; "
            "c = RunConfig.from_yaml(sys.argv[1], tuple(sys.argv[3:])); "
            "export_onnx(load_source(c.model), c.export).save(Path(sys.argv[2]))"
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"{name}: exporting", flush=True)
        run_child(["-c", code, f"configs/{config}.yaml", str(path), *overrides])
    return path


def _onnxline(path: Path, recipe: tuple[str, ...] = ("default",)) -> dict[str, Any]:
    import passes
    from passes.context import open_context
    from passes.external.onnxscript import option_names
    from passes.recipe.recipe import steps_of
    from passes.step import flatten

    feeds = [_draw(path)]
    with open_context() as context:
        for worker in (context.worker, context.proofs):
            worker.call(os.getpid)
        for step in flatten(steps_of(recipe)):
            step.inner(context)  # the worker imports its library
        context.worker.call(option_names)  # this one too
        begun = time.perf_counter()
        run = passes.optimize(path, recipe=recipe, keep=["qkv?"], feeds=feeds, context=context)
        seconds = time.perf_counter() - begun
    changed = [row for row in run.rows if row.changed]
    return {
        "seconds": seconds,
        "passes": len(run.rows),
        "changed": len(changed),
        "reverted": len(run.reverted),
        "nodes": len(run.model.proto.graph.node),
        "kept": sum(one.kept for one in run.structures),
    }


def _onnxsim(path: Path) -> dict[str, Any]:
    import onnxsim

    begun = time.perf_counter()
    model, equal = onnxsim.simplify(str(path), check_n=1)
    return {"seconds": time.perf_counter() - begun, "equal": bool(equal), "nodes": len(model.graph.node)}


def _loop(path: Path) -> dict[str, Any]:
    import numpy as np
    import onnx
    import onnxoptimizer
    import onnxruntime

    model = onnx.load(path)
    feeds = _draw(path)

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4

    def outputs(proto: onnx.ModelProto) -> list[np.ndarray]:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return session.run(None, feeds)

    begun = time.perf_counter()
    expected, same = outputs(model), True
    for name in onnxoptimizer.get_fuse_and_elimination_passes():
        if name == "fuse_qkv":  # as the policy of the other side has it
            continue
        model = onnxoptimizer.optimize(model, [name])
        same &= all(np.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(expected, outputs(model), strict=True))
    return {"seconds": time.perf_counter() - begun, "equal": bool(same), "nodes": len(model.graph.node)}


def _draw(path: Path) -> dict[str, Any]:
    from passes.optimize import draw_feeds
    from passes.weights.detached import read_model

    return draw_feeds(read_model(path), 0)


def _markdown(samples: Samples, peaks: Peaks, options: argparse.Namespace) -> str:
    time_rows = [
        "| model | onnxline | onnxsim, check_n=1 | ratio | whole processes | libraries | ratio | stage | ratio | loop "
        "| loop / onnxline |",
        "| --- " * 11 + "|",
    ]
    memory_rows = [
        "| model | weights | onnxline, default | limit | stage | onnxsim |",
        "| --- " * 6 + "|",
    ]
    for name in dict.fromkeys(name for name, _ in peaks):
        ours, libraries, stage, bare, loop = (samples.get((name, side), []) for side in SIDES)
        if ours and bare:
            mine, its = _median(ours), _median(bare)
            looped = f"{_median(loop):.1f} s | {_median(loop) / mine:.0f} ×" if loop else "cannot run | "
            whole = [statistics.median(one.process_s for one in side) for side in (ours, bare)]
            time_rows.append(
                f"| {name} | {mine:.2f} s ({_each(ours)}) | {its:.2f} s ({_each(bare)}) | {mine / its:.2f} "
                f"| {whole[0]:.1f} s to {whole[1]:.1f} s, {whole[0] / whole[1]:.2f} "
                f"| {_median(libraries):.2f} s ({_each(libraries)}) | {_median(libraries) / its:.2f} "
                f"| {_median(stage):.2f} s ({_each(stage)}) | {_median(stage) / its:.2f} | {looped} |"
            )
        weights = _weight_bytes(name)
        limit = 1.3 * weights + 0.8 * 2**30
        mine, both, its = (peaks.get((name, side)) for side in ("onnxline", "stage", "onnxsim"))
        row = [weights, mine, limit, both, its]
        memory_rows.append(f"| {name} | {' | '.join(mib(one) if one else '' for one in row)} |")
    date = time.strftime("%Y-%m-%d")
    table = "\n".join(time_rows) + "\n\n" + "\n".join(memory_rows)
    return (
        f"`python -m benchmarks.passes_cost --repeats {options.repeats}`, {date}\n\n{table}\n\n"
        f"Machine: {machine()}. Memory is {kind_of_memory()} over the process tree, in a run of its own.\n"
        f"Versions: {versions_line()}.\n"
    )


def _weight_bytes(name: str) -> int:
    return sum(file.stat().st_size for file in exported(name).parent.glob(f"{name.replace(' ', '_')}.onnx.*data"))


def _median(side: list[Sample]) -> float:
    return statistics.median(one.seconds for one in side)


def _each(side: list[Sample]) -> str:
    return ", ".join(f"{one.seconds:.2f}" for one in side)


SIDES: Final[Mapping[str, Callable[[Path], dict[str, Any]]]] = {
    "onnxline": _onnxline,
    "libraries": lambda path: _onnxline(path, ("onnxscript", "default", "onnxsim")),
    "stage": lambda path: _onnxline(path, TORCH_RECIPE),
    "onnxsim": _onnxsim,
    "loop": _loop,
}


if __name__ == "__main__":
    main()
