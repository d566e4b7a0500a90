"""One call of a module, watched: what it writes to, and what of Python the graph holds as it was in this call."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import nn

from pipeline.export.source import Example, TorchSource
from pipeline.export.tree import named_leaves
from pipeline.importers.from_torch.modules import STANDARD, every_path, preserve_module_state

NUMBERS = (bool, int, float)


@dataclass(slots=True)
class Watch:
    """What a call has changed: buffers by name, numbers of Python by the path of their attribute; and what it drew."""

    buffers: set[str] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    draws_of_python: bool = False

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
                f"forward changes {shorten(sorted(self.attributes))}, a number of Python: the graph holds what the "
                "first call reads there; make it a tensor that is a buffer"
            )
        if self.parameters:
            notes.append(
                f"forward writes to the parameter {shorten(sorted(self.parameters))}: each call of the graph begins "
                "with the stored value; write in the constructor, or make it a buffer"
            )
        if self.draws_of_python:
            notes.append(
                "forward calls Python's or numpy's random generator: the graph holds the numbers that were drawn while "
                "it was traced; use torch.rand, or make them inputs"
            )
        return tuple(notes)


@contextmanager
def watch_call(module: nn.Module) -> Iterator[Watch]:
    """Yield a Watch, which is filled in when the block ends; what the module held before is put back then.

    An in-place operator raises the version of a tensor. A kernel of BatchNorm in train mode does not, so that the
    numbers of buffers are compared too.
    """
    watch = Watch()
    parameters = {name: (parameter, version_of(parameter)) for name, parameter in module.named_parameters()}
    buffers = {name: (buffer, version_of(buffer), buffer.detach().clone()) for name, buffer in module.named_buffers()}
    numbers, generators = dict(_numbers(module)), _generators()
    yield watch
    now = dict(module.named_buffers())
    for name, (buffer, version, values) in buffers.items():
        if now.get(name) is buffer and version == version_of(buffer) and _are_equal(buffer, values):
            continue
        watch.buffers.add(name)
        path, _, own = name.rpartition(".")
        module.get_submodule(path)._buffers[own] = buffer
        _write(buffer, values)
    watch.parameters = {name for name, (parameter, version) in parameters.items() if version != version_of(parameter)}
    for (owner, path, name), value in numbers.items():
        if vars(owner).get(name) is not value and vars(owner).get(name) != value:
            watch.attributes.add(f"{path}.{name}" if path else name)
            setattr(owner, name, value)
    watch.draws_of_python = generators != _generators()


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
    buffers = {name: buffer for name, buffer in source.module.named_buffers() if name in source.writes}
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
