"""A run in parts that is quantized: samples of a part out of the chain, what parts share, and what the chain says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

from passes.weights.detached import DetachedModel, open_model, read_model
from passes.weights.sessions import Session
from pipeline.config import QuantSimConfig, RunConfig, SuggestConfig
from pipeline.errors import UsageError
from pipeline.parts.slots import Step
from pipeline.quantsim.calibration import calibrate
from pipeline.quantsim.chain_noise import ChainJudge, ChainNoise, rate_chain
from pipeline.quantsim.chain_record import ChainSamples, record
from pipeline.quantsim.chains import ChainResult, PartsChain, Seq2SeqChain, TextChain
from pipeline.quantsim.encodings import encode
from pipeline.quantsim.layer_costs import CostedModel, CostMetric, measure_costs
from pipeline.quantsim.parts import check_settings_of_parts, join_encodings
from pipeline.quantsim.placement import Placement, place
from pipeline.quantsim.preparation import add_conversion, add_untie, prepare_config
from pipeline.quantsim.profiles import rules_of
from pipeline.quantsim.qdq import insert_qdq
from pipeline.quantsim.report import make_report
from pipeline.quantsim.sensitivity import estimate_sensitivity, find_layers
from pipeline.quantsim.shared_values import SharedValues
from pipeline.quantsim.suggest import LayeredModel, Placements, suggest, suggestion_text
from tests.pipeline.parts.test_generate import save_in_place
from tests.pipeline.parts.test_seq2seq import FEATURES, models
from tests.pipeline.quantsim.pictures_of_qdq import model_of

__all__ = ["models"]


def settings(**calibration: object) -> QuantSimConfig:
    return QuantSimConfig.model_validate({"calibration": calibration})


def steps_of(chain: PartsChain) -> dict[str, Step]:
    return {part: Session.of(read_model(chain.file(chain.models, part))).run for part in chain.parts}


def samples_of(chain: PartsChain, folder: Path, count: int) -> dict[str, list[dict[str, np.ndarray]]]:
    """The samples of each part, after the chain was recorded."""
    record(chain, steps_of(chain), folder, dict.fromkeys(chain.parts, count))
    chosen = QuantSimConfig(calibration=chain.calibration)
    return {part: list(ChainSamples(chosen, chain, folder, part, ()).first(count)) for part in chain.parts}


def text_chain(folder: Path, prompts: Sequence[Sequence[int]] | np.ndarray) -> TextChain:
    save_in_place(folder)
    (folder / "config.json").write_text('{"vocab_size": 7}')
    np.savez(folder / "prompts.npz", input_ids=np.array(prompts))
    return TextChain(folder, ("prefill", "decode"), settings(data=[str(folder / "prompts.npz")]).calibration)


def test_decode_is_sampled_on_the_cache_that_prefill_has_written(tmp_path: Path) -> None:
    """The cache holds 12 tokens, so that decode is called six times after a prompt of six."""
    chain = text_chain(tmp_path, [[1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1]])
    found = samples_of(chain, tmp_path, 6)
    assert [chunk["input_ids"][0].tolist() for chunk in found["prefill"][:3]] == [
        [1, 2, 3, 4],
        [5, 6, 0, 0],
        [6, 5, 4, 3],
    ]
    first = found["decode"][0]
    assert first["past_key_values.0.key"][0, 0, :, 0].tolist() == [*range(1, 7), *[0] * 6]
    assert first["cache_position"].tolist() == [6] and first["input_ids"].tolist() == [[21 % 7]]
    assert [int(call["cache_position"][0]) for call in found["decode"]] == [6, 7, 8, 9, 10, 11]


def test_a_decoder_is_sampled_over_its_whole_text_at_other_places_for_each_source(models: Path, tmp_path: Path) -> None:
    np.savez(
        tmp_path / "sources.npz",
        input_features=np.concatenate([FEATURES + shift for shift in (0, 1, -1)], dtype=np.float32),
    )
    calibration = settings(data=[str(tmp_path / "sources.npz")]).calibration
    chain = Seq2SeqChain(models, ("encoder", "decoder"), calibration)
    found = samples_of(chain, tmp_path, 12)
    assert [call["input_features"].sum() for call in found["encoder"]] == [15, 21, 9]
    lengths = [call["past_key_values.0.decoder.key"].shape[1] for call in found["decoder"]]
    assert lengths == [0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26]
    for call in found["decoder"][:4]:  # the state that the encoder has computed of the first source
        np.testing.assert_array_equal(call["past_key_values.0.encoder.key"], FEATURES.reshape(1, 6))


def test_ranges_are_of_all_calls_and_not_of_those_that_are_kept(models: Path, tmp_path: Path) -> None:
    chain = Seq2SeqChain(models, ("encoder", "decoder"), settings(seed=3).calibration)
    seen: dict[str, list[int]] = {"encoder": [], "decoder": []}
    observers = {
        "encoder": lambda feeds: seen["encoder"].append(len(feeds)),
        "decoder": lambda feeds: seen["decoder"].append(feeds["past_key_values.0.decoder.key"].shape[1]),
    }
    found = record(chain, steps_of(chain), tmp_path, {"encoder": 2, "decoder": 2}, observers)
    assert found.counts == {"encoder": 2, "decoder": 2} and found.seen == {"encoder": 2, "decoder": 64}
    assert seen["decoder"] == [*range(32)] * 2


def test_what_is_held_out_is_no_sample_and_a_text_is_read_at_once_for_algorithms(models: Path, tmp_path: Path) -> None:
    sources = np.concatenate([FEATURES + shift for shift in (0, 1, -1)], dtype=np.float32)
    np.savez(tmp_path / "sources.npz", input_features=sources)
    chain = Seq2SeqChain(models, ("encoder", "decoder"), settings(data=[str(tmp_path / "sources.npz")]).calibration)
    seen: list[float] = []
    observers = {"encoder": lambda feeds: seen.append(float(feeds["input_features"].sum()))}
    record(chain, steps_of(chain), tmp_path, dict.fromkeys(chain.parts, 5), observers, holds_out=True)
    chosen = QuantSimConfig(calibration=chain.calibration)
    samples = {part: ChainSamples(chosen, chain, tmp_path, part, (), holds_out=True) for part in chain.parts}
    assert seen == [21, 9]
    assert [call["input_features"].sum() for call in samples["encoder"].fitting()] == [21, 9]
    for judged in (samples["encoder"].evaluation(8), samples["encoder"].unseen(8)):
        assert [call["input_features"].sum() for call in judged] == [15]
    assert [call["input_ids"].shape[1] for call in samples["decoder"].evaluation(8)] == [1] * 4
    assert [call["input_ids"].shape[1] for call in samples["decoder"].fitting()] == [32, 32]
    [held] = samples["decoder"].layer_evaluation(8)
    np.testing.assert_array_equal(held["past_key_values.0.encoder.key"], FEATURES.reshape(1, 6))


def test_one_sample_cannot_be_held_out(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1, 2, 3, 4, 5]])
    with pytest.raises(UsageError, match="found 1 sample, expected two at least: the steps of"):
        record(chain, steps_of(chain), tmp_path, dict.fromkeys(chain.parts, 1), holds_out=True)


def test_a_prompt_outside_of_the_vocabulary_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prompts.npz: found the token 9, expected 0 to 6"):
        next(text_chain(tmp_path, [[1, 9]]).subjects())


def test_a_part_without_a_call_is_one_sentence(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1]])
    with pytest.raises(UsageError, match=r"1 sample gave no call of the part prefill"):
        samples_of(chain, tmp_path, 4)


def test_random_prompts_are_longer_than_a_chunk(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1]])
    chain.calibration = settings().calibration
    assert len(next(chain.subjects())) > chain.text.chunk


def test_data_without_a_prompt_is_one_sentence(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, np.zeros((0, 3), np.int64))
    with pytest.raises(UsageError, match="found no prompts in the data, expected one at least: files with an array"):
        samples_of(chain, tmp_path, 1)


def picture(tokens: str, kind: str, bias: str) -> DetachedModel:
    return open_model(
        onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 20]>
        part (float[{tokens}, 2] x) => (float[{tokens}, 2] y)
        <float[2, 2] w = {{1.0, 2.0, 3.0, 4.0}}, float[2] bias = {{0.0, {bias}}}> {{
            product = MatMul (x, w)
            sum = Add (product, bias)
            y = {kind} (sum)
        }}""")
    )


