"""Each step over a library against the library's own call, on the same model, data and seed.

    python -m benchmarks.quant_adapters [--aimet PYTHON] [--nncf PYTHON] [--minilm [PATH]] [--only STEP …]

The models are small: two products after a norm, and two convolutions with a Gemm; with `--minilm`, the products of
MiniLM's first layer as well. A row has how many scales, zero points, integers and float weights have equal bits, of all
that the library was asked for, kept by the step or not. `benchmarks/library_calls.py` has the libraries' own calls.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

import passes
from benchmarks.handoff import minilm
from benchmarks.handoff.harness import Feeds, detach_copy, interpreter_options, write_samples
from benchmarks.handoff.models import export_minilm
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel, attach
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode, quantize
from pipeline.quantsim.optimize import Chosen, Optimization
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.simulation import compare_outputs

SCRIPT: Final = Path(__file__).with_name("library_calls.py")

PRODUCTS: Final = """g (float[16, 64] x) => (float[16, 32] y) {
    n = LayerNormalization <axis = -1> (x, norm_scale, norm_bias)
    h = MatMul (n, first)
    r = Relu (h)
    m = LayerNormalization <axis = -1> (r, other_scale, other_bias)
    y = MatMul (m, second)
}"""
CONVOLUTIONS: Final = """g (float[4, 16, 8, 8] x) => (float[4, 8] y) {
    a = Conv <pads = [1, 1, 1, 1]> (x, first, first_bias)
    r = Relu (a)
    b = Conv <pads = [1, 1, 1, 1]> (r, second, second_bias)
    s = Relu (b)
    p = GlobalAveragePool (s)
    f = Flatten (p)
    y = Gemm <transB = 1> (f, third, third_bias)
}"""


@dataclass(frozen=True, slots=True)
class Case:
    """A step on a model. `weights` are the tensors that are compared."""

    step: str
    model: str
    format: str
    weights: tuple[str, ...]
    options: Mapping[str, Any]
    python: str


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument(
        "--minilm", type=Path, nargs="?", const=Path(), help="the exported MiniLM, if it is there already"
    )
    parser.add_argument("--iterations", type=int, default=200, help="of AdaRound, for each layer")
    parser.add_argument("--only", nargs="*", default=[])
    chosen = parser.parse_args()
    print(f"{machine()}; {versions_line()}\n")
    print("| step | model | library | equal bits | not equal |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        models = {"two products": draw_products(), "two convolutions and a Gemm": draw_convolutions()}
        if chosen.minilm is not None:
            path = chosen.minilm if chosen.minilm.is_file() else export_minilm(21, folder)
            models["MiniLM, first layer"] = (onnx.load(path), minilm.calibration_samples())
        for index, case in enumerate(list_cases(chosen, models)):
            if not chosen.only or case.step in chosen.only:
                proto, samples = models[case.model]
                print(compare(case, proto, samples, folder / str(index)), flush=True)


def draw_products() -> tuple[onnx.ModelProto, list[Feeds]]:
    """Rows whose channels depend on each other and have very different sizes, as those of a trained model have."""
    draw = np.random.default_rng(0)
    sizes = np.exp(draw.normal(size=64))
    arrays = {"norm_scale": sizes, "norm_bias": draw.normal(size=64) / 4, "first": draw.normal(size=(64, 64))}
    arrays |= {"other_scale": sizes[::-1], "other_bias": draw.normal(size=64) / 4, "second": draw.normal(size=(64, 32))}
    mixed = draw.normal(size=(8, 64))
    rows = [draw.normal(size=(16, 8)) @ mixed + draw.normal(size=(16, 64)) / 10 for _ in range(8)]
    return build(PRODUCTS, arrays), [{"x": array.astype(np.float32)} for array in rows]


def draw_convolutions() -> tuple[onnx.ModelProto, list[Feeds]]:
    draw = np.random.default_rng(1)
    shapes = {"first": (16, 16, 3, 3), "first_bias": (16,), "second": (16, 16, 3, 3), "second_bias": (16,)}
    shapes |= {"third": (8, 16), "third_bias": (8,)}
    arrays = {name: draw.normal(size=shape) for name, shape in shapes.items()}
    arrays["first"] *= np.exp(draw.normal(size=(16, 1, 1, 1)))
    return build(CONVOLUTIONS, arrays), [{"x": draw.normal(size=(4, 16, 8, 8)).astype(np.float32)} for _ in range(8)]


def build(text: str, arrays: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    stored = ((name, array.astype(np.float32)) for name, array in arrays.items())
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in stored)
    return onnx.shape_inference.infer_shapes(model)  # onnxsim takes no product of a value without a type


def list_cases(chosen: argparse.Namespace, models: Mapping[str, tuple[onnx.ModelProto, list[Feeds]]]) -> list[Case]:
    products, convolutions, *trained = models
    pair, layers = ("first", "second"), ("first", "second", "third")
    here = sys.executable
    cases = [
        Case("gptq", products, "int4/block32", pair, {}, here),
        Case("awq", products, "int4/block32", pair, {}, here),
        Case("smooth-quant", products, "int4/block32", pair, {}, here),
        Case("cross-layer-equalization", convolutions, "int4/channel", (*layers, "first_bias"), {}, here),
        Case("bias-correction", convolutions, "int4/channel", ("first_bias", "second_bias", "third_bias"), {}, here),
    ]
    if chosen.aimet:
        rounds = {"iterations": chosen.iterations}
        cases += [
            Case("seq-mse", products, "int4/channel", pair, {}, chosen.aimet),
            Case("seq-mse", products, "int4/block32", pair, {}, chosen.aimet),
            Case("seq-mse", convolutions, "int4/channel", layers, {}, chosen.aimet),
            Case("ada-round", products, "int4/channel", pair, rounds, chosen.aimet),
            Case("ada-round", convolutions, "int4/channel", layers, rounds, chosen.aimet),
        ]
    if chosen.nncf:
        cases += [
            Case("scale-estimation", products, f"uint4/{of}", pair, {}, chosen.nncf) for of in ("channel", "block32")
        ]
    for name in trained:
        layer = find_products(models[name][0], "layer.0.")
        cases.append(Case("gptq", name, "int4/block32", layer, {}, here))
        if chosen.aimet:
            cases += [Case("seq-mse", name, f"int4/{of}", layer, {}, chosen.aimet) for of in ("channel", "block32")]
            cases.append(
                Case("ada-round", name, "int4/channel", layer, {"iterations": chosen.iterations}, chosen.aimet)
            )
        if chosen.nncf:
            cases.append(Case("scale-estimation", name, "uint4/block32", layer, {}, chosen.nncf))
    return cases


def find_products(proto: onnx.ModelProto, part: str) -> tuple[str, ...]:
    """The stored matrices of MatMul and Gemm whose node's name or weight has `part` in it."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    nodes = [node for node in proto.graph.node if node.op_type in ("MatMul", "Gemm") and node.input[1] in stored]
    found = tuple(node.input[1] for node in nodes if part in f"{node.name} {node.input[1]} {node.metadata_props}")
    return tuple(dict.fromkeys(found))


