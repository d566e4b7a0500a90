"""One call of a module, watched: what it writes to, what it prints, what of Python the graph holds from this call.

What torch and transformers print and warn of during a call is collected for the caller's notes.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import nn

from passes.user_files import is_user_code
from pipeline.export.source import Example, TorchSource
from pipeline.export.tree import named_leaves
from pipeline.export.user_code import kept_surroundings
from pipeline.importers.from_torch.modules import (
    STANDARD,
    attribute_items,
    every_path,
    kept_tensors,
    preserve_module_state,
)
from pipeline.importers.from_torch.tensors import memory_of
from pipeline.turn import TURN

DEPRECATIONS = (DeprecationWarning, FutureWarning, PendingDeprecationWarning)

ABOUT_LIBRARIES = {
    "torch.onnx._internal.exporter._registration",  # operators of packages that are not installed
    "torch.onnx._internal.exporter._compat",  # an opset below 18 is made by a conversion
    "onnxscript.version_converter",  # which of two converters does that
    "onnx_ir._convenience",  # an empty list of numbers in a translation
}
"""Loggers whose warnings say nothing of the user's model. An opset that was not reached is an error of its own."""

ASSIGNED = "assigned during export"
"""In torch's warning of each tensor that forward leaves in an attribute. `Watch.carried` has those that matter."""

LOUD = ("torch", "transformers", "onnxscript", "onnx_ir", "huggingface_hub")


@contextlib.contextmanager
def capture_output() -> Iterator[list[str]]:
    """Collect what is printed, logged or warned of in this block; the yielded list gets the lines when it ends. Put
    back the working directory and numpy's handling of errors.

    What libraries say of themselves is left out: deprecations in code that is not the user's, and `ABOUT_LIBRARIES`.
    Streams, loggers and warnings belong to the process, so blocks in two threads take turns.
    """
    notes: list[str] = []
    stream = io.StringIO()
    with (
        TURN,
        warnings.catch_warnings(record=True) as caught,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
        _loggers_into(notes),
        kept_surroundings(),
    ):
        warnings.simplefilter("always")
        try:
            yield notes
        finally:
            notes += [line for line in stream.getvalue().splitlines() if line.strip()]
            notes += dict.fromkeys(
                f"{warning.category.__name__}: {warning.message}" for warning in caught if is_about_model(warning)
            )


def is_about_model(warning: warnings.WarningMessage) -> bool:
    """Whether a warning says something of the user's model or code, and nothing else says it."""
    if issubclass(warning.category, DEPRECATIONS):
        return is_user_code(warning.filename)
    return ASSIGNED not in str(warning.message)


