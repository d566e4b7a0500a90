"""Case studies of quantization simulation: what docs/explanation/case-studies.md shows, made by the shipped code.

study.py      a simulation, and its models ready to run: read this first
minilm.py     sentences: the mask, and Q, K and V with scales of their own; retrieval as the task
magika.py     kinds of files, by their bytes
rapidocr.py   text that is rendered, read again
diffusion.py  one transformer block of a diffusion model, over its time steps
llama.py      two layers with a cache: prefill and decode share encodings
vit.py        ViT-base
"""
