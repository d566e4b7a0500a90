"""Everyday jobs on ONNX models: functions that run one step with its proof, split and merge models, and state facts.

doors.py    a function for each job, which runs the step of its name
parts.py    split a model into files, and merge two models
chain.py    run models one after the other, and compare them with one model
comparison.py  run two models, and compare outputs, layers and what both have
facts.py    what a model is: operators, parameters, MACs, memory, structures

A module is loaded when one of its names is first used, so that a fact costs no proof.
"""

from typing import TYPE_CHECKING

from passes.doors import open_door

if TYPE_CHECKING:
    from passes.tools.comparison import ModelComparison as ModelComparison
    from passes.tools.comparison import compare as compare
    from passes.tools.doors import change_batch as change_batch
    from passes.tools.doors import change_outputs as change_outputs
    from passes.tools.doors import convert_opset as convert_opset
    from passes.tools.doors import extract as extract
    from passes.tools.doors import fix_shapes as fix_shapes
    from passes.tools.doors import rename as rename
    from passes.tools.doors import to_bf16 as to_bf16
    from passes.tools.doors import to_fp16 as to_fp16
    from passes.tools.facts import ModelFacts as ModelFacts
    from passes.tools.facts import inspect_model as inspect_model
    from passes.tools.parts import MergedModel as MergedModel
    from passes.tools.parts import PartedModel as PartedModel
    from passes.tools.parts import merge as merge
    from passes.tools.parts import split as split
else:
    __all__, __getattr__ = open_door(__name__, __file__)
