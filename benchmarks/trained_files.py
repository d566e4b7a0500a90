"""The default run on ONNX files that somebody else has trained and exported: what `onnxline run` says of each.

    python -m benchmarks.trained_files FOLDER [--model-section FILE] [--markdown FILE]

Each `*.onnx` below FOLDER is run with nothing but its path, and `passes: {recipe: [default, onnxsim]}`, in a process of
its own. `--model-section` is a YAML file that maps the path of a file below FOLDER to what its section `model:` needs
beside, such as the ranges of its inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.measure import machine, versions_line

LIMIT_S: Final = 600.0
HEAD: Final = "| file | exit code | seconds | sizes of open dims that were drawn | onnxruntime | plan |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model-section", type=Path)
    parser.add_argument("--markdown", type=Path, default=Path("runs/benchmarks/trained_files.md"))
    options = parser.parse_args()
    sections = yaml.safe_load(options.model_section.read_text()) if options.model_section else {}
    lines = [HEAD, "| --- " * 6 + "|"]
    for path in sorted(options.folder.rglob("*.onnx")):
        name = str(path.relative_to(options.folder))
        lines.append(_row(path, name, sections.get(name, {})))
        print(lines[-1], flush=True)
    options.markdown.parent.mkdir(parents=True, exist_ok=True)
    options.markdown.write_text("\n".join([*lines, "", f"Machine: {machine()}. {versions_line()}.", ""]))


def _row(path: Path, name: str, section: Mapping[str, Any]) -> str:
    with tempfile.TemporaryDirectory(prefix="onnxline-trained-") as place:
        config, out = Path(place, "run.yaml"), Path(place, "out")
        model = {"onnx": str(path.resolve()), **section}
        config.write_text(json.dumps({"name": "trained", "model": model, "passes": {"recipe": ["default", "onnxsim"]}}))
        begun = time.perf_counter()
        command = [sys.executable, "-m", "onnxline", "run", str(config), "--out", str(out)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        seconds = time.perf_counter() - begun
        if ended.returncode:
            said = (ended.stderr.strip().splitlines() or [""])[-1]
            return f"| {name} | {ended.returncode} | {seconds:.0f} s | | {said} | |"
        report = json.loads((out / "report.json").read_text())
    drawn = "; ".join(
        f"{dim or 'unnamed'} {', '.join(map(str, sizes))}" for dim, sizes in report["coverage"]["sizes"].items()
    )
    outcomes = {backend["name"]: _outcome(backend) for backend in report["runtime"]["backends"]}
    return f"| {name} | 0 | {seconds:.0f} s | {drawn} | {outcomes['onnxruntime']} | {outcomes['plan']} |"


def _outcome(backend: Mapping[str, Any]) -> str:
    if backend["status"] != "ran":
        return f"{backend['status']}: {', '.join(backend['operators'])}"
    return f"{max((errors['max_abs'] for errors in backend['errors'].values()), default=0.0):.1e}"


if __name__ == "__main__":
    main()
