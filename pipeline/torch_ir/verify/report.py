"""What came of a verification."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["VerificationReport"]


@dataclass
class VerificationReport:
    """`max_diff` and `mean_diff` are the largest of all outputs.

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
        lines = [
            f"Verification {'PASSED' if self.is_valid else 'FAILED'}",
            f"  Outputs compared: {self.num_outputs}",
            f"  Max difference: {self.max_diff:.2e}",
            f"  Mean difference: {self.mean_diff:.2e}",
        ]
        if self.error_message:
            lines.append(f"  Error: {self.error_message}")
        if self.first_divergence:
            lines.append(f"  First divergence: {self.first_divergence}")
        return "\n".join(lines)
