"""Tokens by a decoder of a folder: the loop over states, choice of tokens, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest

from pipeline.config import RuntimeConfig
from pipeline.errors import OnnxlineError, UsageError
from pipeline.parts.filling import ROWS, fill_up
from pipeline.parts.generate import TextGenerator, continue_text, take_largest
from pipeline.parts.sessions import CarriedStates, PartCalls, PlannedStates, TextParts, TextReader
from pipeline.parts.slots import Step, state_slots
from pipeline.verify.backends import Feeds, OnnxFile, OnnxRuntime
from tests.support.onnx_text import parse_renamed

COUNTER = """
<ir_version: 10, opset_import: ["": 20]>
agraph (int64[batch_size, sequence_length] input_ids, int64[batch_size, total] attention_mask,
        float[batch_size, past_sequence_length] past_key, float[batch_size, 1] past_sum)
    => (float[batch_size, sequence_length, 7] logits,
        float[batch_size, all] present_key, float[batch_size, 1] present_sum)
<int64 seven = {7}, float[2] off_on = {0.0, 1.0}, int64[1] last = {-1}> {
    new = Cast <to = 1> (input_ids)
    present_key = Concat <axis = -1> (past_key, new)
    added = ReduceSum <keepdims = 1> (new, last)
    present_sum = Add (past_sum, added)
    whole = Cast <to = 7> (present_sum)
    rest = Mod (whole, seven)
    shape = Shape (input_ids)
    place = Expand (rest, shape)
    logits = OneHot <axis = -1> (place, seven, off_on)
}
"""
"""The next token is the sum of all tokens modulo 7; one state grows, one has a fixed size."""


@pytest.fixture
def counter(tmp_path: Path) -> Path:
    model = parse_renamed(COUNTER, with_dots)
    (tmp_path / "models").mkdir()
    onnx.save(model, tmp_path / "models" / "decoder.onnx")
    return tmp_path


def with_dots(name: str) -> str:
    """The names of states, which ONNX's text cannot have."""
    return (
        name.replace("past_key", "past_key_values.0.key")
        .replace("past_sum", "past_key_values.0.sum")
        .replace("present_", "present.0.")
    )


def by_hand(prompt: list[int], count: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % 7)
    return tuple(tokens[len(prompt) :])


def test_ids_may_be_an_array_of_integers_of_64_bits(counter: Path) -> None:
    generator = TextGenerator(counter, "onnxruntime")
    assert generator.generate(np.array([1, 2, 3]), max_new_tokens=5).tokens == by_hand([1, 2, 3], 5)
    with pytest.raises(UsageError, match=f"found the token {2**63}, expected 0 to {2**63 - 1}"):
        generator.generate([1, 2**63])


def test_parts_in_bfloat16_run_on_a_plan_and_onnxruntime_says_so(counter: Path) -> None:
    text = COUNTER.replace("added = ", "half = Cast <to = 16> (new) twice = Mul (half, half) added = ", 1)
    model = parse_renamed(text, with_dots)
    next(node for node in model.graph.node if node.op_type == "Mul").name = "square"
    onnx.save(model, counter / "models" / "decoder.onnx")
    with pytest.raises(UsageError, match=r"has no Mul of opset 14 for bfloat16 .*; .* may run it: --backend plan"):
        TextGenerator(counter)
    assert TextGenerator(counter, "plan").generate([1, 2, 3], max_new_tokens=5).tokens == by_hand([1, 2, 3], 5)


def test_arguments_without_a_use_are_refused(counter: Path) -> None:
    """numpy's own error came out for the seed, and inputs of an encoder that is not there were ignored."""
    generator = TextGenerator(counter, "onnxruntime")
    with pytest.raises(UsageError, match="seed is -1; expected an integer of 0 or more"):
        generator.generate([1, 2, 3], temperature=1.0, seed=-1)
    with pytest.raises(UsageError, match=r"found inputs \(input_features\), but .* has no encoder"):
        generator.generate([1, 2, 3], inputs={"input_features": np.zeros((1, 2))})
    count, seed = np.int64(5), np.uint8(0)  # numpy's scalars are the numbers that they are
    assert generator.generate([1, 2, 3], max_new_tokens=count, seed=seed).tokens == by_hand([1, 2, 3], 5)


