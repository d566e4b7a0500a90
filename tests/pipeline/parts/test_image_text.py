"""A text after images by a folder of three small models, on each backend: what goes from one to the next."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.parts import TextGenerator
from tests.pipeline.parts.test_generate import by_hand, with_dots
from tests.support.onnx_text import parse_renamed

IMAGE = 9
"""The token that stands for a row of an image; its feature takes its place."""

VISION = """<ir_version: 10, opset_import: ["": 20]>
vision (float[1, 4] pixel_values) => (float[2, 1] image_features)
<int64[2] rows = {2, 2}, int64[1] last = {1}> {
    pairs = Reshape (pixel_values, rows)
    image_features = ReduceSum <keepdims = 1> (pairs, last)
}"""

EMBEDDING = f"""<ir_version: 10, opset_import: ["": 20]>
embedding (int64[batch_size, sequence_length] input_ids, float[image_tokens, 1] image_features)
    => (float[batch_size, sequence_length, 1] inputs_embeds)
<int64 image = {{{IMAGE}}}, int64 one = {{1}}, int64[1] end = {{-1}}, float[1, 1] nothing = {{0.0}}> {{
    plain = Cast <to = 1> (input_ids)
    embeds = Unsqueeze (plain, end)
    is_image = Equal (input_ids, image)
    shown = Cast <to = 7> (is_image)
    counts = CumSum (shown, one)
    row = Mul (counts, shown)
    rows = Concat <axis = 0> (nothing, image_features)
    features = Gather <axis = 0> (rows, row)
    is_row = Unsqueeze (is_image, end)
    inputs_embeds = Where (is_row, features, embeds)
}}"""

DECODER = """<ir_version: 10, opset_import: ["": 20]>
decoder (float[batch_size, sequence_length, 1] inputs_embeds, int64[batch_size, total] attention_mask,
         int64[batch_size, sequence_length] position_ids,
         float[batch_size, past_sequence_length, 1] past_key, float[batch_size, 1] past_sum)
    => (float[batch_size, sequence_length, 7] logits, float[batch_size, all, 1] present_key,
        float[batch_size, 1] present_sum)
<int64 seven = {7}, float[2] off_on = {0.0, 1.0}, int64[1] middle = {1}> {
    present_key = Concat <axis = 1> (past_key, inputs_embeds)
    added = ReduceSum <keepdims = 0> (inputs_embeds, middle)
    present_sum = Add (past_sum, added)
    whole = Cast <to = 7> (present_sum)
    rest = Mod (whole, seven)
    shape = Shape (position_ids)
    place = Expand (rest, shape)
    logits = OneHot <axis = -1> (place, seven, off_on)
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, text in (("vision", VISION), ("embedding", EMBEDDING), ("decoder", DECODER)):
        onnx.save(parse_renamed(text, with_dots), tmp_path / f"{part}.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": IMAGE, "vocab_size": 10}))
    return tmp_path


@pytest.mark.parametrize("backend", ["onnxruntime", "plan", "torch"])
def test_features_of_images_take_the_place_of_their_tokens(folder: Path, backend: str) -> None:
    generator = TextGenerator(folder, backend)
    pixels = np.array([[1, 2, 3, 1], [4, 1, 0, 2]], np.float32)
    texts = [  # two images, one, and none: with the sums 3, 4, 5 and 2 of their rows in the places of their tokens
        ([1, IMAGE, IMAGE, 2, IMAGE, IMAGE], pixels, [1, 3, 4, 2, 5, 2]),
        ([IMAGE, IMAGE], pixels[1:], [5, 2]),
        ([3, 4], pixels[:0], [3, 4]),
    ]
    for ids, images, seen in texts:
        found = generator.generate(ids, inputs={"pixel_values": images}, max_new_tokens=5, stop=())
        assert found.tokens == by_hand(seen, 5)
