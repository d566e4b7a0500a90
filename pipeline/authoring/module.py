"""`Module`: a module of torch whose `forward` computes with tensors, or emits ops when it gets IR tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from passes.suggest import describe_argument, nearest
from pipeline.argument_checks import a, expects
from pipeline.authoring.builder import ModelBuilder
from pipeline.authoring.tensors import IRTensor
from pipeline.errors import UsageError
from pipeline.runtime.tensors import dtype_name
from pipeline.training.step_function import swapped_tensors


class Parameter(nn.Parameter):
    """What an optimizer trains: a parameter of torch."""

    def __new__(cls, data: Any, requires_grad: bool = True) -> Self:
        return super().__new__(cls, _check_tensor(data), requires_grad)


class Buffer(nn.Buffer):
    """What belongs to the state of a module and is not trained, such as running statistics or a mask."""

    def __new__(cls, data: Any, *, persistent: bool = True) -> Any:
        return nn.Buffer(_check_tensor(data), persistent=persistent)


def _check_tensor(data: object) -> torch.Tensor:
    if not isinstance(data, torch.Tensor):
        raise UsageError(f"data is {describe_argument(data)}; expected a tensor")
    return data.detach()


class Module(nn.Module):
    """A part of a model: a module of torch that needs no `super().__init__()`. A subclass has a `forward`.

    `forward` is written with torch's functions and methods, with `functional` and with other modules. Called with
    tensors it computes, and torch differentiates it; called with IR tensors it adds ops to their graph. A list or tuple
    of modules is one attribute, whose modules are `name.0`, `name.1` and so on.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        made = super().__new__(cls)
        nn.Module.__init__(made)
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        is_row = isinstance(value, list | tuple) and value and all(isinstance(part, nn.Module) for part in value)
        super().__setattr__(name, nn.ModuleList(value) if is_row else value)  # type: ignore[arg-type]
        if isinstance(value, nn.Module) and hasattr(nn.Module, name):
            self.__dict__[name] = value  # before the method of torch that has the name

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        leaves = pytree.tree_leaves((inputs, named))
        builder = next((leaf.builder for leaf in leaves if isinstance(leaf, IRTensor)), None)
        if not isinstance(builder, ModelBuilder) or builder.path_of(self) is not None:
            return super().__call__(*inputs, **named)
        return emit(builder, self, *inputs, **named)

    def emit(self, builder: ModelBuilder, *inputs: Any) -> Any:
        """Add what the module computes to the graph of `builder`. Returns what its `forward` does.

        Args:
            builder: the builder of the graph.
            inputs: IR tensors, and other arguments of `forward`.

        Raises:
            UsageError: the inputs do not fit; the message names the layer.
        """
        return emit(builder, self, *inputs)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module and of all that it holds: a part in `eval()` emits what it does at inference.

        Args:
            mode: True for training, False for inference.
        """
        _set_mode(self, mode)
        return self

    def eval(self) -> Self:
        _set_mode(self, False)  # by no attribute, which a part called `train` would hide
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    def describe(self) -> str:
        """The settings, as they are between the brackets of the constructor."""
        return ""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load the parameters and buffers of a state dict, which torch's module of the same layers may have made.

        Args:
            state_dict: name → tensor of the shape and dtype that the parameter or buffer has.
            strict: whether each name has to be there, and no other.
            assign: whether the tensors themselves become the parameters and buffers; by default their values are
                copied.

        Raises:
            UsageError: a name, a shape or a dtype is another; nothing has changed.
        """
        check_state_dict(self, state_dict)
        return super().load_state_dict(state_dict, strict, assign)


def _set_mode(module: nn.Module, mode: bool) -> None:
    for part in module.modules():
        part.training = mode