def names_of(shared: SharedValues) -> set[tuple[str, ...]]:
    return {tuple(places.values()) for places in shared.places}


def test_parts_that_are_alike_share_values_of_one_name_operator_and_weight(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1]])
    pair = {"prefill": picture("4", "Relu", "1.0"), "decode": picture("1", "Sigmoid", "2.0")}
    shared = SharedValues.of(chain, pair)
    assert names_of(shared) == {("x", "x"), ("product", "product"), ("y", "y")}  # y is an output of both
    assert [*shared.handed] == [{"prefill": "x", "decode": "x"}]
    assert shared.weights == {"w": ("prefill", "decode")} and shared.stored_before("decode") == {"w"}


def test_other_parts_share_what_one_hands_to_the_other(models: Path) -> None:
    chain = Seq2SeqChain(models, ("encoder", "decoder"), settings().calibration)
    files = {part: read_model(models / f"{part}.onnx") for part in chain.parts}
    shared = SharedValues.of(chain, files)
    assert names_of(shared) == {("present.0.encoder.key", "past_key_values.0.encoder.key")}
    assert shared.handed == shared.places


def test_a_weight_of_both_parts_has_one_format(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1]])
    pair = {"prefill": picture("4", "Relu", "1.0"), "decode": picture("1", "Relu", "1.0")}
    shared = SharedValues.of(chain, pair)
    rules = {"prefill": {}, "decode": {"op:*": {"weights": "int16/channel"}}}
    placements = {part: place_by(model, rules[part]) for part, model in pair.items()}
    with pytest.raises(UsageError, match=r"the weight w is .* in prefill and int16.* in decode, which share it"):
        shared.refuse_two_formats(placements)


