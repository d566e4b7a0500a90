"""A causal LM as two graphs with fixed shapes: prefill and decode, the cache as plain inputs and outputs.

    prefill = Prefill(model)    (input_ids, attention_mask, position_ids) → (logits, k0, v0, k1, v1, …)
    decode = Decode(model)      (…, cache_position, k0, v0, …) → (logits, k0, v0, …)

Both are ordinary modules: `torch.export.export`, `torch.onnx.export(dynamo=True, optimize=False)` and `extract_ir` take
them with `prefill_inputs` and `decode_inputs`, on meta or on a real device. Export under `torch.no_grad()`, otherwise
the models that turn gradients off in places become graphs with regions. `kv_mapping` says which tensor of one
graph is which of the other, and `generate` runs any such pair. Needs torch and transformers.
"""

from __future__ import annotations

from pipeline.export.static_cache.generate import (
    PREFILL_INPUTS,
    CacheSizes,
    CacheSpec,
    Generated,
    KVMapping,
    Program,
    cache_specs,
    decode_input_names,
    decode_inputs,
    decode_output_names,
    generate,
    kv_mapping,
    prefill_inputs,
    prefill_output_names,
    save_kv_mapping,
)
from pipeline.export.static_cache.wrappers import Decode, Prefill, causal_mask

__all__ = [
    "PREFILL_INPUTS",
    "CacheSizes",
    "CacheSpec",
    "Decode",
    "Generated",
    "KVMapping",
    "Prefill",
    "Program",
    "cache_specs",
    "causal_mask",
    "decode_input_names",
    "decode_inputs",
    "decode_output_names",
    "generate",
    "kv_mapping",
    "prefill_inputs",
    "prefill_output_names",
    "save_kv_mapping",
]
