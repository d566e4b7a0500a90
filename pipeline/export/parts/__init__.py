"""The torch side of models in parts: the module of each part, with its cache as inputs and outputs.

states.py      the tensors of a cache of transformers, by name; caches that grow, and caches of a fixed length
decoder.py     a causal LM as one graph over a cache that grows: tokens and cache in, logits and the new cache out
static.py      a causal LM as two graphs over a cache of fixed length: prefill and decode
draws.py       inputs that make sense together: caches that torch wrote, masks with padding
seq2seq.py     an encoder, and a decoder over a cache of its own and one that the encoder has computed
diffusion.py   the models of a pipeline, by the calls that it makes; diffusers_pipeline.py loads or makes one
source.py      the model of `model.transformers`, loaded once, as the source of each part
"""

from pipeline.export.parts.diffusion import CallFile
from pipeline.export.parts.source import load_for_parts, make_part, part_of
