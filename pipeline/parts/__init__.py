"""Models in parts: a run of each part, the folder of models that they make together, and text by that folder.

run.py         all parts of a source, one after the other, and what comes after them
folder.py      the final models of all parts over one file of weights, with what applications read next to them
own.py         the same folder of parts of one's own, each of which has a source
own_chain.py   the proof of such parts together, by a function of the user's
first_call.py  the decoder after an encoder as optimum-onnx makes its first call
genai.py       `genai_config.json`, by which onnxruntime-genai loads the folder
seq2seq.py     a text of a decoder after an encoder
hidden_rows.py rows before a cache that masks hide, by which a plan serves many lengths of it
token_blocks.py  the same by tokens after the last one, where there is no such mask
generate.py    tokens by such a folder, on any backend
chain.py       the proof that these tokens are those of torch's `generate`
report.py      the report of all parts, as data and as a page
result.py      what a run in parts returns
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pipeline.parts.result import PartsResult

if TYPE_CHECKING:
    from pipeline.parts.generate import Generation, TextGenerator

__all__ = ["Generation", "PartsResult", "TextGenerator"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".generate", __name__), name)  # loads onnxruntime
