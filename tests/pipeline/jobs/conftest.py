from __future__ import annotations

import os
import sys

import pytest


@pytest.fixture
def environment() -> dict[str, str]:
    """For a Python of our own that finds the same modules."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
