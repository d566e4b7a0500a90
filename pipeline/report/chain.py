"""The results of a chain: the parts of a model one after the other, against torch, and quantized against float."""

from __future__ import annotations

from dataclasses import dataclass

from passes.suggest import plural


@dataclass(frozen=True, slots=True)
class ChainReport:
    """The parts one after the other on a backend, against torch's greedy `generate`.

    equal: of the `tokens` new tokens of all prompts, those before the first one that differs.
    is_right: no token differs, or torch's own logits of the two tokens differ by rounding; and the decoder's first call
        by itself gives the same, where there is one.
    """

    backend: str
    prompts: int
    tokens: int
    equal: int
    is_right: bool
    why: str = ""
    """Where the tokens part from torch's, and what else was found."""

    @property
    def sentence(self) -> str:
        return f"{self.backend} {self.result} as torch generates them"

    @property
    def result(self) -> str:
        return f"{self.equal} of {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class ImageReport:
    """An image of a pipeline by its parts on a backend, against that of diffusers with the same seed.

    max_abs: the largest difference of a pixel, from 0 to 1; `limit` is what it may be.
    """

    backend: str
    steps: int
    max_abs: float
    limit: float
    is_right: bool
    why: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.backend} {self.result}, by {self.max_abs:.1e} at most ({self.limit:.1e} allowed)"

    @property
    def result(self) -> str:
        return f"image of {self.steps} steps {'as' if self.is_right else 'differs from'} diffusers makes it"


@dataclass(frozen=True, slots=True)
class ValuesReport:
    """What a chain of one's own parts returns on a backend, against what it returns for their sources.

    max_abs: the largest error of a value; `is_right` says that all are within the tolerances of their dtypes.
    """

    backend: str
    values: int
    max_abs: float
    is_right: bool
    why: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.backend} {self.result}, off by {self.max_abs:.1e} at most"

    @property
    def result(self) -> str:
        return f"{plural(self.values, 'result')} {'as' if self.is_right else 'not as'} from the sources"


@dataclass(frozen=True, slots=True)
class ChainQuantization:
    """What the page shows of a chain of quantized parts.

    sentence: what they do together; `notes` say it of each part, and of the metric.
    rows: layers of all parts, worst first, by `titles`.
    suggestion: a sentence, and rules in YAML on the lines after it; empty where none was asked for.
    """

    sentence: str
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    suggestion: str = ""