@pytest.mark.parametrize("backend", ["onnxruntime", "plan", "torch"])
def test_states_are_carried_from_call_to_call(counter: Path, backend: str) -> None:
    found = TextGenerator(str(counter), backend).generate([1, 2, 3], max_new_tokens=5)
    assert found.tokens == by_hand([1, 2, 3], 5)
    assert found.backend == backend and found.tokens_per_second > 0


def test_the_rate_leaves_out_what_a_plan_is_made_for(counter: Path) -> None:
    """The prompt and the first token after it have sizes of their own, for which plan compiles."""
    found = TextGenerator(counter, "plan").generate([1, 2, 3], max_new_tokens=12)
    assert found.first_seconds < found.seconds
    assert found.tokens_per_second > 2 * len(found.tokens) / found.seconds
    alone = TextGenerator(counter, "plan").generate([1, 2, 3], max_new_tokens=1)
    assert alone.first_seconds == alone.seconds == pytest.approx(1 / alone.tokens_per_second)


def test_a_cache_is_filled_up_to_a_few_lengths_whose_first_rows_are_hidden(counter: Path) -> None:
    """A backend that compiles for each combination of sizes meets four in a text of 82 tokens, as the first call over a
    cache is made without hidden rows too."""
    parts, met = TextParts.of(counter), set[tuple[int, ...]]()

    def open_step(path: Path) -> Step:
        run = OnnxRuntime(OnnxFile(path)).run

        def step(feeds: Feeds) -> Mapping[str, np.ndarray]:
            key, mask = feeds["past_key_values.0.key"], feeds["attention_mask"]
            assert mask.shape[1] == key.shape[1] + feeds["input_ids"].shape[1]
            assert not mask[0, : -mask.sum()].any()
            assert not key[0, : -mask.sum()].any()
            met.add(key.shape)
            return run(feeds)

        return step

    calls = CarriedStates(parts, lambda path: fill_up(open_step(path), parts.graphs["decoder"]))
    tokens = tuple(continue_text(TextReader(parts, calls), [1, 2, 3], ROWS + 15, take_largest))
    assert tokens == by_hand([1, 2, 3], ROWS + 15)
    assert met == {(1, 0), (1, len([1, 2, 3])), (1, ROWS), (1, 2 * ROWS)}
    assert calls.states["past_key_values.0.key"].tolist() == [[1, 2, 3, *tokens[:-1]]]


@pytest.mark.parametrize("room", [ROWS, ROWS - 1])
def test_a_model_that_counts_the_rows_of_its_cache_is_not_filled_up(counter: Path, room: int) -> None:
    """Without room for the hidden rows its table of positions raises an error, as that of BART."""
    parts = TextParts.of(counter)

    def open_step(path: Path) -> Step:
        run = OnnxRuntime(OnnxFile(path)).run

        def step(feeds: Feeds) -> Mapping[str, np.ndarray]:
            places, outputs = np.arange(room + 1), run(feeds)
            place = places[feeds["past_key_values.0.key"].shape[1]]
            return {**outputs, "logits": np.roll(outputs["logits"], place, -1)}

        return step

    graph = parts.graphs["decoder"]
    makers = (open_step, lambda path: fill_up(open_step(path), graph))
    readers = [TextReader(parts, CarriedStates(parts, maker)) for maker in makers]
    plain, filled = (tuple(continue_text(reader, [1, 2, 3], 20, take_largest)) for reader in readers)
    assert filled == plain != by_hand([1, 2, 3], 20)


def test_a_token_that_ends_a_text_is_the_last(counter: Path) -> None:
    assert by_hand([1, 2], 6)[:3] == (3, 6, 5)
    assert TextGenerator(counter).generate([1, 2], max_new_tokens=6, stop=[6]).tokens == (3, 6)


def test_slots_have_length_0_where_a_state_grows(counter: Path) -> None:
    slots = state_slots(onnx.load(counter / "models" / "decoder.onnx").graph)
    assert [(slot.before, slot.after, slot.shape) for slot in slots] == [
        ("past_key_values.0.key", "present.0.key", (1, 0)),
        ("past_key_values.0.sum", "present.0.sum", (1, 1)),
    ]


