"""The handoff: what quantization tools make of our models. `python -m benchmarks.handoff` prints the table.

models.py        the models: MiniLM and an attention block, in many forms
minilm.py        sentences, and the retrieval by which a quantized MiniLM is judged
tools.py         runs one tool, by the interpreter of that tool's environment
harness.py       starts tools.py, and judges what comes of it with onnxruntime
__main__.py      the table of docs/explanation/handoff.md
"""