def compare(case: Case, proto: onnx.ModelProto, samples: Sequence[Feeds], folder: Path) -> str:
    """A row of the table."""
    seen, held = list(samples[:-2]), list(samples[-2:])
    model = detach_copy(proto)
    for node in model.proto.graph.node:  # so that a call finds the product of a weight whose name it has changed
        node.name = next(
            (f"product of {name}" for name in node.input if name in case.weights), node.name or node.output[0]
        )
    matrices = [name for name in case.weights if len(model.index.initializers[name].dims) > 1]
    selectors = [f"tensor:{name}" for name in matrices] or ["op:*"]
    rules = [PlacementRule(selector, parse_precision(case.format)) for selector in selectors]
    placement = place(model, [PlacementRule("op:*", None, "float"), *rules])
    begun = time.perf_counter()
    if case.step in PREPARING:
        ours = prepare(case, model, seen)
    else:
        ours = optimize(case, model, placement, seen, held, folder / "ours")
    seconds = time.perf_counter() - begun
    theirs, version, own_seconds = call_library(case, model, placement, seen, folder / "theirs")
    counts: dict[str, list[int]] = {}
    different: list[str] = []
    for name, array in theirs.items():
        kind, other = name.rpartition("/")[2], ours.get(name)
        if other is None:
            different.append(f"{name}: the step has none")
            continue
        other = other.reshape(array.shape)
        equal = int((other == array).sum())
        known = counts.setdefault(kind, [0, 0])
        known[0], known[1] = known[0] + equal, known[1] + array.size
        if equal < array.size:
            different.append(f"{name}: {array.size - equal}, by {distance(other, array)} at most")
    equal = "; ".join(f"{same:,} of {total:,} {WORDS[kind]}" for kind, (same, total) in counts.items())
    times = f"{seconds:.1f} s, the call {own_seconds:.1f} s"
    return f"| `{case.step}`, `{case.format}` | {case.model} | {version} | {equal} ({times}) | {'; '.join(different)} |"


