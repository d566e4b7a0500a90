"""The export stage's result: an onnx_ir model whose weights are still torch's, its names, and how to save it.

The inputs, outputs and dynamic dims of the graph get the names of their source.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto
from onnx_ir.passes.common import NameFixPass

from pipeline.errors import Unsupported, UsageError
from pipeline.export.checkpoint import Shards
from pipeline.export.external_weights import Pieces, refer
from pipeline.export.source import InputSpec, TorchSource, shape_text


def name_inputs_and_outputs(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Rename inputs and outputs in place, by position.

    Where one value is returned twice, or an input or a weight is returned as it is, an Identity gives the output
    a value of its own: ONNX wants distinct output names.

    Raises:
        Unsupported: the graph has another number of inputs or outputs than the module.
    """
    graph = model.graph
    _check_count("inputs", [value.name for value in graph.inputs], inputs)
    _check_count("outputs", [value.name for value in graph.outputs], outputs)
    _make_outputs_distinct(graph)
    for value, name in (*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)):
        value.name = name
    NameFixPass()(model)  # renames other values that have one of these names


def _check_count(what: str, found: Sequence[str | None], expected: Sequence[str]) -> None:
    if len(found) != len(expected):
        cache = any(name.startswith("past_key_values") for name in expected)
        raise Unsupported(
            f"the exported graph has {len(found)} {what} ({', '.join(map(str, found))}) and a call of the module "
            f"{len(expected)} ({', '.join(expected)}): forward takes or returns something else while torch exports it; "
            + (
                "set use_cache: false in model.transformers.config, by which the cache is no output"
                if cache and what == "outputs"
                else "let it do the same where torch.compiler.is_exporting() is true"
            )
        )


def _make_outputs_distinct(graph: ir.Graph) -> None:
    seen: set[ir.Value] = set()
    for index, value in enumerate(list(graph.outputs)):
        if value.producer() is not None and value not in seen:
            seen.add(value)
            continue
        node = ir.node("Identity", [value], name=f"identity_output_{index}")
        own = node.outputs[0]
        own.type, own.shape = value.type, value.shape
        graph.append(node)
        graph.outputs[index] = own
        seen.add(own)


_SYMBOL = re.compile(r"[A-Za-z_]\w*")


def name_dims(model: ir.Model, inputs: Sequence[InputSpec], way_out: str = "") -> None:
    """Rename torch's symbols (`s77`) to the declared names, in place.

    Args:
        way_out: what to try where a dim came out constant, of a source whose inputs and code are no user's.

    Raises:
        UsageError: a declared dim came out constant, or two names turned out to be one dim.
    """
    names: dict[str, str] = {}
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        for axis, declared in enumerate(spec.shape):
            if isinstance(declared, str):
                _name_symbol(names, _symbol(value, axis, spec, way_out), declared)
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape([_rename_dim(dim, names) for dim in value.shape])
    for value, spec in zip(model.graph.inputs, inputs, strict=True):
        value.shape = ir.Shape(spec.shape)  # an axis tied to another one (`2*batch`) has a name of its own too


def _symbol(value: ir.Value, axis: int, spec: InputSpec, way_out: str) -> str:
    dim = value.shape[axis] if value.shape is not None else None
    # torch 2.13 writes a dim that it made constant as the text '2'.
    if isinstance(dim, ir.SymbolicDim) and dim.value is not None and not dim.value.isdecimal():
        return dim.value
    fixed = shape_text((*spec.shape[:axis], str(dim), *spec.shape[axis + 1 :]))
    way_out = way_out or (
        f"use x.shape[{axis}] as it is, or -1 in reshape; or export it for this size alone: "
        f"model.inputs.{spec.name}.shape: {fixed}"
    )
    raise UsageError(
        f"input {spec.name!r}, axis {axis}: the dim {spec.shape[axis]!r} was asked to be dynamic and came out as the "
        f"constant {dim}: the model's code fixes it (a comparison, a loop over it, int(x.shape[{axis}]), a literal in "
        f"reshape)\n  what to try: {way_out}"
    )


def _name_symbol(names: dict[str, str], symbol: str, declared: str) -> None:
    if names.setdefault(symbol, declared) != declared and _SYMBOL.fullmatch(symbol):
        raise UsageError(
            f"the dims {names[symbol]!r} and {declared!r} are always equal in this model; give them one name"
        )


