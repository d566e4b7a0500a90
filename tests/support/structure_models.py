"""Models as ONNX text, and what is found in them. What is declared and not computed is a weight."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import onnx
from onnx import numpy_helper

from passes.context import PassContext
from passes.optimize import draw_feeds
from passes.policy.policy import Policy
from passes.proof.numeric import NumericProver
from passes.recipe.recipe import RecipeItem, steps_of
from passes.run.result import PassRun
from passes.run.runner import run_passes
from passes.structures import Instance, structure_of
from passes.weights.sharing import detached_copy
from tests.support.onnx_models import detached

BATCH_NORM = """
g (float[1, 3, 4, 4] x) => (float[1, 3, 4, 4] y) <float[3, 3, 1, 1] k, float[3] s, float[3] b, float[3] m, float[3] v> {
    c = Conv (x, k)
    y = BatchNormalization <epsilon = 0.001> (c, s, b, m, v)
}"""


def drawn(text: str, opset: int = 20) -> onnx.ModelProto:
    """A model whose declared weights are drawn by their names, all types inferred."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>\n{text}')
    computed = {name for node in model.graph.node for name in node.output}
    declared = list(model.graph.value_info)
    del model.graph.value_info[:]
    for info in declared:
        assert info.name not in computed, f"{info.name} is declared as a weight and computed"
        shape = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        draw = np.random.default_rng(zlib.crc32(info.name.encode())).standard_normal(shape) / np.sqrt(max(shape))
        draw = np.abs(draw) if len(shape) == 1 else draw  # one of them may be a variance
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        model.graph.initializer.append(numpy_helper.from_array(draw.astype(dtype), info.name))
    return onnx.shape_inference.infer_shapes(model)


def found(kind: str, model: onnx.ModelProto) -> tuple[Instance, ...]:
    structure = structure_of(kind)
    assert structure is not None
    return structure.find(detached(model)).instances


def lost(kind: str, instances: tuple[Instance, ...], model: onnx.ModelProto) -> dict[str, str]:
    structure = structure_of(kind)
    assert structure is not None
    return structure.find_lost(instances, detached(model))


def run(
    model: onnx.ModelProto, context: PassContext, recipe: Sequence[RecipeItem], watch: bool = True, **policy: list[str]
) -> PassRun:
    """`passes.optimize` with workers that are there already; `policy` is `skip` and `keep`."""
    source = detached_copy(model, context.spill)
    prover = NumericProver.of_itself([draw_feeds(source, 0)], context)
    wishes = Policy(tuple(policy.get("skip", ())), tuple(policy.get("keep", ())), watch)
    return run_passes(source, steps_of(recipe), wishes, prover, context)


def names(instances: tuple[Instance, ...]) -> list[str]:
    return [instance.core.value for instance in instances if instance.core is not None]
