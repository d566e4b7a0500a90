"""MiniLM, weights of 8 bits by channel and activations of 16: by onnxline's own simulation and by other tools, as it is
exported and after the shipped steps that prepare it, clamp-mask among them.

    python -m benchmarks.quantsim_minilm --aimet PYTHON --quark PYTHON [--folder DIR]

Each tool runs in its own environment. SQNR is that of the sentences' embeddings; top-1 the share of sentences whose
nearest neighbour stays. Then scales are compared with AIMET's and onnxruntime's, encodings go both ways, and our own
calibration is simulated for the formats that AIMET has chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import (
    Feeds,
    ToolRun,
    detach_copy,
    interpreter_options,
    run_tool,
    runner_of,
    write_samples,
)
from benchmarks.handoff.models import export_minilm
from benchmarks.handoff.ours import Simulated, simulate, simulate_encodings
from benchmarks.measure import machine, versions_line
from benchmarks.quantsim_specification import show_agreement
from passes.encodings.aimet import from_aimet, to_aimet
from passes.encodings.encoding import fit_encodings
from passes.weights.detached import DetachedModel
from passes.weights.sessions import Session
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import Encoding, Range, encode
from pipeline.quantsim.given_encodings import adopt_encodings
from pipeline.quantsim.qdq import insert_qdq

QDQ_OPSET = 21
TOOLS = ("aimet", "onnxruntime", "quark", "onnxsim")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """The samples, where they lie, and the interpreters of the tools."""

    folder: Path
    interpreters: Mapping[str, str]
    calibration: list[Feeds]
    evaluation: list[Feeds]

    def run(self, tool: str, model: Path, name: str, **more: object) -> ToolRun:
        return run_tool(
            tool,
            self.interpreters[tool],
            model,
            write_samples(self.calibration, self.folder / "calibration"),
            write_samples(self.evaluation, self.folder / "evaluation"),
            self.folder / name,
            **more,
        )

    def embed(self, outputs: Sequence[np.ndarray]) -> minilm.Embeddings:
        left: Iterator[np.ndarray] = iter(outputs)
        return minilm.embed(lambda _: next(left), self.evaluation)

    def expected(self, proto: onnx.ModelProto) -> minilm.Embeddings:
        return minilm.embed(runner_of(proto), self.evaluation)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    parser.add_argument("--repeats", type=int, default=1, help="of the timed runs; the least time counts")
    chosen = parser.parse_args()
    benchmark = Benchmark(
        chosen.folder, interpreters_of(chosen), minilm.calibration_samples(), minilm.evaluation_samples()
    )
    plain, clamped = (export_minilm(QDQ_OPSET, chosen.folder, prepared=prepared) for prepared in (False, True))
    print(f"{machine()}; {versions_line()}\n\n| MiniLM | simulated by | SQNR | top-1 | quantize, s | evaluate, s |")
    print("| --- | --- | --- | --- | --- | --- |")
    compare_tools(benchmark, plain, "as exported", 1)
    ours, runs = compare_tools(benchmark, clamped, "prepared", chosen.repeats)
    compare_times(ours, runs)
    print()
    show_agreement(insert_qdq(detach_copy(onnx.load(clamped)), ours[0].encodings), benchmark.evaluation[0])
    compare_with_onnxruntime(ours, runs["onnxruntime"])
    if not runs["aimet"].failure:
        exchange_with_aimet(benchmark, clamped, ours, runs["aimet"])


def interpreters_of(chosen: argparse.Namespace) -> dict[str, str]:
    return {"aimet": chosen.aimet, "quark": chosen.quark, "onnxruntime": sys.executable, "onnxsim": sys.executable}


def compare_tools(
    benchmark: Benchmark, path: Path, title: str, repeats: int
) -> tuple[list[Simulated], dict[str, ToolRun]]:
    """Figure 1: a row for each tool. Ours and AIMET's are timed, in turns."""
    name = title.replace(" ", "-")
    proto = onnx.load(path)
    expected = benchmark.expected(proto)
    ours: list[Simulated] = []
    runs: dict[str, ToolRun] = {}
    for _ in range(repeats):
        ours.append(simulate(detach_copy(proto), benchmark.calibration, benchmark.evaluation))
        again = benchmark.run("aimet", path, f"{name}-aimet")
        if again.failure or "aimet" not in runs or seconds(again) < seconds(runs["aimet"]):
            runs["aimet"] = again
    best = min(ours, key=lambda found: found.quantize_s + found.evaluate_s)
    rows = [("onnxline", benchmark.embed(best.outputs), f"{best.quantize_s:.1f}", f"{best.evaluate_s:.1f}")]
    for tool in TOOLS:
        found = runs.setdefault(tool, benchmark.run(tool, path, f"{name}-{tool}") if tool != "aimet" else runs["aimet"])
        if found.failure:
            print(f"| {title} | {tool} | {found.failure} | | | |", flush=True)
            continue
        quantized, evaluated = (
            f"{found.found[key]:.1f}" if key in found.found else "" for key in ("quantize_s", "evaluate_s")
        )
        embeddings = benchmark.embed(found.run(benchmark.evaluation))
        rows.append((f"{tool} {found.version}", embeddings, quantized, evaluated))
    for who, embeddings, quantized, evaluated in rows:
        db, agreement = minilm.sqnr_db(expected, embeddings), minilm.top1_agreement(expected, embeddings)
        print(f"| {title} | {who} | {db:.2f} dB | {agreement:.1%} | {quantized} | {evaluated} |", flush=True)
    return ours, runs


