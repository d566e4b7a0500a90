"""The gallery: tiny models in ONNX text, each of which shows the effect of a pass.

A declared value that no node computes is a weight. Its numbers are drawn with its name as the seed, so files hold no
weights; numbers that matter are written out. The comment in the first line is the caption.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx
from onnx import numpy_helper

from passes.proof.draws import draw_array

GALLERY: Final = Path(__file__).parents[1] / "gallery"


@dataclass(frozen=True, slots=True)
class ExampleModel:
    """A model to run a pass on. `caption` is one sentence."""

    caption: str
    model: onnx.ModelProto


def example_of(name: str) -> Path | None:
    """The example file of the pass `name`, if any. `onnxsim.fuse_qkv`, with the step, takes precedence."""
    step, _, bare = name.rpartition("/")
    files = [GALLERY / f"{stem}.onnxtxt" for stem in ((f"{step}.{bare}", bare) if step else (bare,))]
    return next((file for file in files if file.is_file()), None)


def read_example(file: Path, seed: str = "") -> ExampleModel:
    """Read one file of the gallery, draw its weights, and infer the type of every value.

    Another `seed` draws other weights. Floats are drawn from [-1, 1].
    """
    text = file.read_text(encoding="utf-8")
    model = onnx.parser.parse_model(text)
    computed = {name for node in model.graph.node for name in node.output}
    declared = list(model.graph.value_info)
    del model.graph.value_info[:]
    model.graph.value_info.extend(info for info in declared if info.name in computed)
    model.graph.initializer.extend(_draw_weight(info, seed) for info in declared if info.name not in computed)
    caption = text.partition("\n")[0].removeprefix("#").strip()
    return ExampleModel(caption, onnx.shape_inference.infer_shapes(model))


def _draw_weight(info: onnx.ValueInfoProto, seed: str) -> onnx.TensorProto:
    tensor = info.type.tensor_type
    shape = [dim.dim_value for dim in tensor.shape.dim]
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
    return numpy_helper.from_array(draw_array(f"{seed}{info.name}", shape, dtype, -1.0, 1.0), info.name)


UNPICTURED: Final[Mapping[str, str]] = {
    "nop": "it does nothing, on purpose",
    "clamp-mask": "its bound comes from the scores on the draws of a run",
    "smooth-quant": "its factors come from the activations on the draws of a run",
    "rotate": "it rotates a whole decoder",
    "infer_shapes": "it writes types and shapes, and leaves every operator as it is",
    "shape_inference": "it writes types and shapes, and leaves every operator as it is",
    "set_unique_name_for_nodes": "it writes names, and leaves every operator as it is",
    "rename_input_output": "it renames the inputs and outputs of the model, and a run reverts what does that",
    "rewrite_input_dtype": "it changes what the model takes, and a run reverts what does that",
    "split_init": "it changes what the model computes, and a run reverts what does that",
    "split_predict": "it changes what the model computes, and a run reverts what does that",
    "rank0_to_rank1": "it changes the shape of an output, and a run reverts what does that",
    "lift_lexical_references": "what it makes is no ONNX model",
}
"""Bare name → why a pass has no example."""