class _Collector(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        if record.name not in ABOUT_LIBRARIES:
            self.notes.append(f"{record.name}: {record.getMessage()}")


@contextlib.contextmanager
def _loggers_into(notes: list[str]) -> Iterator[None]:
    """Send loud loggers into `notes`. Dozens of torch's loggers have a handler with the real stderr: swap them all."""
    collector = _Collector(notes)
    saved = {name: (logger.handlers, logger.propagate) for name, logger in _loud_loggers()}
    for name, logger in _loud_loggers():
        logger.handlers = [collector] if name in LOUD else []
        logger.propagate = name not in LOUD
    try:
        yield
    finally:
        for name, (handlers, propagate) in saved.items():
            logger = logging.getLogger(name)
            logger.handlers, logger.propagate = handlers, propagate


def _loud_loggers() -> list[tuple[str, logging.Logger]]:
    roots = [(name, logging.getLogger(name)) for name in LOUD]
    known = [
        (name, logger)
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.partition(".")[0] in LOUD
    ]
    return list(dict([*roots, *known]).items())


NUMBERS = (bool, int, float)


@dataclass(slots=True)
class Watch:
    """What a call has changed: buffers and parameters by name, attributes by their path; and what it drew."""

    buffers: set[str] = field(default_factory=set)
    resized: set[str] = field(default_factory=set)
    """Those of `buffers` that the call gave another shape."""
    inputs: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    """Attributes with numbers of Python that the call changed; attributes with texts, or with containers of numbers or
    texts, only where a second call returns other values."""
    overwritten: set[str] = field(default_factory=set)
    """Attributes that hold a tensor that the call wrote to in place, and that is neither parameter nor buffer."""
    carried: set[str] = field(default_factory=set)
    """Parameters that the call wrote to, and attributes in which it left other tensors, where a second call with the
    same inputs returns other values."""
    rebound: set[tuple[str, str]] = field(default_factory=set)
    """(kind, name) of the buffers, parameters and inputs that the call pointed at other memory (`x.data = …`)."""
    draws_of_python: bool = False

    def lost_writes(self) -> Iterator[str]:
        """Sentences on writes that a graph cannot make as an output, and that torch.export drops or refuses."""
        for name in sorted(self.overwritten):
            yield (
                f"forward writes to a tensor in the attribute {name!r}, which is no buffer of the module; make it one "
                "(self.register_buffer), so that its old value is an input of the graph and its new one an output"
            )
        for name in sorted(self.resized):
            yield (
                f"forward changes the shape of the buffer {name!r}, so that the graph of one call does not fit the "
                "next; give the buffer its full size and write to a part of it, or take it as an argument and return it"
            )
        for name in sorted(self.parameters & self.carried):
            yield (
                f"forward writes to the parameter {name!r}, and the next call reads the new value, but the graph "
                "stores parameters as constants; make it a buffer (self.register_buffer)"
            )

        for kind, name in sorted(self.rebound):
            yield (
                f"forward points the {kind} {name!r} at other memory (`.data = …`, `set_`, a module's `to(…)`), "
                f"which torch.export does not see; {INSTEAD[kind].format(name)}"
            )

    def notes(self, module: nn.Module, example: Example) -> tuple[str, ...]:
        """Sentences for the user on what the graph holds as it was in the first call."""
        leaves = named_leaves(module, example)
        numbers = [f"{name}={leaf!r}" for name, leaf in leaves if type(leaf) in NUMBERS]
        notes = []
        if numbers:
            notes.append(
                f"the graph holds numbers of Python that forward is given: {shorten(numbers)}; give a tensor for one "
                "that changes from call to call"
            )
        if self.attributes:
            notes.append(
                f"forward changes {shorten(sorted(self.attributes))}, a value of Python: the graph holds what the "
                "first call reads there; make it a tensor that is a buffer"
            )
        if self.parameters:
            notes.append(
                f"forward writes to the parameter {shorten(sorted(self.parameters))}: each call of the graph begins "
                "with the stored value; write in the constructor, or make it a buffer"
            )
        if self.carried:
            notes.append(
                f"forward keeps tensors in {shorten(sorted(self.carried))} for the next call: the graph computes what "
                "the first call computes, each time; make what is kept a buffer (self.register_buffer), or take it as "
                "an argument and return it"
            )
        if self.draws_of_python:
            notes.append(
                "forward calls Python's or numpy's random generator: the graph holds the numbers that were drawn while "
                "it was traced; use torch.rand, or make them inputs"
            )
        return tuple(notes)


INSTEAD: Final = {
    "buffer": "write to it in place, as in self.{}.copy_(value)",
    "parameter": "compute the new value as a tensor of its own, or write it in the constructor",
    "input": "compute the new value as a tensor of its own, or write in place, as in {}.copy_(value)",
}
"""What to do in place of pointing a tensor at other memory."""


def watch_call(module: nn.Module, call: Callable[[], dict[str, torch.Tensor]]) -> tuple[dict[str, torch.Tensor], Watch]:
    """Return the result of `call`, which calls the module, and what it changed, which is put back.

    An in-place operator raises the version of a tensor. A kernel of BatchNorm in train mode does not, so that the
    values of buffers are compared too. Where the call changed parameters or left other tensors in attributes, a second
    call shows whether it reads them.
    """
    watch = Watch()
    parameters = {name: TensorBefore(parameter) for name, parameter in module.named_parameters()}
    buffers = {name: (TensorBefore(buffer), buffer.detach().clone()) for name, buffer in module.named_buffers()}
    items = attribute_items(module)
    held = kept_tensors(items, module)
    versions = {name: [version_of(tensor) for tensor in tensors] for name, tensors in held.items()}
    numbers, generators, seed = dict(_numbers(module)), _generators(), torch.get_rng_state()
    with preserve_module_state(module):
        outputs = call()
        watch.draws_of_python = generators != _generators()
        watch.parameters = {name for name, before in parameters.items() if before.is_written}
        watch.rebound = {("parameter", name) for name, before in parameters.items() if before.is_rebound}
        watch.rebound |= {("buffer", name) for name, (before, _) in buffers.items() if before.is_rebound}
        watch.overwritten = {name for name, found in versions.items() if found != list(map(version_of, held[name]))}
        for (owner, path, name), value in numbers.items():
            if vars(owner).get(name) is not value and vars(owner).get(name) != value:
                watch.attributes.add(f"{path}.{name}" if path else name)
        first = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        _put_back(module, parameters, buffers, watch)
        after = attribute_items(module)
        changed = watch.parameters | _changed_tensors(held, kept_tensors(after, module))
        plain = {
            name for name, found in after.items() if _plain_values(found) != _plain_values(items.get(name, []))
        } - changed
        if changed | plain and not any(tensor.is_meta for tensor in (*first.values(), *module.parameters())):
            torch.set_rng_state(seed)
            if _differs(call, first):
                watch.carried = changed
                watch.attributes |= plain
            _put_back(module, parameters, buffers, Watch())
    return outputs, watch


def _put_back(
    module: nn.Module,
    parameters: Mapping[str, TensorBefore],
    buffers: Mapping[str, tuple[TensorBefore, torch.Tensor]],
    watch: Watch,
) -> None:
    """Give each parameter its memory and each buffer the values that it had, and note the buffers that had others."""
    for before in (*parameters.values(), *(before for before, _ in buffers.values())):
        before.put_back()
    now = dict(module.named_buffers())
    for name, (before, values) in buffers.items():
        buffer = before.tensor
        if now.get(name) is buffer and not before.is_written and _are_equal(buffer, values):
            continue
        watch.buffers.add(name)
        if name in now and now[name].shape != values.shape:
            watch.resized.add(name)
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = buffer
        _write(buffer, values)


def _plain_values(items: Iterable[object]) -> list[tuple[type, object]]:
    """The numbers and texts among what an attribute holds."""
    return [(type(item), item) for item in items if type(item) in (*NUMBERS, complex, str)]


def _changed_tensors(before: Mapping[str, list[torch.Tensor]], after: Mapping[str, list[torch.Tensor]]) -> set[str]:
    ids = [{name: [id(tensor) for tensor in tensors] for name, tensors in held.items()} for held in (before, after)]
    return {name for name in ids[1] if ids[1][name] != ids[0].get(name)}


def _differs(call: Callable[[], dict[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> bool:
    """Whether a further call returns other values, or raises."""
    try:
        found = call()
    except Exception:  # the user's forward may raise anything
        return True
    return found.keys() != expected.keys() or any(
        found[name].shape != tensor.shape or not _are_equal(found[name], tensor) for name, tensor in expected.items()
    )


class TensorBefore:
    """A tensor as it was before a call: its version, which an in-place operator raises, and its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._version = version_of(tensor)
        self._alias = tensor.detach()

    @property
    def is_rebound(self) -> bool:
        """Whether it has other memory, as after `tensor.data = …`, which does not raise the version."""
        return memory_of(self.tensor) != memory_of(self._alias)

    @property
    def is_written(self) -> bool:
        return version_of(self.tensor) != self._version or self.is_rebound

    def put_back(self) -> None:
        """Give the tensor its memory again."""
        if self.is_rebound:
            self.tensor.data = self._alias


def version_of(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _are_equal(buffer: torch.Tensor, values: torch.Tensor) -> bool:
    is_plain = type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta
    return not is_plain or torch.equal(buffer, values) or torch.equal(buffer.nan_to_num(), values.nan_to_num())


def _write(buffer: torch.Tensor, values: torch.Tensor) -> None:
    if buffer.shape == values.shape:
        buffer.data.copy_(values)  # of what an in-place write has made require a gradient, too
    else:
        buffer.data = values.clone()


def _numbers(module: nn.Module) -> Iterator[tuple[tuple[nn.Module, str, str], object]]:
    for path, owner in every_path(module):
        own = vars(owner)
        if len(own) > len(STANDARD):
            for name in own.keys() - STANDARD:
                if type(own[name]) in NUMBERS:
                    yield (owner, path, name), own[name]


def _generators() -> tuple[str, str]:
    """The states of the generators of Python and numpy, as text."""
    return repr(random.getstate()), repr(np.random.get_state(legacy=False))


@contextmanager
def with_state(source: TorchSource, feeds: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Give the module the state of a call: lifted buffers from `feeds`, everything else as it was made.

    When the block ends, what the module held before is put back.
    """
    buffers = {name: buffer for name, buffer in source.module.named_buffers() if name in source.written_buffers}
    before = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    with preserve_module_state(source.module):
        for value in source.lifted:
            if value.is_buffer:
                _write(buffers[value.target], feeds[value.before])
        try:
            yield
        finally:
            for name, buffer in buffers.items():
                _write(buffer, before[name])


def shorten(names: Collection[str]) -> str:
    shown = list(names)[:SHOWN]
    return ", ".join(shown) + (f", … {len(names)} in all" if len(names) > SHOWN else "")


SHOWN: Final = 4
"""Names that a sentence lists."""
