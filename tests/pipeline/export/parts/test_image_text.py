"""A language model with images in parts: the parts of an image, what they compute, and texts after an image."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers import DynamicCache

from benchmarks import other_families
from benchmarks.generation import make_model as make_decoder
from benchmarks.image_text import FAMILIES, configuration, image_by_genai, make_model
from pipeline import Pipeline
from pipeline.config import ExportConfig, ModelConfig, RunConfig, VerifyConfig
from pipeline.errors import SourceError, UsageError
from pipeline.export import TorchSource, export_onnx, load_source, run_torch
from pipeline.export.parts import load_for_parts
from pipeline.export.parts.image_text import EmbeddingPart, ImageTextDecoder, VisionPart, sees_later_words
from pipeline.export.parts.states import is_equal
from pipeline.parts import PartsResult, TextGenerator
from pipeline.parts.chain import generate_after_image
from pipeline.parts.genai import genai_image_config
from tests.pipeline.export.parts.graphs import check_graph


@pytest.mark.parametrize(
    ("family", "pixels", "tokens", "is_wired"),
    [
        ("Gemma 3", [1, 3, 16, 16], 4, True),
        ("SmolVLM", [1, 3, 16, 16], 4, True),  # without the axis of images that the model itself takes
        ("Qwen2.5-VL", [64, 96], 16, True),
        ("LLaVA", [1, 3, 16, 16], 16, False),  # which takes a layer of the tower without its first token
    ],
)
@torch.no_grad()
def test_an_image_is_what_the_model_makes_of_it(family: str, pixels: list[int], tokens: int, is_wired: bool) -> None:
    model = make_model(family)
    part = VisionPart(model)
    assert [*part.pixels.shape] == pixels and part.features.shape == (tokens, 32) and part.is_wired is is_wired
    image = part.draw_pixels(1)
    assert -1 <= image.min() < 0 < image.max() <= 1
    given = {**part.given, "pixel_values": image.reshape(part.given["pixel_values"].shape)}
    expected = model.get_image_features(**given, return_dict=True).pooler_output
    expected = torch.cat(list(expected)) if isinstance(expected, list | tuple) else expected
    torch.testing.assert_close(part(image)["image_features"], expected.reshape(tokens, 32), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_features_stand_where_a_text_has_the_token_of_an_image() -> None:
    model = make_model("Gemma 3")
    part, table = EmbeddingPart(model), model.get_input_embeddings()
    ids = torch.tensor([[5, 88, 88, 7], [88, 6, 88, 88]])
    features = torch.arange(5 * 32.0).reshape(5, 32)
    found = part(ids, features)["inputs_embeds"]
    torch.testing.assert_close(found[0, 1:3], features[:2])
    torch.testing.assert_close(found[1, [0, 2, 3]], features[2:])
    torch.testing.assert_close(found[0, [0, 3]], table(torch.tensor([5, 7])))
    alone = part(ids[:1], features[:0])["inputs_embeds"]  # a token of images that the model has written itself
    torch.testing.assert_close(alone, table(ids[:1]))


def test_the_decoder_reads_what_the_family_has() -> None:
    gemma = ImageTextDecoder(make_model("Gemma 3")).declarations()
    assert [*gemma][:4] == ["inputs_embeds", "attention_mask", "position_ids", "token_type_ids"]
    qwen = ImageTextDecoder(make_model("Qwen2.5-VL")).declarations()
    assert qwen["position_ids"].dynamic == {1: "batch_size", 2: "sequence_length"} and "token_type_ids" not in qwen


def test_a_tower_that_asks_for_the_size_of_its_image(tmp_path: Path) -> None:
    other_families.make_model("Mistral 3").save_pretrained(tmp_path / "source")
    section = ModelConfig.model_validate({**configuration(tmp_path / "source")["model"], "part": "vision"})
    source = load_source(section)
    assert isinstance(source, TorchSource) and source.draws is not None
    export_onnx(source, ExportConfig(), tmp_path / "vision.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "vision.onnx"), providers=["CPUExecutionProvider"])
    for draw in source.draws(VerifyConfig()):
        [expected] = run_torch(source, draw.feeds).values()
        [found] = map(np.asarray, session.run(None, dict(draw.feeds)))
        limit = 1e-4 * float(np.abs(expected).max())  # float32, other orders of sums
        np.testing.assert_allclose(found, expected, atol=limit, rtol=0)


@torch.no_grad()
def test_words_of_a_prompt_that_see_the_words_after_them() -> None:
    """PaliGemma: one graph for all calls does what forward does with an empty cache, and what it does later."""
    model = other_families.make_model("PaliGemma")
    part = ImageTextDecoder(model)
    assert "prefix_mask" in part.declarations() and "token_type_ids" not in part.declarations()
    mask = torch.ones(1, 7, dtype=torch.int64)
    words = model.get_input_embeddings()(torch.arange(7)[None] + 2)
    prefix = (torch.arange(7) < 4).long()[None]
    cache = DynamicCache(config=model.config)
    types = torch.zeros_like(mask[:, :4])
    first = model(inputs_embeds=words[:, :4], attention_mask=mask[:, :4], token_type_ids=types, past_key_values=cache)
    later = model(inputs_embeds=words[:, 4:], attention_mask=mask, token_type_ids=1 - prefix, past_key_values=cache)
    found = part(words[:, :4], mask[:, :4], prefix_mask=prefix[:, :4], past_key_values=part.empty_states(1))
    torch.testing.assert_close(found["logits"], first.logits)
    again = part(words[:, 4:], mask, prefix_mask=prefix, past_key_values=found["present"])
    torch.testing.assert_close(again["logits"], later.logits)
    whole = part(words, mask, prefix_mask=prefix, past_key_values=part.empty_states(1))
    torch.testing.assert_close(whole["logits"], torch.cat([first.logits, later.logits], 1), atol=1e-5, rtol=0)


def test_logits_that_are_no_numbers_are_equal_where_they_are_so_in_both_calls() -> None:
    model = make_model("Gemma 3")
    assert not sees_later_words(model)
    model.lm_head.weight.data[3] = torch.nan
    assert not sees_later_words(model)


def test_results_of_two_dtypes_are_compared() -> None:
    """A mask may have as many elements as the features of an image."""
    features = torch.tensor([0.5, torch.nan])
    assert not is_equal(torch.tensor([True, False]), features)
    assert is_equal(features.double(), features)


def check_settings(text: str | None, family: str) -> None:
    """onnxruntime-genai gives no token_type_ids; of other families names are there, and what positions depend on."""
    assert (text is None) == (family == "Gemma 3")
    if text is None or family != "Qwen2.5-VL":
        return
    found = json.loads(text)["model"]
    assert [*found["decoder"]["inputs"]][:3] == ["inputs_embeds", "attention_mask", "position_ids"]
    assert found["type"] == "qwen2_5_vl" and found["image_token_id"] == 88 and found["vision_start_token_id"] == 86
    vision = {"filename": "vision.onnx", "patch_size": 4, "spatial_merge_size": 2, "tokens_per_second": 4}
    names = {"inputs": {"pixel_values": "pixel_values"}, "outputs": {"image_features": "image_features"}}
    assert found["vision"] == vision | names


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graphs_are_the_model(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "config.json").write_text(model.config.to_json_string())
    loaded, graphs = None, dict[str, onnx.GraphProto]()
    for part in ("vision", "embedding", "decoder"):
        section = ModelConfig.model_validate({**configuration(tmp_path / "source")["model"], "part": part})
        loaded = loaded or load_for_parts(section)
        source = load_source(section, loaded=loaded)
        assert isinstance(source, TorchSource)
        check_graph(source, tmp_path / f"{part}.onnx")
        graphs[part] = onnx.load(tmp_path / f"{part}.onnx", load_external_data=False).graph
    check_settings(genai_image_config(model.config, graphs), family)
    text = generate_after_image(model, 7, 7)
    generator = TextGenerator(tmp_path)
    found_tokens = generator.generate(text.prompt, inputs=text.inputs, max_new_tokens=32, stop=()).tokens
    assert found_tokens == text.tokens
    other = {"pixel_values": np.asarray(text.inputs["pixel_values"])[..., ::-1] * 0.5}  # the text is about the image
    assert generator.generate(text.prompt, inputs=other, max_new_tokens=32, stop=()).tokens != text.tokens
    with pytest.raises(UsageError, match="the text has 0 tokens of images"):
        generator.generate([1, 2], inputs=text.inputs)
    with pytest.raises(UsageError, match="pixel_values has the shape"):
        generator.generate(text.prompt, inputs={"pixel_values": np.zeros((1, 3, 5, 5))})


@pytest.mark.skipif(
    not os.environ.get("GENAI_PYTHON"), reason="GENAI_PYTHON names no interpreter with onnxruntime-genai"
)
def test_onnxruntime_genai_writes_what_torch_writes_after_an_image(tmp_path: Path) -> None:
    model = make_model("Qwen2.5-VL")
    model.save_pretrained(tmp_path / "source")
    settings = configuration(tmp_path / "source", passes={"recipe": ["onnxscript"]})
    result = Pipeline(RunConfig.from_mapping(settings), tmp_path / "out").run()
    assert isinstance(result, PartsResult)
    assert image_by_genai(os.environ["GENAI_PYTHON"], result.models, model, tmp_path / "image.npz") == "32 of 32"


def test_a_model_without_images_is_refused_in_one_sentence() -> None:
    with pytest.raises(SourceError, match="LlamaForCausalLM reads no images; expected a model such as Gemma3"):
        VisionPart(make_decoder("Llama"))
