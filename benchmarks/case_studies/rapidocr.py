"""PP-OCR's text recognition, trained: how many characters of rendered lines are read wrong, before and after.

    python -m benchmarks.case_studies.rapidocr

The lines are drawn with the font of Pillow in three sizes. An error is an insertion, a deletion or a replacement;
the rate is that of all characters.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import numpy as np
import onnx
from PIL import Image, ImageDraw, ImageFont

from benchmarks.case_studies.study import Feeds, Study, quantize, show_table, sqnr_db

HEIGHT, WIDTH, BLANK = 48, 480, 0
CALIBRATED, EVALUATED = 24, 120

WORDS: Final = (
    "harbour", "invoice", "No. 4711", "Total:", "18.90 EUR", "bread", "quarter", "signature", "Platform 9", "the", "of",
    "26.11.2026", "(copy)", "machine", "left & right", "50%", "Zurich", "please", "return", "before", "noon", "B-12",
    "weight", "kg", "gate",
)  # fmt: skip

SETTINGS: Final = {
    "quantsim.calibration": {"data": "benchmarks/case_studies/rapidocr.py:calibrate", "samples": CALIBRATED},
    "quantsim.prepare": [{"convert-opset": {"to": 21}}],
}

FORMATS: Final = {
    "W8 per channel, A16 (qnn-htp)": {"quantsim.profile": "qnn-htp"},
    "W8 per channel, A8 (ort-cpu)": {"quantsim.profile": "ort-cpu"},
    "W8 per channel, A8, percentile": {"quantsim.profile": "ort-cpu", "quantsim.calibration.method": "percentile"},
}


def calibrate() -> Iterator[Feeds]:
    """The loader: lines that are not evaluated."""
    yield from (_draw(text, number) for number, text in enumerate(_texts()[EVALUATED:]))


def main() -> None:
    texts = _texts()[:EVALUATED]
    samples = [_draw(text, number) for number, text in enumerate(texts)]
    head = ("PP-OCR recognition", "probabilities", "character errors", "lines read as in float")
    show_table(head, _rows(texts, samples))


def _rows(texts: Sequence[str], samples: Sequence[Feeds]) -> Iterator[tuple[str, ...]]:
    kinds = _characters()
    for number, (title, overrides) in enumerate(FORMATS.items()):
        study = quantize("configs/rapidocr_rec.yaml", f"rapidocr-{number}", SETTINGS | overrides)
        expected, found = _probabilities(study, samples)
        before, after = ([_spell(row, kinds) for row in rows] for rows in (expected, found))
        if number == 0:
            yield "float", "", _rate(texts, before), ""
        same = sum(a == b for a, b in zip(before, after, strict=True))
        yield title, f"{sqnr_db(expected, found):.2f} dB", _rate(texts, after), f"{same} of {len(texts)}"


def _probabilities(study: Study, samples: Sequence[Feeds]) -> Iterator[list[np.ndarray]]:
    return ([outputs[0][0] for outputs in run(samples)] for run in (study.run_float, study.run_quantized))


def _texts() -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.sample(WORDS, 3)) for _ in range(EVALUATED + CALIBRATED)]


def _draw(text: str, number: int) -> Feeds:
    """A line of 48 pixels height, dark on light with some noise, as the model reads it: from -1 to 1."""
    image = Image.new("RGB", (WIDTH, HEIGHT), (238, 236, 230))
    ImageDraw.Draw(image).text((8, 8), text, (40, 40, 60), ImageFont.load_default((22, 26, 30)[number % 3]))
    pixels = np.asarray(image, np.float32) + np.random.default_rng(number).normal(0, 12, (HEIGHT, WIDTH, 3))
    return {"x": ((pixels[..., ::-1].transpose(2, 0, 1)[None] / 255 - 0.5) / 0.5).astype(np.float32)}


def _spell(probabilities: np.ndarray, kinds: Sequence[str]) -> str:
    """The text of the best path: repeats count once, blanks not at all."""
    best = probabilities.argmax(1)
    return "".join(kinds[kind] for kind, last in zip(best, [-1, *best[:-1]], strict=True) if kind not in (BLANK, last))


def _rate(texts: Sequence[str], read: Sequence[str]) -> str:
    errors = sum(_distance(text, found) for text, found in zip(texts, read, strict=True))
    return f"{errors / sum(map(len, texts)):.2%}"


def _distance(one: str, other: str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(other) + 1))
    for place, letter in enumerate(one, 1):
        last, row[0] = row[0], place
        for column, found in enumerate(other, 1):
            last, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, last + (letter != found))
    return row[-1]


def _characters() -> list[str]:
    spec = find_spec("rapidocr")
    if spec is None or spec.origin is None:
        raise SystemExit("rapidocr is not there: pip install 'onnxline[models]'")
    model = onnx.load(Path(spec.origin).parent / "models/PP-OCRv6_rec_small.onnx")
    [characters] = [entry.value for entry in model.metadata_props if entry.key == "character"]
    return ["", *characters.split("\n"), " "]


if __name__ == "__main__":
    main()
