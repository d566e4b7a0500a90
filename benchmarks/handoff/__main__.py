"""What quantization tools make of our models: a table of numbers, made by running each of them.

    python -m benchmarks.handoff --aimet PYTHON --quark PYTHON --nncf PYTHON [--models block fused minilm minilm-merged]

An attention block with Q, K and V merged and apart, at opsets 20, 21 and 23, as torch exports it and after onnxline's
default recipe; at 23 also by torch's own attention, as it is and taken apart; and the trained MiniLM, apart and merged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

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
from benchmarks.handoff.models import (
    block_samples,
    export_block,
    export_merged_minilm,
    export_minilm,
    optimize_block,
    prepare_block,
)
from benchmarks.measure import machine, versions_line
from passes.structures import STRUCTURES
from pipeline.quantsim.crosscheck import compare_values, find_jump
from pipeline.quantsim.sites import find_sites

TOOLS = ("aimet", "onnxruntime", "quark", "onnxsim", "nncf", "nncf-int4")


@dataclass(frozen=True, slots=True)
class Form:
    """A model in one of its forms, and samples to calibrate and evaluate it."""

    title: str
    opset: int
    path: Path
    calibration: Sequence[Feeds]
    evaluation: Sequence[Feeds]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    interpreter_options(parser.add_argument)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "onnxline-handoff")
    parser.add_argument(
        "--models", nargs="+", choices=list(MAKERS), default=["block", "fused"], help="minilm: minutes for each tool"
    )
    parser.add_argument("--opsets", type=int, nargs="+", default=(20, 21, 23))
    chosen = parser.parse_args()
    interpreters = {"aimet": chosen.aimet, "quark": chosen.quark, "nncf": chosen.nncf, "nncf-int4": chosen.nncf}
    print(f"{machine()}; {versions_line()}\n")
    print("| model | opset | tool | quantizers | coverage | names kept | Q, K, V apart | SQNR | error jumps at |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for form in (form for name in chosen.models for form in MAKERS[name](chosen.folder, chosen.opsets)):
        for tool in TOOLS:
            print(row(form, tool, interpreters.get(tool, sys.executable), chosen.folder), flush=True)


def blocks(folder: Path, opsets: Sequence[int]) -> Iterator[Form]:
    calibration, evaluation = block_samples(8, 1), block_samples(8, 2)
    for opset in opsets:
        path = export_block(opset, folder, "merged")
        yield Form("block, merged", opset, path, calibration, evaluation)
        path = export_block(opset, folder, "separate")
        yield Form("block, separate", opset, path, calibration, evaluation)
        optimized = optimize_block(path, folder)
        yield Form("block, separate, default recipe", opset, optimized, calibration, evaluation)


def fused_blocks(folder: Path, opsets: Sequence[int]) -> Iterator[Form]:
    """Torch's own attention, where it is one operator."""
    calibration, evaluation = block_samples(8, 1), block_samples(8, 2)
    for opset in (opset for opset in opsets if opset >= ATTENTION_FROM):
        path = export_block(opset, folder, "fused")
        yield Form("block, Attention", opset, path, calibration, evaluation)
        prepared = prepare_block(path, folder)
        yield Form("block, Attention, decompose-attention", opset, prepared, calibration, evaluation)


def minilms(folder: Path, opsets: Sequence[int]) -> Iterator[Form]:
    calibration, evaluation = minilm.calibration_samples(), minilm.evaluation_samples()[:5]
    for opset in opsets:
        for title, prepared in (("MiniLM", False), ("MiniLM, prepared", True)):
            yield Form(title, opset, export_minilm(opset, folder, prepared=prepared), calibration, evaluation)


