"""The chains of an image with its prompt and of features: their samples, draws, and data that does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

from pipeline.errors import UsageError
from pipeline.quantsim.chain_noise import ChainJudge
from pipeline.quantsim.chain_record import record
from pipeline.quantsim.chains import FeatureChain, ImageTextChain, TextChain
from tests.pipeline.quantsim.test_parts import samples_of, settings, steps_of

VISION = """<ir_version: 10, opset_import: ["": 20]>
g (float[1, 3, 2, 2] pixel_values) => (float[4, 3] image_features) <int64[2] shape = {4, 3}> {
    image_features = Reshape (pixel_values, shape)
}"""
EMBEDDING = """<ir_version: 10, opset_import: ["": 20]>
g (int64[1, tokens] input_ids, float[places, 3] image_features) => (float[1, tokens, 3] inputs_embeds)
<float[7, 3] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}> {
    words = Gather (table, input_ids)
    sum = ReduceSum <keepdims = 0> (image_features)
    inputs_embeds = Add (words, sum)
}"""
WORDS = """<ir_version: 10, opset_import: ["": 20]>
g (float[1, tokens, 3] inputs_embeds) => (float[1, tokens, 7] logits)
<float[3, 7] head = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20}> {
    logits = MatMul (inputs_embeds, head)
}"""


def image_chain(folder: Path, *samples: Mapping[str, object]) -> ImageTextChain:
    for part, text in (("vision", VISION), ("embedding", EMBEDDING), ("decoder", WORDS)):
        onnx.save(onnx.parser.parse_model(text), folder / f"{part}.onnx")
    (folder / "config.json").write_text('{"vocab_size": 7, "image_token_id": 5}')
    files = [folder / f"{place}.npz" for place in range(len(samples))]
    for file, arrays in zip(files, samples, strict=True):
        np.savez(file, **{name: np.asarray(array) for name, array in arrays.items()})  # pyright: ignore[reportArgumentType]
    calibration = settings(data=[*map(str, files)]).calibration
    return ImageTextChain(folder, ("vision", "embedding", "decoder"), calibration)


IMAGE = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)


def test_an_image_is_seen_once_and_embedded_with_the_prompt(tmp_path: Path) -> None:
    chain = image_chain(tmp_path, {"pixel_values": IMAGE, "input_ids": [[1, 5, 5, 5, 5, 2]]})
    found = samples_of(chain, tmp_path, 3)
    [image] = found["vision"]
    np.testing.assert_array_equal(image["pixel_values"], IMAGE)
    prompt, *tokens = found["embedding"]
    assert prompt["input_ids"].tolist() == [[1, 5, 5, 5, 5, 2]]
    np.testing.assert_array_equal(prompt["image_features"], IMAGE.reshape(4, 3))
    assert [len(call["image_features"]) for call in tokens] == [0, 0]
    assert found["decoder"][0]["inputs_embeds"][0, 0].tolist() == [3 + 66, 4 + 66, 5 + 66]


def test_a_random_prompt_has_the_tokens_of_its_image(tmp_path: Path) -> None:
    chain = image_chain(tmp_path)
    subject = next(chain.subjects())
    assert subject["pixel_values"].shape == IMAGE.shape and (subject["input_ids"] == 5).sum() == 4
    assert samples_of(chain, tmp_path, 2)["vision"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"vocab_size": 7, "pad_token_id": 0}', {1, 2, 3, 4, 6}),
        ('{"vocab_size": 7, "pad_token_id": 6}', {0, 1, 2, 3, 4}),
        ('{"vocab_size": 7}', {0, 1, 2, 3, 4, 6}),
        ('{"vocab_size": 1, "pad_token_id": 0}', {0}),  # there is no other
    ],
)
def test_drawn_tokens_are_neither_padding_nor_images(tmp_path: Path, config: str, words: set[int]) -> None:
    chain = image_chain(tmp_path)
    (tmp_path / "config.json").write_text(config)
    assert {*chain.draw_tokens(np.random.default_rng(0), 400, 5).tolist()} == words


IMAGE_MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"pixel_values": IMAGE, "input_ids": [[1, 5, 2]]}, "found 1 token 5, which stands for an image, expected 4"),
    (
        {"pixel_values": IMAGE, "input_ids": [[5, 5, 5, 5], [5, 5, 5, 5]]},
        "found 2 prompts, expected one for each image",
    ),
    ({"pixel_values": IMAGE * np.nan, "input_ids": [[5, 5, 5, 5]]}, "'pixel_values' holds NaN"),
    ({"pixel_values": IMAGE, "input_ids": np.zeros((1, 0), np.int64)}, "found input_ids of length 0"),
]


@pytest.mark.parametrize(("arrays", "sentence"), IMAGE_MISTAKES, ids=[sentence for _, sentence in IMAGE_MISTAKES])
def test_data_that_is_no_image_with_a_prompt_is_one_sentence(
    tmp_path: Path, arrays: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UsageError, match=rf"0\.npz: {sentence}"):
        next(image_chain(tmp_path, arrays).subjects())


FEATURES_OF_TOKENS = """<ir_version: 10, opset_import: ["": 20]>
g (int64[batch, tokens] input_ids) => (float[batch, tokens, 2] last_hidden_state)
<float[3, 2] table = {1, 2, 3, 4, 5, 6}> { last_hidden_state = Gather (table, input_ids) }"""


DECODER = """<ir_version: 10, opset_import: ["": 20]>
g (int64[1, tokens] input_ids, int64[1, tokens] position_ids) => (float[1, tokens, 5] logits)
<float[5, 5] table = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24}> {
    logits = Gather (table, position_ids)
}"""


@pytest.mark.parametrize(("length", "count"), [(3, 3), (5, 1), (8, 1)])
def test_a_text_ends_with_the_last_position(tmp_path: Path, length: int, count: int) -> None:
    """A block of a calibration set is often as long as the table of positions, or longer."""
    onnx.save(onnx.parser.parse_model(DECODER), tmp_path / "decoder.onnx")
    (tmp_path / "config.json").write_text('{"vocab_size": 5, "n_positions": 5}')
    chain = TextChain(tmp_path, ("decoder",), settings().calibration)
    assert len(chain.open(steps_of(chain))([1] * length, 32, ()).tokens) == count


def test_a_text_after_an_image_ends_with_the_last_position(tmp_path: Path) -> None:
    chain = image_chain(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 7, "image_token_id": 5, "max_position_embeddings": 7}')
    subject = {"pixel_values": IMAGE, "input_ids": np.array([[1, 5, 5, 5, 5, 2]])}
    assert len(chain.open(steps_of(chain))(subject, 32, ()).tokens) == 2


def test_written_tokens_are_no_prefix_where_a_text_is_read_at_once(tmp_path: Path) -> None:
    """All tokens of the prompt of a PaliGemma see each other; those that were written after it do not."""
    chain = image_chain(tmp_path)
    masked = WORDS.replace("inputs_embeds)", "inputs_embeds, int64[1, tokens] prefix_mask)", 1)
    onnx.save(onnx.parser.parse_model(masked), tmp_path / "decoder.onnx")
    steps, masks = steps_of(chain), list[list[int]]()

    def decode(feeds: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        masks.append(feeds["prefix_mask"][0].tolist())
        return steps["decoder"](feeds)

    run = chain.open({**steps, "decoder": decode})
    subject = {"pixel_values": IMAGE, "input_ids": np.array([[1, 5, 5, 5, 5, 2]])}
    found = run(subject, 3, ())
    run(chain.extend(subject, found.tokens[:-1]), 1, ())
    assert masks == [[1] * 6, [1] * 6 + [0], [1] * 6 + [0] * 2, [1] * 6 + [0] * 2]


def test_a_chain_of_features_is_its_part(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(FEATURES_OF_TOKENS), tmp_path / "model.onnx")
    (tmp_path / "config.json").write_text('{"vocab_size": 3}')
    for number, tokens in enumerate(([[0, 1]], [[2], [2]])):
        np.savez(tmp_path / f"{number}.npz", input_ids=np.array(tokens))
    files = settings(data=[str(tmp_path / "0.npz"), str(tmp_path / "1.npz")])
    chain = FeatureChain(tmp_path, ("model",), files.calibration)
    steps = steps_of(chain)
    found = record(chain, steps, tmp_path, {"model": 8})
    assert found.counts == {"model": 2}
    assert [result.values.tolist() for _, result in found.cases] == [[1, 2, 3, 4], [5, 6, 5, 6]]
    assert (
        ChainJudge(chain, steps, found.cases).compare({}).sentence == "chain: outputs exact against the parts in float"
    )
    np.savez(tmp_path / "1.npz", input_ids=np.array([[3]]))
    with pytest.raises(UsageError, match=r"1\.npz: found the token 3, expected 0 to 2"):
        list(chain.subjects())
    without = FeatureChain(tmp_path, ("model",), settings().calibration)
    with pytest.raises(UsageError, match=r"found neither quantsim\.calibration\.data nor draws"):
        next(without.subjects())