def check_state_dict(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse a state dict of another module."""
    if not isinstance(state, Mapping):
        raise UsageError(f"state is {describe_argument(state)}; expected a mapping of names to tensors")
    own = module.state_dict()
    for name in [*(name for name in own if name not in state), *(name for name in state if name not in own)]:
        holder = "the state dict lacks" if name in own else "the module lacks"
        raise UsageError(f"load_state_dict: {holder} {name!r}{nearest(name, state if name in own else own)}")
    for name, tensor in own.items():
        if not isinstance(state[name], torch.Tensor):
            raise UsageError(f"load_state_dict: {name!r} is {describe_argument(state[name])}, expected a tensor")
        found, expected = (f"{dtype_name(data.dtype)}{list(data.shape)}" for data in (state[name], tensor))
        if found != expected:
            raise UsageError(f"load_state_dict: {name!r} is {found}, expected {expected}")


@expects(
    "emit: ", builder=a(ModelBuilder, "a ModelBuilder"), module=a(nn.Module, "a layer of torch.nn or a module of yours")
)
def emit(builder: ModelBuilder, module: nn.Module, *inputs: Any, path: str | None = None, **named: Any) -> Any:
    """Add what `module`, a layer of torch.nn or a module of yours, computes to the graph of `builder`.

    Args:
        builder: the graph that is being built.
        module: the layer or module; its mode is that of the builder, and a module in `eval()` stays so.
        inputs: IR tensors, or tuples of these, as the module takes them.
        path: what its parameters and ops are called by; by default the name of its class, in small letters.
        named: arguments by name.

    Returns:
        What the module returns: an IR tensor, or a tuple, list or dict of these, as of an LSTM.

    Raises:
        UsageError: the inputs do not fit, or torch refuses them; the message names the layer.
    """
    if type(module).forward is nn.Module.forward:
        raise UsageError(f"{type(module).__name__} has no forward; expected one that takes and returns IR tensors")
    if any(isinstance(part, nn.CrossMapLRN2d) for part in module.modules()):
        raise UsageError("CrossMapLRN2d computes in a loop of Python that resizes tensors; expected LocalResponseNorm")
    stored = (*module.named_parameters(), *module.named_buffers())
    if lazy := next((name for name, tensor in stored if is_lazy(tensor)), ""):
        raise UsageError(
            f"{type(module).__name__}: {lazy!r} has no shape yet, since no tensor has reached the layer; "
            "expected a call with a tensor first, which gives a lazy layer its shapes"
        )
    path = builder.unique_name(type(module).__name__.lower()) if path is None else path
    tensors = builder.register(module, path)
    with builder.within(path, module), swapped_tensors(module, dict[str, Any](tensors)), _scopes(builder, module):
        result = module(*inputs, **named)
        leaves = [leaf for leaf in pytree.tree_leaves(result) if leaf is not None]
        if not leaves or not all(isinstance(leaf, IRTensor) for leaf in leaves):
            found = type(result).__name__
            raise builder.refusal(f"forward returned {found}, expected an IR tensor, or a tuple of IR tensors")
        return result


@contextmanager
def _scopes(builder: ModelBuilder, module: nn.Module) -> Iterator[None]:
    """Let each part of `module` be the scope of the builder while it is called, and be in the builder's mode.

    A part that is called twice has its first path. After an error the innermost scope stays, for the message.
    """

    def enter(part: nn.Module, _: object) -> None:
        builder.scopes.append((part, builder.path_of(part) or ""))

    def leave(part: nn.Module, _: object, result: object) -> None:
        while builder.scopes.pop()[0] is not part:
            pass

    parts = list(module.modules())
    modes = [part.training for part in parts]
    handles: list[Any] = []
    try:
        for part in parts:
            part.training = part.training and builder.training
            handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave)]
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode
        for handle in handles:
            handle.remove()


class Sequential(Module, nn.Sequential):
    """Modules in a row, each called with the result of the last; they are called `0`, `1` and so on."""

    def __init__(self, *modules: Any) -> None:
        """`modules`: in order, or one dict of modules with their names, as torch's class takes it."""
        for module in modules:
            for part in module.values() if isinstance(module, dict) else [module]:
                check_module(part)
        nn.Sequential.__init__(self, *modules)

    def append(self, module: nn.Module) -> Self:
        """Put a module at the end.

        Args:
            module: a layer of `onnxline.authoring` or of `torch.nn`.

        Raises:
            UsageError: it is no module.
        """
        check_module(module)
        return super().append(module)

    def forward(self, *inputs: Any) -> Any:  # type: ignore[override] - the first one may take several
        if not len(self):
            raise UsageError("the model has no layer; expected add(layer) before it is used")
        first, *rest = self
        result = first(*inputs)
        for module in rest:
            result = module(result)
        return result

    def describe(self) -> str:
        return ", ".join(" ".join(repr(module).split()) for module in self)


def check_module(module: object) -> None:
    """Refuse what is no module.

    Raises:
        UsageError: the message names what was found.
    """
    if isinstance(module, nn.Module):
        return
    kind = type(module)
    found = (
        f"the class {module.__name__}, which is not called"
        if isinstance(module, type)
        else f"{kind.__module__}.{kind.__name__}"
    )
    raise UsageError(f"found {found}, expected a layer such as Linear(64, 10), or another module")
