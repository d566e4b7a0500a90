"""`python -m benchmarks.everyday [JOB…]`: each job by each tool that is installed and does it, in turn, in one run.

Files: those of the extra `models` (magika, rapidocr). Peers: onnxsim and onnxslim of the environment; Polygraphy with
onnx_graphsurgeon, Olive and Netron where `polygraphy`, `olive` and `netron` are on PATH (Olive with torch of the CPU).
A peer that checks its result by running it does what onnxline does; one that does not is timed as well.
"Look at it" ends when a headless Chromium has drawn the graph, where there is one; its processor time is the command's.

Each command runs once to fill caches, bytecode among them, as after an installation; then in turn with the others. A
time is the median of `TIMED` rounds: the wall time, and the processor time of the command with all its children, each
as a ratio to onnxline's, since the machine may be shared. Whether a result is right is judged here by onnxruntime:
outputs of the file before and after on the same inputs.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import onnx
import onnxruntime

from benchmarks.browser import NoBrowser, open_browser

if TYPE_CHECKING:
    from playwright.sync_api import Browser

TIMED: Final = 3
SHAPE: Final = {"cls": "x=1,3,48,192", "det": "x=1,3,320,320", "magika": "bytes=1,2048"}
OLIVE: Final = "olive run-pass --disable_telemetry -m {model} -o {out}.olive --pass-name"

JOBS: Final[dict[str, dict[str, str]]] = {
    "simplify": {
        "onnxline": "onnxline optimize {model} -o {out} --no-latency",
        "onnxline, unproven": "onnxline optimize {model} -o {out} --no-latency --proof structure",
        "onnxsim": "onnxsim {model} {out}",
        "onnxsim, checked": "onnxsim {model} {out} 3 --overwrite-input-shape {colon}",
        "onnxslim": "onnxslim {model} {out}",
        "onnxslim, checked": "onnxslim {model} {out} --model-check --model-check-inputs {colon}",
        "polygraphy": "polygraphy surgeon sanitize {model} --fold-constants -o {out}",
        "olive": f"{OLIVE} OnnxPeepholeOptimizer",
    },
    "what changed": {"onnxline": "onnxline diff {model} {simplified} --structure-only"},
    "fixed shapes": {
        "onnxline": "onnxline fix-shapes {model} -o {out} --shape {shape}",
        "onnxsim": "onnxsim {model} {out} --overwrite-input-shape {colon}",
        "onnxslim": "onnxslim {model} {out} --input-shapes {colon}",
        "polygraphy": "polygraphy surgeon sanitize {model} --override-input-shapes {poly} -o {out}",
        "olive": f"{OLIVE} DynamicToFixedShape --pass-config '{{json}}'",
    },
    "subgraph": {
        "onnxline": "onnxline extract {model} -o {out} --to {cut}",
        "onnxline, unproven": "onnxline extract {model} -o {out} --to {cut} --proof structure",
        "polygraphy": "polygraphy surgeon extract {model} --outputs {cut}:auto -o {out}",
    },
    "opset": {
        "onnxline": "onnxline convert-opset {model} -o {out} --opset 17",
        "olive": OLIVE + """ OnnxOpVersionConversion --pass-config '{{"target_opset": 17}}'""",
    },
    "fp16": {
        "onnxline": "onnxline to-fp16 {model} -o {out}",
        "onnxslim": "onnxslim {model} {out} --dtype fp16",
        "polygraphy": "polygraphy convert {model} --fp-to-fp16 -o {out}",
        "olive": f"{OLIVE} OnnxFloatToFloat16",
    },
    "compare by layer": {
        "onnxline": "onnxline compare {model} {simplified}",
        "polygraphy": "polygraphy run {model} --onnxrt --input-shapes {poly} --onnx-outputs mark all "
        "--save-outputs {out}.json && polygraphy run {simplified} --onnxrt --input-shapes {poly} "
        "--onnx-outputs mark all --load-outputs {out}.json",
        "polygraphy, one model": "polygraphy run {model} --onnxrt --input-shapes {poly} --onnx-outputs mark all "
        "--save-outputs {out}.json",
    },
    "count operators, MACs": {
        "onnxline": "onnxline inspect {model} --shape {shape}",
        "onnxslim": "onnxslim --inspect {model}",
        "polygraphy": "polygraphy inspect model {model} --show layers",
    },
    "look at it": {
        "onnxline": "onnxline view {model} -o {out}.html",
        "netron": "netron --port 8497 {model}",
    },
    "int8": {
        "onnxline": "onnxline to-int8 {model} -o {out} --data {data} --samples 16",
        "onnxline, with its report": "onnxline quantsim {config} --out {out}.int8",
        "quantize_static": "python -m benchmarks.everyday {model} {out} {shape}",
    },
}  # fmt: skip
"""Job → tool → command."""

CONFIG: Final = """name: int8
model: {{onnx: {model}}}
passes: {{recipe: []}}
runtime: {{backends: [onnxruntime]}}
quantsim: {{profile: ort-cpu, calibration: {{samples: 16, data: [{data}]}}, sensitivity: false}}
"""

SAMPLES: Final = 16
"""What both tools calibrate int8 on: the same arrays."""


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


def draw(entry: onnxruntime.NodeArg, shape_text: str, seed: int = 0) -> np.ndarray:
    shape = [int(size) for size in shape_text.split("=")[1].split(",")]
    generator = np.random.default_rng(seed)
    if "int" in entry.type:
        return generator.integers(0, 200, shape).astype(entry.type[7:-1])
    return generator.standard_normal(shape).astype(np.float32)


def is_right(before: Path, after: Path, shape_text: str) -> str:
    """How far the outputs of two files are apart on one input, or why that is not known."""
    try:
        sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]) for path in (before, after)]
        feeds = {entry.name: draw(entry, shape_text) for entry in sessions[0].get_inputs()}
        names = [entry.name for entry in sessions[1].get_outputs()]
        if not {*names} <= {entry.name for entry in sessions[0].get_outputs()}:
            return "other outputs"
        left, right = (session.run(names, feeds) for session in sessions)
        pairs = [(np.asarray(a, float), np.asarray(b, float)) for a, b in zip(left, right, strict=True)]
        return f"{max(float(np.abs(a - b).max()) for a, b in pairs):.0e}"
    except Exception as error:
        return f"does not run: {type(error).__name__}"


def quantize_by_onnxruntime(model: str, out: str, shape_text: str) -> None:
    """What Olive's pass OnnxStaticQuantization calls, on 16 samples."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            (entry,) = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).get_inputs()
            self.rows = iter([{entry.name: draw(entry, shape_text, seed)} for seed in range(SAMPLES)])

        def get_next(self) -> dict[str, np.ndarray]:
            return next(self.rows, None)  # type: ignore[return-value] # as onnxruntime wants it

    quantize_static(model, out, Reader(), per_channel=True, activation_type=QuantType.QUInt8)


