"""`CustomOp`: one operator of the user's, how its outputs are inferred, and how a node of it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import onnx
from onnx import TypeProto, helper
from onnx.defs import OpSchema

from passes.errors import ModelError, PolicyError, StepFailed, WrongReference
from passes.suggest import plural

ONNX_OWN: Final = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training")
"""The domains whose operators ONNX defines."""


@dataclass(frozen=True, slots=True)
class ArrayType:
    """The type of one input or output.

    Args:
        dtype: the name of the dtype of the elements, such as `float32`: numpy's or, as `bfloat16`, that of ml_dtypes.
        shape: the size of each axis: a number, the name of an open dim, or None where the size is unknown.
    """

    dtype: str
    shape: tuple[int | str | None, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", np.dtype(self.dtype).name)
        object.__setattr__(self, "shape", tuple(self.shape))


@dataclass(frozen=True, slots=True)
class CustomOp:
    """An operator that ONNX does not define.

    Args:
        domain: the domain of the operator, such as `com.acme`; none of ONNX's own.
        name: the type of its nodes.
        infer: the types of the inputs (ArrayType, or None for an input that is left out), and the attributes by name →
            the ArrayType of the output, or a sequence with one for each output.
        compute: the inputs as numpy arrays (or None), and the attributes by name → the output as a numpy array, or a
            sequence of arrays. It is the reference: it has to be deterministic, and must not write to its inputs.
        version: the first opset version of `domain` that has the operator.
        attributes: name → default value: a number, a text, a bool, or a list of numbers or of texts. A node with
            another attribute is refused.
        shared_library: a shared object with kernels of onnxruntime, relative to the file; then onnxruntime runs the
            operator.
        torch_op: the operator of torch that is exported as this one, such as `acme::swish`. Its tensors become the
            inputs, its other arguments the attributes of the same names.

    Raises:
        PolicyError: a field of another type, one of ONNX's own domains, or an attribute whose default has no type of
            ONNX.
    """

    domain: str
    name: str
    infer: Callable[..., ArrayType | Sequence[ArrayType]]
    compute: Callable[..., Any]
    version: int = 1
    attributes: Mapping[str, Any] = field(default_factory=dict)
    shared_library: str | None = None
    torch_op: str | None = None

    def __post_init__(self) -> None:
        self._check_fields()
        if self.domain in ONNX_OWN:
            raise PolicyError(
                f"the custom operator {self.name!r} has the domain {self.domain!r}, which is ONNX's own; expected a "
                "domain of yours, such as 'com.acme'"
            )
        for name, value in self.attributes.items():
            try:
                _attribute(name, value)
            except (TypeError, ValueError) as error:
                raise PolicyError(
                    f"{self.key}: the attribute {name!r} has the default {value!r}; expected a number, a text, a bool, "
                    "or a list of numbers or of texts that is not empty"
                ) from error

    def _check_fields(self) -> None:
        checks = (
            ("domain", isinstance(self.domain, str), "a text, such as 'com.acme'"),
            ("name", isinstance(self.name, str) and self.name != "", "the type of the nodes, a text"),
            ("infer", callable(self.infer), "a function of ArrayTypes"),
            ("compute", callable(self.compute), "a function of numpy arrays"),
            ("version", type(self.version) is int and self.version > 0, "an opset version of 1 or more"),
            ("attributes", isinstance(self.attributes, Mapping), "a dict of names and default values"),
        )
        for field_name, is_right, expected in checks:
            if not is_right:
                found = getattr(self, field_name)
                raise PolicyError(f"CustomOp {self.name!r}: {field_name} is {found!r}; expected {expected}")

    @property
    def key(self) -> str:
        """The operator as messages name it: `com.acme::Swish`."""
        return f"{self.domain}::{self.name}"

    def schema(self) -> OpSchema:
        """The schema by which ONNX infers the types of the operator's nodes."""
        many = OpSchema.FormalParameterOption.Variadic
        ends = [
            [OpSchema.FormalParameter(side, "T", param_option=many, is_homogeneous=False, min_arity=least)]
            for side, least in (("inputs", 0), ("outputs", 1))
        ]
        schema = OpSchema(
            *(self.name, self.domain, self.version),
            inputs=ends[0],
            outputs=ends[1],
            type_constraints=[("T", onnx.defs.get_schema("Identity").type_constraints[0].allowed_type_strs, "any")],
            attributes=[OpSchema.Attribute(name, _attribute(name, value)) for name, value in self.attributes.items()],
        )
        schema.set_type_and_shape_inference_function(self._infer_node)
        return schema

    def _infer_node(self, context: onnx.shape_inference.InferenceContext) -> None:
        types = [context.get_input_type(place) for place in range(context.get_num_inputs())]
        attributes = [context.get_attribute(name) for name in self.attributes]
        given = [attribute for attribute in attributes if attribute is not None]
        for place, kind in enumerate(self.output_types(types, given, context.get_num_outputs())):
            context.set_output_type(place, kind)

    def output_types(
        self, inputs: Sequence[TypeProto | None], attributes: Iterable[onnx.AttributeProto], outputs: int
    ) -> list[TypeProto]:
        """ONNX's types of the `outputs` of a node, by `infer`; none where an input has no type yet.

        Args:
            inputs: the type of each input; None where it is left out or unknown.
            attributes: the attributes of the node.
            outputs: how many outputs the node has.

        Raises:
            ModelError: as `infer_types`.
        """
        kinds = [kind if kind is not None and kind.WhichOneof("value") else None for kind in inputs]
        if any(kind is not None and not _is_known(kind) for kind in kinds):
            return []
        given = {attribute.name: _value_of(attribute) for attribute in attributes}
        found = self.infer_types([kind and _array_type(kind) for kind in kinds], given, outputs)
        return [
            helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), kind.shape)
            for kind in found[:outputs]
        ]

    def infer_types(
        self, inputs: Sequence[ArrayType | None], attributes: Mapping[str, Any], outputs: int
    ) -> tuple[ArrayType, ...]:
        """The types of the outputs of a node.

        Args:
            inputs: the types of the inputs; None for an input that is left out or unknown.
            attributes: name → value, as the node has them.
            outputs: how many outputs the node has.

        Returns:
            A type for each output.

        Raises:
            ModelError: `infer` raises, or returns something else than types, or too few.
        """
        try:
            found = self.infer(*inputs, **{**self.attributes, **attributes})
        except Exception as error:  # code of the user's
            raise ModelError(f"{self.key}: `infer` raises {type(error).__name__}: {error}") from error
        types: tuple[Any, ...] = (found,) if _is_type(found) else tuple(found) if isinstance(found, Sequence) else ()
        if len(types) < outputs or not all(map(_is_type, types)):
            raise ModelError(
                f"{self.key}: `infer` returns {found!r} for a node with {outputs} output{'s' * (outputs != 1)}; "
                "expected an ArrayType, or a sequence with one for each output"
            )
        return types

    def run(self, node: onnx.NodeProto, inputs: Sequence[np.ndarray | None]) -> list[np.ndarray]:
        """Compute a node of the operator by its reference; its results are held to what `infer` says of them.

        Args:
            node: the node.
            inputs: an array for each input; None for an input that is left out.

        Returns:
            An array for each output.

        Raises:
            StepFailed: `compute` raises; a WrongReference where it returns something else than `infer` says.
            ModelError: the node has an attribute that is not declared, or one of another type; or `infer` raises.
        """
        given = {attribute.name: _value_of(attribute) for attribute in node.attribute}
        unknown = [name for name in given if name not in self.attributes]
        if unknown:
            raise ModelError(
                f"node {node.name or node.output[0]!r} has the attribute {unknown[0]!r}, which {self.key} does not "
                f"declare; expected {', '.join(self.attributes) or 'no attribute'}"
            )
        inputs = [None if array is None else _read_only(_as_stored(array)) for array in inputs]
        for attribute in node.attribute:
            default = _attribute(attribute.name, self.attributes[attribute.name])
            if attribute.type != default.type:
                kinds = [onnx.AttributeProto.AttributeType.Name(item.type) for item in (attribute, default)]
                raise ModelError(
                    f"node {node.name or node.output[0]!r} has the attribute {attribute.name!r} of type {kinds[0]}; "
                    f"{self.key} declares {kinds[1]}, by its default {self.attributes[attribute.name]!r}"
                )
        types = [None if array is None else ArrayType(array.dtype.name, array.shape) for array in inputs]
        expected = self.infer_types(types, given, len(node.output))
        try:
            found = self.compute(*inputs, **{**self.attributes, **given})
        except Exception as error:  # code of the user's
            raise StepFailed(f"{self.key}: `compute` raises {type(error).__name__}: {error}") from error
        arrays = [_as_stored(array) for array in (found if isinstance(found, list | tuple) else [found])]
        if not len(node.output) <= len(arrays) <= len(expected):
            raise WrongReference(
                f"{self.key}: `compute` returns {plural(len(arrays), 'output')} and `infer` {len(expected)}; expected "
                f"as many of both, and {len(node.output)} for this node or more"
            )
        for array, kind in zip(arrays, expected, strict=False):
            if array.dtype.name != kind.dtype or not _fits(array.shape, kind.shape):
                raise WrongReference(
                    f"{self.key}: `compute` returns {array.dtype.name}{list(array.shape)}, and `infer` says "
                    f"{kind.dtype}{list(kind.shape)}; expected the same dtype and shape"
                )
        return arrays[: len(node.output)]


