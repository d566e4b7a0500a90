"""The configurations that AIMET ships, by AIMET's own names of them, and the profile of 4-bit weights.

They are read from an installed aimet_onnx, or from that of the environment whose interpreter AIMET_PYTHON names.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np
import pytest

from passes.weights.detached import DetachedModel
from pipeline.config import AimetProfile, QuantSimConfig, RunConfig
from pipeline.config.paths import AIMET_CONFIGS
from pipeline.errors import SourceError
from pipeline.quantsim.placement import place
from pipeline.quantsim.profiles import load_target, read_profile, rules_of
from tests.pipeline.quantsim.pictures_of_qdq import model_of

BLOCK = """g (float[2, 8] x) => (float[2, 8] y) {
    h = LayerNormalization (x, scale)
    r = Gemm (h, first)
    s = Softmax (r)
    y = MatMul (s, second)
}"""


def block() -> DetachedModel:
    draw = np.random.default_rng(0).standard_normal
    first, second = (draw((8, 8)).astype(np.float32) for _ in range(2))
    return model_of(BLOCK, scale=np.ones(8, np.float32), first=first, second=second)


def formats(config: QuantSimConfig) -> dict[str, str]:
    sites = place(block(), rules_of(config, block())).sites
    return {placed.site.tensor: str(placed.precision) for placed in sites}


def shipped_configs() -> Path | None:
    """The folder of AIMET's configurations, where there is an AIMET."""
    spec = importlib.util.find_spec("aimet_onnx")
    places = list(spec.submodule_search_locations or ()) if spec else []
    environment = Path(os.environ.get("AIMET_PYTHON", "/nowhere/bin/python")).absolute().parents[1]
    places += map(str, environment.glob("lib/python*/site-packages/aimet_onnx"))
    return Path(places[0]) / "common" / "quantsim_config" if places else None


@pytest.mark.skipif(shipped_configs() is None, reason="aimet-onnx is an extra")
@pytest.mark.parametrize("name", AIMET_CONFIGS)
def test_each_configuration_that_aimet_ships_is_read_and_placed(name: str) -> None:
    folder = shipped_configs()
    assert folder is not None
    file = str(folder / AIMET_CONFIGS[name])
    profile = read_profile(QuantSimConfig(profile=AimetProfile(aimet_config=file)))
    assert profile.placement.conventions is not None
    version = profile.placement.conventions.defaults.hw_version
    assert version == (name.removeprefix("htp_").upper() if name.startswith("htp") else None)
    for bits, weights in ((8, "int8"), (4, "int4")):
        found = formats(QuantSimConfig(profile=AimetProfile(aimet_config=file, weight_bits=bits)))
        assert {found["first"].partition("/")[0], found["second"].partition("/")[0]} == {weights}
        assert {found["x"], found["s"], found["y"]} == {"int16" if name.startswith("enpu") else "uint16"}
        if name.startswith("htp"):
            assert found["scale"].removeprefix("u").removeprefix("int") == "8"


@pytest.mark.skipif(shipped_configs() is None, reason="aimet-onnx is an extra")
def test_no_configuration_of_htp_is_without_a_name() -> None:
    folder = shipped_configs()
    assert folder is not None
    shipped = {path.name for path in folder.glob("htp_*.json") if "per_channel_linear" not in path.name}
    assert shipped <= set(AIMET_CONFIGS.values())


def test_a_name_of_aimet_stands_for_its_file_unless_a_file_has_it(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("model: {onnx: m.onnx}\nquantsim: {profile: {aimet_config: htp_v73}}\n")

    def chosen() -> str:
        config = RunConfig.from_source(str(path)).quantsim
        assert config is not None
        assert isinstance(config.profile, AimetProfile)
        return config.profile.aimet_config

    assert chosen() == "package:aimet_onnx/common/quantsim_config/htp_quantsim_config_v73.json"
    (tmp_path / "htp_v73").write_text("{}")
    assert chosen() == str(tmp_path / "htp_v73")


@pytest.mark.skipif(importlib.util.find_spec("aimet_onnx") is not None, reason="aimet-onnx is there")
def test_without_aimet_the_extra_is_named() -> None:
    file = "package:aimet_onnx/common/quantsim_config/htp_quantsim_config_v73.json"
    with pytest.raises(
        SourceError, match=r"'aimet_onnx' is not installed; it is an extra: pip install onnxline\[aimet"
    ):
        read_profile(QuantSimConfig(profile=AimetProfile(aimet_config=file)))


def test_a_name_that_aimet_does_not_have_is_answered_with_its_names(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no file or folder") as raised:
        read_profile(QuantSimConfig(profile=AimetProfile(aimet_config=str(tmp_path / "htp_v67"))))
    [note] = raised.value.__notes__
    assert note.startswith("AIMET's own configurations are named default, htp_v66, htp_v68")
    assert "did you mean 'htp_v" in note


def test_the_profile_of_4_bit_weights_is_that_of_htp_but_for_them() -> None:
    eight, four = (formats(QuantSimConfig(profile=name)) for name in ("qnn-htp", "qnn-htp-w4a16"))
    assert {name: (eight[name], four[name]) for name in eight if eight[name] != four[name]} == {
        "first": ("int8/channel", "int4/channel"),
        "second": ("int8/channel", "int4/channel"),
    }
    assert four["scale"] == "uint8"
    assert {four[name] for name in ("x", "h", "r", "s", "y")} == {"uint16"}
    table, base = load_target("qnn-htp-w4a16"), load_target("qnn-htp")
    assert (table.operators, table.opsets, table.sources.ranks) == (base.operators, base.opsets, base.sources.ranks)
    assert table.sources.placement != base.sources.placement
