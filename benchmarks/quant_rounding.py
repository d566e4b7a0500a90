"""MiniLM with weights of 4 bits alone: the steps of `quantsim.optimize` and `prepare` against rounding to the nearest.

    python -m benchmarks.quant_rounding --aimet PYTHON --nncf PYTHON --torchao PYTHON [--folder DIR] [--only STEP]

The steps see 6 of 8 batches of calibration and keep what is better on the other 2; the ratio is that of the embeddings
of 200 other sentences. `benchmarks.quant_adapters` holds each step against its library's own call. torchao, whose
interpreter needs no more than torch, rounds the same weights by algorithms of its own, which see no data.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

from benchmarks.handoff import minilm
from benchmarks.handoff.harness import Feeds, detach_copy, interpreter_options, runner_of
from benchmarks.handoff.models import export_minilm
from benchmarks.handoff.ours import simulate_encodings
from benchmarks.measure import machine, versions_line
from passes.weights.detached import DetachedModel
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.optimize import Chosen, Optimization, OptimizedStep
from pipeline.quantsim.optimizers import optimizers_of
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.simulation import compare_outputs

OPSET, HELD_OUT = 21, 2
CHANNEL, BLOCK, ASYMMETRIC = "int4/channel", "int4/block32", "uint4/block32"

CHAINS: Final[dict[tuple[str, ...], tuple[str, ...]]] = {
    (): (CHANNEL, BLOCK, ASYMMETRIC),
    ("gptq",): (CHANNEL, BLOCK, ASYMMETRIC),
    ("seq-mse",): (CHANNEL, BLOCK),
    ("seq-mse", "gptq"): (CHANNEL,),
    ("ada-round",): (CHANNEL,),
    ("scale-estimation",): (ASYMMETRIC,),
}
"""Steps in order → the formats that they are tried with."""

LIBRARIES: Final = {"seq-mse": "aimet", "ada-round": "aimet", "scale-estimation": "nncf"}
"""Step → the option that names an interpreter with its library."""

TORCHAO: Final = {"AFFINE": (CHANNEL, BLOCK), "HQQ_SCALE_ONLY": (CHANNEL, BLOCK)}
"""torchao's choices of scales → the formats that they are tried with."""


