"""The JSON of an IR, ours or pytorch-ir's, as a Graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pipeline.importers.from_torch.payload import TensorPayload
from pipeline.ir import Graph, Payload, Role
from pipeline.ir.builder import assemble
from pipeline.torch_ir.document.expected import TEXT, refused
from pipeline.torch_ir.document.reader import Reader

__all__ = ["graph_in", "read_graph"]

Data = Mapping[str, Any]


def read_graph(data: Data, constants: Mapping[str, torch.Tensor], what: str = TEXT) -> Graph:
    """The Graph of an IR as `document` writes it; `constants` are its values by checkpoint name. It is
    of the file `what`.

    The calls of a traced model, which has a signature, are whole; nodes that were put together by hand may be only a
    picture, whose calls lack arguments.

    Raises:
        SerializationError: the data is no IR, or names a tensor that nothing makes; the message says where.
    """
    with refused(what):
        return graph_in(data, constants, "signature" in data)


def graph_in(data: Data, constants: Mapping[str, torch.Tensor], whole: bool) -> Graph:
    """See `read_graph`; the calls are held to be `whole`, or not.

    Raises:
        Unexpected: the data is no IR.
    """
    reader = Reader(whole)
    with reader.placed():
        reader.meet_dims(data)
        reader.weights(data)
        inputs = [reader.declare(one, Role.INPUT) for one in reader.each(data, "graph_inputs")]
        reader.nodes(data)
        outputs = [reader.used(one) for one in reader.each(data, "graph_outputs")]
        payloads: dict[str, Payload] = {
            stub.name: TensorPayload(constants[keys[0]])
            for vid, keys in reader.sources.items()
            if keys[0] in constants and (stub := reader.stubs[vid])
        }
        facts = reader.facts(data)
        return assemble(data.get("model_name", ""), reader.stubs, reader.ops, inputs, outputs, payloads, facts=facts)
