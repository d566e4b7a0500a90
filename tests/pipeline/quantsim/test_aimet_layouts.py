"""Scales of weights in every layout, version and format, both ways between our files and the real AIMET.

AIMET runs in the environment whose interpreter AIMET_PYTHON names.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
import pytest

from passes.encodings.aimet import aimet_text, read_aimet
from passes.encodings.encoding import Encoding, fit_encodings
from passes.weights.detached import DetachedModel, attach
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.placement import place
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule

PYTHON: Final = os.environ.get("AIMET_PYTHON", "")

LAYOUTS: Final[dict[str, tuple[str, tuple[int, ...]]]] = {
    "matmul": ("g (float[2, 64] x) => (float[2, 6] y) { y = MatMul(x, w) }", (64, 6)),
    "matmul_rows": ("g (float[2, 3, 64] x) => (float[2, 3, 6] y) { y = MatMul(x, w) }", (64, 6)),
    "gemm": ("g (float[2, 64] x) => (float[2, 6] y) { y = Gemm(x, w) }", (64, 6)),
    "gemm_transposed": ("g (float[2, 64] x) => (float[2, 6] y) { y = Gemm <transB = 1>(x, w) }", (6, 64)),
    "conv": ("g (float[1, 64, 5, 5] x) => (float[1, 6, 3, 3] y) { y = Conv(x, w) }", (6, 64, 3, 3)),
    "conv_1d": ("g (float[1, 64, 5] x) => (float[1, 6, 3] y) { y = Conv(x, w) }", (6, 64, 3)),
    "conv_groups": ("g (float[1, 128, 5, 5] x) => (float[1, 6, 3, 3] y) { y = Conv <group = 2>(x, w) }", (6, 64, 3, 3)),
    "conv_transpose_1d": ("g (float[1, 64, 5] x) => (float[1, 6, 7] y) { y = ConvTranspose(x, w) }", (64, 6, 3)),
    "conv_transpose": ("g (float[1, 64, 5, 5] x) => (float[1, 6, 7, 7] y) { y = ConvTranspose(x, w) }", (64, 6, 3, 3)),
}  # fmt: skip

FORMATS: Final = {"channel": "int8/channel", "block": "int4/block32", "lpbq": "lpbq32"}
VERSIONS: Final = ("0.6.1", "1.0.0", "2.0.0", "2.1.0")
WITHOUT_FORM: Final = {("0.6.1", "block"), ("0.6.1", "lpbq"), ("2.1.0", "lpbq")}
"""0.6.1 has no blocks, and aimet-onnx 2.42 reads no scales that are scaled in turn in version 2.1.0."""


@dataclass(frozen=True)
class Answers:
    """What AIMET has read and written, and what was asked."""

    folder: Path
    models: Mapping[str, DetachedModel] = field(default_factory=dict)
    encodings: Mapping[str, Encoding] = field(default_factory=dict)
    scales: Mapping[str, np.ndarray] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if not PYTHON:
        pytest.skip("AIMET_PYTHON names no interpreter")
    folder = tmp_path_factory.mktemp("layouts")
    models, encodings, cases = {}, {}, []
    for layout, (text, shape) in LAYOUTS.items():
        draw = np.random.default_rng(0)
        weight = (draw.normal(size=shape) * np.exp(draw.normal(size=shape))).astype(np.float32)
        for kind, precision in FORMATS.items():
            name = f"{layout}-{kind}"
            model = models[name] = model_of(text, w=weight)
            onnx.save(attach(model), folder / f"{name}.onnx")
            encoding = encodings[name] = encode(place(model, [rule("op:*", precision, "float")]), {}, model)["w"]
            for version in VERSIONS:
                if (version, kind) not in WITHOUT_FORM:
                    text_of_file = aimet_text({"w": encoding}, {"w"}, version)
                    (folder / f"{name}.{version}.encodings").write_text(text_of_file)
            cases.append([name, kind, 32])
    (folder / "cases.json").write_text(json.dumps(cases))
    script = Path(__file__).with_name("ask_aimet.py")
    subprocess.run([PYTHON, str(script), str(folder)], check=True, capture_output=True)
    with np.load(folder / "result.npz") as scales:
        return Answers(folder, models, encodings, dict(scales), json.loads((folder / "refused.json").read_text()))


def is_equal(found: np.ndarray, wanted: np.ndarray) -> bool:
    """AIMET has one scale for the positions of a kernel."""
    return found.size <= wanted.size and np.array_equal(np.broadcast_to(found, wanted.shape), wanted)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_aimet_reads_our_scales(answers: Answers, layout: str, kind: str) -> None:
    name = f"{layout}-{kind}"
    wrong = {key: why for key, why in answers.refused.items() if key.startswith(f"{name}/")}
    for version in VERSIONS:
        found = answers.scales.get(f"{name}/{version}")
        if found is not None and not is_equal(found, answers.encodings[name].scale):
            wrong[version] = f"other scales, of shape {found.shape}"
    assert not wrong


@pytest.mark.parametrize("version", ["1.0.0", "2.0.0"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_we_read_aimets_scales(answers: Answers, layout: str, kind: str, version: str) -> None:
    name = f"{layout}-{kind}"
    known = read_aimet(answers.folder / f"{name}.aimet.{version}.encodings")[0]
    found: Any = fit_encodings(known, answers.models[name])["w"]
    own = answers.scales[f"{name}/own"]
    np.testing.assert_allclose(found.scale, np.broadcast_to(own, found.scale.shape), rtol=2e-7, atol=0)
