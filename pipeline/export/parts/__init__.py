"""The torch side of models in parts: the module of each part, with its cache as inputs and outputs.

states.py      the tensors of a cache of transformers, by name
decoder.py     a causal LM as one graph: tokens and cache in, logits and the new cache out
draws.py       inputs that make sense together: caches that torch wrote, masks with padding
source.py      the model of `model.transformers` as the source of a part
patches.py     what tracing needs otherwise than transformers has it
"""

from __future__ import annotations

from pipeline.export.parts.source import decoder_of, make_decoder

__all__ = ["decoder_of", "make_decoder"]
