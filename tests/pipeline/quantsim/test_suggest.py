"""Mixed precision for a target: what is suggested has the ratio and the size that it says, and no layer too many."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from passes.provenance.annotations import ModulePath, write_module_path
from passes.weights.detached import DetachedModel
from pipeline.config import FormatsConfig, QuantSimConfig, SuggestConfig
from pipeline.errors import UsageError
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.encodings import encode, find_limited_biases
from pipeline.quantsim.module_rules import name_modules
from pipeline.quantsim.new_formats import check_new_formats
from pipeline.quantsim.placement import Placement, PlacementRule, place
from pipeline.quantsim.profiles import load_target, rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.sensitivity import estimate_sensitivity, find_layers
from pipeline.quantsim.simulation import compare_outputs
from pipeline.quantsim.suggest import (
    LayeredModel,
    Placements,
    Suggestion,
    suggest,
    suggestion_text,
)
from tests.pipeline.quantsim.pictures_of_qdq import model_of, rule


def chain() -> DetachedModel:
    """Three products; the second has one large weight in each column, so that its scales leave few steps."""
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=(64, 64)).astype(np.float32) / 8 for name in ("first", "second", "third")}
    weights["second"][0] = 25
    return model_of(
        """g (float[4, 64] x) => (float[4, 64] y) {
            h = MatMul(x, first)
            r = Relu(h)
            m = MatMul(r, second)
            y = MatMul(m, third)
        }""",
        **weights,
    )


def rules(model: DetachedModel) -> tuple[PlacementRule, ...]:
    return rules_of(QuantSimConfig(profile="ort-cpu"), model)


def samples() -> list[dict[str, np.ndarray]]:
    draw = np.random.default_rng(1)
    return [{"x": draw.normal(size=(4, 64)).astype(np.float32)} for _ in range(4)]


def simulate(model: DetachedModel, placement: Placement) -> float:
    encodings = encode(placement, calibrate(model, placement, samples()), model)
    return compare_outputs(model, insert_qdq(model, encodings), samples())["y"].sqnr_db


def find(target: SuggestConfig, model: DetachedModel | None = None) -> Suggestion:
    model = model or chain()
    placement = place(model, rules(model))
    encodings = encode(placement, calibrate(model, placement, samples()), model)
    sensitivity = estimate_sensitivity(model, encodings, samples())
    layers = find_layers(model, encodings)
    entry = LayeredModel(model, rules(model), layers, sensitivity)
    return suggest(target, {"": entry}, lambda placements: simulate(model, placements[""]))


def with_rules(suggestion: Suggestion) -> float:
    """The ratio of a model that is quantized with the suggested rules from the beginning."""
    config = QuantSimConfig.model_validate({"profile": "ort-cpu", "rules": suggestion.rules})
    return simulate(chain(), place(chain(), rules_of(config, chain())))


def test_a_ratio_is_met_by_the_fewest_layers() -> None:
    base = simulate(chain(), place(chain(), rules(chain())))
    found = find(SuggestConfig(sqnr_db=base + 3))
    assert found.is_met
    assert found.layers == 1
    assert found.rules == {
        "tensor:r": {"activations": "uint16"},
        "tensor:second": {"weights": "int16/channel"},
        "tensor:m": {"activations": "uint16"},
    } or found.rules.keys() <= {"tensor:m", "tensor:third", "tensor:y"}
    assert found.sqnr_db == pytest.approx(with_rules(found)) and found.sqnr_db >= base + 3


def test_a_ratio_that_the_rules_have_already_needs_no_other() -> None:
    found = find(SuggestConfig(sqnr_db=1))
    assert (found.is_met, found.rules, found.simulations) == (True, {}, 1)
    assert suggestion_text(found).startswith("suggestion for at least 1 dB: the rules as they are (")


def test_a_ratio_out_of_reach_gives_the_best_that_was_found() -> None:
    found = find(SuggestConfig(sqnr_db=300))
    assert not found.is_met
    assert found.layers == 3
    assert found.sqnr_db == pytest.approx(with_rules(found))
    assert "cannot be met; the best that was found: 3 layers" in suggestion_text(found)


def test_operators_between_layers_change_where_all_layers_are_not_enough() -> None:
    """The sum alone has a wide range, of which its consumer takes a narrow part: no layer reads or makes it."""
    draw = np.random.default_rng(0)
    model = model_of(
        "g (float[4, 64] x) => (float[4, 64] y) { s = Add(x, wide) t = Sub(s, wide) h = Tanh(t) y = MatMul(h, w) }",
        wide=np.full((1, 64), 1000, np.float32),
        w=draw.normal(size=(64, 64)).astype(np.float32),
    )
    base = simulate(model, place(model, rules(model)))
    found = find(SuggestConfig(sqnr_db=base + 20), model)
    assert found.is_met and (found.layers, found.others) == (1, 1)
    assert found.rules["tensor:s"] == {"activations": "uint16"}
    assert "1 layer and 1 operator between layers in another format" in suggestion_text(found)


def test_a_size_is_met_by_the_layers_that_add_least() -> None:
    base = find(SuggestConfig(sqnr_db=1))
    smaller = 0.9 * base.weight_bytes / (3 * 64 * 64 * 4)
    found = find(SuggestConfig(size=smaller))
    assert found.is_met
    assert found.layers == 1
    assert found.weight_bytes <= 0.9 * base.weight_bytes
    assert found.rules.keys() != {"tensor:second"}
    assert found.simulations == 1  # sizes need none
    assert found.sqnr_db == pytest.approx(with_rules(found))


def test_one_target_is_given() -> None:
    for entry in ({}, {"sqnr_db": 30, "size": 0.2}):
        with pytest.raises(ValidationError, match="one target: sqnr_db or size"):
            SuggestConfig.model_validate(entry)


def in_modules(bias_in_float: bool = False) -> tuple[DetachedModel, list[PlacementRule]]:
    """Two products in a module each, and a sum in the module around both."""
    draw = np.random.default_rng(0)
    model = model_of(
        """g (float[4, 64] x) => (float[4, 64] y) {
            h = Gemm(x, first, b)
            r = Relu(h)
            m = MatMul(r, second)
            y = Add(m, x)
        }""",
        first=draw.normal(size=(64, 64)).astype(np.float32) / 8,
        second=draw.normal(size=(64, 64)).astype(np.float32) / 8,
        b=draw.normal(size=64).astype(np.float32),
    )
    gemm, relu, product, total = model.proto.graph.node
    for node, inner in ((gemm, ["net.0"]), (relu, []), (product, ["net.[1]"]), (total, [])):
        write_module_path(node, ModulePath(("", "net", *inner), (), ()), "torch")
    in_float = [rule("tensor:b", activations="float")] if bias_in_float else []
    return model, [rule("op:*", "int8/channel", "uint8"), *in_float]


EVERY_WEIGHT = {f"tensor:{name}": FormatsConfig(weights="int4/channel") for name in ("first", "second")}
RESULTS = {f"tensor:{name}": FormatsConfig(activations="uint16") for name in ("x", "h", "m")}


@pytest.mark.parametrize(
    ("rules", "bias_in_float", "wanted"),
    [
        (EVERY_WEIGHT, False, {"module:net": "weights"}),
        ({"tensor:second": EVERY_WEIGHT["tensor:second"]}, False, {"module:net.[[]1]": "weights"}),
        (RESULTS, False, {"module:net.0": "activations", "module:net.[[]1]": "activations"}),
        (RESULTS, True, {"module:net.[[]1]": "activations", "tensor:h": "activations", "tensor:x": "activations"}),
    ],
    ids=["all weights", "one weight", "results", "a bias in float"],
)
def test_rules_name_modules_where_these_place_the_same(
    rules: dict[str, FormatsConfig], bias_in_float: bool, wanted: dict[str, str]
) -> None:
    model, given = in_modules(bias_in_float)
    place_with = LayeredModel(model, given, (), {}).place_with
    found = name_modules(rules, place_with)
    kinds = {selector: next(iter(formats.model_dump(exclude_none=True))) for selector, formats in found.items()}
    assert kinds == wanted
    assert place_with(found).formats() == place_with(rules).formats()


def biased() -> DetachedModel:
    """A bias far larger than the products that it is added to: in the scale of 16 bits it is beyond 32."""
    draw = np.random.default_rng(0)
    weights = {name: draw.normal(size=(64, 64)).astype(np.float32) / 1000 for name in ("first", "second")}
    return model_of(
        "g (float[4, 64] x) => (float[4, 64] y) { h = Gemm(x, first, large) y = Gemm(h, second) }",
        **weights,
        large=np.full(64, 40, np.float32),
    )


def find_for_biased(find_limited: bool) -> tuple[float, Suggestion]:
    model = biased()
    placement = place(model, rules(model))
    ranges = calibrate(model, placement, samples())
    encodings = encode(placement, ranges, model)

    def limited(placements: Placements) -> dict[str, list[str]]:
        found = encode(placements[""], calibrate(model, placements[""], samples()), model)
        return {"": [name for name, *_ in find_limited_biases(found, model)]} if find_limited else {}

    sensitivity = estimate_sensitivity(model, encodings, samples())
    entry = LayeredModel(model, rules(model), find_layers(model, encodings), sensitivity)
    formats = FormatsConfig(weights="uint16/channel", activations="uint16")  # with zero points, so none is widened
    found = suggest(
        SuggestConfig(sqnr_db=300, formats=formats),
        {"": entry},
        lambda placements: simulate(model, placements[""]),
        limited,
    )
    return simulate(model, placement), found


def test_a_bias_that_32_bits_do_not_hold_in_the_new_scale_stays_in_float() -> None:
    base, found = find_for_biased(find_limited=True)
    assert found.rules["tensor:large"] == {"activations": "float"}
    assert found.sqnr_db > base + 20


def test_nothing_is_suggested_that_is_worse_than_the_rules_as_they_are() -> None:
    """Here the rule of the bias is missing on purpose, so that more bits are worse."""
    base, found = find_for_biased(find_limited=False)
    assert found.sqnr_db >= base


@pytest.mark.parametrize(
    ("target", "is_held"),
    [(SuggestConfig(sqnr_db=40.0), False), (SuggestConfig(size=0.5), False), (SuggestConfig(metric_drop=0.1), True)],
)
def test_formats_that_the_opset_lacks_are_refused_before_calibration(target: SuggestConfig, is_held: bool) -> None:
    proto = model_of("g (float[2] x) => (float[2] y) { y = Neg(x) }").proto
    check_new_formats(target, proto, None)
    proto.opset_import[0].version = 20
    if is_held:  # 8 bits
        check_new_formats(target, proto, None)
    else:
        with pytest.raises(UsageError, match=r"quantsim\.suggest: layers are to change to .* and the model has 20"):
            check_new_formats(target, proto, None)


def test_layers_change_to_formats_that_the_target_runs() -> None:
    """TensorRT has no 16 bits: its layers go back to float, and settings with such a format are refused."""
    config, model = QuantSimConfig(profile="tensorrt"), chain()
    placement = place(model, rules_of(config, model))
    encodings = encode(placement, calibrate(model, placement, samples()), model)
    sensitivity = estimate_sensitivity(model, encodings, samples())
    layers, table = find_layers(model, encodings), load_target("tensorrt")
    entry = LayeredModel(model, rules_of(config, model), layers, sensitivity, target=table)
    base = simulate(model, placement)
    found = suggest(SuggestConfig(sqnr_db=base + 1), {"": entry}, lambda placements: simulate(model, placements[""]))
    assert found.is_met
    assert found.sqnr_db >= base + 1
    assert {text for formats in found.rules.values() for text in formats.values()} == {"float"}

    asked = SuggestConfig(sqnr_db=99.0, formats=FormatsConfig(weights="int8/channel", activations="uint16"))
    with pytest.raises(UsageError, match=r"quantsim\.suggest\.formats: found uint16, which TensorRT"):
        check_new_formats(asked, model.proto, table)
