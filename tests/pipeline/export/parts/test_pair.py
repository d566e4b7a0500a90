"""Prefill and decode with a static cache compute what the model computes on the whole sequence, without any cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnxruntime as ort
import pytest
import torch

from pipeline.export.parts.pair import CacheSizes, generate

FAMILIES = ["GPT2", "Llama", "Qwen2", "Qwen3", "Mixtral", "DeepseekV3", "Mistral", "Gemma3Text"]
SIZES = CacheSizes(prefill_len=6, max_cache_len=11)
PROMPT = torch.tensor([[5, 17, 3, 44, 8]])  # one token shorter than prefill
STEPS = 5  # the last one before the caches overflow is at position 9


def as_it_is(wrapper: torch.nn.Module, *_: Any) -> Any:
    return wrapper


def export_and_load(wrapper: torch.nn.Module, inputs: tuple[torch.Tensor, ...], *_: Any) -> Any:
    with torch.no_grad():
        program = torch.export.export(wrapper, inputs, strict=False)
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in targets if "wrap_with" in name]  # no regions
    assert targets.count("aten.index_copy.default") == max(0, len(inputs) - 4)  # every cache, in sight
    assert not program.graph_signature.user_inputs_to_mutate
    return program.module()


def in_onnxruntime(wrapper: Any, inputs: Any, input_names: Any, output_names: Any) -> Any:
    names: dict[str, Any] = {"input_names": list(input_names), "output_names": list(output_names)}
    with torch.no_grad():
        model = torch.onnx.export(wrapper, inputs, dynamo=True, optimize=False, verbose=False, **names)
    assert model is not None
    session = ort.InferenceSession(model.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == list(input_names)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        feed = {name: tensor.numpy() for name, tensor in zip(input_names, tensors, strict=True)}
        return [torch.from_numpy(array) for array in session.run(list(output_names), feed)]

    return run


CASES = [
    *((family, as_it_is) for family in FAMILIES),
    *((family, export_and_load) for family in FAMILIES[:6]),
    *((family, in_onnxruntime) for family in ("GPT2", "Qwen3")),
]


@pytest.mark.parametrize(("family", "how"), CASES, ids=[f"{family}-{how.__name__}" for family, how in CASES])
def test_same_tokens_and_logits_as_the_whole_model(
    family: str, how: Any, causal_lm: Callable[..., Any], programs: Callable[..., Any]
) -> None:
    model = causal_lm(family)
    tokens, logits = whole_sequences(model)
    assert len(set(tokens)) > 3  # else a cache could be wrong without changing one
    actual = generate(*programs(model, SIZES, how), PROMPT, STEPS, SIZES)
    assert actual.tokens.tolist() == tokens
    # float32 and the same sums in another order: 1e-6 of the largest logit is what comes out.
    torch.testing.assert_close(actual.logits, logits, atol=1e-5 * float(logits.abs().max()), rtol=1e-4)


def whole_sequences(model: Any) -> tuple[list[int], torch.Tensor]:
    """Greedy without a cache: the model sees all tokens again each time."""
    ids, rows = PROMPT, []
    with torch.no_grad():
        for _ in range(STEPS + 1):
            rows.append(model(input_ids=ids, use_cache=False).logits[0, -1])
            ids = torch.cat([ids, rows[-1].argmax().reshape(1, 1)], dim=1)
    return ids[0, PROMPT.shape[1] :].tolist(), torch.stack(rows)
