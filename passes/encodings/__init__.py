"""Quantization encodings: how a float tensor becomes integers, in files and carried through passes.

encoding.py     the format of a tensor, its scales and zero points, and the tensors that share them by moves; the
                encodings of a file for a model: every name is known, and every axis
aimet.py        files of AIMET's encodings, in both directions
tool_files.py   the files of other tools: TensorRT's calibration cache, ai-edge-quantizer's recipe
from_qdq.py     the encodings of a model with QuantizeLinear and DequantizeLinear, and the names of values there
carry.py        the encodings of the final model of a run, from those of its source, as data and text: read first
versions.py     the models of a run in order, and the tensors of the source that a later one has: by nodes, and on draws
stored.py       the encoding of a stored tensor that was made of other tensors: transposed, cut, joined
"""
