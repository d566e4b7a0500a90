"""The planned runtime next to its peers: torch eager, onnxruntime with IOBinding, torch.compile (frozen), OpenVINO.

    python -m benchmarks.runtime_speed [--models tiny,bert,resnet,light] [--rounds 15] [--threads 1] [--peers]
                                       [--markdown FILE]

One process: the sides take turns, a few runs each, and every other round turns the order around, so that a busy
machine slows all of them alike. With one thread the time is that of the processor (of the clock with `--wall`), which
leaves out the turns of other processes. A row holds the median of a side, and the medians of its ratio to torch eager
and to onnxruntime in the same round. All sides of a model have the same weights; onnxruntime and `plan` run the same
file, `plan of torch` runs what torch.export traced. `fused` is after the passes that `fusions: all` runs on a CPU,
`replayed` is a replay of a capture with the outputs as views; the other sides of `plan` are runs. `native` has kernels
in C++, which need a compiler.
light_resnet50 is a file of the onnx package and has no torch side. `--peers` adds torch.compile, which compiles for
minutes and needs a C++ compiler, and OpenVINO where it is installed. A peer that cannot be run has a row that says why.

`--threads` counts for every side, and `--scaling` compares one thread with two. `--costs` takes the fixed cost of a run
of one op, and what a further call and a further input cost.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from benchmarks.measure import machine, show, versions_line
from benchmarks.runtime_peers import find_obstacle, make_compiled, make_openvino
from pipeline.importers import from_onnx
from pipeline.importers.from_torch import from_torch
from pipeline.importers.from_torch.functionalize import functionalize_program
from pipeline.ir.graph import TensorSpec
from pipeline.lowering.fusion import CPU_FUSIONS, fuse
from pipeline.ops import GraphBuilder, emitter_of
from pipeline.runtime import CompiledProgram, compile_graph

Side = Callable[[], Any]
Clock = Callable[[], float]

EAGER, COMPILED, OPENVINO, PEER, OURS, OF_TORCH = (
    "torch eager",
    "torch.compile",
    "OpenVINO",
    "onnxruntime",
    "plan, fused",
    "plan of torch, fused",
)
UNFUSED, REPLAYED, OF_TORCH_REPLAYED = "plan", "plan, fused, replayed", "plan of torch, fused, replayed"
NATIVE, NATIVE_REPLAYED = "plan, fused, native", "plan, fused, native, replayed"

BARRED = (REPLAYED, NATIVE_REPLAYED)
"""The sides for which a bar is wanted: the second may need a compiler."""

SLICE_S = 0.02
"""Seconds of one turn: a side whose run is shorter runs several times."""


@dataclass(frozen=True, slots=True)
class Case:
    """One model: its file, and the torch module that it came from."""

    name: str
    path: Path
    feeds: Mapping[str, np.ndarray]
    module: nn.Module | None = None
    bars: Mapping[str, float] = field(default_factory=dict)
    """The ratio of `plan` to a side that is wanted."""


class TinyTransformer(nn.Module):
    """Two encoder layers of width 128 with four heads, normalised first."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(128, 4, 512, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def tiny(folder: Path) -> Case:
    return _exported("tiny transformer", TinyTransformer(), (torch.randn(1, 32, 128),), folder, {EAGER: 2.2, PEER: 1.0})


def bert(folder: Path) -> Case:
    from transformers import BertConfig, BertModel

    tokens = torch.randint(0, 30522, (1, 128))
    return _exported("BERT-base 128", BertModel(BertConfig()), (tokens,), folder, {EAGER: 1.25, PEER: 1.0})


def resnet(folder: Path) -> Case:
    from transformers import ResNetConfig, ResNetForImageClassification

    model = ResNetForImageClassification(ResNetConfig())
    return _exported("ResNet-50", model, (torch.randn(1, 3, 224, 224),), folder, {PEER: 1.0})


def light(_: Path) -> Case:
    path = Path(onnx.__file__).parent / "backend/test/data/light/light_resnet50.onnx"
    image = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
    return Case("light_resnet50", path, {"gpu_0/data_0": image}, bars={PEER: 0.9})


MODELS: Mapping[str, Callable[[Path], Case]] = {"tiny": tiny, "bert": bert, "resnet": resnet, "light": light}


