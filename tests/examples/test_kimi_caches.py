"""The model with caches of the caller, as seed document 000 has them: states come out, and are put back by place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from extract_kimi_k25_text_ir import CONFIG
from kimi_k25_text_local import KimiK25TextForCausalLM, KimiTextConfig, fill, shrunk

LENGTH, ROOM = 5, 9


class IndexCache:
    """Rows of fixed length; `update` says by `cache_kwargs` where the new ones go, as transformers 4 did."""

    def __init__(self, pairs: list[tuple[Tensor, Tensor]]) -> None:
        self.pairs = [tuple(torch.nn.functional.pad(side, (0, 0, 0, ROOM - LENGTH)) for side in pair) for pair in pairs]

    def update(self, keys: Tensor, values: Tensor, layer: int, cache_kwargs: Any = None) -> tuple[Tensor, ...]:
        at, new = cache_kwargs["cache_position"], (keys, values)
        self.pairs[layer] = tuple(old.index_copy(2, at, item) for old, item in zip(self.pairs[layer], new, strict=True))
        return self.pairs[layer]


def mask(queries: Tensor, keys: int) -> Tensor:
    hidden = torch.arange(keys) > queries[:, None]
    return torch.zeros(1, 1, len(queries), keys).masked_fill(hidden, torch.finfo(torch.float32).min)


@torch.no_grad()
def test_a_step_with_the_states_of_the_prompt_is_the_whole_prompt() -> None:
    config = shrunk(KimiTextConfig.from_json(CONFIG))
    model = KimiK25TextForCausalLM(config, device="cpu")
    fill(model)
    tokens, positions = torch.randint(0, config.vocab_size, (1, LENGTH + 1)), torch.arange(LENGTH + 1)
    whole = model(tokens, mask(positions, LENGTH + 1), positions[None], use_cache=False)
    assert whole.past_key_values is None

    prompt = model(tokens[:, :LENGTH], mask(positions[:LENGTH], LENGTH), positions[None, :LENGTH])
    assert len(prompt.past_key_values) == config.num_hidden_layers
    cache, last = IndexCache(list(prompt.past_key_values)), positions[LENGTH:]
    step = model(tokens[:, LENGTH:], mask(last, ROOM), last[None], past_key_values=cache, cache_position=last)
    assert step.past_key_values is cache
    # float32; sums over keys have ROOM terms in place of LENGTH + 1
    torch.testing.assert_close(step.logits[:, 0], whole.logits[:, LENGTH], rtol=1e-4, atol=1e-4)
