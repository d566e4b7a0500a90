"""The handoff: what quantization tools make of our models. `python -m benchmarks.handoff` prints the table.

models.py        the models: MiniLM and an attention block, in many forms; block.py: the block
minilm.py        sentences, and the retrieval by which a quantized MiniLM is judged
tools.py         runs one tool, by the interpreter of that tool's environment
harness.py       starts tools.py, and runs the model that it writes
ours.py          onnxline's own simulation, step by step
__main__.py      the table of docs/explanation/handoff.md
"""