def main() -> None:
    options = _options()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    lines = [f"{machine()}, {options.threads} threads; {versions_line()}; load {os.getloadavg()[0]:.1f}", ""]
    if options.costs:
        lines += _costs()
    else:
        with tempfile.TemporaryDirectory() as folder:
            cases = [MODELS[name](Path(folder)) for name in options.models.split(",")]
            lines += _scaling(cases, options) if options.scaling else _comparison(cases, options)
    text = "\n".join([*lines, ""])
    show(text, options.markdown)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peers", action="store_true", help="torch.compile too, which compiles for minutes; OpenVINO")
    parser.add_argument("--scaling", action="store_true", help="one thread against two")
    parser.add_argument("--costs", action="store_true", help="the fixed costs of a run")
    parser.add_argument("--wall", action="store_true", help="time of the clock also for one thread")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def _comparison(cases: Sequence[Case], options: argparse.Namespace) -> list[str]:
    rows = ["| model | side | median ms | × eager | × onnxruntime | wanted |", "| --- | --- | --- | --- | --- | --- |"]
    for case in cases:
        clock = time.perf_counter if options.wall or options.threads > 1 else time.process_time
        seconds = measure(_sides(case, options), options.rounds, clock)
        for side, taken in seconds.items():
            ratios = [_ratio(seconds.get(peer), taken) for peer in (EAGER, PEER)]
            wanted = ", ".join(f"{bar:g} × {peer}" for peer, bar in case.bars.items()) if side in BARRED else ""
            cells = [case.name, side, f"{statistics.median(taken) * 1e3:.3f}", *ratios, wanted]
            rows.append(f"| {' | '.join(cells)} |")
        rows += [f"| {case.name} | {peer} | {reason} | | | |" for peer, reason in _obstacles(case, options)]
    return rows


