"""Text-only Kimi-K2.5, written for export: static shapes, no control flow on data, light to make on meta.

The tree of modules gives the parameter names of the checkpoint (which has `language_model.` in front of them). The
numbers are DeepSeek-V3's: `tests/examples/test_kimi_numbers.py` compares with transformers' own class.
"""

from __future__ import annotations

from kimi_k25_text_local.config import KimiTextConfig
from kimi_k25_text_local.model import CausalOutput, KimiK25TextForCausalLM
from kimi_k25_text_local.small import fill, shrunk

__all__ = ["CausalOutput", "KimiK25TextForCausalLM", "KimiTextConfig", "fill", "shrunk"]
