"""What a run in parts returns: the result of each part, and of the chain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.run.result import PassRow, StructureVerdict, summary_lines
from passes.suggest import shorten_lines
from pipeline.report import ChainReport, ImageReport, ValuesReport
from pipeline.result import RunResult

if TYPE_CHECKING:
    import numpy as np

    from pipeline.ir import Graph
    from pipeline.parts.generate import Generation


@dataclass(frozen=True, repr=False)
class PartsResult(RunResult):
    """The results of a run in parts that ended well.

    `passes` and `structures` are those of all parts; `export`, `optimize`, `runtime`, `model` and `graph` those of the
    first one. `parts` has everything of each.
    """

    parts: Mapping[str, RunResult] = field(default_factory=dict)
    chain: tuple[ChainReport | ImageReport | ValuesReport, ...] = ()

    @property
    def passes(self) -> tuple[PassRow, ...]:
        return tuple(row for part in self.parts.values() for row in part.passes)

    @property
    def structures(self) -> tuple[StructureVerdict, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return tuple(verdict for part in self.parts.values() for verdict in part.structures)

    @property
    def models(self) -> Path:
        """The folder with the final models of all parts."""
        return self.folder / "models"

    @property
    def model(self) -> Path:
        first = next(iter(self.parts))
        alone = self.models / first / "model.onnx"  # of a pipeline, whose models share nothing
        return alone if alone.is_file() else self.models / f"{first}.onnx"

    @cached_property
    def graph(self) -> Graph:
        return next(iter(self.parts.values())).graph

    def generate(
        self,
        ids: Sequence[int] | None = None,
        *,
        prompt: str | None = None,
        inputs: Mapping[str, np.ndarray] | None = None,
        start: Sequence[int] | None = None,
        max_new_tokens: int = 32,
        temperature: float = 0.0,
        seed: int = 0,
        stop: Sequence[int] | None = None,
        backend: str = "onnxruntime",
    ) -> Generation:
        """Generate after a prompt, by tokens or by text.

        Args:
            ids: the prompt as tokens.
            prompt: the prompt as text, which the tokenizer next to the models turns into tokens.
            inputs: of an encoder that reads no tokens, such as `input_features`, by name.
            start: tokens that a decoder after an encoder begins with; by default that of the model's configuration.
            max_new_tokens: the most tokens that are added.
            temperature: 0 takes the most likely token; above it tokens are drawn.
            seed: of the draws.
            stop: tokens that end the text; by default those of the model's configuration.
            backend: onnxruntime, plan or torch.

        Returns:
            The new tokens, their text where there is a tokenizer, and the seconds that they took.

        Raises:
            UsageError: there is no prompt or no tokenizer, or the backend is unknown.
        """
        from pipeline.parts.generate import TextGenerator

        settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed}
        return TextGenerator(self.models, backend).generate(
            ids, prompt=prompt, inputs=inputs, start=start, stop=stop, **settings
        )

    def __repr__(self) -> str:
        lines = ["PartsResult"]
        for name, part in self.parts.items():
            lines += [f"part {name}:", *summary_lines(part.passes, part.structures)]
        lines += [chain.sentence for chain in self.chain]
        return shorten_lines((*lines, f"files: {self.folder}/"))