def _rename_dim(dim: int | ir.SymbolicDim, names: Mapping[str, str]) -> int | str | None:
    if isinstance(dim, int):
        return dim
    if dim.value is not None and dim.value.isdecimal():
        return int(dim.value)
    return None if dim.value is None else _SYMBOL.sub(lambda match: names.get(match[0], match[0]), dim.value)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    for graph in (model.graph, *model.functions.values()):
        yield from graph.inputs
        for node in ir.traversal.RecursiveGraphIterator(graph):
            yield from node.outputs
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.GRAPH:
                    yield from attribute.as_graph().inputs


# Above this, weights go into a separate file: protobuf ends at 2 GiB, and every reader copies what is inside.
EXTERNAL_DATA_BYTES = 100 * 1000 * 1000
SMALLEST_EXTERNAL_BYTES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModel:
    """An ONNX model and where it came from.

    source: the torch source under the names of the graph; feed it and `run_torch` answers in these names.
    parameters: names of the initializers that are an nn.Parameter of the module.
    notes: settings that were filled in by default, and warnings of torch during the export.
    computed_in: the floating types that the module computes in, as torch calls them.
    ranges: named dim → the smallest and the largest size that the graph was traced for; None: no largest.
    unheld: named dim → small sizes for which torch's trace has a guard that fails, so that the graph may hold or not.
    """

    ir_model: ir.Model
    source: TorchSource
    parameters: frozenset[str]
    notes: tuple[str, ...]
    computed_in: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)
    unheld: Mapping[str, frozenset[int]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write `path`, and `path`.data when the weights exceed 100 MB. Weights in other files stay there."""
        save_model(self.ir_model, path)

    def move_weights(self, path: Path) -> None:
        """Let parameters of the module be views of the data file of `path`, which `save` wrote, where it has one.

        Of a large model a copy goes with that, and the module computes what it did before.
        """
        data, whole = path.with_name(f"{path.name}.data"), None
        stored = onnx.load(path, load_external_data=False).graph.initializer if data.exists() else ()
        named = self.source.module.named_parameters(remove_duplicate=False)
        known = {name: own for name, own in named if type(own.data) is torch.Tensor and own.device.type == "cpu"}
        for tensor in stored:
            parameter = known.get(tensor.name)
            if parameter is None or tensor.data_location != TensorProto.EXTERNAL:
                continue
            where = {entry.key: entry.value for entry in tensor.external_data}
            whole = np.memmap(data, np.uint8, "c") if whole is None else whole
            begin, size = int(where["offset"]), parameter.numel() * parameter.element_size()
            if tuple(tensor.dims) == tuple(parameter.shape) and int(where["length"]) == size:
                flat = torch.frombuffer(whole[begin : begin + size], dtype=parameter.dtype)
                parameter.data = flat.view(parameter.shape)

    def referring_to(self, shards: Shards, pieces: Pieces) -> ExportedModel:
        """The same model, whose weights are now references into `shards`.

        Raises:
            SourceError: the checkpoint does not fit the model; see `refer`.
        """
        return replace(self, notes=(*self.notes, *refer(self.ir_model, self.source, shards, pieces)))


def save_model(model: ir.Model, path: Path) -> None:
    """Write a model so that a reader finds a whole one under `path`, or none.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    data = path.with_name(f"{path.name}.data")
    values = [value.const_value for value in model.graph.initializers.values() if value.const_value]
    size = sum(value.nbytes for value in values if not isinstance(value, ir.ExternalTensor))
    external = data.name if size > EXTERNAL_DATA_BYTES else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written in a folder of its own, since the model refers to the weights by their final file name.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as folder:
            draft = Path(folder) / path.name
            ir.save(model, draft, external_data=external, size_threshold_bytes=SMALLEST_EXTERNAL_BYTES)
            path.unlink(missing_ok=True)  # first, so that an old graph is never next to new weights
            if external:
                draft.with_name(external).replace(data)
            for old in set(path.parent.glob(f"{path.name}.*data")) - ({data} if external else set()):
                old.unlink()
            draft.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; free space or choose another folder"
        ) from error
