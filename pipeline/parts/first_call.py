"""The decoder's first call as optimum-onnx makes it: from the hidden states of the encoder, without any cache.

    decoder_model: input_ids, encoder_hidden_states, encoder_attention_mask, past_key_values.N.decoder.NAME
                   → logits, present.N.SIDE.NAME

optimum-onnx's encoder returns hidden states alone, and its first decoder computes the cache of cross attention. Ours
computes that cache in the encoder, where onnxruntime-genai wants it. Its nodes are copied here before the decoder.
"""

from __future__ import annotations

from typing import Final

from onnx import GraphProto
from onnx.helper import make_attribute

from passes.errors import PolicyError, StepFailed
from passes.graph.index import copy_of, replace_all_uses_with
from passes.graph.traversal import read_names
from passes.rewrites.interface import cut_out
from passes.rewrites.merge import join_models
from passes.weights.detached import DetachedModel
from pipeline.parts.sessions import state_slots

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
        The model, on the weights of both; None where the cache depends on more than the hidden states and the sizes of
        the source, or a pass made the two models so that they are not joined: of two opsets, say.
    """
    try:
        return _join(encoder, decoder)
    except (PolicyError, StepFailed):
        return None


def _join(encoder: DetachedModel, decoder: DetachedModel) -> DetachedModel | None:
    computed = {slot.after: slot.before for slot in state_slots(decoder.proto.graph)}
    computed = {after: before for after, before in computed.items() if after in encoder.index.outputs}
    cross = cut_out(encoder.without_functions(), [HIDDEN], [*computed])
    proto = cross.copy_proto()
    _measure_hidden_states(proto.graph)
    if read_names(proto.graph.node).intersection(info.name for info in proto.graph.input if info.name != HIDDEN):
        return None
    [hidden] = (copy_of(info) for info in proto.graph.input if info.name == HIDDEN)
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
