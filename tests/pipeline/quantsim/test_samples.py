"""Random samples are drawn at sizes in use, where the model runs at them; and QuantSim refuses what is no argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from passes.context import PassContext
from passes.optimize import plan_draws
from passes.proof.draw_choice import choose_in_worker, sampler_of
from passes.proof.draws import InputSampler
from passes.weights.detached import DetachedModel
from pipeline.config import ModelConfig, QuantSimConfig, RunConfig, VerifyConfig
from pipeline.errors import ConfigError, UsageError
from pipeline.export.source import InputSpec
from pipeline.quantsim import QuantSim
from pipeline.quantsim.preparation import describe_run, prepare_config
from pipeline.quantsim.samples import Samples, enlarge
from tests.support.onnx_models import detached, model_of

POOLED = """g (float[N, 3, H, W] x) => (float[N, 4, I, J] y) {
    y = Conv <pads = [1, 1, 1, 1]> (x, w)
}"""
TABLE = """g (float[N, T, 4] x) => (float[N, T, 4] y) {
    length = Shape <start = 1, end = 2> (x)
    rows = Slice (table, zero, length, zero)
    y = Add (x, rows)
}"""
FEW_ROWS = {"table": np.ones((20, 4), np.float32), "zero": np.array([0])}
FAR = """g (float[N, T] x) => (float[N, T] y) {
    length = Shape <start = 1, end = 2> (x)
    size = Cast <to = 1> (length)
    over = Sub (limit, size)
    root = Sqrt (over)
    y = Mul (x, root)
}"""


def sampler_for(model: DetachedModel, context: PassContext) -> InputSampler:
    """The sampler that a run of this model has."""
    chosen, _ = choose_in_worker(model, plan_draws(model), context)
    sampler = sampler_of(chosen)
    assert sampler is not None
    return sampler


@pytest.mark.parametrize(
    ("text", "weights", "given", "sizes"),
    [
        (POOLED, {"w": np.ones((4, 3, 3, 3), np.float32)}, {}, {"H": 64, "W": 64}),
        (POOLED, {"w": np.ones((4, 3, 3, 3), np.float32)}, {"W": 2}, {"H": 64, "W": 2}),
        (POOLED.replace("H, W", "40, 50"), {"w": np.ones((4, 3, 3, 3), np.float32)}, {}, {}),
        (TABLE, FEW_ROWS, {}, {"T": 16}),
        (FAR, {"limit": np.array([40], np.float32)}, {}, {"T": 32}),
        (FAR, {"limit": np.array([4], np.float32)}, {}, {"T": 2}),
        (POOLED.replace("3, H, W", "3000, H, 4"), {"w": np.ones((4, 3000, 3, 3), np.float32)}, {}, {"H": 2}),
    ],
    ids=["image", "one size is given", "fixed", "a table of 20 rows", "NaN above 40", "NaN above 4", "too large"],
)
def test_small_sizes_become_the_largest_at_which_the_model_gives_numbers(
    text: str, weights: dict[str, np.ndarray], given: dict[str, int], sizes: dict[str, int], context: PassContext
) -> None:
    model = detached(model_of(text, **weights))
    sampler = sampler_for(model, context)
    assert set(sampler.sizes.values()) == {2}
    larger = enlarge(sampler, model, given)
    assert larger.sizes == {"N": 2, **sizes}, "the batch stays"
    assert larger.inputs == sampler.inputs


def test_samples_have_the_sizes_and_the_note_says_so(context: PassContext) -> None:
    model = detached(model_of(TABLE, **FEW_ROWS))
    sampler = enlarge(sampler_for(model, context), model, ())
    samples = Samples(QuantSimConfig(), (), sampler)
    drawn = list(samples.first(3))
    assert [sample["x"].shape for sample in drawn] == [(2, 16, 4)] * 3
    assert not np.array_equal(drawn[0]["x"], drawn[1]["x"])
    assert "random inputs (N=2, T=16)" in samples.note
    assert samples.identity() == [("N", 2), ("T", 16)]


CONFIG = RunConfig(name="n", model=ModelConfig(onnx="m.onnx"))
ODD = [3, None, [1], "m.yaml", {"model": {}}, torch.ones(2), np.ones(2), QuantSimConfig()]


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_what_is_no_configuration_is_refused(odd: Any) -> None:
    with pytest.raises(UsageError, match=r"^config is .*; expected a RunConfig, as RunConfig.from_yaml reads$"):
        QuantSim(odd)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda odd: QuantSim(CONFIG, odd), "^out is .*; expected a path, or None$"),
        (lambda odd: QuantSim(CONFIG, observer=odd), "^observer is .*; expected a function$"),
        (
            lambda odd: RunConfig(model=CONFIG.model, quantsim=odd),
            "^RunConfig: quantsim: found .*, expected a mapping$",
        ),
        (
            lambda odd: RunConfig(model=CONFIG.model, quantsim={"rules": odd}),
            r"^RunConfig: quantsim\.rules: found .*, expected a mapping$",
        ),
    ],
    ids=["out", "observer", "section", "rules"],
)
@pytest.mark.parametrize("odd", [3, [1], torch.ones(2)], ids=lambda odd: type(odd).__name__)
def test_another_type_is_refused_in_one_sentence(make: Callable[[Any], object], sentence: str, odd: Any) -> None:
    with pytest.raises(UsageError, match=sentence):
        make(odd)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        ({"suggest": {"sqnr_db": True}}, "suggest.sqnr_db: found true, expected a number"),
        ({"suggest": {"size": "0.5"}}, "suggest.size: found '0.5', expected a number"),
        ({"calibration": {"method": "percentile", "percentile": True}}, "percentile: found true, expected a number"),
        ({"encodings_from": ""}, "encodings_from: found '', expected text that is not empty"),
        ({"profile": {"weight_bits": 8}}, "quantsim.profile: the key 'aimet_config' is missing"),
        ({"rules": {"op:Conv": None}}, "rules.op:Conv: found nothing, expected a mapping"),
    ],
)
def test_settings_of_another_type_are_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_mapping({"model": {"onnx": "m.onnx"}, "quantsim": section})
    assert str(caught.value).endswith(sentence)


@pytest.mark.parametrize(
    ("section", "inputs"),
    [
        ({"prepare": ["clamp-mask"], "calibration": {"data": "x.npz"}}, ("x.npz",)),
        ({"prepare": [{"smooth-quant": {"alpha": 0.4}}], "calibration": {"data": "x.npz"}}, ("x.npz",)),
        ({"prepare": ["untie"], "calibration": {"data": "x.npz"}}, ()),
        ({"prepare": ["clamp-mask"]}, ()),
        ({"prepare": ["clamp-mask"], "calibration": {"data": "x.py:load", "args": {"n": 1}}}, ()),
    ],
    ids=["clamp-mask", "smooth-quant", "reads no data", "no data", "a loader with arguments"],
)
def test_steps_that_read_data_read_that_of_the_calibration(section: dict[str, Any], inputs: tuple[str, ...]) -> None:
    config = RunConfig.model_validate({"model": {"onnx": "model.onnx"}, "quantsim": section})
    assert prepare_config(config).verify.inputs == inputs
    own = config.model_copy(update={"verify": VerifyConfig(inputs=("own.npz",))})
    assert prepare_config(own).verify.inputs == ("own.npz",)


@pytest.mark.parametrize(
    ("section", "sentence"),
    [
        (
            {"quantsim": {"calibration": {"data": "x.py:load", "args": {"n": 1}}}},
            "its loader is called with",
        ),
        ({"export": {"input_names": ["y"]}}, "it has the names of export.input_names, and not those of torch"),
        ({}, None),
    ],
    ids=["a loader with arguments", "other names", "read"],
)
def test_steps_that_do_not_read_the_data_of_the_calibration_are_a_note(
    section: dict[str, Any], sentence: str | None
) -> None:
    settings = {"prepare": ["clamp-mask", "awq"], "calibration": {"data": "x.npz"}, **section.get("quantsim", {})}
    source = {"factory": "net.py:make"} if "export" in section else {"onnx": "model.onnx"}
    config = prepare_config(RunConfig.model_validate({"model": source, **section, "quantsim": settings}))
    nothing = SimpleNamespace(passes=(), runtime=SimpleNamespace(backends=()))
    notes = list(describe_run(nothing, config))  # type: ignore[arg-type]
    assert len(notes) == (sentence is not None)
    for note in notes:
        assert note.startswith("clamp-mask and awq took activations from random draws and not from")
        assert sentence is not None and sentence in note and note.endswith("as verify.inputs")


def test_samples_are_held_out_after_those_that_are_fitted_or_a_quarter_of_what_there_is(tmp_path: Path) -> None:
    specs = (InputSpec("x", (), "float32", 0, 1),)
    np.save(tmp_path / "x.npy", np.arange(10, dtype=np.float32))

    def split(samples: int, evaluation: int) -> tuple[list[float], list[float]]:
        calibration = {"data": str(tmp_path / "x.npy"), "samples": samples}
        found = Samples(QuantSimConfig.model_validate({"calibration": calibration}), specs, None)
        found.hold_out(evaluation)
        seen, judged = found.first(found.fitted), found.evaluation(evaluation)
        return [float(sample["x"]) for sample in seen], [float(sample["x"]) for sample in judged]

    assert split(6, 3) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    assert split(32, 8) == ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9])
    assert split(8, 8) == ([0, 1, 2, 3, 4, 5, 6, 7], [8, 9])
    with pytest.raises(UsageError, match=r"found 1 sample in quantsim.calibration.data, expected two at least"):
        np.save(tmp_path / "x.npy", np.zeros(1, np.float32))
        split(4, 4)