def seconds(run: ToolRun) -> float:
    return float(run.found["quantize_s"] + run.found["evaluate_s"])


def compare_times(ours: Sequence[Simulated], runs: Mapping[str, ToolRun]) -> None:
    """Figure 4."""
    if runs["aimet"].failure:
        return
    mine = min(found.quantize_s + found.evaluate_s for found in ours)
    theirs = seconds(runs["aimet"])
    print(f"\ncalibration and simulation: {mine:.1f} s, AIMET {theirs:.1f} s: {mine / theirs:.2f} ×", flush=True)


def compare_with_onnxruntime(ours: Sequence[Simulated], run: ToolRun) -> None:
    """Figure 3: the scales of both, where both have the same format."""
    graph = onnx.load(run.model).graph
    arrays = {tensor.name: tensor for tensor in graph.initializer}
    scales: dict[str, tuple[np.ndarray, int]] = {}
    for node in graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) == 3:
            tensor = node.input[0].removesuffix("_QuantizeLinear_Input").removesuffix("_quantized")
            scales[tensor] = numpy_helper.to_array(arrays[node.input[1]]), arrays[node.input[2]].data_type
    same = {
        name: scale
        for name, encoding in ours[0].encodings.items()
        for scale, dtype in [scales.get(name, (np.zeros(0), 0))]
        if onnx.TensorProto.DataType.Name(dtype) == encoding.precision.onnx_name and scale.size == encoding.scale.size
    }
    say_scales("onnxruntime", ours[0], same)


