"""The sizes that the caller fixes: by the name of a dim, or for a whole input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from pipeline.errors import UsageError
from pipeline.importers.from_onnx.infer import declared
from pipeline.ir.spec import TensorSpec

__all__ = ["Sizes"]


class Sizes:
    """`dims` as given, and what `shapes` says of the names that stand in the model.

    Raises:
        UsageError: a name that the model does not have, a size below 0, or a shape that does not fit.
    """

    def __init__(self, graph: onnx.GraphProto, dims: Mapping[str, int], shapes: Mapping[str, Sequence[int]]) -> None:
        self._graph = graph
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._check_dims(dims)
        self._check_shapes()
        self.dims = {**self._bound_by_shapes(), **dims}

    def of(self, value: onnx.ValueInfoProto) -> TensorSpec | None:
        """The spec of an input; None where the model says too little."""
        spec = declared(value, self.dims)
        if spec is None or value.name not in self._shapes:
            return spec
        return TensorSpec(self._shapes[value.name], spec.dtype)

    def missing(self) -> list[str]:
        """Names of dims that nothing fixes."""
        return [name for name in self._names() if name not in self.dims]

    def _names(self) -> list[str]:
        dims = (dim.dim_param for value in self._graph.input for dim in value.type.tensor_type.shape.dim)
        return list(dict.fromkeys(filter(None, dims)))

    def _bound_by_shapes(self) -> dict[str, int]:
        found: dict[str, set[int]] = {}
        for value in self._graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, self._shapes.get(value.name, ()), strict=False):
                if dim.dim_param:
                    found.setdefault(dim.dim_param, set()).add(size)
        # Paddle calls every open dim "?": two sizes for one name mean that it is no name.
        return {name: sizes.pop() for name, sizes in found.items() if len(sizes) == 1}

    def _check_dims(self, dims: Mapping[str, int]) -> None:
        names = self._names()
        if strange := [name for name in dims if name not in names]:
            raise UsageError(
                f"dims: found {', '.join(map(repr, strange))}, expected names of dimensions of the inputs: "
                f"{', '.join(map(repr, names)) or 'this model has none'}"
            )
        for name, size in dims.items():
            if size < 0:
                raise UsageError(f"dims: found {name!r}: {size}, expected a size of at least 0")

    def _check_shapes(self) -> None:
        inputs = {value.name: value.type.tensor_type for value in self._graph.input}
        for name, shape in self._shapes.items():
            if name not in inputs:
                raise UsageError(f"shapes: found {name!r}, expected names of inputs: {', '.join(map(repr, inputs))}")
            own = [dim.dim_value if dim.dim_value > 0 else dim.dim_param or "?" for dim in inputs[name].shape.dim]
            fits = len(own) == len(shape) and all(isinstance(a, str) or a == b for a, b in zip(own, shape, strict=True))
            if inputs[name].HasField("shape") and not fits:
                raise UsageError(f"shapes: found {name!r}: {list(shape)}, which does not fit the model's {own}")
