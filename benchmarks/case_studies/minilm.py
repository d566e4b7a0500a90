"""MiniLM, trained: what the mask costs, what one scale for Q, K and V costs, and what retrieval notices of it.

    python -m benchmarks.case_studies.minilm

200 sentences are embedded. SQNR is that of the embeddings; top-1 is the share of sentences whose nearest neighbour
stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.case_studies.study import Feeds, Study, quantize, run_values, show_table, sqnr_db
from benchmarks.handoff import minilm
from passes.structures import STRUCTURES
from passes.weights.detached import read_model
from pipeline.config.quantsim import parse_precision
from pipeline.quantsim.encodings import encode_range
from pipeline.quantsim.encodings import quantize as quantize_array

SEPARATE: Final = "configs/minilm.yaml"
MERGED: Final = "benchmarks/case_studies/merged_minilm.yaml"

CALIBRATION: Final = {"quantsim.calibration": {"data": "benchmarks/case_studies/minilm.py:calibrate", "samples": 8}}
CLAMPED: Final = {"quantsim.prepare": ["clamp-mask"]}
ONLY: Final = {"op:*": {"weights": "float", "activations": "float"}}


def calibrate() -> Iterator[Feeds]:
    """The loader: 64 sentences in batches of 8, padded, none of which is evaluated."""
    yield from minilm.calibration_samples()


def main() -> None:
    exported = _simulate(SEPARATE, "exported", {"quantsim.profile": "qnn-htp"})
    clamped = _simulate(SEPARATE, "clamped", {"quantsim.profile": "qnn-htp"} | CLAMPED)
    rows = {"as exported": exported, "after clamp-mask": clamped}
    show_table(
        ("W8 per channel, A16 (qnn-htp)", "embeddings", "top-1"),
        ((title, *_judge(study)) for title, study in rows.items()),
    )
    show_table(("V at uint8, layer", "scale of its own", "scale of Q, K and V", "lost"), _rows_of_layers(clamped))
    show_table(
        ("only Q, K and V quantized", "separate", "merged", "separate, top-1", "merged, top-1"), _rows_of_merge()
    )


def _simulate(source: str, name: str, overrides: Mapping[str, Any]) -> Study:
    return quantize(source, f"minilm-{name}", {**CALIBRATION, **overrides})


def _judge(study: Study) -> tuple[str, str]:
    """SQNR of the embeddings, and how many neighbours stay."""
    samples = minilm.evaluation_samples()
    expected, found = (_embed(outputs, samples) for outputs in (study.run_float(samples), study.run_quantized(samples)))
    return f"{minilm.sqnr_db(expected, found):.2f} dB", f"{minilm.top1_agreement(expected, found):.1%}"


def _embed(outputs: Sequence[Sequence[np.ndarray]], samples: Sequence[Feeds]) -> np.ndarray:
    left = iter(outputs)
    return minilm.embed(lambda _: next(left)[0], samples)


def _rows_of_layers(study: Study) -> Iterator[tuple[str, ...]]:
    """V of each layer at 8 bits, by a scale from its own values and by one from Q's, K's and V's together."""
    model = study.folder / "model.onnx"
    layers = [
        [pin.after_bias.name for pin in found.pins] for found in STRUCTURES["qkv"].find(read_model(model)).instances
    ]
    runs = run_values(model, [value for layer in layers for value in layer], calibrate())
    precision = parse_precision("uint8")
    assert precision is not None
    for place, layer in enumerate(layers):
        parts = [np.stack([run[name] for run in runs]) for name in layer]
        found = []
        for sharers in (parts[2:], parts):
            encoding = encode_range((min(map(np.min, sharers)), max(map(np.max, sharers))), precision)
            numbers = quantize_array(parts[2], encoding) - encoding.zero_point
            found.append(sqnr_db([parts[2]], [numbers * encoding.scale]))
        yield str(place), f"{found[0]:.1f} dB", f"{found[1]:.1f} dB", f"{found[0] - found[1]:.1f} dB"


def _rows_of_merge() -> Iterator[tuple[str, ...]]:
    for granularity in ("tensor", "channel"):
        for bits in (8, 16):
            formats = {"weights": f"int8/{granularity}", "activations": f"uint{bits}"}
            separate, merged = (
                _simulate(source, f"{name}-{granularity}-{bits}", CLAMPED | {"quantsim.rules": ONLY | {which: formats}})
                for source, name, which in ((SEPARATE, "separate", "qkv"), (MERGED, "merged", "module:*.merged"))
            )
            (one, one_top), (other, other_top) = _judge(separate), _judge(merged)
            yield f"W8 per {granularity}, A{bits}", one, other, one_top, other_top


if __name__ == "__main__":
    main()