def place_by(model: DetachedModel, rules: Mapping[str, object]) -> Placement:
    return place(model, rules_of(QuantSimConfig.model_validate({"profile": "ort-cpu", "rules": rules}), model))


def test_encodings_of_all_parts_are_one_file() -> None:
    first = {"version": "2.0.0", "encodings": [{"name": "key", "scale": 1}], "table": {"a": 1}}
    second = {"version": "2.0.0", "encodings": [{"name": "key", "scale": 1}, {"name": "b", "scale": 2}], "table": {}}
    assert join_encodings([first, second]) == {
        "version": "2.0.0",
        "encodings": [{"name": "key", "scale": 1}, {"name": "b", "scale": 2}],
        "table": {"a": 1},
    }


class TwoProducts(PartsChain):
    """Two parts: the first makes h of x, and the second y of h."""

    measured = "outputs"

    def read(self) -> Iterator[np.ndarray]:
        return iter(())

    def draw(self, generator: np.random.Generator) -> Iterator[np.ndarray]:
        while True:
            yield generator.normal(size=(4, 32)).astype(np.float32)

    def open(self, steps: Mapping[str, Step]) -> Any:
        return partial(self._run, steps)

    def _run(self, steps: Mapping[str, Step], x: np.ndarray, _most: int, _text: Sequence[int]) -> ChainResult:
        return ChainResult(steps["second"]({"h": steps["first"]({"x": x})["h"]})["y"])


class Pair:
    """A chain of two parts with two products each; the last one has a weight that leaves few steps for the others."""

    def __init__(self, folder: Path) -> None:
        draw = np.random.default_rng(0)
        weights = {name: draw.normal(size=(32, 32)).astype(np.float32) / 6 for name in "abcd"}
        weights["d"][0] = 20
        self.models = {
            "first": model_of(
                "g (float[4, 32] x) => (float[4, 32] h) { m = MatMul(x, a) h = MatMul(m, b) }",
                a=weights["a"],
                b=weights["b"],
            ),
            "second": model_of(
                "g (float[4, 32] h) => (float[4, 32] y) { m = MatMul(h, c) y = MatMul(m, d) }",
                c=weights["c"],
                d=weights["d"],
            ),
        }
        self.chain = TwoProducts(folder, tuple(self.models), settings(samples=4).calibration)
        self.steps = {name: Session.of(model).run for name, model in self.models.items()}
        recording = record(self.chain, self.steps, folder, dict.fromkeys(self.models, 4))
        self.judge = ChainJudge(self.chain, self.steps, recording.cases)
        chosen = QuantSimConfig()
        self.samples = {name: list(ChainSamples(chosen, self.chain, folder, name, ()).first(4)) for name in self.models}
        self.shared = SharedValues.of(self.chain, self.models)

    def encodings(self, placements: Placements) -> dict[str, Any]:
        ranges = self.shared.join(
            {name: calibrate(self.models[name], found, self.samples[name]) for name, found in placements.items()},
            placements,
        )
        return {name: encode(found, ranges[name], self.models[name]) for name, found in placements.items()}

    def compare(self, placements: Placements) -> ChainNoise:
        found = self.encodings(placements)
        return self.judge.compare({name: insert_qdq(self.models[name], own) for name, own in found.items()})

    def placements(self, rules: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Placement]:
        return {name: place_by(model, (rules or {}).get(name, {})) for name, model in self.models.items()}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


