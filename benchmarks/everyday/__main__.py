"""`python -m benchmarks.everyday [JOB…]`: each job by each tool that is installed and does it, in turn, in one run.

Files: those of the extra `models` (magika, rapidocr). Peers: onnxsim and onnxslim of the environment; Polygraphy with
onnx_graphsurgeon, where `polygraphy` is on PATH. Olive needs a configuration and a data set for each of these jobs, and
Netron shows and changes nothing from a command line, so neither has a time here.

A time is the wall time of the command, as a ratio to onnxline's of the same run, since the machine may be shared.
Whether a result is right is judged here by onnxruntime: outputs of the file before and after on the same inputs.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import onnx
import onnxruntime

SHAPE: Final = {"cls": "x=1,3,48,192", "det": "x=1,3,320,320", "magika": "bytes=1,2048"}
POLY_SHAPE: Final = {name: "{}:[{}]".format(*text.split("=")) for name, text in SHAPE.items()}

JOBS: Final[dict[str, dict[str, str]]] = {
    "simplify": {
        "onnxline": "onnxline optimize {model} -o {out} --no-latency",
        "onnxsim": "onnxsim {model} {out}",
        "onnxslim": "onnxslim {model} {out}",
        "polygraphy": "polygraphy surgeon sanitize {model} --fold-constants -o {out}",
    },
    "what changed": {"onnxline": "onnxline diff {model} {simplified} --structure-only"},
    "fixed shapes": {
        "onnxline": "onnxline fix-shapes {model} -o {out} --shape {shape}",
        "onnxsim": "onnxsim {model} {out} --overwrite-input-shape {colon}",
        "onnxslim": "onnxslim {model} {out} --input-shapes {colon}",
        "polygraphy": "polygraphy surgeon sanitize {model} --override-input-shapes {poly} -o {out}",
    },
    "subgraph": {
        "onnxline": "onnxline extract {model} -o {out} --to {cut}",
        "polygraphy": "polygraphy surgeon extract {model} --outputs {cut}:auto -o {out}",
    },
    "opset": {"onnxline": "onnxline convert-opset {model} -o {out} --opset 17"},
    "fp16": {
        "onnxline": "onnxline to-fp16 {model} -o {out}",
        "onnxslim": "onnxslim {model} {out} --dtype fp16",
        "polygraphy": "polygraphy convert {model} --fp-to-fp16 -o {out}",
    },
    "compare by layer": {
        "onnxline": "onnxline compare {model} {simplified}",
        "polygraphy": "polygraphy run {model} --onnxrt --onnx-outputs mark all --save-outputs {out}.json",
    },
    "count operators, MACs": {
        "onnxline": "onnxline inspect {model} --shape {shape}",
        "onnxslim": "onnxslim --inspect {model}",
        "polygraphy": "polygraphy inspect model {model} --show layers",
    },
    "look at it": {"onnxline": "onnxline view {model} -o {out}.html"},
}
"""Job → tool → command. int8 is in RESULTS.md, since it needs data."""


def files() -> dict[str, Path]:
    places: dict[str, Path] = {}
    for package, pattern, name in (
        ("magika", "models/standard_v3_3/model.onnx", "magika"),
        ("rapidocr", "models/*cls_mobile.onnx", "cls"),
        ("rapidocr", "models/*det_small.onnx", "det"),
    ):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            places[name] = next(iter(sorted(Path(spec.origin).parent.glob(pattern))))
    return places


def is_right(before: Path, after: Path, shape_text: str) -> str:
    """`right`, or how far the outputs of two files are apart on one input."""
    try:
        sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (before, after)]
        feeds = {}
        for entry in sessions[0].get_inputs():
            shape = [int(size) for size in shape_text.split("=")[1].split(",")]
            draw = np.random.default_rng(0)
            integers = "int" in entry.type
            array = draw.integers(0, 200, shape) if integers else draw.standard_normal(shape)
            feeds[entry.name] = array.astype(entry.type[7:-1].replace("float", "float32") if integers else np.float32)
        names = [entry.name for entry in sessions[1].get_outputs()]
        if not {*names} <= {entry.name for entry in sessions[0].get_outputs()}:
            return "other outputs"
        one, other = (session.run(names, feeds) for session in sessions)
        worst = max(
            float(np.abs(left.astype(float) - right.astype(float)).max())
            for left, right in zip(one, other, strict=True)
        )
        return f"{worst:.0e}"
    except Exception as error:
        return f"does not run: {type(error).__name__}"


def main(chosen: list[str]) -> None:
    folder = Path("runs/everyday").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(
        "| job | file | tool | exit | time ÷ onnxline's | nodes | off by |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, model in files().items():
        simplified = folder / f"{name}.simplified.onnx"
        subprocess.run(["onnxline", "optimize", model, "-o", simplified, "--no-latency", "-q"], check=False)
        cut = next(node.output[0] for node in onnx.load(model).graph.node[20:] if node.op_type in ("Relu", "Add"))
        for job, tools in JOBS.items():
            if chosen and job not in chosen:
                continue
            own = 0.0
            for tool, command in tools.items():
                if shutil.which(tool) is None:
                    continue
                out = folder / f"{name}.{tool}.onnx"
                out.unlink(missing_ok=True)
                words = command.format(
                    model=model, out=out, simplified=simplified, shape=SHAPE[name], cut=cut,
                    colon=SHAPE[name].replace("=", ":"), poly=POLY_SHAPE[name],
                )  # fmt: skip
                begun = time.perf_counter()
                done = subprocess.run(shlex.split(words), capture_output=True, text=True, check=False)
                seconds = time.perf_counter() - begun
                own = own or seconds
                nodes = len(onnx.load(out).graph.node) if out.is_file() else ""
                off = is_right(model, out, SHAPE[name]) if out.is_file() and job != "subgraph" else ""
                print(
                    f"| {job} | {name} | {tool} | {done.returncode} | {seconds / own:.2f} | {nodes} | {off} |",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
