"""Do encodings of the source cover the final model, after every shipped recipe?

    python -m benchmarks.encodings_coverage [--family NAME]…

Small models with random weights (benchmarks/families) are exported and quantized as they come, W8 per channel A16, and
the encodings are carried through each recipe. Then a checker that knows nothing of the carrying looks at the numbers of
all float tensors, by onnxruntime alone: a tensor of the final model is **due** an encoding if a tensor of the source
that had one has its numbers, scalars aside. Exits 1 where one that is due has none, or where an encoding is for other
numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime

from benchmarks.families.detect import export_family
from benchmarks.families.table import families
from benchmarks.measure import machine, versions_line
from passes.encodings.carry import CarriedEncodings
from passes.encodings.encoding import Encoding
from passes.optimize import optimize
from passes.recipe import DEFAULT_RECIPE, TORCH_RECIPE
from passes.weights.detached import DetachedModel, attach
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import PlacementRule, place

FAMILIES: Final = ("bert", "vit", "gpt2", "llama", "bloom", "levit")

RECIPES: Final[Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "ONNX default": (DEFAULT_RECIPE, ()),
    "torch default": (TORCH_RECIPE, ()),
    "torch default, keep qkv?": (TORCH_RECIPE, ("qkv?",)),
    "prepared": (("onnxscript", "default", "clamp-mask", "split-qkv", "split-gate-up", "untie"), ("qkv?",)),
}
"""Title → recipe, and structures to keep."""

W8A16: Final = PlacementRule("op:*", parse_precision("int8/channel"), parse_precision("uint16"))

Numbers = Mapping[str, np.ndarray]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--family", action="append", choices=[*families()], metavar="NAME")
    chosen = parser.parse_args().family or FAMILIES
    print(f"{machine()}; {versions_line()}\n")
    print("| model | recipe | tensors | covered | due, covered | not due | wrong | why not due |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    is_whole = True
    for name in chosen:
        exported = export_family(families()[name], draws=2)
        known = encode_source(exported.model, exported.feeds)
        for title, (recipe, keep) in RECIPES.items():
            run = optimize(exported.model, recipe, keep=keep, encodings=known, feeds=exported.feeds)
            assert run.encodings is not None
            cells, is_right = judge(exported.model, run.model, known, run.encodings, exported.feeds[0])
            is_whole = is_whole and is_right
            print(f"| {name} | {title} | {' | '.join(cells)} |", flush=True)
    sys.exit(0 if is_whole else 1)


def encode_source(model: DetachedModel, feeds: Sequence[Numbers]) -> dict[str, Encoding]:
    """Encodings of all float tensors of a model."""
    placement = place(model, [W8A16])
    return encode(placement, calibrate(model, placement, [dict(draw) for draw in feeds]), model)


def judge(
    source: DetachedModel,
    final: DetachedModel,
    known: Mapping[str, Encoding],
    carried: CarriedEncodings,
    feeds: Numbers,
) -> tuple[list[str], bool]:
    """The columns after the recipe, and whether all that is due is covered by what is right."""
    before, after = read_numbers(source, feeds), read_numbers(final, feeds)
    prints = {fingerprint(array) for name, array in before.items() if name in known}
    due = {name for name, array in after.items() if array.size > 1 and fingerprint(array) in prints}
    uncovered = {entry.tensor: entry for entry in carried.uncovered}
    missed = sorted(name for name in due if name in uncovered)
    wrong = [name for name in carried.encodings if not has_right_range(name, before, after, known, carried)]
    reasons = Counter(f"{entry.reason} ({entry.by})" for name, entry in uncovered.items() if name not in due)
    total = len(set(uncovered) | (after.keys() - uncovered.keys()))
    cells = [
        str(total),
        f"{(total - len(uncovered)) / total:.1%}",
        f"{(len(due) - len(missed)) / max(len(due), 1):.1%}" + (f": {', '.join(missed[:4])}" if missed else ""),
        str(len(uncovered.keys() - due)),
        ", ".join(wrong[:4]) or "none",
        "; ".join(f"{count} {reason}" for reason, count in reasons.most_common(4)),
    ]
    return cells, not missed and not wrong


def has_right_range(
    name: str, before: Numbers, after: Numbers, known: Mapping[str, Encoding], carried: CarriedEncodings
) -> bool:
    """Whether the tensor fits into the range of its encoding, as the tensor of the source does that it is of.

    Scales of channels are taken with it: a weight into which a factor was folded has the steps of the source.
    """
    if name not in after or not after[name].size:
        return True
    sources = [one for one in carried.sources.get(name, (name,)) if one in before and one in known]
    if not sources:  # a tensor that a step has made: its numbers are those of others
        return True
    encoding = carried.encodings[name]
    if encoding.axis is not None:
        limit = max(largest_step(before[one], known[one]) for one in sources)
        return largest_step(after[name], encoding) <= limit * (1 + 1e-3) + 1e-6
    least = min(float(before[one].min()) for one in sources)
    greatest = max(float(before[one].max()) for one in sources)
    margin = 1e-3 * max(abs(least), abs(greatest)) + 1e-12
    return least - margin <= float(after[name].min()) and float(after[name].max()) <= greatest + margin


def largest_step(array: np.ndarray, encoding: Encoding) -> float:
    """The size of the largest number in steps of its scale, of which each index of the axis may have its own."""
    if encoding.axis is not None:
        array = np.moveaxis(array, encoding.axis, -1)
    return float(np.abs(array / encoding.scale).max())


def fingerprint(array: np.ndarray) -> tuple[int, str]:
    """What tensors of equal numbers share, whatever their shape and order, up to rounding."""
    scale = float(np.abs(array).max(initial=0.0)) or 1.0
    if not np.isfinite(scale):
        return array.size, "infinite"
    numbers = np.sort(array.reshape(-1).astype(np.float64)) / scale
    marks = [numbers[0], numbers[-1], numbers.mean(), np.square(numbers).mean()]
    return array.size, " ".join(f"{mark:.3f}" for mark in (*marks, np.log10(scale) * 10))


def read_numbers(model: DetachedModel, feeds: Numbers) -> dict[str, np.ndarray]:
    """The numbers of all float tensors, by onnxruntime with optimizations off."""
    proto = onnx.shape_inference.infer_shapes(attach(model))
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    found = {one.name: onnx.numpy_helper.to_array(one) for one in proto.graph.initializer if one.data_type in floats}
    found |= {name: array for name, array in feeds.items() if array.dtype.kind == "f"}
    typed = [info for info in proto.graph.value_info if info.type.tensor_type.elem_type in floats]
    made = {name for node in proto.graph.node for name in node.output}
    outputs = {info.name for info in proto.graph.output}
    proto.graph.output.extend(info for info in typed if info.name in made and info.name not in outputs)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory() as folder:
        onnx.save(proto, Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(Path(folder) / "model.onnx", options)
    names = {entry.name for entry in session.get_inputs()}
    given = {name: array for name, array in feeds.items() if name in names}
    results = session.run(None, given)
    arrays = {entry.name: np.asarray(one) for entry, one in zip(session.get_outputs(), results, strict=True)}
    return found | {name: array for name, array in arrays.items() if array.dtype.kind == "f"}


if __name__ == "__main__":
    main()
