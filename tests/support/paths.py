"""Where the checkout lies."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["EXAMPLES", "ROOT", "TESTS"]

ROOT: Final = Path(__file__).resolve().parents[2]
TESTS: Final = ROOT / "tests"
EXAMPLES: Final = ROOT / "examples"
