"""Models at the call of a library.

For tools that need the weights: the model goes to a file, the worker makes another, and that is read back. While a
library works on a model in memory, values have short names, and the names of nodes are numbers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import onnx
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    save_model,  # bound here: a pass of the user's may patch onnx
)

from passes.context import PassContext
from passes.errors import StepFailed
from passes.graph.index import GraphIndex, replace_entries, required_inputs
from passes.graph.traversal import every_graph
from passes.weights.detached import PROTOBUF_LIMIT, DetachedModel, read_model
from passes.weights.files import save
from passes.worker.client import Worker


def through_files(
    model: DetachedModel,
    context: PassContext,
    function: Callable[..., None],
    options: Mapping[str, Any],
    worker: Worker | None = None,
) -> DetachedModel:
    """Call `function(source=…, target=…, options=…)` in the worker on the attached model, and read what it wrote.

    The model goes inline while one protobuf message can hold it: the tools are slower with external data. The result's
    weights are memory-mapped, and its file stays until the context is cleared away.

    Args:
        model: the model, which does not change.
        context: whose folder holds the files.
        function: what to call; it reads the path `source` and writes the path `target`.
        options: what `function` gets as `options`.
        worker: the worker that runs `function`; by default the context's worker for libraries.

    Raises:
        StepFailed: weights are to stay unread, or the function raised, crashed or timed out.
    """
    unread = model.unread()
    if unread:
        raise StepFailed(
            f"it takes the whole model with its weights, and {len(unread)} of them are to stay unread "
            f"({model.nbytes() / 2**30:.3g} GiB); leave it out, or prove by numbers"
        )
    folder = Path(tempfile.mkdtemp(dir=context.folder, prefix="step-"))
    source, target = folder / "before.onnx", folder / "after.onnx"
    try:
        save(model, source, external_from=PROTOBUF_LIMIT)
        (worker or context.worker).call(function, source=str(source), target=str(target), options=dict(options))
        return read_model(target, known=model.weights, may_lack_outputs=True)  # of the pins: the runner judges that
    finally:
        for file in folder.glob("*before.onnx*"):
            file.unlink()


def write(model: onnx.ModelProto, target: str) -> None:
    """Write `model` to `target`, with every tensor of 1 KiB or more in a file next to it; `model` is used up.

    Weights always go to that file, not only above protobuf's 2 GiB: a larger message cannot even compute its own size.
    """
    save_model(model, target, save_as_external_data=True, location=f"{Path(target).name}.data", size_threshold=1024)


def give_back_inputs(source: str, model: onnx.ModelProto) -> None:
    """Put back, in order, the inputs that `model` has no more: they belong to the signature of the file `source`.

    Libraries drop inputs that nothing reads; some also drop inputs that are read only inside of an If or a Loop.
    """
    before = onnx.load(source, load_external_data=False).graph
    has = GraphIndex(model.graph).inputs
    inputs = [has.pop(info.name, info) for info in required_inputs(before)]
    replace_entries(model.graph.input, [*inputs, *has.values()])


class ShortNames:
    """Renames the values of `graph` and of its inner graphs in place; later restores the full names in the graphs that
    passes made from it.

    A name becomes the same short name wherever it is used, so scopes do not change.
    """

    def __init__(self, graph: GraphProto) -> None:
        self._short: dict[str, str] = {}
        _rename(graph, lambda name: self._short.setdefault(name, f"v{len(self._short)}"))
        self._full = {short: name for name, short in self._short.items()}

    def restore(self, graph: GraphProto) -> None:
        """Give the values of `graph`, which was made of the first one, their names back. New values keep the names that
        they have, unless another has it."""
        _rename(graph, self._restore_name)

    def quote_own_names(self, message: str) -> str:
        """What a library says about the graph, with the names that its values have outside."""
        return re.sub(r"\bv\d+\b", lambda short: self._full.get(short[0], short[0]), message)

    def _restore_name(self, short: str) -> str:
        if short not in self._full:
            free = short
            while free in self._short:
                free += "_"
            self._short[free] = short
            self._full[short] = free
        return self._full[short]


def _rename(graph: GraphProto, rename: Callable[[str], str]) -> None:
    for subgraph in every_graph(graph):
        for node in subgraph.node:
            for names in (node.input, node.output):
                names[:] = [rename(name) if name else "" for name in names]
        for named in (subgraph.input, subgraph.output, subgraph.value_info, subgraph.initializer):
            for entry in named:
                entry.name = rename(entry.name)
        for sparse in subgraph.sparse_initializer:
            sparse.values.name = rename(sparse.values.name)
        for annotation in subgraph.quantization_annotation:
            annotation.tensor_name = rename(annotation.tensor_name)
            for parameter in annotation.quant_parameter_tensor_names:
                parameter.value = rename(parameter.value)


NUMBERED: Final = "onnxline.node/"


def number_nodes(model: ModelProto) -> list[str]:
    """Name each node by its place, in place; returns the names that they had.

    What is carried across a pass anyway goes, since it takes longer to read than many a pass to run.
    """
    del model.metadata_props[:]
    names = []
    for index, node in enumerate(model.graph.node):
        names.append(node.name)
        node.name = f"{NUMBERED}{index}"
        node.ClearField("doc_string")
        del node.metadata_props[:]
    return names


def restore_names(model: ModelProto, names: Sequence[str], source: Sequence[NodeProto]) -> None:
    """Give the nodes of `model` their `names`, where those are numbers the names of the `source` nodes."""
    for node, name in zip(model.graph.node, names, strict=True):
        index = name.removeprefix(NUMBERED)
        node.name = name if index == name else source[int(index)].name


def quote_own_names(message: str, source: Sequence[NodeProto]) -> str:
    """What a library says of a numbered model, with the names that its nodes have in `source`."""

    def find_name(number_nodes: re.Match[str]) -> str:
        index = int(number_nodes[1])
        node = source[index] if index < len(source) else NodeProto()
        return next((name for name in (node.name, *node.output) if name), number_nodes[0])

    return re.sub(rf"{re.escape(NUMBERED)}(\d+)", find_name, message)
