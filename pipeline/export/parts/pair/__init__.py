"""A causal LM as two modules with fixed shapes, for `torch.export`, `torch.onnx.export` and `extract_ir`; what
`onnxline.static_cache` shows.

Both are ordinary modules (`Prefill` and `Decode`), which are exported with `prefill_inputs` and
`decode_inputs`, on meta or on a real device. Export under `torch.no_grad()`, otherwise the models that turn gradients
off in places become graphs with regions. `kv_mapping` says which tensor of one graph is which of the other, and
`generate` runs a pair as a host would: prefill, copy into fixed caches, then token by token. A run of a configuration
takes static.py, whose graphs make their masks and whose prefill writes into the cache.
"""

from passes.doors import list_names
from pipeline.export.parts.pair.generate import PREFILL_INPUTS as PREFILL_INPUTS
from pipeline.export.parts.pair.generate import CacheSizes as CacheSizes
from pipeline.export.parts.pair.generate import CacheSpec as CacheSpec
from pipeline.export.parts.pair.generate import Generated as Generated
from pipeline.export.parts.pair.generate import KVMapping as KVMapping
from pipeline.export.parts.pair.generate import Program as Program
from pipeline.export.parts.pair.generate import cache_specs as cache_specs
from pipeline.export.parts.pair.generate import decode_input_names as decode_input_names
from pipeline.export.parts.pair.generate import decode_inputs as decode_inputs
from pipeline.export.parts.pair.generate import decode_output_names as decode_output_names
from pipeline.export.parts.pair.generate import generate as generate
from pipeline.export.parts.pair.generate import kv_mapping as kv_mapping
from pipeline.export.parts.pair.generate import prefill_inputs as prefill_inputs
from pipeline.export.parts.pair.generate import prefill_output_names as prefill_output_names
from pipeline.export.parts.pair.generate import save_kv_mapping as save_kv_mapping
from pipeline.export.parts.pair.masked import Decode as Decode
from pipeline.export.parts.pair.masked import Prefill as Prefill
from pipeline.export.parts.pair.masked import causal_mask as causal_mask

list_names(__name__)
