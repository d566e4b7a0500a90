"""The decoder's first call as optimum-onnx makes it: from the hidden states of the encoder, without any cache.

    decoder_model: input_ids, encoder_hidden_states, encoder_attention_mask, past_key_values.N.decoder.NAME
                   → logits, present.N.SIDE.NAME

optimum-onnx's encoder returns hidden states alone, and its first decoder computes the cache of cross attention. Ours
computes that cache in the encoder, where onnxruntime-genai wants it. Its nodes are copied here before the decoder. The
chain runs the joined model once, next to the encoder and the decoder themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
from onnx import GraphProto
from onnx.helper import make_attribute

from passes.errors import PolicyError, StepFailed
from passes.graph.index import copy_of, replace_all_uses_with
from passes.graph.traversal import read_names
from passes.proof.numbers import compare, least_precise
from passes.proof.precision import computed_types
from passes.rewrites.interface import cut_out
from passes.rewrites.merge import join_models
from passes.suggest import plural
from passes.weights.detached import DetachedModel, read_model
from pipeline.parts.seq2seq import Seq2SeqReader
from pipeline.parts.slots import Step, state_slots
from pipeline.verify.backends import Feeds

FIRST_CALL: Final = "decoder_model"
"""The name of the model, which optimum-onnx looks for."""

HIDDEN: Final = "last_hidden_state"
GIVEN: Final = "encoder_hidden_states"
"""What the encoder returns, and what optimum-onnx gives to the decoder."""


def make_first_call(encoder: DetachedModel, decoder: DetachedModel) -> DetachedModel | None:
    """The decoder with its cache of cross attention computed from `encoder_hidden_states`.

    Args:
        encoder: the final model of the part `encoder`.
        decoder: that of the part `decoder`.

    Returns:
        The model, on the weights of both; None where there is no cache of cross attention, or it depends on more than
        the hidden states and the sizes of the source, or a pass made the two models so that they are not joined: of
        two opsets, say.
    """
    try:
        return _join(encoder, decoder)
    except (PolicyError, StepFailed):
        return None


def prove_first_call(
    models: Path, open_step: Callable[[Path], Step], inputs: Feeds, start: int
) -> tuple[str, bool] | None:
    """Run the first call once, and compare its outputs with those of the encoder and the decoder themselves.

    Args:
        models: the folder of a run.
        open_step: a file of a model → a call of it.
        inputs: of the encoder.
        start: the token that the decoder reads.

    Returns:
        What was found, as a sentence, and whether it is right; None where the folder has no such model.
    """
    path = models / f"{FIRST_CALL}.onnx"
    if not path.is_file():
        return None
    calls: dict[str, tuple[Feeds, Mapping[str, np.ndarray]]] = {}

    def open_noted(part: Path) -> Step:
        step = open_step(part)

        def call(feeds: Feeds) -> Mapping[str, np.ndarray]:
            outputs = step(feeds)
            calls[part.stem] = feeds, outputs
            return outputs

        return call

    reader = Seq2SeqReader(models, open_noted)
    reader.encode(inputs)
    reader.begin(1)
    reader.read([start])
    (_, encoded), (feeds, decoded) = calls["encoder"], calls["decoder"]
    expected = {**encoded, **decoded}
    feeds = {**feeds, GIVEN: expected.pop(HIDDEN)}
    model = read_model(path)
    found = open_step(path)({value.name: feeds[value.name] for value in model.proto.graph.input})
    types = [dtype for part in calls for dtype in computed_types(read_model(models / f"{part}.onnx")).values()]
    errors = {name: compare(array, found[name], computed_in=least_precise(*types)) for name, array in expected.items()}
    if wrong := [f"{name} ({errors[name].why})" for name in errors if not errors[name].ok]:
        return f"{path.name} has other results than encoder and decoder: {', '.join(wrong)}", False
    largest = max(error.max_abs for error in errors.values())
    outputs = plural(len(errors), "output")
    return f"{path.name} gives what encoder and decoder give: {outputs}, by {largest:.1e} at most", True


def _join(encoder: DetachedModel, decoder: DetachedModel) -> DetachedModel | None:
    computed = {slot.after: slot.before for slot in state_slots(decoder.proto.graph)}
    computed = {after: before for after, before in computed.items() if after in encoder.index.outputs}
    cross = cut_out(encoder.without_functions(), [HIDDEN], [*computed])
    proto = cross.copy_proto()
    _measure_hidden_states(proto.graph)
    if read_names(proto.graph.node).intersection(info.name for info in proto.graph.input if info.name != HIDDEN):
        return None
    hidden = next((copy_of(info) for info in proto.graph.input if info.name == HIDDEN), None)
    if hidden is None:
        return None
    del proto.graph.input[:]
    replace_all_uses_with(proto.graph.node, {HIDDEN: GIVEN})
    hidden.name = GIVEN
    proto.graph.input.append(hidden)
    joined = join_models(cross.with_proto(proto), decoder.without_functions(), computed).model
    whole = joined.copy_proto()
    whole.graph.output.extend(encoder.index.outputs[name] for name in computed)
    return joined.with_proto(whole)


def _measure_hidden_states(graph: GraphProto) -> None:
    """Let each Shape of the encoder's tokens, or of their mask, read the same axes of the hidden states, in place."""
    sizes = {info.name: len(info.type.tensor_type.shape.dim) for info in graph.input}
    for node in graph.node:
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        if node.op_type == "Shape" and sizes.get(node.input[0]) == TEXT_AXES and min(bounds.values(), default=0) >= 0:
            node.input[0] = HIDDEN
            bounds["end"] = min(bounds.get("end", TEXT_AXES), TEXT_AXES)
            del node.attribute[:]
            node.attribute.extend(make_attribute(name, bound) for name, bound in bounds.items())


TEXT_AXES: Final = 2
"""Axes of tokens and of their mask: batch and source, which are the first ones of hidden states too."""
