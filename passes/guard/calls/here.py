"""An optimizer as a step in this process: for arguments, and registrations, that a worker process cannot be given.

A crash of the optimizer then ends the script, as it does without a guard. Everything else holds: pins, proof, revert.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from passes.context import PassContext
from passes.errors import StepFailed
from passes.model.files import save
from passes.model.weights import PROTOBUF_LIMIT, DetachedModel, read_model
from passes.step import CompositeStep

__all__ = ["Here"]


@dataclass(frozen=True, slots=True)
class Here(CompositeStep):
    """`run(source, target, left_out)` makes the file `target` from the file `source` without the inner passes named."""

    name: str
    names: tuple[str, ...]
    """The inner passes that it would run."""
    run: Callable[[str, str, Sequence[str]], None]
    narrows: bool = False
    """Whether the caller gave it other input shapes than those that the model declares."""
    left_out: tuple[str, ...] = ()

    suspects: ClassVar[tuple[str, ...]] = ("constant_folding", "shape_inference")

    @property
    def source(self) -> str:  # type: ignore[override]
        return self.name

    def apply(self, model: DetachedModel, bench: PassContext) -> DetachedModel:
        folder = Path(tempfile.mkdtemp(dir=bench.folder, prefix="here-"))  # the weights stay in it, mapped
        source, target = folder / "before.onnx", folder / "after.onnx"
        save(model, source, external_from=PROTOBUF_LIMIT)
        try:
            self.run(str(source), str(target), self.left_out)
        except Exception as error:  # whatever an optimizer raises
            raise StepFailed(f"{type(error).__name__}: {error}") from error
        return read_model(target, known=model.weights)

    def inner(self, bench: PassContext) -> tuple[str, ...]:
        return tuple(name for name in self.names if name not in self.left_out)
