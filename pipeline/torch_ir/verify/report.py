"""What came of a verification."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["VerificationReport"]


@dataclass
class VerificationReport:
    """`max_diff` and `mean_diff` are the largest of all outputs; infinite where there is nothing to subtract.

    `output_details` has a dict for each tensor of the result, and for each buffer that the model writes to: `index`,
    `path` (such as `past_key_values.layers.0.keys`, or `buffer cache`), `shape`, `dtype`, `is_close`, `max_diff`,
    `mean_diff`, `reason`. `first_divergence` says where intermediates part, if it was asked for.
    """

    is_valid: bool
    max_diff: float = 0.0
    mean_diff: float = 0.0
    num_outputs: int = 0
    output_details: list[dict[str, Any]] = field(default_factory=list)
    error_message: str | None = None
    first_divergence: str | None = None

    def __str__(self) -> str:
        lines = [f"Verification {'PASSED' if self.is_valid else 'FAILED'}"]
        lines.append(f"  Outputs compared: {self.num_outputs or 'none'}")
        if self.num_outputs:
            lines.append(f"  Max difference: {_figure(self.max_diff)}")
            lines.append(f"  Mean difference: {_figure(self.mean_diff)}")
        if self.error_message:
            lines.append(_entry("Error", self.error_message))
        if self.first_divergence:
            lines.append(_entry("First divergence", self.first_divergence))
        return "\n".join(lines)


def _figure(difference: float) -> str:
    return f"{difference:.2e}" if math.isfinite(difference) else "none can be given"


def _entry(title: str, text: str) -> str:
    """Further lines stand under the first; of very many the last are counted."""
    lines = text.splitlines()
    if len(lines) > MOST:
        lines[MOST - 1 :] = [f"and {len(lines) - MOST + 1} more; output_details has all"]
    indent = "\n" + " " * (len(title) + 4)
    return f"  {title}: {indent.join(lines)}"


MOST = 12
"""Lines of one entry: a cache of 60 layers has 120 tensors."""
