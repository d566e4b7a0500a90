"""`ModelBuilder`, which collects the ops that modules emit and makes a Graph of them.

A call of a torch function on IR tensors is made on meta tensors of the same shapes. Each torch operator that this call
dispatches becomes an op of the graph, and the meta result gives the shape and dtype of the op's result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.utils import _pytree as pytree

from pipeline.authoring.forms import FORMS
from pipeline.authoring.tensors import DTYPES, IRTensor, check_dtype, name_of, spec_of, text_of
from pipeline.errors import OnnxlineError, UsageError
from pipeline.importers.from_torch.modules import named_tensors
from pipeline.importers.from_torch.operators import describe_operator
from pipeline.importers.from_torch.region import Arguments
from pipeline.importers.from_torch.tensors import TensorPayload
from pipeline.ir import Attr, InputRef, TensorSpec, TorchConst
from pipeline.ir.builder import GraphFacts
from pipeline.ir.graph import parts
from pipeline.ops import GraphBuilder
from pipeline.ops.aten import is_call


@dataclass(frozen=True, slots=True)
class MetaCall:
    """A call of an operator of torch, on tensors of the device meta."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class MetaCalls(ProxyTorchDispatchMode):
    """Lists the operators that a function calls, before torch decomposes them (`aten.linear`, not `aten.addmm`).

    Only torch's own modes see calls before decomposition, so this class inherits from one (torch 2.13).
    """

    def __init__(self) -> None:
        super().__init__(PythonKeyTracer(), "real", pre_dispatch=True)
        self.calls: list[MetaCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append(MetaCall(func, args, kwargs or {}, result))
        return result


class MetaOperands:
    """While the call of a function is recorded: meta tensor → the IR tensor whose shape and dtype it has."""

    def __init__(self, builder: ModelBuilder) -> None:
        self._builder = builder
        self._by_tensor: dict[int, IRTensor] = {}
        self._by_place: dict[tuple[object, ...], IRTensor] = {}

    def make(self, value: IRTensor) -> torch.Tensor:
        """A new meta tensor that stands for `value`."""
        meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
        self.add(meta, value)
        return meta

    def add(self, meta: torch.Tensor, value: IRTensor) -> None:
        """Let `meta` stand for `value`."""
        self._by_tensor[id(meta)] = value
        self._by_place.setdefault(self._place_of(meta), value)

    def find(self, tensor: torch.Tensor) -> IRTensor:
        """What `tensor` stands for; a tensor that has values, such as an index in a list, is a constant.

        What an operator makes, as `torch.rand` does, may reach the function as another object over its storage.

        Raises:
            UsageError: torch has made the tensor by no operator that was recorded.
        """
        if (found := self._by_tensor.get(id(tensor))) is not None:
            return found
        if not tensor.is_meta:
            return self._builder.operand(tensor)
        found = self._by_place.get(self._place_of(tensor))
        if found is None:
            raise self._builder.refusal("torch makes a tensor in it by no operator that a graph could hold")
        return found

    @staticmethod
    def _place_of(meta: torch.Tensor) -> tuple[object, ...]:
        """Two tensors at one place have the same elements."""
        return meta.untyped_storage()._cdata, meta.dtype, meta.shape, meta.stride(), meta.storage_offset()


class ModelBuilder(GraphBuilder):
    """A Builder with the parameters and modules of a model, and its mode.

    Args:
        name: the name of the graph.
        training: whether modules emit their training behaviour: Dropout draws, BatchNorm normalises by its batch.
    """

    def __init__(self, name: str = "model", *, training: bool = False) -> None:
        super().__init__(name)
        self.training = training
        self.scopes: list[tuple[nn.Module, str]] = []
        """The modules that are emitting, each with its path."""
        self._names: dict[int, tuple[str, ...]] = {}
        self._tensors: dict[int, IRTensor] = {}
        self._paths: dict[nn.Module, str] = {}
        self._used: dict[str, int] = {}

    def add_input(self, name: str, spec: TensorSpec) -> IRTensor:
        """Declare the next input of the graph.

        Args:
            name: the input's name in the graph.
            spec: its shape, dtype and device.
        """
        check_dtype(spec.dtype, DTYPES, f"input {name!r}")
        return IRTensor(self, self.input(self.unique_name(name), spec))

    def register(self, module: nn.Module, prefix: str = "") -> dict[str, IRTensor]:
        """Record the paths of `module` and its submodules, and the names of their tensors.

        Args:
            module: a module of the model, or the model itself.
            prefix: the path of `module` in the model, such as `encoder.0`; empty for the model itself.

        Returns:
            {name in `module`: IR tensor} of its parameters and buffers.
        """
        stored = named_tensors(module)
        for name, tensor in stored.items():
            full = f"{prefix}.{name}" if prefix else name
            self._names[id(tensor)] = (*self._names.get(id(tensor), ()), full)
            self._tensors.setdefault(id(tensor), IRTensor(self, stored=tensor))
        for path, part in module.named_modules(prefix=prefix):
            self._paths.setdefault(part, path)
        return {name: self._tensors[id(tensor)] for name, tensor in stored.items()}

    def path_of(self, module: nn.Module) -> str | None:
        """The path of a module in the model; None if it was not registered.

        Args:
            module: the module, which is found by identity.
        """
        return self._paths.get(module)

    @contextmanager
    def within(self, path: str, module: nn.Module) -> Iterator[None]:
        """Ops that are emitted in this block belong to `module` at `path`, in names and in messages.

        An error of torch, or of the module's own code, becomes one sentence that names the innermost module.
        """
        depth = len(self.scopes)
        self.scopes.append((module, path))
        try:
            yield
        except OnnxlineError:
            raise
        except Exception as error:
            raise self.refusal(_first_line(error)) from error
        finally:
            del self.scopes[depth:]

    def call(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch gives for IR tensors: by its form in `FORMS` if it has one, else by what it calls.

        Args:
            function: a function of torch or a method of its tensors.
            args: its positional arguments; tensors among them are IR tensors, or torch's for constants.
            kwargs: its arguments by name.

        Raises:
            UsageError: an operand does not fit, or torch refuses the call.
        """
        form = FORMS.get(function)
        return form(self, *args, **kwargs) if form else self.record(function, args, kwargs)

    def record(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of torch gives for IR tensors: the operators that it calls are added to the graph.

        Args:
            function: a function of torch or a method of its tensors.
            args: its positional arguments; tensors among them are IR tensors, or torch's for constants.
            kwargs: its arguments by name.

        Raises:
            UsageError: torch refuses the call, or an operand is none of this graph.
        """
        operands = MetaOperands(self)

        def stand_in(item: Any) -> Any:
            return operands.make(self.operand(item)) if isinstance(item, IRTensor | torch.Tensor) else item

        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, IRTensor | torch.Tensor)]
        own_args, own_kwargs = pytree.tree_map(stand_in, (tuple(args), dict(kwargs)))
        with torch.no_grad(), enable_python_dispatcher(), MetaCalls() as recorder:
            try:
                result = function(*own_args, **own_kwargs)
            except Exception as error:
                found = " and ".join(map(text_of, leaves))
                raise self.refusal(f"{name_of(function)} found {found}: {_reason(error)}") from error
        for call in recorder.calls:
            self._emit_call(call, operands)
        return pytree.tree_map_only(torch.Tensor, operands.find, result)

    def emit_several(
        self,
        kind: str,
        inputs: Sequence[IRTensor],
        outputs: Mapping[str, TensorSpec],
        attrs: Mapping[str, Attr] | None = None,
    ) -> tuple[IRTensor, ...]:
        """Add an op by its kind: how each result is called in its module, and what it looks like.

        Args:
            kind: the operator, such as `aten.native_layer_norm.default`.
            inputs: the operands, in the operator's order.
            outputs: name of a result in its module → its shape, dtype and device, in the operator's order.
            attrs: the operator's other arguments by name.
        """
        declared = [(self.name_here(name), spec) for name, spec in outputs.items()]
        operands = [self.operand(tensor).vid for tensor in inputs]
        vids = self.emit(kind, operands, declared, attrs, name=declared[0][0], origin=self._path)
        return tuple(IRTensor(self, vid) for vid in vids)

    def write(self, target: IRTensor, source: IRTensor | torch.Tensor) -> IRTensor:
        """Let a buffer have the value of `source`, now and when a step is done.

        Args:
            target: the IR tensor of the buffer.
            source: the new value, of the buffer's shape and dtype.

        Raises:
            UsageError: the target is no buffer, or the graph is one of inference, in which buffers are constants; or
                the value is of another shape or dtype.
        """
        if not target.is_buffer:
            raise self.refusal("forward writes to a tensor in place; expected an operation that gives a new one")
        if not self.training:
            raise self.refusal("forward writes to a buffer at inference; expected `if self.training:` before the write")
        after = self.operand(source)
        if target.spec != after.spec:
            raise self.refusal(f"forward writes {text_of(after)} to a buffer of {text_of(target)}; expected equal ones")
        self.update(target.first_vid, after.vid)
        target.vid = after.vid
        return target

    def refusal(self, problem: str) -> UsageError:
        """The error for what a module cannot take: its place in the model, and the problem.

        Args:
            problem: what was found and what was expected, without a full stop.
        """
        if not self.scopes:
            return UsageError(problem)
        module, path = self.scopes[-1]
        title = " ".join(repr(module).split())
        title = title if len(title) <= LONGEST_TITLE else f"{type(module).__name__}(…)"
        return UsageError(f"layer {path!r}, {title}: {problem}" if path else f"{title}: {problem}")

    def complete_arguments(self, kind: str, operands: int, given: Mapping[str, Attr]) -> dict[str, Attr]:
        """Say where the operands of a call go; a recorded call of torch has said so already, also for those in lists.

        Args:
            kind: the operator.
            operands: how many operands the call has.
            given: the attributes of the call.
        """
        is_complete = any(isinstance(part, InputRef) for item in given.values() for part in parts(item))
        return dict(given) if is_complete else super().complete_arguments(kind, operands, given)

    def facts(self) -> GraphFacts:
        """The updates of buffers, and the names of tied weights."""
        shared = {key: names for key, names in self._names.items() if len(names) > 1}
        sources = {self._tensors[key].first_vid: names for key, names in shared.items() if self._tensors[key].is_read}
        return GraphFacts(updates=dict(self._updates), sources=sources)

    def declare(self, stored: torch.Tensor) -> int:
        """The vid of a parameter or a buffer, which is declared when it is first read.

        Args:
            stored: the parameter or buffer; it is found by identity.
        """
        add = self.param if isinstance(stored, nn.Parameter) else self.state if self.training else self.const
        data = stored.detach()
        return add(self.unique_name(self._names[id(stored)][0]), spec_of(data), TensorPayload(data))

    def unique_name(self, name: str) -> str:
        """`name`, or with a number after it where it was given before."""
        count = self._used.get(name, 0)
        self._used[name] = count + 1
        return name if not count else self.unique_name(f"{name}_{count}")

    def name_here(self, label: str) -> str:
        """A name for what the module at hand calls `label`."""
        return self.unique_name(f"{self._path}.{label}" if self._path else label)

    @property
    def _path(self) -> str:
        return self.scopes[-1][1] if self.scopes else ""

    def operand(self, item: IRTensor | torch.Tensor) -> IRTensor:
        """The IR tensor of a tensor: a parameter or buffer of the model, or a constant.

        Args:
            item: an IR tensor of this graph, which is returned as it is, or a tensor of torch.

        Raises:
            UsageError: it belongs to another graph, or is a parameter that no module of the model holds.
        """
        if isinstance(item, IRTensor):
            if item.builder is not self:
                raise self.refusal(f"an operation reads a tensor of another graph, {item.builder.name!r}")
            return item
        if id(item) in self._tensors:
            return self._tensors[id(item)]
        if isinstance(item, nn.Parameter | nn.Buffer) or item.requires_grad:
            raise self.refusal(
                f"a parameter or buffer of shape {list(item.shape)} is read that no module of the model holds; "
                "expected it as an attribute of a Module, or in a list that is one"
            )
        return IRTensor(self, self.const(self.name_here("const"), spec_of(item), TensorPayload(item)))

    def _emit_call(self, call: MetaCall, operands: MetaOperands) -> None:
        """Add an operator of torch, and put its results into `operands`.

        Raises:
            UsageError: the operator writes in place, or has an argument that the IR cannot hold.
        """
        operator = describe_operator(call.target)
        arguments = Arguments(lambda meta: operands.find(meta).vid)
        label = label_of(operator.kind)
        if operator.written:
            raise self.refusal(f"{label} writes to a tensor in place; expected an operation that gives a new one")
        attrs = arguments.read(call, operator)
        if attrs.get("device") == ON_META:
            attrs["device"] = ON_CPU
        results = [item for item in pytree.tree_leaves(call.result) if isinstance(item, torch.Tensor)]
        if not results:
            return
        if isinstance(dim := attrs.get("dim"), int) and arguments.inputs:
            self._check_axis(IRTensor(self, arguments.inputs[0]), dim, results[0].dim())
        name = self.name_here(label)
        names = [name] if len(results) == 1 else [f"{name}_{index}" for index in range(len(results))]
        declared = [(own, spec_of(meta)) for own, meta in zip(names, results, strict=True)]
        vids = self.emit(operator.kind, arguments.inputs, declared, attrs, name=name, origin=self._path)
        for meta, vid in zip(results, vids, strict=True):
            operands.add(meta, IRTensor(self, vid))

    def _check_axis(self, x: IRTensor, dim: int, result_rank: int) -> None:
        """Refuse an axis that is not there, which some operators of torch take on the device meta."""
        limit = max(x.rank, 1)
        if result_rank <= x.rank and not -limit <= dim < limit:
            raise self.refusal(f"found axis {dim} of {text_of(x)}, expected {-limit} to {limit - 1}")


def label_of(kind: str) -> str:
    """How names and messages call an op: `aten.add.Tensor` is add."""
    return kind.split(".")[1] if is_call(kind) else kind.lower()


LONGEST_TITLE = 120
"""Characters of a module in a message; of a larger one only the class is said."""

ON_META, ON_CPU = TorchConst("device", "meta"), TorchConst("device", "cpu")


def _reason(error: Exception) -> str:
    """Why torch refuses a call on tensors of the device meta, in a sentence."""
    if BY_VALUES.search(str(error)):
        return "it asks for values of tensors, and a graph has none while it is built; expected a decision by shapes"
    if isinstance(error, NotImplementedError):
        return "torch does not say without values what its result looks like; expected another operator in its place"
    return _first_line(error)


BY_VALUES = re.compile("Cannot cast tensor|cannot be called on meta|data-dependent|_local_scalar_dense|nonzero")
"""torch's words where a function asks a tensor without values for one."""


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
