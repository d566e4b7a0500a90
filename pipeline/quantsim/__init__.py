"""Quantization simulation: placement by rules, calibration, encodings, and the noise of each step.

run.py          the run of the model, then the simulation: read this first
stages.py       the stages of the simulation, in order
quantizer.py    those up to the quantized model, which `int8.py` has too
int8.py         `onnxline to-int8`: the quantized model of a file, without a run
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

A module is loaded when one of its names is first used: a target's table needs no simulation, and no torch.
"""

from typing import TYPE_CHECKING

from passes.doors import open_door

if TYPE_CHECKING:
    from passes.encodings.aimet import from_aimet as from_aimet
    from passes.encodings.encoding import fit_encodings as fit_encodings
    from passes.weights.detached import read_model as read_model
    from pipeline.quantsim.crosscheck import compare_values as compare_values
    from pipeline.quantsim.crosscheck import find_jump as find_jump
    from pipeline.quantsim.qdq import insert_qdq as insert_qdq
    from pipeline.quantsim.run import QuantSim as QuantSim
    from pipeline.quantsim.run import QuantSimResult as QuantSimResult
    from pipeline.quantsim.torch_nodes import TorchRun as TorchRun
else:
    __all__, __getattr__ = open_door(__name__, __file__)