def distance(array: np.ndarray, other: np.ndarray) -> str:
    """The largest difference, in units in the last place where the elements are float32."""
    difference = np.abs(array.astype(np.float64) - other)
    if array.dtype != np.float32:
        return f"{difference.max():.3g}"
    return f"{(difference / np.spacing(np.maximum(np.abs(array), np.abs(other)))).max():.3g} ulp"


def prepare(case: Case, model: DetachedModel, seen: Sequence[Feeds]) -> dict[str, np.ndarray]:
    """The weights after a step from float to float; the integers of `awq`, whose library gives no others."""
    after = passes.optimize(model, [{case.step: dict(case.options)}], feeds=seen).model
    arrays = {name: after.array(after.index.initializers[name]) for name in case.weights}
    if case.step != "awq":
        return {f"{name}/values": array for name, array in arrays.items()}
    encodings = encode(place(after, [PlacementRule("op:*", parse_precision(case.format), "float")]), {}, after)
    return {f"{name}/integers": quantize(array, encodings[name]) for name, array in arrays.items()}


def optimize(
    case: Case, model: DetachedModel, placement: Placement, seen: list[Feeds], held: list[Feeds], folder: Path
) -> dict[str, np.ndarray]:
    """What the step offers for each weight, and integers as rounding to the nearest has them afterwards."""
    encodings = encode(placement, {}, model)

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return min(noise.sqnr_db for noise in compare_outputs(model, quantized, held).values())

    folder.mkdir(parents=True)
    options = dict(case.options) | ({} if case.python == sys.executable else {"python": case.python})
    optimization = Optimization(model, placement, encodings, lambda: held, rate, folder)
    (step,) = optimizers_of([{case.step: options}])
    optimization.write_samples(seen)
    offered, _, left = optimization.offer(step, Chosen(encodings))
    if left:
        print(f"{case.step}: {left}", file=sys.stderr)
    stored = model.index.initializers
    found: dict[str, np.ndarray] = {}
    for name in case.weights:
        array = offered.arrays.get(name)
        if name not in offered.encodings:
            found |= {} if array is None else {f"{name}/values": array}
            continue
        encoding = offered.encodings[name]
        found[f"{name}/scale"], found[f"{name}/zero_point"] = encoding.scale, encoding.zero_point
        found[f"{name}/integers"] = quantize(model.array(stored[name]) if array is None else array, encoding)
    return found


def call_library(
    case: Case, model: DetachedModel, placement: Placement, seen: Sequence[Feeds], folder: Path
) -> tuple[dict[str, np.ndarray], str, float]:
    """What the library gives by its own call, its version, and seconds."""
    write_samples(seen, folder / "seen")
    onnx.save(attach(model), folder / "float.onnx")
    onnx.save(attach(insert_qdq(model, encode(placement, {}, model))), folder / "nearest.onnx")
    block = int(case.format.partition("block")[2] or 0)
    call = {"call": case.step, "block": block, "weights": case.weights, "options": dict(case.options)}
    (folder / "call.json").write_text(json.dumps(call))
    begun = time.perf_counter()
    child = subprocess.run([case.python, str(SCRIPT), str(folder)], capture_output=True, text=True)
    if child.returncode:
        raise SystemExit(f"{case.step}: the library's own call fails: {child.stderr.strip().splitlines()[-1]}")
    with np.load(folder / "result.npz") as found:
        return dict(found), (folder / "version.txt").read_text(), time.perf_counter() - begun


WORDS: Final = {"scale": "scales", "zero_point": "zero points", "integers": "integers", "values": "float weights"}

PREPARING: Final = ("awq", "smooth-quant", "cross-layer-equalization")

if __name__ == "__main__":
    main()