def run(command: str, environment: Mapping[str, str], browser: Browser | None) -> tuple[int, float, float]:
    """Exit code, seconds of wall time, and seconds of processor time."""
    begun, spent, code, seconds = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN), 0, 0.0
    for words in map(shlex.split, command.split(" && ")):
        if words[0] == "netron":  # it serves the page and the model, and the browser reads the graph
            process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
            code = wait_for_page(NETRON, process)
            draw_page(browser, NETRON, "document.querySelector('g.node')")
            seconds = time.perf_counter() - begun
            process.terminate()
            process.wait()
            continue
        code = code or subprocess.run(words, capture_output=True, check=False, env=environment).returncode
        if words[1] == "view":
            draw_page(browser, Path(words[-1]).as_uri(), "performance.getEntriesByName('onnxline-ready').length")
        seconds = time.perf_counter() - begun
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    return code, seconds, now.ru_utime + now.ru_stime - spent.ru_utime - spent.ru_stime


NETRON: Final = "http://127.0.0.1:8497/"


def draw_page(browser: Browser | None, address: str, is_drawn: str) -> None:
    """Open a page until `is_drawn` holds on it; no other server is asked for anything."""
    if browser is None:
        return
    page = browser.new_page()
    if address == NETRON:
        page.context.add_cookies([{"name": "consent", "value": str(int(time.time() * 1000)), "url": NETRON}])
    page.route("http*://**", lambda route: route.continue_() if NETRON in route.request.url else route.abort())
    page.goto(address)
    page.locator("g.node").first.wait_for(state="attached") if address == NETRON else page.wait_for_function(is_drawn)
    page.close()


