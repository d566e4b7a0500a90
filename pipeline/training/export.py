"""A trained program → ONNX by the main job: export, passes and their proof against the trained module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from pipeline.errors import UsageError
from pipeline.optimize import optimize
from pipeline.training.batch import Arguments
from pipeline.training.graph_module import GraphModule
from pipeline.training.with_weights import TrainedModule, with_weights

if TYPE_CHECKING:
    from passes.run.result import PassRun
    from pipeline.result import RunResult


class ExportableProgram(TrainedModule, Protocol):
    """A `TrainProgram`, as far as it takes part in its export."""

    @property
    def example(self) -> Arguments: ...

    def write_to(self, module: nn.Module) -> None: ...


def export_program(
    program: ExportableProgram,
    path: Path,
    args: Sequence[torch.Tensor] | None,
    kwargs: Mapping[str, torch.Tensor] | None,
    keep: Sequence[str],
    options: Mapping[str, Any],
) -> RunResult | PassRun:
    """Export and save; see `TrainProgram.export`."""
    module = program.module
    if isinstance(module, GraphModule) and module.source is not None:
        if args is not None or kwargs is not None:
            raise UsageError("export: found args, expected none: the module came from ONNX, whose inputs are known")
        run = optimize(with_weights(module.source, program), keep=keep, **options)
    else:
        own_args, own_kwargs = program.example if args is None and kwargs is None else (args or (), kwargs or {})
        run = optimize(_trained_copy(module, program), tuple(own_args), dict(own_kwargs), keep=keep, **options)
    run.save(path)
    return run


def _trained_copy(module: nn.Module, program: ExportableProgram) -> nn.Module:
    found = copy.deepcopy(module)
    program.write_to(found)
    return found.eval()
