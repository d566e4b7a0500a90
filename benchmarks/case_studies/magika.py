"""Magika, trained: does the model that tells 214 kinds of files from their bytes still tell the same kind?

    python -m benchmarks.case_studies.magika

The files are those of installed packages and of Python itself, up to 24 of each ending.
"""

from __future__ import annotations

import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.case_studies.study import Feeds, quantize, show_table, sqnr_db

HALF: Final = 1024
"""Bytes that the model reads of a file's beginning, and of its end."""

PADDING: Final = 256
EACH: Final = 24

SETTINGS: Final = {
    "quantsim.calibration": {"data": "benchmarks/case_studies/magika.py:calibrate", "samples": 96},
    "quantsim.prepare": [{"convert-opset": {"to": 21}}],
}

WIDER: Final = {"activations": "uint16"}

FORMATS: Final = {
    "W8 per channel, A8 (ort-cpu)": {"quantsim.profile": "ort-cpu"},
    "the same, GELU and norms at A16": {
        "quantsim.profile": "ort-cpu",
        "quantsim.rules": {"node:*ApplyActivation*": WIDER, "node:*LayerNorm*": WIDER},
    },
    "W8 per channel, A16 (qnn-htp)": {"quantsim.profile": "qnn-htp"},
    "W4 in blocks of 32, float (weight-only)": {"quantsim.profile": "weight-only"},
}


def calibrate() -> Iterator[Feeds]:
    """The loader: every fourth file, one at a time."""
    for path in _files()[::4]:
        yield {"bytes": _read(path)}


def main() -> None:
    evaluated = [path for place, path in enumerate(_files()) if place % 4]
    samples = [{"bytes": _read(path)} for path in evaluated]
    print(f"{len(evaluated)} files of {len({path.suffix for path in evaluated})} endings")
    show_table(("Magika", "probabilities", "same kind", "files that changed"), _rows(samples, evaluated))


def _rows(samples: list[Feeds], files: list[Path]) -> Iterator[tuple[str, ...]]:
    names = _names_of_kinds()
    for number, (title, overrides) in enumerate(FORMATS.items()):
        study = quantize("configs/magika.yaml", f"magika-{number}", SETTINGS | overrides)
        expected, found = ([outputs[0] for outputs in run(samples)] for run in (study.run_float, study.run_quantized))
        kinds = [(int(a.argmax()), int(b.argmax()), file) for a, b, file in zip(expected, found, files, strict=True)]
        moved = [f"{file.suffix}: {names[a]} → {names[b]}" for a, b, file in kinds if a != b]
        told = "; ".join(moved[:4]) + (f"; {len(moved) - 4} more" if len(moved) > 4 else "")
        yield title, f"{sqnr_db(expected, found):.2f} dB", f"{1 - len(moved) / len(files):.1%}", told or "none"


def _files() -> list[Path]:
    """Up to 24 files of each ending, in the order of their names; those below 16 bytes say nothing."""
    found: dict[str, list[Path]] = defaultdict(list)
    for folder in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(folder)).rglob("*")):
            if path.suffix and path.is_file() and path.stat().st_size >= 16 and len(found[path.suffix]) < EACH:
                found[path.suffix].append(path)
    return [path for _, paths in sorted(found.items()) if len(paths) == EACH for path in paths]


def _read(path: Path) -> np.ndarray:
    """The file as the model reads it: 1024 bytes from both ends, without the white space there."""
    data = path.read_bytes()
    first, last = data[: 4 * HALF].lstrip()[:HALF], data[-4 * HALF :].rstrip()[-HALF:]
    numbers = np.full((1, 2 * HALF), PADDING, np.int32)
    numbers[0, : len(first)] = np.frombuffer(first, np.uint8)
    numbers[0, 2 * HALF - len(last) :] = np.frombuffer(last, np.uint8)
    return numbers


def _names_of_kinds() -> list[str]:
    spec = find_spec("magika")
    if spec is None or spec.origin is None:
        raise SystemExit("Magika is not there: pip install 'onnxline[models]'")
    return json.loads((Path(spec.origin).parent / "models/standard_v3_3/config.min.json").read_text())[
        "target_labels_space"
    ]


if __name__ == "__main__":
    main()
