"""Small weights through the saved graphs, token by token against the eager model."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.graphs import GraphFiles
from kimi_k25_text_local.model import KimiK25TextForCausalLM
from kimi_k25_text_local.small import fill
from onnxline.errors import CheckFailed, UsageError
from onnxline.static_cache import CacheSizes, Generated, causal_mask, generate

STEPS: Final = 16
SIZES: Final = CacheSizes(prefill_len=8, max_cache_len=32)
TOLERANCE: Final = 1e-5
"""Of the largest logit: float32, and the same sums in another order."""


def check_saved_graphs(config: KimiTextConfig, files: GraphFiles, sizes: CacheSizes = SIZES) -> float:
    """Write the graphs of a small model on meta, read them back, and run them with weights they have never seen.

    Returns:
        the largest difference of a logit, as a part of the largest logit.

    Raises:
        UsageError: `sizes` have no room for a prompt and STEPS.
        CheckFailed: a token is another one, or a logit differs by more than TOLERANCE.
    """
    length = max(sizes.prefill_len - 1, 1)  # one less, where there is one: prefill is padded then
    if sizes.max_cache_len < length + STEPS:
        raise UsageError(
            f"caches of {sizes.max_cache_len} tokens; expected at least {length + STEPS}, for a prompt of {length} and "
            f"{STEPS} steps"
        )
    files.write(KimiK25TextForCausalLM(config), sizes)
    model = KimiK25TextForCausalLM(config, "cpu")
    fill(model)
    prompt = torch.randint(0, config.vocab_size, (1, length))
    found = generate(*files.read(model.state_dict()), prompt, STEPS, sizes)
    expected = _eager(model, prompt)
    if found.tokens.tolist() != expected.tokens.tolist():
        at = int((found.tokens != expected.tokens).nonzero()[0])
        raise CheckFailed(
            f"token {at} of {STEPS} is {int(found.tokens[at])} from the saved graphs and {int(expected.tokens[at])} "
            f"from the eager model; look at {'prefill' if at == 0 else 'decode'} in {files.folder}"
        )
    difference = float((found.logits - expected.logits).abs().max() / expected.logits.abs().max())
    if not difference <= TOLERANCE:
        raise CheckFailed(f"logits differ by {difference:.1e} of the largest one; expected at most {TOLERANCE:.0e}")
    return difference


@torch.no_grad()
def _eager(model: KimiK25TextForCausalLM, prompt: Tensor) -> Generated:
    """Greedy without any cache: the whole sequence again for every token."""
    rows: list[Tensor] = []
    for _ in range(STEPS + 1):
        positions = torch.arange(prompt.shape[1])
        mask = causal_mask(positions, prompt.shape[1])
        rows.append(model(prompt, mask, positions.unsqueeze(0), use_cache=False).logits[0, -1])
        prompt = torch.cat([prompt, rows[-1].argmax().reshape(1, 1)], dim=1)
    logits = torch.stack(rows)
    return Generated(logits.argmax(dim=-1), logits)
