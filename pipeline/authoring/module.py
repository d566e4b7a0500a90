"""`Module`: parameters, buffers and other modules, with a `forward` over IR tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from passes.suggest import describe_argument, nearest
from pipeline.authoring.builder import IRTensor, ModelBuilder, builder_of, typed
from pipeline.authoring.storage import Buffer, ModuleTensor, Parameter
from pipeline.errors import UsageError
from pipeline.runtime.tensors import dtype_name


def _refuse_to_compute(self: Module, *_: object) -> IRTensor:
    raise UsageError(f"{type(self).__name__} has no forward; expected one that takes and returns IR tensors")


class Module:
    """A part of a model. A subclass has parameters, buffers and modules as attributes, and a `forward`.

    A list or tuple of modules is one attribute, whose modules are `name.0`, `name.1` and so on. Names are those that
    torch gives, so state dicts go both ways.
    """

    forward: Callable[..., IRTensor] = _refuse_to_compute
    """What the module computes, by the operations of `functional` and by other modules."""

    def emit(self, builder: ModelBuilder, *inputs: IRTensor) -> IRTensor:
        """Add what the module computes to the graph of `builder`.

        Raises:
            UsageError: the inputs do not fit; the message names the layer.
        """
        if not builder.is_within and builder.path_of(self) is None:
            self.register_in(builder, builder.unique_name(type(self).__name__.lower()))
        with builder.within(builder.path_of(self) or "", repr(self)):
            result = self.forward(*inputs)
            if not isinstance(result, IRTensor):
                raise builder.refusal(f"forward returned {type(result).__name__}, expected an IR tensor")
            return result

    def __call__(self, *inputs: IRTensor) -> IRTensor:
        return self.emit(builder_of(*inputs), *inputs)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def describe(self) -> str:
        """The settings, as they are between the brackets of the constructor."""
        return ""

    def register_in(self, builder: ModelBuilder, prefix: str = "") -> None:
        """Give the module, and all that it holds, their names in the graph of `builder`."""
        names: dict[ModuleTensor, tuple[str, ...]] = {}
        for name, tensor in self._walk_tensors(prefix):
            names[tensor] = (*names.get(tensor, ()), name)
        paths: dict[object, str] = {}
        for path, module in self.named_modules(prefix):
            paths.setdefault(module, path)
        builder.register(paths, names)

    def children(self) -> Iterator[tuple[str, Module]]:
        """The modules that this one holds itself, by name."""
        for name, item in vars(self).items():
            if isinstance(item, Module):
                yield name, item
            elif isinstance(item, list | tuple):
                yield from ((f"{name}.{place}", part) for place, part in enumerate(item) if isinstance(part, Module))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all below it, with their paths."""
        yield prefix, self
        for name, child in self.children():
            yield from child.named_modules(_join(prefix, name))

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Each parameter once, with its first name."""
        yield from _once(self._walk_tensors(""), Parameter)

    def named_buffers(self) -> Iterator[tuple[str, Buffer]]:
        """Each buffer once, with its first name."""
        yield from _once(self._walk_tensors(""), Buffer)

    def parameters(self) -> Iterator[Parameter]:
        return (parameter for _, parameter in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies of parameters and buffers by name; what is shared has all its names."""
        return {name: tensor.data.clone() for name, tensor in self._walk_tensors("")}

    @typed
    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the numbers of a state dict, which torch's module of the same layers may have made.

        Raises:
            UsageError: a name, a shape or a dtype is another; nothing has changed.
        """
        own = dict(self._walk_tensors(""))
        for name in [*(name for name in own if name not in state), *(name for name in state if name not in own)]:
            holder = "the state dict lacks" if name in own else "the module lacks"
            raise UsageError(f"load_state_dict: {holder} {name!r}{nearest(name, state if name in own else own)}")
        for name, tensor in own.items():
            if not isinstance(state[name], torch.Tensor):
                raise UsageError(f"load_state_dict: {name!r} is {describe_argument(state[name])}, expected a tensor")
            found, expected = (f"{dtype_name(data.dtype)}{list(data.shape)}" for data in (state[name], tensor.data))
            if found != expected:
                raise UsageError(f"load_state_dict: {name!r} is {found}, expected {expected}")
        for name, tensor in own.items():
            tensor.data = state[name].detach().clone()

    def _walk_tensors(self, prefix: str) -> Iterator[tuple[str, ModuleTensor]]:
        """Parameters and buffers with all their names, those of this module first, as torch orders them."""
        own = [(name, item) for name, item in vars(self).items() if isinstance(item, ModuleTensor)]
        for sort in (Parameter, Buffer):
            yield from ((_join(prefix, name), item) for name, item in own if isinstance(item, sort))
        for name, child in self.children():
            yield from child._walk_tensors(_join(prefix, name))


class Sequential(Module):
    """Modules in a row, each called with what the one before gave; they are called `0`, `1` and so on."""

    def __init__(self, *modules: Module) -> None:
        self._modules: list[Module] = []
        for module in modules:
            self.append(module)

    def append(self, module: Module) -> None:
        """Put a module at the end.

        Raises:
            UsageError: it is no Module.
        """
        check_module(module)
        self._modules.append(module)

    def children(self) -> Iterator[tuple[str, Module]]:
        return ((str(place), module) for place, module in enumerate(self._modules))

    def forward(self, *inputs: IRTensor) -> IRTensor:
        if not self._modules:
            raise UsageError("the model has no layer; expected add(layer) before it is used")
        first, *rest = self._modules
        result = first(*inputs)
        for module in rest:
            result = module(result)
        return result

    def describe(self) -> str:
        return ", ".join(map(repr, self._modules))

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, place: int) -> Module:
        return self._modules[place]


def check_module(module: object) -> None:
    """Refuse what is no Module.

    Raises:
        UsageError: the message names what was found.
    """
    if isinstance(module, Module):
        return
    kind = type(module)
    found = (
        f"the class {module.__name__}, which is not called"
        if isinstance(module, type)
        else f"{kind.__module__}.{kind.__name__}"
    )
    hint = "; record_step trains a module of torch" if isinstance(module, torch.nn.Module) else ""
    raise UsageError(
        f"found {found}, expected a layer such as Linear(64, 10), or another Module of pipeline.authoring{hint}"
    )


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _once(named: Iterator[tuple[str, ModuleTensor]], sort: type[Any]) -> Iterator[tuple[str, Any]]:
    seen: set[ModuleTensor] = set()
    for name, tensor in named:
        if isinstance(tensor, sort) and tensor not in seen:
            seen.add(tensor)
            yield name, tensor
