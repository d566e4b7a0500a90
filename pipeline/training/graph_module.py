"""A Graph, or an ONNX model, as a torch module that can be trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias

import onnx
import torch
from torch import nn

from passes.weights.detached import attach, read_model
from pipeline.argument_checks import a, expects
from pipeline.errors import Unsupported, UsageError
from pipeline.importers import from_onnx
from pipeline.ir import Graph, Op, Role, Value
from pipeline.ir.dims import dims_of, fix_dims
from pipeline.runtime.eager import STRAIGHT_THROUGH, apply, refuse_kinds, why_not_differentiable
from pipeline.runtime.kernels.base import place_of
from pipeline.runtime.tensors import as_tensor, dtype_name
from pipeline.training.frozen_numbers import WRONG_WHEN_RECORDED
from pipeline.training.qdq import has_quantizers, read_quantizers, trainable_form
from pipeline.training.trained import DEQUANTIZER, QUANTIZER, find_candidates, find_trained, scales_of


@expects(model=a((Graph, onnx.ModelProto, str, Path), "a Graph, or an ONNX model or its path"))
def as_module(
    model: Graph | onnx.ModelProto | str | Path,
    *,
    train: Sequence[str] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> GraphModule:
    """A torch module that computes what `model` does, op by op with torch's operators, so that it can be trained.

    Parameters have their names in the checkpoint. Normalisations use their stored statistics, as at inference.

    Args:
        model: a Graph of either importer, or an ONNX model. Of a model with QuantizeLinear and DequantizeLinear the
            weights are floats that are quantized at each call; rounding lets gradients through, and scales are trained
            by LSQ.
        train: globs of the names of the weights to train; by default the float weights of products, convolutions,
            normalisations and embeddings, with their biases (`pipeline/training/trained.py` has the rule).
        weights: arrays by their names in the checkpoint, for a graph without weights, such as a graph from torch.
        dims: sizes of named dims of an ONNX model's inputs, as `from_onnx` takes them. Where the model leaves sizes
            open, a call may have others.
        shapes: shapes of an ONNX model's inputs by name, as `from_onnx` takes them.

    Returns:
        A module whose parameters are the weights to train; call it with the inputs in the model's order.

    Raises:
        Unsupported: an op that torch cannot differentiate.
        UsageError: weights are missing, or `train` matches none of them.
    """
    if isinstance(model, Graph):
        if dims or shapes:
            raise UsageError(
                "as_module: found sizes with a Graph, expected them with an ONNX model; give a Graph its sizes by "
                "onnxline.ir.fix_dims"
            )
        refuse_ops(model)
        return GraphModule(model, find_trained(model, train), weights or {})
    proto = whole_model(model)
    if has_quantizers(proto):
        proto = trainable_form(read_quantizers(proto))

    def import_at(dims: Mapping[str, int] | None, shapes: Mapping[str, Sequence[int]] | None) -> Graph:
        graph = from_onnx(proto, dims=dims, shapes=shapes, trainable=find_candidates(proto.graph), fallback=True)
        refuse_ops(graph)
        return graph

    graph = import_at(dims, shapes)
    trained = find_trained(graph, train, by_readers=True)
    return GraphModule(graph, trained, weights or {}, source=model, import_at=partial(import_at, None))


def whole_model(model: onnx.ModelProto | str | Path) -> onnx.ModelProto:
    """The model with all of its weights inside; a ModelProto as it is."""
    return model if isinstance(model, onnx.ModelProto) else attach(read_model(Path(model)))


@dataclass(frozen=True, slots=True)
class GraphAtSizes:
    """A graph for given sizes, the vids of parameters and buffers in it, and its other constants."""

    graph: Graph
    vids: Mapping[str, int]
    constants: Mapping[int, torch.Tensor] = field(default_factory=dict)


class GraphModule(nn.Module):
    """A Graph whose weights are parameters (those that are trained, and other params) and buffers.

    It is called with the graph's inputs in order or by name, and gives its output, or a tuple of several. Names that
    the graph does not have are ignored: they are the part of a batch that only the loss reads. `source` is the ONNX
    model that the graph was made of, and `import_at` makes another graph of it, by the shapes of its inputs.
    """

    def __init__(
        self,
        graph: Graph,
        trained: frozenset[int],
        weights: Mapping[str, torch.Tensor],
        source: onnx.ModelProto | str | Path | None = None,
        import_at: Callable[[Mapping[str, Sequence[int]]], Graph] | None = None,
    ) -> None:
        super().__init__()
        self.graph, self.source = graph, source
        self.trained: tuple[str, ...] = ()
        """The names of the parameters that are trained."""
        self.value_names: dict[str, str] = {}
        """{name of a parameter or buffer: name of its value in the graph}."""
        self._vids: dict[str, int] = {}
        self._import_at = import_at
        self._graphs: dict[Shapes, GraphAtSizes] = {}
        self._tied: dict[frozenset[str], torch.Tensor] = {}
        """{all names of a tied weight: the tensor that each of them is an attribute of}."""
        self._ratios: dict[str, str] = {}
        """{name of a scale's buffer: name of the parameter by which it is multiplied}."""
        used = {
            *graph.outputs,
            *graph.updates,
            *graph.updates.values(),
            *(value.vid for value in graph.values if value.users),
        }
        weights_read = {name for vid in used for name in graph.sources.get(vid, ())}
        for vid, names in graph.weight_names().items():
            value = graph.values[vid]
            if vid in used or not weights_read.isdisjoint(graph.sources.get(vid, ())):
                given = next((weights[name] for name in names if name in weights), None)
                self._register(value, names[0], given, trains=vid in trained)
        quantizers = scales_of(graph)
        scales = {name: vid for name, vid in self._vids.items() if vid in quantizers and name in self.trained}
        self._factors: dict[str, float] = {
            name: _gradient_factor(graph, quantizers[vid]) for name, vid in scales.items()
        }
        self._make_relative(list(scales))

    def _make_relative(self, scales: Sequence[str]) -> None:
        """Train each scale as a multiple of its first value, which stays as a buffer.

        Scales differ by thousands, and an optimizer like Adam takes steps of one size: a step of 1e-3 is 0.1 % now.
        """
        for name in scales:
            holder, own = self._find(name)
            start = getattr(holder, own).detach()
            delattr(holder, own)
            holder.register_buffer(own, start)
            place = self._holder(f"{RELATIVE}.{name}")
            place[0].register_parameter(place[1], nn.Parameter(torch.ones_like(start)))
            full = place[1] if place[0] is self else f"{RELATIVE}.{name}"
            self._ratios[name] = full
            self.trained = tuple(full if own == name else own for own in self.trained)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        inputs = self._inputs(args, kwargs)
        sized = self._graph_for(inputs)
        graph, vids = sized.graph, sized.vids
        slots = {vid: inputs[graph.values[vid].name] for vid in graph.inputs}
        slots |= sized.constants
        slots |= {vid: self._tensor(name) for name, vid in vids.items()}
        own = {**refuse_kinds(graph), BATCH_NORM: normalize_by_statistics, **STRAIGHT_THROUGH}
        for op in graph.ops:
            results = apply(op, [slots[vid] for vid in op.inputs], own)
            slots.update(zip(op.outputs, results, strict=True))
        for vid, new in graph.updates.items():
            self._find_tensor(next(name for name, own in vids.items() if own == vid)).copy_(slots[new].detach())
        found = tuple(slots[vid] for vid in graph.outputs)
        return found[0] if len(found) == 1 else found

    def scale_parameters(self) -> list[nn.Parameter]:
        """The trained factors of scales, for a group of an optimizer with its own learning rate."""
        return [self.get_parameter(name) for name in self._ratios.values()]

    def weight_parameters(self) -> list[nn.Parameter]:
        """The trained parameters that are no factors of scales."""
        return [self.get_parameter(name) for name in self.trained if name not in self._ratios.values()]

    def trained_numbers(self, state: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """{name of the value in the graph: trained array}, from a state dict; by default, the module's own.

        Args:
            state: a state dict of this module.
        """
        state = self.state_dict() if state is None else state
        scales = {self.value_names[name]: state[name] * state[ratio] for name, ratio in self._ratios.items()}
        weights = [name for name in self.trained if name not in self._ratios.values()]
        return {**{self.value_names[name]: state[name] for name in weights}, **scales}

    def _register(self, value: Value, name: str, given: torch.Tensor | None, *, trains: bool) -> None:
        payload = self.graph.payloads.get(value.vid)
        if given is None and payload is None:
            raise UsageError(
                f"graph {self.graph.name!r} has no values of {value.role} {name!r}; give them by weights=, such as "
                "module.state_dict()"
            )
        tensor = given.detach().clone() if given is not None else as_tensor(payload.numpy()).clone()  # type: ignore[union-attr]
        if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (value.spec.sizes, value.spec.dtype):
            raise UsageError(
                f"weight {name!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}; the graph declares "
                f"{value.spec.dtype}{list(value.spec.shape)}"
            )
        holder, own = self._holder(name)
        full = own if holder is self else name
        self._vids[full] = value.vid
        self.value_names[full] = name
        if trains or (value.role is Role.PARAM and tensor.is_floating_point()):
            tensor = nn.Parameter(tensor, requires_grad=trains)
        names = frozenset(self.graph.sources.get(value.vid, ()))
        is_tied = len(names) > 1 and value.vid not in self.graph.updates
        stored = self._tied.setdefault(names, tensor) if is_tied else tensor
        if isinstance(stored, nn.Parameter):
            holder.register_parameter(own, stored)
        else:
            holder.register_buffer(own, stored)
        if trains and stored is tensor:
            self.trained = (*self.trained, full)

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """The module that takes a weight called `blocks.0.weight`, and the last part of the name.

        Where torch cannot have the name, as that of a method, the weight has another one in this module itself.
        """
        holder: nn.Module = self
        *path, last = name.split(".")
        for part in path:
            child = holder._modules.get(part)
            if child is None and (not part or hasattr(holder, part)):
                break
            if child is None:
                child = nn.Module()
                holder.add_module(part, child)
            holder = child
        else:
            if last and not hasattr(holder, last):
                return holder, last
        own = name.replace(".", "_") + "_"
        while hasattr(self, own):
            own += "_"
        return self, own

    def _find(self, name: str) -> tuple[nn.Module, str]:
        path, _, last = name.rpartition(".")
        return self.get_submodule(path), last

    def _find_tensor(self, name: str) -> torch.Tensor:
        """As `get_parameter`, which refuses the tensors that torch puts in the place of parameters to record a call."""
        holder, own = self._find(name)
        return getattr(holder, own)

    def _tensor(self, name: str) -> torch.Tensor:
        tensor = self._find_tensor(name)
        if name not in self._ratios:
            return tensor
        ratio = self._find_tensor(self._ratios[name])
        # SGD changes the scale as LSQ does: the step of the factor, times the first scale, is that of LSQ.
        return (tensor * ratio).detach() + (ratio - ratio.detach()) * (self._factors[name] / tensor)

    def _inputs(self, args: Sequence[torch.Tensor], kwargs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a call by the names of the graph's inputs."""
        names = [self.graph.values[vid].name for vid in self.graph.inputs]
        given: dict[str, torch.Tensor] = {**dict(zip(names, args, strict=False)), **kwargs}
        if not given.keys() >= set(names) or len(args) > len(names):
            raise UsageError(
                f"graph {self.graph.name!r} reads {', '.join(names)}; found {len(args)} tensors by order and "
                f"{', '.join(kwargs) or 'none'} by name"
            )
        return {name: given[name] for name in names}

    def _graph_for(self, inputs: Mapping[str, torch.Tensor]) -> GraphAtSizes:
        """The graph for the sizes of these inputs.

        Raises:
            UsageError: the graph takes no such inputs.
        """
        sizes = tuple(tuple(int(size) for size in tensor.shape) for tensor in inputs.values())
        if sizes not in self._graphs:
            self._graphs[sizes] = self._graph_at(inputs, sizes)
        for sentence in _misfits(self._graphs[sizes].graph, inputs):
            raise UsageError(sentence)
        return self._graphs[sizes]

    def _graph_at(self, inputs: Mapping[str, torch.Tensor], sizes: Shapes) -> GraphAtSizes:
        misfits = list(_misfits(self.graph, inputs))
        shapes = dict(zip(inputs, sizes, strict=True))
        if not misfits or self._import_at is None:
            return GraphAtSizes(
                self.graph if misfits else fix_dims(self.graph, dims_of(self.graph, shapes)), self._vids
            )
        try:
            graph = self._import_at(shapes)
        except UsageError as error:  # the model does not leave these sizes open
            raise UsageError(misfits[0]) from error
        params = {names[0]: vid for vid, names in graph.weight_names().items() if graph.values[vid].role is Role.PARAM}
        vids = {name: params[value] for name, value in self.value_names.items() if value in params}
        stored = [value for value in graph.with_role(Role.PARAM, Role.CONST) if value.vid not in vids.values()]
        # Other sizes give other constants, also under the same name.
        return GraphAtSizes(graph, vids, {value.vid: as_tensor(graph.payloads[value.vid].numpy()) for value in stored})


def normalize_by_statistics(op: Op, ins: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A BatchNormalization by stored statistics, which torch's own operator refuses to differentiate.

    A BatchNormalization that computes the statistics of the batch is torch's operator.
    """
    if op.attrs.get("training") is not False or len(ins) != 5:
        return apply(op, ins, {})
    shape = (1, -1, *[1] * (ins[0].dim() - 2))
    scale, bias, mean, variance = (operand.view(shape) for operand in ins[1:])
    return [(ins[0] - mean) * torch.rsqrt(variance + op.attrs["eps"]) * scale + bias]  # type: ignore[operator]


UNKNOWN_WHEN_RECORDED: Final = {
    "onnxline.roi_align": "it takes as many samples as its boxes have pixels, and a recorded step has no boxes yet; "
    "leave it out of what is trained, and compute it in a call of its own"
}
"""Operator of ours → why no step may record it, although torch differentiates it op by op."""


def refuse_ops(graph: Graph) -> None:
    """Refuse a graph that no module can train.

    Args:
        graph: a Graph of either importer.

    Raises:
        Unsupported: it changes a value that is no state, or has an op that no step may record.
    """
    changed = [graph.values[vid] for vid in graph.updates if graph.values[vid].role is not Role.STATE]
    if changed:
        raise Unsupported(f"the graph changes {changed[0].role} {changed[0].name!r}; a module changes its states only")
    for op in graph.ops:
        name = op.kind.removeprefix("aten.").removesuffix(".default")
        if why := why_not_differentiable(op) or WRONG_WHEN_RECORDED.get(name) or UNKNOWN_WHEN_RECORDED.get(name):
            raise Unsupported(f"{place_of(op)} cannot be trained through: {why}")
        if op.kind != QUANTIZER:
            continue
        if str(op.attrs["to"]).startswith("float8"):
            raise Unsupported(f"{place_of(op)} rounds to {op.attrs['to']}, expected integers of 8 or 16 bits")
        for user in (graph.ops[oid] for vid in op.outputs for oid in graph.values[vid].users):
            if user.kind not in (*CARRIERS, DEQUANTIZER):
                raise Unsupported(
                    f"{place_of(user)} computes with the integers of {place_of(op)}; expected a "
                    "DequantizeLinear after each QuantizeLinear"
                )


def _misfits(graph: Graph, inputs: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A sentence for each tensor that is not what the graph declares."""
    specs = {graph.values[vid].name: graph.values[vid].spec for vid in graph.inputs}
    for name, tensor in inputs.items():
        spec = specs[name]
        fits = len(spec.shape) == tensor.dim() and all(
            isinstance(size, str) or size == own for size, own in zip(spec.shape, tensor.shape, strict=True)
        )
        if not fits or dtype_name(tensor.dtype) != spec.dtype:
            yield (
                f"input {name!r} is {dtype_name(tensor.dtype)}{list(tensor.shape)}; "
                f"the graph declares {spec.dtype}{list(spec.shape)}"
            )


Shapes: TypeAlias = tuple[tuple[int, ...], ...]

BATCH_NORM = "aten.batch_norm.default"

RELATIVE = "relative"
"""The prefix of the names of the factors of scales."""

MOVES = """
cat.default clamp.default clone.default constant_pad_nd.default expand.default flip.default index.Tensor
max_pool1d.default max_pool2d.default max_pool3d.default permute.default repeat.default reshape.default slice.Tensor
split_with_sizes.default
"""

CARRIERS = frozenset(f"aten.{name}" for name in MOVES.split())
"""Kinds that pass integers on unchanged, also if the integers are held as floats."""


def _gradient_factor(graph: Graph, quantizer: Op) -> float:
    """LSQ's factor for the gradient of a scale, 1 / sqrt(N · Q): N elements that share the scale, of a weight or of one
    sample of an activation, and the greatest integer Q."""
    data, scale = (graph.values[vid] for vid in quantizer.inputs[:2])
    sizes = [size for size in data.spec.shape if isinstance(size, int)]
    if data.producer is not None or data.role is Role.INPUT:
        sizes = sizes[1:] if len(sizes) > 1 else sizes
    result = graph.values[quantizer.outputs[0]]
    clips = [graph.ops[oid] for oid in result.users if graph.ops[oid].kind == "aten.clamp.default"]
    highest = float(torch.iinfo(getattr(torch, result.spec.dtype)).max)
    for clip in clips:
        limit = clip.attrs.get("max")
        highest = min(highest, float(limit)) if isinstance(limit, int | float) else highest
    return 1 / math.sqrt(max(math.prod(sizes) / scale.spec.numel, 1.0) * max(highest, 1.0))
