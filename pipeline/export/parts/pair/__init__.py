"""A causal LM as two modules with fixed shapes, for `torch.export`, `torch.onnx.export` and `extract_ir`; what
`onnxline.static_cache` shows.

Both are ordinary modules (`Prefill` and `Decode`), which are exported with `prefill_inputs` and
`decode_inputs`, on meta or on a real device. Export under `torch.no_grad()`, otherwise the models that turn gradients
off in places become graphs with regions. `kv_mapping` says which tensor of one graph is which of the other, and
`generate` runs a pair as a host would: prefill, copy into fixed caches, then token by token. A run of a configuration
takes static.py, whose graphs make their masks and whose prefill writes into the cache.
"""

from __future__ import annotations

from pipeline.export.parts.pair.generate import (
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
from pipeline.export.parts.pair.masked import Decode, Prefill, causal_mask

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