def test_what_one_part_hands_to_the_other_has_one_scale(pair: Pair) -> None:
    pair.samples["second"] = [{"h": call["h"] / 2} for call in pair.samples["second"]]  # with another range
    found = pair.encodings(pair.placements())
    pair.samples["second"] = [{"h": call["h"] * 2} for call in pair.samples["second"]]
    assert found["first"]["h"].scale == found["second"]["h"].scale


def test_what_a_part_hands_on_has_the_format_in_which_it_is_read(pair: Pair) -> None:
    rules = {"second": {"tensor:h": {"activations": "int16"}}}
    found = pair.shared.unify(pair.placements(rules))
    assert str(found["first"].formats()["h"]) == str(found["second"].formats()["h"]) == "int16"
    assert str(found["first"].formats()["m"]) == "uint8"
    scales = pair.encodings(found)
    assert scales["first"]["h"].scale == scales["second"]["h"].scale


def test_the_table_over_all_parts_is_what_runs_of_the_chain_measure(pair: Pair) -> None:
    """The estimate of a layer is within 3 dB of a chain in which it alone is quantized: a draw of signs has this much
    freedom on outputs of 128 elements."""
    placements, encodings = pair.placements(), pair.encodings(pair.placements())
    quantized = {name: insert_qdq(pair.models[name], own) for name, own in encodings.items()}
    reports = {}
    for name, model in pair.models.items():
        sensitivity = estimate_sensitivity(model, encodings[name], pair.samples[name])
        reports[name] = make_report(placements[name], {}, sensitivity, "", {}, None, model)
    rated = rate_chain(pair.judge, quantized, reports)
    assert rated.noise == pair.compare(placements) and set(rated.parts) == {"first", "second"}
    assert {row.part for row in rated.layers} == {"first", "second"} and len(rated.layers) == 4
    assert (rated.layers[0].part, rated.layers[0].layer) == ("second", "y")
    assert sum(row.share for row in rated.layers) == pytest.approx(1)
    for row in rated.layers:
        layer = next(
            entry for entry in find_layers(pair.models[row.part], encodings[row.part]) if entry.output == row.layer
        )
        own = {name: encodings[row.part][name] for name in layer.tensors() if name in encodings[row.part]}
        alone = pair.judge.compare({row.part: insert_qdq(pair.models[row.part], own)})
        assert row.sqnr_db == pytest.approx(alone.sqnr_db, abs=3), row
    head, first, *_ = rated.lines(12)
    assert head.split() == ["part", "layer", "is", "module", "alone", "share"] and first.split()[:2] == ["second", "y"]


def test_the_layer_that_costs_most_is_found_over_all_parts(pair: Pair) -> None:
    found = pair.encodings(pair.placements())
    models = {name: CostedModel(model, found[name], {}) for name, model in pair.models.items()}
    metric = CostMetric("noise", 0.0, lambda chosen: -pair.judge.compare(chosen).sqnr_db, lambda value: value)
    costs = measure_costs(models, metric, 100)
    assert (costs.costs[0].part, costs.costs[0].layer) == ("second", "y") and len(costs.costs) == 4
    assert costs.quantized_value == -pair.compare(pair.placements()).sqnr_db > costs.without_worst
    together = measure_costs(models, metric, 100, are_alike=True)
    assert [cost.part for cost in together.costs if cost.layer == "m"] == ["first and second"]


def test_a_suggestion_over_all_parts_names_the_part_and_holds(pair: Pair) -> None:
    placements, encodings = pair.placements(), pair.encodings(pair.placements())
    sensitivity = {
        name: estimate_sensitivity(model, encodings[name], pair.samples[name]) for name, model in pair.models.items()
    }
    entries = {
        name: LayeredModel(
            model, rules_of(QuantSimConfig(), model), find_layers(model, encodings[name]), sensitivity[name]
        )
        for name, model in pair.models.items()
    }
    target = pair.compare(placements).sqnr_db + 1.5
    found = suggest(SuggestConfig(sqnr_db=target), entries, lambda chosen: pair.compare(chosen).sqnr_db)
    assert found.is_met and found.layers == 1 and found.rules == {}
    assert set(found.part_rules) == {"second"}
    assert "parts:\n  second:\n    quantsim:\n      rules:" in suggestion_text(found)
    again = pair.compare(pair.placements(found.part_rules))
    assert again.sqnr_db == pytest.approx(found.sqnr_db) and again.sqnr_db >= target


