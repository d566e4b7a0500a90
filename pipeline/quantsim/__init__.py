"""Quantization simulation: placement by rules, calibration, encodings, and the noise of each step.

run.py          the run of the model, then the simulation: read this first
stages.py       the stages of the simulation, in order
preparation.py  the run before the simulation: its configuration, and messages on it
parts.py        all parts of a run in parts: samples out of the chain, one set of ranges, the chain of quantized parts
sites.py        the float tensors of a model, and which of them share an encoding
placement.py    rules → the format of each tensor, or the reason why it stays in float
profiles.py     the rules of a target, from its table or a file of AIMET (aimet_config.py, conventions.py)
encodings_check.py  what a converter does not find in a file of encodings, or misreads
target_check.py what a target does not take of a model, and the steps that mend it
calibration.py  ranges of activations, by onnxruntime's calibrators
encodings.py    ranges and weights → scales and zero points; or the encodings of a file in place of calibrated ones
qdq.py          the model with QuantizeLinear and DequantizeLinear
optimizers.py   the algorithms that round weights, and their options
optimize.py     weights as algorithms of libraries round them (algorithm.py runs these), kept where that is better
prepared_layers.py  layers before and after a step that moves factors between weights
files.py        the files of a simulation, and its weights in other layouts of 4 bits
shards.py       weights of a checkpoint, rounded shard by shard by jobs, for a model that fits nowhere
shard_files.py  the job for a shard: rounding to the nearest, its proof by torch, and the file
shard_data.py   the weights of products rounded by GPTQ, step by step with the pieces of the model
pieces.py       the model cut into pieces that run one after the other
simulation.py   outputs of the quantized model, by ONNX's specification and as a device computes them
crosscheck.py   the model of another tool against the float model: where its error jumps
noise.py        noise added by each step, and noise accumulated up to each tensor
sensitivity.py  what each layer does to the outputs, by their gradients (gradients.py)
torch_nodes.py  layers as torch's operators, for that estimate; outputs by torch and torchao, as a cross-check
metric.py       the metric of the task, of both models
layer_costs.py  what the quantization of each layer alone costs in that metric
best.py         the steps of optimize, tried one after the other within a budget
suggest.py      formats of single layers for a target
weight_sizes.py bytes of the constants in float, and with a placement
report.py       the results as data
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from passes.encodings.aimet import from_aimet
    from passes.encodings.encoding import fit_encodings
    from passes.weights.detached import read_model
    from pipeline.quantsim.crosscheck import compare_values, find_jump
    from pipeline.quantsim.qdq import insert_qdq
    from pipeline.quantsim.run import QuantSim, QuantSimResult
    from pipeline.quantsim.torch_nodes import TorchRun

__all__ = [
    "QuantSim",
    "QuantSimResult",
    "TorchRun",
    "compare_values",
    "find_jump",
    "fit_encodings",
    "from_aimet",
    "insert_qdq",
    "read_model",
]

HOMES: Final = {
    "QuantSim": "pipeline.quantsim.run",
    "QuantSimResult": "pipeline.quantsim.run",
    "TorchRun": "pipeline.quantsim.torch_nodes",
    "compare_values": "pipeline.quantsim.crosscheck",
    "find_jump": "pipeline.quantsim.crosscheck",
    "fit_encodings": "passes.encodings.encoding",
    "from_aimet": "passes.encodings.aimet",
    "insert_qdq": "pipeline.quantsim.qdq",
    "read_model": "passes.weights.detached",
}
"""Name → its module, loaded when the name is first used: a target's table needs no simulation, and no torch."""


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    prefix = __name__.removesuffix("pipeline.quantsim")  # our packages may have private names here
    return getattr(importlib.import_module(prefix + HOMES[name]), name)