def merged_minilms(folder: Path, opsets: Sequence[int]) -> Iterator[Form]:
    """MiniLM with one Linear for Q, K and V: as it is, prepared but for that product, and prepared with three."""
    calibration, evaluation = minilm.calibration_samples(), minilm.evaluation_samples()[:5]
    titles = {"plain": "", "prepared": ", prepared", "split": ", prepared, split-qkv"}
    for opset in opsets:
        for form, title in titles.items():
            path = export_merged_minilm(opset, folder, form)
            yield Form(f"MiniLM, merged{title}", opset, path, calibration, evaluation)


def row(form: Form, tool: str, python: str, folder: Path) -> str:
    name = form.path.parent.name if form.path.stem == "model" else form.path.stem
    run = run_tool(
        tool,
        python,
        form.path,
        write_samples(form.calibration, folder / f"{name}-calibration"),
        write_samples(form.evaluation, folder / f"{name}-evaluation"),
        folder / f"{name}-{tool}",
    )
    start = f"| {form.title} | {form.opset} | {tool} {run.version}".rstrip()
    try:
        cells = [run.failure] if run.failure else judge(form, run)
    except Exception as error:  # the tool's model does not even run, which is a result
        cells = [f"its model does not run: {' '.join(str(error).split())[-110:]}"]
    return f"{start} | {' | '.join([*cells, *[''] * (6 - len(cells))])} |"


def judge(form: Form, run: ToolRun) -> list[str]:
    """The columns after the tool's name."""
    model = detach_copy(onnx.load(form.path))
    constants = {tensor.name for tensor in model.proto.graph.initializer}
    wanted = [site.tensor for site in find_sites(model) if site.role in ("input", "activation") and not site.body_of]
    scales = read_scales(run)
    covered = [name for name in wanted if name in scales]
    kept = ""
    jump = ""
    if run.model.exists():
        made = {name for node in onnx.load(run.model).graph.node for name in node.output}
        computed = [name for node in model.proto.graph.node for name in node.output]
        kept = f"{sum(name in made for name in computed) / len(computed):.0%}"
        found = find_jump(compare_values(model, detach_copy(onnx.load(run.model)), form.evaluation[:1]))
        constant = f", {found.constant} twice or never" if found and found.constant else ""
        jump = f"{found.node} ({found.op}), {found.sqnr_db:.1f} dB{constant}" if found else "nowhere"
    expected = runner_of(onnx.load(form.path))
    outputs = run.run(form.evaluation)
    wanted_outputs = np.concatenate([expected(sample).ravel() for sample in form.evaluation])
    db = minilm.sqnr_db(wanted_outputs, np.concatenate([output.ravel() for output in outputs]))
    triple = STRUCTURES["qkv"].find(model).instances
    ends = [site.after_bias.name for site in triple[0].pins] if triple else []
    apart = f"{sum(name in scales for name in ends)} of 3" if triple else "one scale for all"
    if not scales.keys() - constants:
        apart = "no activations"
    count = len(scales.keys() - constants)
    return [str(count), f"{len(covered) / len(wanted):.0%}", kept, apart, f"{db:.2f} dB", jump]


def read_scales(run: ToolRun) -> Mapping[str, np.ndarray]:
    """Tensor of the float model → its scale, of AIMET's encodings or of the QuantizeLinear operators."""
    encodings = run.folder / "encodings_2.0.0.encodings"
    if encodings.exists():
        rows = json.loads(encodings.read_text())["encodings"]
        return {entry["name"]: np.asarray(entry["y_scale"], np.float32) for entry in rows if "y_scale" in entry}
    graph = onnx.load(run.model).graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    return {
        node.input[0].removesuffix("_QuantizeLinear_Input").removesuffix("/f"): numpy_helper.to_array(
            constants[node.input[1]]
        )
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[1] in constants
    }


ATTENTION_FROM: Final = 23

MAKERS: Final[Mapping[str, Callable[[Path, Sequence[int]], Iterator[Form]]]] = {
    "block": blocks,
    "fused": fused_blocks,
    "minilm": minilms,
    "minilm-merged": merged_minilms,
}


if __name__ == "__main__":
    main()