def test_parts_that_are_alike_change_a_layer_together(tmp_path: Path) -> None:
    text = "g (float[{0}, 4] x) => (float[{0}, 4] y) {{ y = MatMul(x, w) }}"
    weight = np.arange(16, dtype=np.float32).reshape(4, 4)
    pair = {"prefill": model_of(text.format(3), w=weight), "decode": model_of(text.format(1), w=weight)}
    shared = SharedValues.of(text_chain(tmp_path, [[1]]), pair)
    entries = {
        name: LayeredModel(
            model,
            rules_of(QuantSimConfig(), model),
            find_layers(model, {"w": 0}),
            {"y": 30.0},
            shared.stored_before(name),
        )
        for name, model in pair.items()
    }
    found = suggest(
        SuggestConfig(sqnr_db=40), entries, lambda chosen: 50.0 if has_16_bits(chosen) else 30.0, are_alike=True
    )
    assert (found.is_met, found.layers, found.part_rules) == (True, 1, {})
    assert found.rules["tensor:w"] == {"weights": "int16/channel"}
    alone = suggest(SuggestConfig(sqnr_db=1), {"": entries["prefill"]}, lambda _: 30.0)
    both = suggest(SuggestConfig(sqnr_db=1), entries, lambda _: 30.0, are_alike=True)
    assert alone.weight_bytes == both.weight_bytes  # a weight of both is stored once


def has_16_bits(placements: Placements) -> bool:
    return all(placement.formats()["w"].bits == 16 for placement in placements.values())


def test_a_chain_is_equal_to_itself(tmp_path: Path) -> None:
    chain = text_chain(tmp_path, [[1, 2, 3], [6, 1, 2]])
    steps = steps_of(chain)
    cases = record(chain, steps, tmp_path, dict.fromkeys(chain.parts, 1)).cases
    found = ChainJudge(chain, steps, cases).compare({})
    assert (found.tokens, found.equal, found.agreement) == (10 + 10, 20, 1)
    assert found.sentence == "chain: 20 of 20 tokens are those of the parts in float, logits exact"
    assert ChainNoise("image", 31.25).sentence == "chain: image 31.25 dB against the parts in float"
    assert math.isnan(ChainNoise("image", 31.25).agreement)


PART = {"model": {"transformers": "x", "task": "text-generation", "cache": {"kind": "static", "length": 8}}}

MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"quantsim": {"metric": "top-1"}}, "quantsim.metric: found top-1 for a run in parts, expected token-agreement"),
    ({"quantsim": {"metric": {"use": "token-agreement", "output": "y"}}}, "found token-agreement with output"),
    ({"parts": {"decode": {"quantsim": {"suggest": {"size": 0.5}}}}}, "parts.decode.quantsim.suggest: the chain"),
    ({"parts": {"decode": {"quantsim": {"calibration": {"seed": 3}}}}}, "parts.decode.quantsim.calibration: the calls"),
    ({"parts": {"decode": {"quantsim": {"shard_mib": 4}}}}, "parts.decode.quantsim.shard_mib is for a single model"),
    ({"parts": {"decode": {"quantsim": {"optimize": ["gptq"]}}}}, "prefill and decode share their weights, which"),
]


@pytest.mark.parametrize(("change", "sentence"), MISTAKES, ids=[sentence for _, sentence in MISTAKES])
def test_what_a_chain_does_not_take_is_one_sentence(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(UsageError) as found:
        check_settings_of_parts(RunConfig.from_mapping({**PART, **change}, tmp_path))
    assert sentence in str(found.value)


def test_a_part_has_its_own_steps_of_preparation(tmp_path: Path) -> None:
    parts = {"decode": {"quantsim": {"prepare": ["split-qkv"]}}, "prefill": {"passes": {"recipe": ["clean"]}}}
    quantsim = {"profile": "qnn-htp-w4a16", "prepare": ["clamp-mask"]}
    whole = {**PART, "passes": {"recipe": ["onnxsim"]}, "export": {"opset": 17}, "quantsim": quantsim, "parts": parts}
    found, [note] = add_conversion(prepare_config(RunConfig.from_mapping(whole, tmp_path)))
    conversion = {"convert-opset": {"to": 21}}
    assert found.of_part("prefill").passes.recipe == ("clean", conversion, "clamp-mask")
    assert found.of_part("decode").passes.recipe == ("onnxsim", conversion, "split-qkv")
    untied = add_untie(found)
    copies = {"untie": {"by_operator": True}}
    assert untied.of_part("prefill").passes.recipe == ("clean", conversion, "clamp-mask", copies)
    assert untied.of_part("decode").passes.recipe == ("onnxsim", conversion, "split-qkv", copies)
    assert note == "the model has opset 17, and 21 is the first with 4 bits: convert-opset is added to the steps"