def _is_type(value: object) -> bool:
    """Whether a value is an ArrayType; in a script's process the class may have been loaded under a second name."""
    return type(value).__qualname__ == ArrayType.__qualname__ and hasattr(value, "shape")


def _as_stored(found: Any) -> np.ndarray:
    """An array of the dtype that ONNX's has in numpy: texts are objects, and no bytes."""
    array = np.asarray(found)
    if array.dtype.kind not in "US":
        return array
    return (np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array).astype(object)


def _read_only(array: np.ndarray) -> np.ndarray:
    """A view that cannot be written to: the values of a run are those of other nodes too."""
    view = array.view()
    view.flags.writeable = False
    return view


def _fits(found: tuple[int, ...], declared: tuple[int | str | None, ...]) -> bool:
    return len(found) == len(declared) and all(
        not isinstance(size, int) or size == own for own, size in zip(found, declared, strict=True)
    )


def _is_known(kind: TypeProto) -> bool:
    return kind.HasField("tensor_type") and bool(kind.tensor_type.elem_type) and kind.tensor_type.HasField("shape")


def _array_type(kind: TypeProto) -> ArrayType:
    dims = kind.tensor_type.shape.dim
    sizes = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in dims)
    return ArrayType(helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type).name, sizes)


def _attribute(name: str, value: Any) -> onnx.AttributeProto:
    return helper.make_attribute(name, int(value) if isinstance(value, bool) else value)


def _value_of(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode()
    return [item.decode() if isinstance(item, bytes) else item for item in value] if isinstance(value, list) else value
