"""Models in parts: a run of each part, the folder of models that they make together, and text by that folder.

run.py         all parts of a source, one after the other, and what comes after them
folder.py      the final models of all parts over one file of weights, with what applications read next to them
own.py         parts of one's own, each of which has a source: the same folder, and their chain
first_call.py  the decoder after an encoder as optimum-onnx makes its first call
genai.py       `genai_config.json`, by which onnxruntime-genai loads the folder
seq2seq.py     a text of a decoder after an encoder
filling.py     rows before a cache that masks hide, or tokens after the last one, so that a plan serves many lengths
generate.py    tokens by such a folder, on any backend
chain.py       the proof that these tokens are those of torch's `generate`
report.py      the report of all parts, as data and as a page
result.py      what a run in parts returns
"""

from typing import TYPE_CHECKING

from passes.doors import open_door

if TYPE_CHECKING:
    from pipeline.parts.generate import Generation as Generation
    from pipeline.parts.generate import TextGenerator as TextGenerator
    from pipeline.parts.result import PartsResult as PartsResult
else:
    __all__, __getattr__ = open_door(__name__, __file__)