def wait_for_page(address: str, process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(address) as page:
                return 0 if page.read() else 1
        except OSError:
            time.sleep(0.01)
    return 1


Row = tuple[int, float, float]


def measure(
    commands: Mapping[str, tuple[str, Path]], environment: Mapping[str, str], browser: Browser | None
) -> dict[str, Row]:
    """Tool → exit code, wall time and processor time: medians of `TIMED` rounds over all tools, after one that fills
    caches."""
    found: dict[str, list[Row]] = {tool: [] for tool in commands}
    for _ in range(1 + TIMED):
        for tool, (command, out) in commands.items():
            out.unlink(missing_ok=True)
            for rest in out.parent.glob(f"{out.name}.*"):
                shutil.rmtree(rest) if rest.is_dir() else rest.unlink()
            found[tool].append(run(command, environment, browser))
    return {
        tool: (rows[0][0], statistics.median(row[1] for row in rows[1:]), statistics.median(row[2] for row in rows[1:]))
        for tool, rows in found.items()
    }


def main(chosen: list[str]) -> None:
    try:
        with open_browser() as browser:
            compare_tools(chosen, browser)
    except NoBrowser as why:
        print(f"{why}; a page counts as drawn when it is written or served")
        compare_tools(chosen, None)


def compare_tools(chosen: Collection[str], browser: Browser | None) -> None:
    onnxruntime.set_default_logger_severity(3)
    folder = Path("runs/everyday").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment.setdefault("PYTHONPYCACHEPREFIX", str(folder / "bytecode"))
    print("| job | file | tool | exit | wall ÷ onnxline's | processor ÷ onnxline's | nodes | off by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, model in files().items():
        simplified, config = folder / f"{name}.simplified.onnx", folder / f"{name}.yaml"
        entry, sizes = SHAPE[name].split("=")
        samples = folder / f"{name}.samples"
        samples.mkdir()
        with_types = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).get_inputs()[0]
        for seed in range(SAMPLES):
            np.savez(samples / f"{seed:02}.npz", **{entry: draw(with_types, SHAPE[name], seed)})
        config.write_text(CONFIG.format(model=model, data=samples))
        subprocess.run(["onnxline", "optimize", model, "-o", simplified, "--no-latency", "-q"], check=False)
        cut = next(node.output[0] for node in onnx.load(model).graph.node[20:] if node.op_type in ("Relu", "Add"))
        words = {
            "model": model, "simplified": simplified, "config": config, "data": samples, "cut": cut,
            "shape": SHAPE[name], "colon": f"{entry}:{sizes}", "poly": f"{entry}:[{sizes}]",
            "json": f'{{"input_name": ["{entry}"], "input_shape": [[{sizes}]]}}',
        }  # fmt: skip
        for job, tools in JOBS.items():
            if (chosen and job not in chosen) or (job == "int8" and name == "magika"):  # whose input is no float
                continue
            outs = {tool: folder / f"{name}.{tool.replace(', ', '-').replace(' ', '-')}.onnx" for tool in tools}
            commands = {
                tool: (command.format(out=outs[tool], **words), outs[tool])
                for tool, command in tools.items()
                if shutil.which(shlex.split(command)[0]) is not None
            }
            measured = measure(commands, environment, browser)
            own = measured["onnxline"][1:]
            for tool, (code, *times) in measured.items():
                out = outs[tool]
                inner = sorted(out.parent.glob(f"{out.name}.*/**/model*.onnx"))
                made = [path for path in (out, *inner) if path.is_file()]
                nodes = len(onnx.load(made[-1]).graph.node) if made else ""
                off = is_right(model, made[-1], SHAPE[name]) if made and job != "subgraph" else ""
                ratios = [f"{mine / first:.2f}" for mine, first in zip(times, own, strict=True)]
                shown = f"1 ({times[0]:.2f} s) | 1 ({times[1]:.2f} s)" if tool == "onnxline" else " | ".join(ratios)
                print(f"| {job} | {name} | {tool} | {code} | {shown} | {nodes} | {off} |", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1].endswith(".onnx"):
        quantize_by_onnxruntime(*sys.argv[1:])
    else:
        main(sys.argv[1:])
