"""Attention whose projections, weights or scores are written in unusual ways, each with the weights that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.passes.structures.tricky_cores import CORES
from tests.passes.structures.tricky_model import Tricky
from tests.passes.structures.tricky_places import CACHES, NESTED
from tests.passes.structures.tricky_projections import PROJECTIONS

TRICKY: Mapping[str, Callable[[], Tricky]] = {**PROJECTIONS, **CORES, **CACHES, **NESTED}
