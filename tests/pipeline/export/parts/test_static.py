"""Prefill and decode over a cache of fixed length: what they take, and that a text through both is torch's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnxruntime import InferenceSession

from benchmarks.generation import make_model
from pipeline.config import CacheConfig, ExportConfig, ModelConfig, VerifyConfig
from pipeline.errors import SourceError, UsageError
from pipeline.export import export_onnx, run_torch
from pipeline.export.parts.draws import draw_calls
from pipeline.export.parts.source import make_part
from pipeline.export.parts.static import StaticDecoder
from pipeline.export.transformers_class import LoadedModel
from pipeline.parts.chain import generate_by_torch

QUICK = ("Llama", "Gemma 3", "Falcon-H1")
"""One with keys and values alone, one with a window, one with all kinds of states in one layer."""


def parts_of(model: Any, **settings: Any) -> tuple[StaticDecoder, StaticDecoder]:
    cache = CacheConfig(**{"kind": "static", "length": 40, "chunk": 4, **settings})
    return StaticDecoder(model, cache, cache.tokens), StaticDecoder(model, cache, 1)


@torch.no_grad()
def generate(parts: tuple[StaticDecoder, StaticDecoder], prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Greedy tokens: whole chunks by prefill, the rest by decode."""
    prefill, decode = parts
    states, new, seen, tokens = decode.empty_states(1, decode.length), list(prompt), 0, list[int]()
    while len(tokens) < count:
        part = prefill if len(new) >= prefill.tokens else decode
        ids = torch.tensor([new[: part.tokens]])
        found = part(**part.arguments(ids, seen, states))
        states, new, seen = found["present"], new[part.tokens :], seen + part.tokens
        if not new:
            tokens.append(int(found["logits"][0, -1].argmax()))
            new = tokens[-1:]
    return tuple(tokens)


@pytest.mark.parametrize("family", QUICK)
def test_chunks_and_tokens_are_as_torch_generates(family: str) -> None:
    model = make_model(family)
    text = generate_by_torch(model, 9, 1)
    assert len(set(text.tokens)) > 3
    assert generate(parts_of(model), text.prompt, len(text.tokens)) == text.tokens


def test_states_have_one_shape_and_the_dtype_that_is_asked_for() -> None:
    _, decode = parts_of(make_model("Falcon-H1"), dtype="float16")
    states = decode.empty_states(1, decode.length)["0"]
    assert {name: (tuple(state.shape), state.dtype) for name, state in states.items()} == {
        "key": ((1, 2, 40, 8), torch.float16),
        "value": ((1, 2, 40, 8), torch.float16),
        "conv_state": ((1, 80, 4), torch.float32),
        "recurrent_state": ((1, 8, 8, 8), torch.float32),
    }
    found = decode(**decode.arguments(torch.tensor([[3]]), 5, {"0": states, "1": states}))["present"]["0"]
    assert {name: state.dtype for name, state in found.items()} == {name: state.dtype for name, state in states.items()}


@torch.no_grad()
def test_what_fills_a_chunk_up_changes_nothing() -> None:
    prefill, decode = parts_of(make_model("Gemma 3"))
    empty, logits = decode.empty_states(1, 40), []
    for filling in (0, 7):
        first = prefill(**prefill.arguments(torch.tensor([[5, 17, filling, filling]]), 0, empty))
        then = decode(**decode.arguments(torch.tensor([[3]]), 2, first["present"]))
        logits.append(torch.cat([first["logits"][:, :2], then["logits"]], 1))
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "Mamba-2"])  # one takes logits_to_keep, one may not
def test_the_logits_of_one_token_of_a_chunk(family: str) -> None:
    model = make_model(family)
    (every, _), cache = parts_of(model), CacheConfig(kind="static", length=40, chunk=4)
    last = StaticDecoder(model, cache, 4, last_only=True)
    ids, empty = torch.tensor([[5, 17, 3, 8]]), every.empty_states(1, 40)
    given = {**last.arguments(ids, 0, empty), "last_token": torch.tensor([1])}
    found = last(**given)["logits"]
    assert found.shape == (1, 1, 89)
    torch.testing.assert_close(found, every(**every.arguments(ids, 0, empty))["logits"][:, 1:2])


def test_draws_begin_and_end_the_cache_over_rows_of_an_earlier_text() -> None:
    _, decode = parts_of(make_model("Gemma 3"))
    draws = draw_calls(decode, VerifyConfig())
    assert [int(draw.feeds["cache_position"][0]) for draw in draws] == [0, 7, 8, 39]
    for draw in draws:
        rows = abs(draw.feeds["past_key_values.0.key"]).max(axis=(0, 1, 3))
        assert np.count_nonzero(rows) > 30, draw.draw.label  # the token of the padding, whose embedding is 0, has none


