"""The values of a graph that is changed: their names, their types, and the tensors that the graph stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from onnx import TensorProto

from passes.graph.index import initializers_of, take_name, value_names
from passes.graph.inference import dims_of
from passes.provenance.weight_origins import mark_part
from passes.structures.view import GraphView
from passes.weights.stand_ins import Array, Key, Weight, digest_of, initializer_of, key_of, stored_array

Dim = int | str | None
"""A size that is known, the name of a symbolic one, or neither."""


class GraphValues:
    """Names, types and stored tensors, those of the graph of `view` and new ones. New names are free names, in a fixed
    order.

    Args:
        view: the graph as it is; it does not change.
        second: the number after the second value of one name.
    """

    def __init__(self, view: GraphView, second: int = 2) -> None:
        self.view, self.model, self.second = view, view.model, second
        graph = view.model.proto.graph
        self.fed = {info.name for info in graph.input}
        self.stored = initializers_of(graph)
        self.made: dict[tuple[object, ...], str] = {}
        """Description of a value → the name of the value that is added already."""
        self._names = value_names(graph) | {node.name for node in graph.node}
        self._types: dict[str, tuple[int, tuple[Dim, ...] | None]] = {
            name: (tensor.data_type, tuple(tensor.dims)) for name, tensor in self.stored.items()
        }
        self._weights: dict[Key, Weight] = {}
        self._renewed: set[str] = set()
        """Stored tensors that have new values."""

    def array(self, name: str) -> Array | None:
        """The elements of a stored tensor that nobody can override; None for other values, and for an unread weight."""
        return None if name in self.fed else self._elements(self.stored.get(name))

    def _elements(self, tensor: TensorProto | None) -> Array | None:
        if tensor is None or tensor.data_type == TensorProto.STRING or self.model.is_unread(tensor):
            return None
        weight = self._weights.get(key) if self._weights and (key := key_of(tensor)) is not None else None
        return self.model.array(tensor) if weight is None else weight.array()

    def shape(self, name: str) -> tuple[Dim, ...] | None:
        """Sizes, names of symbolic sizes, and None for sizes with neither; None if the rank is not known."""
        return self._type(name)[1]

    def dtype(self, name: str) -> int:
        """The ONNX dtype of a value; 0 if that is not known."""
        return self._type(name)[0]

    def _type(self, name: str) -> tuple[int, tuple[Dim, ...] | None]:
        known = self._types.get(name)
        if known is None:
            info = self.view.types.get(name)
            known = (0, None) if info is None else (info.type.tensor_type.elem_type, dims_of(info))
            self._types[name] = known
        return known

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    def dim(self, name: str, axis: int) -> Dim:
        """One size of a value; None if it is not known, or the value has fewer axes."""
        shape = self.shape(name)
        return shape[axis] if shape is not None and len(shape) > axis else None

    def fixed_shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value whose sizes are all known."""
        shape = self.shape(name)
        sizes = tuple(dim for dim in shape or () if isinstance(dim, int))
        return sizes if shape is not None and len(sizes) == len(shape) else None

    def declare(self, name: str, dtype: int, shape: Sequence[Dim] | None) -> None:
        """Say which type a new value has."""
        self._types[name] = dtype, None if shape is None else tuple(shape)

    def free(self, name: str) -> str:
        """Return `name`, or the next free name derived from it, and mark the result as taken."""
        return take_name(name, self._names, self.second)

    def release_names(self, names: Iterable[str]) -> None:
        """Let new values have these names: what has them now goes."""
        self._names.difference_update(names)

    def constant_of(self, array: Array, label: str) -> str:
        """The name of a stored tensor of these elements; tensors of equal content that were made here are one."""
        key = array.dtype, array.shape, digest_of(array)
        if key not in self.made:
            self.made[key] = self.store(array, label)
        return self.made[key]

    def constant_ints(self, values: Sequence[int], label: str) -> str:
        """The same of sizes, axes or indices, as int64."""
        return self.constant_of(np.array(values, np.int64), label)

    def store(self, array: Array, label: str, whole: TensorProto | None = None, part: str = "") -> str:
        """The name of a new stored tensor, which is a `part` of the tensor `whole`."""
        return self._add_tensor(*stored_array(array, self.free(label)), whole, part)

    def store_weight(self, weight: Weight, label: str, whole: TensorProto, part: str) -> str:
        """The same of a weight, which may be unread."""
        tensor, key = initializer_of(self.free(label), weight)
        return self._add_tensor(tensor, {} if key is None else {key: weight}, whole, part)

    def replace_tensor(self, name: str, array: Array) -> None:
        """Give the stored tensor `name` new values, which all its consumers get."""
        self._renewed.add(name)
        self.stored.pop(name, None)
        self._add_tensor(*stored_array(array, name))

    def renew_tensor(self, name: str, values: Array, on_the_way: Sequence[str] = ()) -> str:
        """Store new values for the tensor `name`, and return the name of the stored tensor: `name` if the old tensor
        has no other consumer.

        Args:
            name: the stored tensor.
            values: the new values.
            on_the_way: values computed from the tensor before the consumer of the new values.
        """
        view = self.view
        shared = any(len(view.consumers.get(value, ())) > 1 or value in view.outputs for value in (name, *on_the_way))
        if shared or name not in view.initializers or name in self._renewed:
            return self.store(values, name)
        self.replace_tensor(name, values)
        return name

    def _add_tensor(
        self, tensor: TensorProto, weights: dict[Key, Weight], whole: TensorProto | None = None, part: str = ""
    ) -> str:
        if whole is not None:
            mark_part(tensor, whole, part)
        self._weights |= weights
        self.stored[tensor.name] = tensor
        self.declare(tensor.name, tensor.data_type, tuple(tensor.dims))
        return tensor.name