def test_masks_are_as_long_as_cache_and_tokens(counter: Path) -> None:
    shapes = []

    def step(feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes.append((feeds["input_ids"].shape[1], feeds["attention_mask"].shape[1]))
        states = {"present.0.key": np.zeros((1, 0)), "present.0.sum": np.zeros((1, 1))}
        return {"logits": np.eye(7, dtype=np.float32)[None], **states}

    parts = TextParts.of(counter)
    reader = TextReader(parts, CarriedStates(parts, lambda _: step))  # type: ignore[arg-type]
    assert list(continue_text(reader, [1, 2, 3], 3, take_largest)) == [6, 6, 6]
    assert shapes == [(3, 3), (1, 4), (1, 5)]


def test_a_seed_draws_the_same_tokens_again(counter: Path) -> None:
    generator = TextGenerator(counter)
    first, again, other = (
        generator.generate([1, 2], max_new_tokens=12, temperature=5.0, seed=seed).tokens for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize(
    ("wishes", "sentence"),
    [
        ({"ids": []}, "the prompt has no token"),
        ({"ids": [1], "max_new_tokens": 0}, "found max_new_tokens 0"),
        ({"ids": [-1]}, "found the token -1, expected 0"),
        ({"ids": [1], "temperature": -1.0}, "found the temperature -1.0"),
        ({"prompt": "hello"}, "has no tokenizer, since its source had none"),
        ({"ids": "1,2"}, "generate: ids is '1,2'; expected tokens, such as"),
        ({"ids": [1.5]}, "generate: ids is .*; expected tokens, such as"),
        ({"prompt": 5}, "generate: prompt is 5; expected a text"),
        ({"ids": [1], "max_new_tokens": "4"}, "generate: max_new_tokens is '4'; expected an integer"),
    ],
)
def test_wrong_wishes_are_one_sentence(counter: Path, wishes: dict, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        TextGenerator(counter).generate(**wishes)


@pytest.mark.parametrize("backend", ["onnxruntime", "plan", "torch"])
def test_a_text_beyond_the_table_of_positions(counter: Path, backend: str) -> None:
    table = "rows = Shape <start = 1> (present_key) none = Gather (table, rows) sum = Add (rest, none)"
    text = COUNTER.replace("<int64 seven", f"<int64[7] table = {{{', '.join('0' * 7)}}}, int64 seven")
    text = text.replace("place = Expand (rest,", f"{table} place = Expand (sum,")
    onnx.save(parse_renamed(text, with_dots), counter / "models" / "decoder.onnx")
    generator = TextGenerator(counter, backend)
    assert generator.generate([1, 2, 3], max_new_tokens=4).tokens == by_hand([1, 2, 3], 4)
    with pytest.raises(OnnxlineError, match="Gather"):
        generator.generate([1, 2, 3], max_new_tokens=8)
    (counter / "models" / "config.json").write_text('{"vocab_size": 7, "max_position_embeddings": 6}')
    with pytest.raises(UsageError, match="the model has 6 positions, and the text needs more: it failed at token 7; "):
        generator.generate([1, 2, 3], max_new_tokens=8)
    assert generator.generate([1, 2, 3], max_new_tokens=4).tokens == by_hand([1, 2, 3], 4)


def test_a_folder_without_a_decoder_and_an_unknown_backend(tmp_path: Path, counter: Path) -> None:
    with pytest.raises(UsageError, match="elsewhere; expected that of a run with model"):
        TextGenerator(str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match="TextGenerator: folder is 5; expected a path"):
        TextGenerator(5)  # type: ignore[arg-type]
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(UsageError, match=r"has no models/decoder.* expected the folder of a run"):
        TextGenerator(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "report.json").write_text('{"failure": "part decode: no memory"}')
    with pytest.raises(UsageError, match=r"models/decode.onnx; the run in it failed: part decode: no memory$"):
        TextGenerator(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="found 'tpu', expected one of torch, onnxruntime, plan"):
        TextGenerator(counter, "tpu")


IN_PLACE = """
<ir_version: 10, opset_import: ["": 20]>
agraph (int64[1, TOKENS] input_ids, int64[TOKENS] cache_position, float[1, 1, 12, 1] past_key)
    => (float[1, TOKENS, 7] logits, float[1, 1, 12, 1] present_key)
<int64 seven = {7}, float[2] off_on = {0.0, 1.0}, int64[1] last = {-1}, int64[4] column = {1, 1, -1, 1},
 int64[3] row = {1, 1, 12}, int64[3] each = {1, -1, 1}, int64[12] places = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}> {
    new = Cast <to = 1> (input_ids)
    rows = Reshape (new, column)
    at = Reshape (cache_position, column)
    present_key = ScatterElements <axis = 2> (past_key, at, rows)
    all = Reshape (present_key, row)
    own = Reshape (cache_position, each)
    is_seen = LessOrEqual (places, own)
    seen = Cast <to = 1> (is_seen)
    kept = Mul (all, seen)
    added = ReduceSum <keepdims = 0> (kept, last)
    whole = Cast <to = 7> (added)
    rest = Mod (whole, seven)
    logits = OneHot <axis = -1> (rest, seven, off_on)
}
"""
"""The same next token, over a cache of 12 rows."""


def save_in_place(folder: Path) -> None:
    """Write prefill and decode of such a model."""
    for part, tokens in (("prefill", 4), ("decode", 1)):
        onnx.save(parse_renamed(IN_PLACE.replace("TOKENS", str(tokens)), with_dots), folder / f"{part}.onnx")


@pytest.fixture
def in_place(tmp_path: Path) -> Path:
    save_in_place(tmp_path)
    return tmp_path


@pytest.mark.parametrize("backend", ["onnxruntime", "plan", "torch"])
def test_a_cache_of_fixed_length_is_read_in_chunks_and_written_in_place(in_place: Path, backend: str) -> None:
    generator = TextGenerator(in_place, backend)
    for prompt in ([1, 2, 3, 4, 5, 6], [2], [6, 5, 4]):  # a filled chunk after a whole one; and rows of earlier texts
        assert generator.generate(prompt, max_new_tokens=7).tokens == by_hand(prompt, 7)


class Recorded(PartCalls):
    """Says which part was called with which tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def reset(self) -> None:
        self.calls.clear()

    def call(self, part: str, feeds: Feeds) -> np.ndarray:
        self.calls.append((part, feeds["input_ids"][0].tolist(), feeds["cache_position"].tolist()))
        return np.eye(7, dtype=np.float32)[None, : feeds["input_ids"].shape[1]]


def test_a_chunk_is_filled_up_where_later_tokens_are_written_over_it(in_place: Path) -> None:
    parts, calls = TextParts.of(in_place), Recorded()
    reader = TextReader(parts, calls)
    reader.begin(12)
    assert reader.read([1, 2, 3, 4, 5, 6]).argmax() == 1  # of the second token in its chunk
    reader.read([3, 3, 3, 3])
    assert calls.calls == [
        ("prefill", [1, 2, 3, 4], [0, 1, 2, 3]),
        ("prefill", [5, 6, 0, 0], [4, 5, 6, 7]),
        ("prefill", [3, 3, 3, 3], [6, 7, 8, 9]),
    ]
    reader.read([5, 6])  # a chunk has no room any more
    assert calls.calls[3:] == [("decode", [5], [10]), ("decode", [6], [11])]


def test_a_state_of_fixed_size_takes_whole_chunks_only(in_place: Path) -> None:
    parts, calls = TextParts.of(in_place), Recorded()
    for graph in parts.graphs.values():
        info = onnx.helper.make_tensor_value_info("past_key_values.0.conv_state", onnx.TensorProto.FLOAT, [1, 8, 4])
        graph.input.append(info)
    reader = TextReader(parts, calls)
    reader.begin(6)
    reader.read([1, 2, 3, 4, 5, 6])
    assert [(part, ids) for part, ids, _ in calls.calls] == [
        ("prefill", [1, 2, 3, 4]),
        ("decode", [5]),
        ("decode", [6]),
    ]


def test_a_cache_that_is_shorter_than_the_text(in_place: Path) -> None:
    generator = TextGenerator(in_place)
    assert len(generator.generate([1], max_new_tokens=12).tokens) == 12
    with pytest.raises(UsageError, match=r"the cache holds 12 tokens, and the text has 13: .* model\.cache\.length"):
        generator.generate([1] * 13, max_new_tokens=1)


def test_a_plan_is_captured_before_the_first_token(in_place: Path) -> None:
    """So the seconds of a text are those of its calls."""
    parts = TextParts.of(in_place)
    calls = PlannedStates(parts, RuntimeConfig())
    captures = [calls._entries.entry(part).captures for part in parts.graphs]
    keys = [known.keys for known in captures]
    assert [len(known) for known in keys] == [1, 1]
    reader = TextReader(parts, calls)
    assert tuple(continue_text(reader, [1, 2, 3, 4, 5, 6], 5, take_largest)) == by_hand([1, 2, 3, 4, 5, 6], 5)
    assert [known.keys for known in captures] == keys