@dataclass(frozen=True, slots=True)
class Quantized:
    model: DetachedModel
    placement: Placement
    chosen: Chosen
    rows: tuple[OptimizedStep, ...]
    seconds: float

    def embed(self, samples: Sequence[Feeds]) -> np.ndarray:
        encodings = encode(self.placement, {}, self.model, self.chosen.encodings)
        outputs = iter(simulate_encodings(self.chosen.tune(self.model), encodings, samples))
        return minilm.embed(lambda _: next(outputs), samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-rounding")
    parser.add_argument("--iterations", type=int, default=500, help="of AdaRound, for each layer")
    parser.add_argument("--only", help="chains with this step alone")
    parser.add_argument("--model", type=Path, help="the exported MiniLM, where it is there already")
    parser.add_argument("--formats", nargs="*", default=(CHANNEL, BLOCK, ASYMMETRIC))
    parser.add_argument("--torchao", metavar="PYTHON", default="")
    chosen = parser.parse_args()
    path = chosen.model or export_minilm(OPSET, chosen.folder)
    proto = onnx.load(path)
    evaluation = minilm.evaluation_samples()
    expected = minilm.embed(runner_of(proto), evaluation)
    print(
        f"{machine()}; {versions_line()}\n\n| weights | steps | SQNR | layers better | s |\n"
        "| --- | --- | --- | --- | --- |"
    )
    for names, formats in CHAINS.items():
        if not all(getattr(chosen, LIBRARIES.get(name, ""), True) for name in names):
            continue
        for weights in formats if not names or chosen.only in (None, *names) else ():
            if weights not in chosen.formats:
                continue
            found = quantize_with(detach_copy(proto), weights, [_item(name, chosen) for name in names])
            ratio = minilm.sqnr_db(expected, found.embed(evaluation))
            better = ", ".join(
                f"{sum(layer.taken for layer in row.layers)} of {len(row.layers)}" if row.layers else str(row)
                for row in found.rows
            )
            steps = ", ".join(names) or "to the nearest"
            print(f"| {weights} | {steps} | {ratio:.2f} dB | {better} | {found.seconds:.0f} |", flush=True)
    for algorithm, formats in TORCHAO.items() if chosen.torchao and not chosen.only else ():
        for weights in formats:
            begun = time.perf_counter()
            rounded = round_by_torchao(proto, weights, algorithm, chosen.torchao)
            seconds = time.perf_counter() - begun
            ratio = minilm.sqnr_db(expected, minilm.embed(runner_of(rounded), evaluation))
            print(f"| {weights} | torchao, {algorithm} | {ratio:.2f} dB | | {seconds:.0f} |", flush=True)


def _item(name: str, chosen: argparse.Namespace) -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {"python": getattr(chosen, LIBRARIES[name])} if name in LIBRARIES else {}
    return {name: options | ({"iterations": chosen.iterations} if name == "ada-round" else {})}


def round_by_torchao(proto: onnx.ModelProto, weights: str, algorithm: str, python: str) -> onnx.ModelProto:
    """The model with the weights of its products as torchao rounds them, in float."""
    placement = place(detach_copy(proto), [PlacementRule("op:*", parse_precision(weights), "float")])
    sites = {placed.site.tensor: placed.site for placed in placement.quantized_sites()}
    found = onnx.ModelProto.FromString(proto.SerializeToString())
    stored = {tensor.name: tensor for tensor in found.graph.initializer if tensor.name in sites}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.npz"
        # torchao's matrices have their channels first
        arrays = {
            name: np.moveaxis(onnx.numpy_helper.to_array(stored[name]), sites[name].channel_axis or 0, 0)
            for name in stored
        }
        np.savez(path, **arrays)  # type: ignore[arg-type]
        block = weights.partition("block")[2] or "0"
        subprocess.run([python, "-c", ASK_TORCHAO, path, algorithm, block], check=True, capture_output=True)
        with np.load(path) as rounded:
            for name, tensor in stored.items():
                array = np.moveaxis(rounded[name], 0, sites[name].channel_axis or 0)
                tensor.CopyFrom(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
    return found


ASK_TORCHAO: Final = """
import sys
import numpy as np, torch
from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup, quantize_
from torchao.quantization.quantize_.workflows import IntxChooseQParamsAlgorithm
path, algorithm, block = sys.argv[1], sys.argv[2], int(sys.argv[3])
config = IntxWeightOnlyConfig(
    torch.int4, PerGroup(block) if block else PerAxis(0),
    intx_choose_qparams_algorithm=IntxChooseQParamsAlgorithm[algorithm],
)
found = {}
for name, array in np.load(path).items():
    linear = torch.nn.Linear(array.shape[1], array.shape[0], bias=False)
    linear.weight = torch.nn.Parameter(torch.from_numpy(array), requires_grad=False)
    quantize_(linear, config)
    found[name] = linear.weight.dequantize().numpy()
np.savez(path, **found)
"""


def quantize_with(model: DetachedModel, weights: str, items: Sequence[Any]) -> Quantized:
    """Weights alone, as `onnxline quantsim` does it with calibration data of 8 batches."""
    calibration = minilm.calibration_samples()
    seen, held = calibration[:-HELD_OUT], calibration[-HELD_OUT:]
    placement = place(model, [PlacementRule("op:*", parse_precision(weights), "float")])
    encodings = encode(placement, {}, model)

    def rate(chosen: Chosen) -> float:
        quantized = insert_qdq(chosen.tune(model), encode(placement, {}, model, chosen.encodings))
        return min(noise.sqnr_db for noise in compare_outputs(model, quantized, held).values())

    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        optimization = Optimization(model, placement, encodings, lambda: held, rate, Path(folder))
        chosen, rows = optimization.run(optimizers_of(items), seen)
    return Quantized(model, placement, chosen, rows, time.perf_counter() - begun)


if __name__ == "__main__":
    main()
