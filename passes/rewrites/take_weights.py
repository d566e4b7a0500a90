"""Take the weights out of a file that another tool has quantized: the model then has the tool's weights bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from passes.context import PassContext
from passes.errors import PolicyError, UsageError
from passes.rewrites.file_weights import FileWeights
from passes.rewrites.gguf_files import read_gguf
from passes.rewrites.nibble_files import read_checkpoint
from passes.step import PassResult, Relation, Step
from passes.suggest import describe_absence
from passes.weights.detached import DetachedModel


@dataclass(frozen=True, slots=True)
class TakeWeights(Step, name="take-weights", reads="values"):
    """Take the weights of 4 bits of a file of GGUF, GPTQ or AWQ. They take the place of the float weights.

    The step changes the outputs. So its proof compares with the float model whose weights are the file's, dequantized.

    file: the path of the file: `.gguf`, `.safetensors`, or `.pt` and `.bin` of torch.save.
    """

    file: str = ""
    makes_reference: ClassVar[bool] = True

    def check(self, context: PassContext) -> None:
        if not isinstance(self.file, str) or Path(self.file).suffix not in READERS:
            raise PolicyError(f"{self.name}: file is {self.file!r}; expected a file {', '.join(READERS)}")
        if not Path(self.file).is_file():
            raise PolicyError(f"{self.name}: file is {self.file!r}: {describe_absence(Path(self.file))}")

    def apply(self, model: DetachedModel, context: PassContext) -> PassResult:
        found = read_weight_file(model, Path(self.file))
        ends = model.index.required_inputs, model.index.outputs
        relation = Relation.between_namesakes(*ends, reference=found.store_floats(model))
        return PassResult(found.store(model), why=found.summary, relation=relation)


def read_weight_file(model: DetachedModel, path: Path) -> FileWeights:
    """Read the weights of a file, and match them with the weights of the float model.

    Args:
        model: the float model.
        path: the file, whose suffix is one of `READERS`.

    Returns:
        The weights, by the names of the model.

    Raises:
        UsageError: the model's weights are unread, or the file cannot be read or is of another network.
    """
    if model.unread():
        raise UsageError(
            f"{path}: the model's weights are unread, and matching the file's rows compares weights; leave out "
            "--proof structure"
        )
    return READERS[path.suffix](model, path)


READERS: Final[Mapping[str, Callable[[DetachedModel, Path], FileWeights]]] = {
    ".gguf": read_gguf,
    **dict.fromkeys((".safetensors", ".pt", ".bin"), read_checkpoint),
}
"""Suffix → the reader of a file."""
