"""The example that writes a model by hand runs, and learns."""

from __future__ import annotations

from pathlib import Path

import author_digits


def test_a_model_by_hand_learns_digits_and_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    found = author_digits.run(3, path, quiet=True)
    assert found.samples == 360
    assert found.metrics["accuracy"] > 0.9  # seen: 96 %
    assert author_digits.run(3, path, quiet=True) == found