def _obstacles(case: Case, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The peers that were asked for and cannot be run, each with the reason."""
    for peer in (COMPILED, OPENVINO) if options.peers else ():
        reason = "no torch side" if peer == COMPILED and case.module is None else find_obstacle(peer)
        if reason:
            yield peer, reason


def _ratio(peer: Sequence[float] | None, taken: Sequence[float]) -> str:
    """How many times as fast as the peer: the median over the rounds."""
    if peer is None:
        return ""
    return f"{statistics.median(of_peer / own for of_peer, own in zip(peer, taken, strict=True)):.2f}"


def _sides(case: Case, options: argparse.Namespace) -> dict[str, Side]:
    sides: dict[str, Side] = {}
    peers = {COMPILED, OPENVINO} - dict(_obstacles(case, options)).keys() if options.peers else set()
    if case.module is not None:
        inputs = [torch.from_numpy(array) for array in case.feeds.values()]
        sides[EAGER] = _without_gradients(case.module, inputs)
        if COMPILED in peers:
            sides[COMPILED] = make_compiled(case.module, inputs)
        sides[OF_TORCH], sides[OF_TORCH_REPLAYED] = _planned_from_torch(case.module, inputs)
    sides[PEER] = _onnxruntime(case, options.threads)
    if OPENVINO in peers:
        sides[OPENVINO] = make_openvino(case.path, case.feeds, options.threads)
    sides[UNFUSED], _ = _planned(case, ())
    sides[OURS], sides[REPLAYED] = _planned(case)
    sides[NATIVE], sides[NATIVE_REPLAYED] = _planned(case, native=True)
    return sides


def _without_gradients(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> Side:
    def run() -> Any:
        with torch.inference_mode():
            return function(*inputs)

    return run


def _onnxruntime(case: Case, threads: int) -> Side:
    """All of onnxruntime's optimizations; inputs and outputs are bound once."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(case.path), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    for name, array in case.feeds.items():
        binding.bind_cpu_input(name, array)
    for output, array in zip(session.get_outputs(), session.run(None, dict(case.feeds)), strict=True):
        value = onnxruntime.OrtValue.ortvalue_from_numpy(np.asarray(array))
        binding.bind_ortvalue_output(output.name, value)
    return lambda: session.run_with_iobinding(binding)


def _planned(case: Case, fusions: Collection[str] = CPU_FUSIONS, *, native: bool = False) -> tuple[Side, Side]:
    """A run and a replay."""
    shapes = {name: array.shape for name, array in case.feeds.items()}
    graph = fuse(from_onnx(case.path, shapes=shapes, emitter_of=emitter_of), fusions)
    program = compile_graph(graph, native=native)
    return _run_and_replay(program, {name: torch.from_numpy(array) for name, array in case.feeds.items()})


def _run_and_replay(program: CompiledProgram, feed: Mapping[str, torch.Tensor]) -> tuple[Side, Side]:
    """Both read the feed anew; a replay gives views of its outputs, as onnxruntime writes into bound ones."""
    return lambda: program.run(feed), lambda: program.replay(feed, copy=False)


def _planned_from_torch(module: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[Side, Side]:
    graph = from_torch(functionalize_program(torch.export.export(module, tuple(inputs), strict=False)))
    keys = {key for keys in graph.sources.values() for key in keys}
    weights = {name: tensor for name, tensor in module.state_dict().items() if name in keys}
    program = compile_graph(fuse(graph), weights)
    feed = {graph.values[vid].name: tensor for vid, tensor in zip(graph.inputs, inputs, strict=True)}
    return _run_and_replay(program, feed)


def _exported(
    name: str, module: nn.Module, inputs: tuple[torch.Tensor, ...], folder: Path, bars: Mapping[str, float]
) -> Case:
    module = module.eval().requires_grad_(False)
    path = folder / f"{name}.onnx"
    program = torch.onnx.export(module, inputs, dynamo=True, opset_version=20, verbose=False)
    if program is None:
        raise SystemExit(f"torch.onnx.export gave no program for {name}")
    program.save(path)
    names = [value.name or "" for value in program.model.graph.inputs]
    return Case(name, path, {key: x.numpy() for key, x in zip(names, inputs, strict=True)}, module, bars)


def measure(sides: Mapping[str, Side], rounds: int, clock: Clock = time.perf_counter) -> dict[str, list[float]]:
    """Seconds of a run by side, one number a round."""
    repeats = {name: _repeats(run) for name, run in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in list(sides.items())[:: 1 if number % 2 else -1]:
            taken = []
            for _ in range(repeats[name]):
                start = clock()
                run()
                taken.append(clock() - start)
            seconds[name].append(statistics.median(taken))
    return seconds


def _repeats(run: Side) -> int:
    for _ in range(3):  # a first run allocates and chooses kernels
        run()
    start = time.perf_counter()
    run()
    return max(1, int(SLICE_S / (time.perf_counter() - start)))


def _scaling(cases: Sequence[Case], options: argparse.Namespace) -> list[str]:
    """`plan` with one thread and with two, in turns; torch takes its number of threads from one place."""
    rows = ["| model | 1 thread ms | 2 threads ms | × |", "| --- | --- | --- | --- |"]
    for case in cases:
        run, _ = _planned(case)
        seconds = measure({str(count): _with_threads(run, count) for count in (1, 2)}, options.rounds)
        one, two = seconds["1"], seconds["2"]
        medians = [f"{statistics.median(taken) * 1e3:.3f}" for taken in (one, two)]
        rows.append(f"| {' | '.join([case.name, *medians, _ratio(one, two)])} |")
    torch.set_num_threads(options.threads)
    return rows


def _with_threads(run: Side, count: int) -> Side:
    def counted() -> Any:
        torch.set_num_threads(count)
        return run()

    return counted


def _costs() -> list[str]:
    """µs of a run of one op, of a further call, and of a further input, all of a few elements."""
    one, calls, inputs = (_median_of(_chain(*sizes)) for sizes in ((1, 1), (101, 1), (1, 51)))
    return [
        "| what | µs |",
        "| --- | --- |",
        f"| a run of one op | {one:.2f} |",
        f"| a further call | {(calls - one) / 100:.2f} |",
        f"| a further input | {(inputs - one) / 50:.2f} |",
    ]


def _chain(calls: int, inputs: int) -> Side:
    """`calls` additions of 8 elements; `inputs` values are fed, of which the first is read."""
    builder = GraphBuilder("chain")
    spec = TensorSpec((8,), "float32")
    vids = [builder.input(f"x{number}", spec) for number in range(inputs)]
    last = vids[0]
    for number in range(calls):
        (last,) = builder.emit("aten.add.Tensor", [last, vids[0]], [(f"y{number}", spec)])
    program = compile_graph(builder.build([last]))
    feed = {f"x{number}": torch.ones(8) for number in range(inputs)}
    return lambda: program.run(feed)


def _median_of(run: Side) -> float:
    return statistics.median(measure({"": run}, 15)[""]) * 1e6


if __name__ == "__main__":
    main()
