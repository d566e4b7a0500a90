"""The export stage's result: an onnx_ir model whose weights are still torch's, and how to save it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx_ir as ir

from pipeline.errors import UsageError
from pipeline.export.source import TorchSource
from pipeline.export.weight_free.external_weights import Pieces, refer
from pipeline.export.weight_free.shards import Shards

# Above this, weights go into a separate file: protobuf ends at 2 GiB, and every reader copies what is inside.
EXTERNAL_DATA_BYTES = 100 * 1000 * 1000
SMALLEST_EXTERNAL_BYTES = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExportedModel:
    """An ONNX model and where it came from.

    source: the torch source under the names of the graph; feed it and `run_torch` answers in these names.
    parameters: names of the initializers that are an nn.Parameter of the module.
    notes: settings that were filled in by default, and warnings of torch during the export.
    computed_in: the floating types that the module computes in, as torch calls them.
    ranges: named dim → the smallest and the largest size that the graph was traced for; None: no largest.
    """

    ir_model: ir.Model
    source: TorchSource
    parameters: frozenset[str]
    notes: tuple[str, ...]
    computed_in: tuple[str, ...] = ()
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write `path`, and `path`.data beside it when the weights exceed 100 MB. Weights in other files stay there."""
        save_model(self.ir_model, path)

    def referring_to(self, shards: Shards, pieces: Pieces) -> ExportedModel:
        """The same model, whose weights are now references into `shards`.

        Raises:
            SourceError: the checkpoint does not fit the model; see `refer`.
        """
        return replace(self, notes=(*self.notes, *refer(self.ir_model, self.source, shards, pieces)))


def save_model(model: ir.Model, path: Path) -> None:
    """Write a model so that a reader finds a whole one under `path`, or none.

    Raises:
        UsageError: the disk is full, or the folder cannot be written.
    """
    data = path.with_name(f"{path.name}.data")
    values = [value.const_value for value in model.graph.initializers.values() if value.const_value]
    size = sum(value.nbytes for value in values if not isinstance(value, ir.ExternalTensor))
    external = data.name if size > EXTERNAL_DATA_BYTES else None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Written in a folder of its own, since the model refers to the weights by their final file name.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp") as folder:
            draft = Path(folder) / path.name
            ir.save(model, draft, external_data=external, size_threshold_bytes=SMALLEST_EXTERNAL_BYTES)
            path.unlink(missing_ok=True)  # first, so that an old graph is never beside new weights
            if external:
                draft.with_name(external).replace(data)
            for old in set(path.parent.glob(f"{path.name}.*data")) - ({data} if external else set()):
                old.unlink()
            draft.replace(path)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}; free space or choose another folder"
        ) from error