def exchange_with_aimet(benchmark: Benchmark, path: Path, ours: Sequence[Simulated], run: ToolRun) -> None:
    """Figure 3: AIMET's encodings in our simulation, ours in AIMET's, and the scales of both."""
    proto = onnx.load(path)
    model = detach_copy(proto)
    expected = benchmark.expected(proto)
    theirs = minilm.sqnr_db(expected, benchmark.embed(run.run(benchmark.evaluation)))
    for version in ("1.0.0", "2.0.0"):
        read = read_encodings(model, run.folder / f"encodings_{version}.encodings")
        found = benchmark.embed(simulate_encodings(model, read, benchmark.evaluation))
        print(
            f"AIMET's encodings {version} ({len(read)}) in our simulation: {minilm.sqnr_db(expected, found):.2f} dB, "
            f"in AIMET's {theirs:.2f} dB",
            flush=True,
        )
    placement, _ = adopt_encodings(ours[0].placement, read, model)
    same_places = encode(placement, calibrate(model, placement, benchmark.calibration), model)
    found = benchmark.embed(simulate_encodings(model, same_places, benchmark.evaluation))
    formats = Counter(
        f"{encoding.precision} in place of {ours[0].encodings[name].precision}"
        for name, encoding in same_places.items()
        if encoding.precision != ours[0].encodings[name].precision
    )
    print(
        f"our scales for AIMET's placement: {minilm.sqnr_db(expected, found):.2f} dB, in AIMET's {theirs:.2f} dB; "
        f"{', '.join(f'{count} {change}' for change, count in formats.items())}",
        flush=True,
    )
    file = benchmark.folder / "ours.encodings"
    parameters = {tensor.name for tensor in proto.graph.initializer}
    mine_db = minilm.sqnr_db(expected, benchmark.embed(ours[0].outputs))
    for version in ("1.0.0", "2.0.0"):
        file.write_text(json.dumps(to_aimet(ours[0].encodings, parameters, version)))
        loaded = benchmark.run("aimet", path, f"aimet-loads-{version}", encodings=str(file))
        if loaded.failure:
            print(f"AIMET loads our encodings {version}: {loaded.failure}")
            continue
        asked, taken = set(loaded.found["own"]), set(loaded.found["quantized"])
        db = minilm.sqnr_db(expected, benchmark.embed(loaded.run(benchmark.evaluation)))
        print(
            f"our encodings {version} in AIMET: {len(asked & taken)} of its {len(asked)} quantizers have one; {db:.2f} "
            f"dB, in our simulation {mine_db:.2f} dB",
            flush=True,
        )
    like = benchmark.run("aimet", path, "aimet-like-ours", like_ours=True)
    if not like.failure:
        read = read_encodings(model, like.folder / "encodings_2.0.0.encodings")
        mine = replace(ours[0], encodings=encode_unpacked(model, ours[0], benchmark.calibration))
        pairs = {name: (encoding, mine.encodings.get(name)) for name, encoding in read.items()}
        same = {name: a.scale for name, (a, b) in pairs.items() if b is not None and has_same_format(a, b)}
        say_scales("AIMET", mine, same)


def encode_unpacked(model: DetachedModel, ours: Simulated, samples: Sequence[Feeds]) -> dict[str, Encoding]:
    """Our encodings by the ranges that AIMET sees. onnxruntime packs constant weights when it opens a model, and sums
    packed products in blocks of another length. AIMET puts an operator of its own after each weight, so its
    session packs none; neither does `Session`. Here each group has one tensor that is computed, whose name it has."""
    ranges = calibrate(model, ours.placement, samples[:1])
    names = [
        placed.site.tensor
        for placed in ours.placement.quantized_sites()
        if placed.site.role == "activation" and placed.site.tensor in ranges
    ]
    session = Session.of(model, names)
    measured: dict[str, Range] = {}
    for sample in samples:
        values = session.run(sample)
        for name in names:
            low, high = measured.get(name, (np.inf, -np.inf))
            measured[name] = min(low, float(values[name].min())), max(high, float(values[name].max()))
    return encode(ours.placement, ranges | measured, model)


def has_same_format(one: Encoding, other: Encoding) -> bool:
    first, second = one.precision, other.precision
    is_same = (first.bits, first.signed, one.scale.shape) == (second.bits, second.signed, other.scale.shape)
    # Weights without the lowest number have a zero point beside the middle in AIMET's files.
    return is_same and (first.signed or first.symmetric == second.symmetric)


def read_encodings(model: DetachedModel, file: Path) -> dict[str, Encoding]:
    return fit_encodings(from_aimet(json.loads(file.read_text())), model)


def say_scales(who: str, ours: Simulated, scales: Mapping[str, np.ndarray]) -> None:
    """How many scales of the same format are within one unit of the last place, and where the others are."""
    sites = {placed.site.tensor: placed.site for placed in ours.placement.sites}
    near: Counter[str] = Counter()
    far: list[str] = []
    for name, scale in scales.items():
        mine = ours.encodings[name].scale
        units = np.abs(mine.ravel() - scale.ravel()) / np.spacing(np.maximum(mine, scale.reshape(mine.shape)).ravel())
        role = sites[name].role
        near[role] += bool((units <= 1).all())
        if (units > 1).any():
            far.append(f"{name} ({sites[name].op}, {np.abs(mine.ravel() / scale.ravel() - 1).max():.1e})")
    total = Counter(sites[name].role for name in scales)
    told = ", ".join(f"{near[role]} of {count} {role}" for role, count in total.items())
    print(f"scales equal to {who}'s within 1 ulp: {told}; not: {', '.join(far[:12]) or 'none'}", flush=True)


if __name__ == "__main__":
    main()