@torch.no_grad()
@pytest.mark.parametrize(("scales", "shape"), [("head", (2,)), ("tensor", ()), ("channel", (2, 1, 8))])
def test_a_cache_in_int8_is_rounded_by_the_scales_of_prompts(
    tmp_path: Path, scales: str, shape: tuple[int, ...]
) -> None:
    np.savez(tmp_path / "prompts.npz", input_ids=np.array([[5, 17, 3, 8]]))
    model, wishes = make_model("Llama"), {"dtype": "int8", "scales": scales, "data": (str(tmp_path / "prompts.npz"),)}
    rounded, exact = (parts_of(model, **given)[0] for given in (wishes, {}))
    found, wanted = (part.write_states(torch.tensor([[5, 17, 3, 8]]))["1"] for part in (rounded, exact))
    assert found.keys() == wanted.keys() == {"key", "value"}
    for name, tensor in found.items():
        scale = rounded.scales["1"][name]
        assert tensor.dtype is torch.int8 and scale.shape == shape
        largest = {"head": (0, 2, 3), "channel": (0, 2), "tensor": (0, 1, 2, 3)}[scales]
        assert tensor.abs().amax(largest).unique().tolist() == [127]
        steps = scale.view(1, -1, 1, 1) if scales == "head" else scale
        # layer 1 reads what layer 0 has rounded, which moves its own by more than half of a step
        assert ((tensor * steps - wanted[name]) / steps).abs().max() < 4


@torch.no_grad()
def test_each_token_of_a_cache_in_int8_has_its_scale() -> None:
    model, ids = make_model("Llama"), torch.tensor([[5, 17, 3, 8]])
    (rounded, decode), (exact, _) = (parts_of(model, **given) for given in ({"dtype": "int8", "scales": "token"}, {}))
    first = rounded.write_states(ids)
    found, wanted = first["1"], exact.write_states(ids)["1"]
    for name in ("key", "value"):
        rows, scales = found[name], found[f"{name}_scale"]
        assert (rows.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (1, 2, 40, 1))
        assert rows[:, :, :4].abs().amax(-1).unique().tolist() == [127] and not scales[:, :, 4:].any()
        difference = rows * scales - wanted[name]
        assert (difference[:, :, :4].abs() / scales[:, :, :4]).max() < 4  # as above: layer 0 is rounded already
    # a token is written without a change of the rows before it, nor of their scales
    then = decode(**decode.arguments(torch.tensor([[9]]), 4, first))["present"]["1"]
    assert all(torch.equal(then[name][:, :, :4], tensor[:, :, :4]) for name, tensor in found.items())
    assert all(then[name][:, :, 4].any() for name in found)


@pytest.mark.parametrize("scales", ["head", "channel", "token"])
def test_a_cache_in_int8_in_onnx(tmp_path: Path, scales: str) -> None:
    """The export reads and writes what the module does, by QuantizeLinear with a scale for each head, or a factor."""
    cache = {**CACHE, "dtype": "int8", "scales": scales}
    config = ModelConfig.model_validate({**LLAMA, "part": "decode", "cache": cache})
    source = make_part(config, LoadedModel(make_model("Llama"), (), "random", None))
    assert any("are those of random tokens" in note for note in source.notes) is (scales != "token")
    export_onnx(source, ExportConfig(), tmp_path / "decode.onnx")
    proto = onnx.load(tmp_path / "decode.onnx")
    rounding = [node for node in proto.graph.node if node.op_type in ("QuantizeLinear", "DequantizeLinear")]
    assert len(rounding) == 8 and {node.attribute[0].i for node in rounding} == {1}
    assert source.draws is not None
    draw = source.draws(VerifyConfig())[1]
    session = InferenceSession(tmp_path / "decode.onnx", providers=["CPUExecutionProvider"])
    wanted = run_torch(source, draw.feeds)
    outputs: Any = session.run(list(wanted), dict(draw.feeds))
    for found, expected in zip(outputs, wanted.values(), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, atol=1 if expected.dtype == np.int8 else 1e-4)


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"ids": np.array([[1]])}, "is no file .npz with an array input_ids"),
        ({"input_ids": np.array([[1, 89]])}, r"found int64\[1, 2\], expected integers from 0 to 88"),
        ({"input_ids": np.array([[0.5]])}, "found float64"),
    ],
)
def test_prompts_that_say_no_scales(tmp_path: Path, arrays: dict[str, np.ndarray], sentence: str) -> None:
    np.savez(tmp_path / "prompts.npz", allow_pickle=False, **arrays)
    with pytest.raises(SourceError, match=sentence):
        parts_of(make_model("Llama"), dtype="int8", data=(str(tmp_path / "prompts.npz"),))


def test_a_cache_with_more_rows_than_a_table_has_positions() -> None:
    sizes: dict[str, Any] = {"vocab_size": 89, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 40}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    assert parts_of(model)[1].length == 40
    with pytest.raises(SourceError, match=r"found 41, but GPT2LMHeadModel computes no token at position 40 .*: 40$"):
        parts_of(model, length=41)
    assert parts_of(make_model("Llama"), length=600)[1].length == 600  # its positions are computed


def test_a_part_has_to_be_named() -> None:
    config = ModelConfig.model_validate({**LLAMA, "cache": CACHE})
    with pytest.raises(UsageError, match=r"found 2 parts, expected one of them here: --set model\.part=prefill or"):
        make_part(config, LoadedModel(make_model("Llama"), (), "random", None))


LLAMA: dict[str, Any] = {"transformers": {"class": "LlamaForCausalLM"}, "task": "text-generation"}
CACHE: dict[str, Any] = {"kind": "static", "length": 40, "chunk": 4}
