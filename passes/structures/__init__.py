"""Structures that a policy can keep, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from passes.structures.base import Found, Instance, KeptWeight, Structure
from passes.structures.qkv import SeparateQKV

__all__ = ["STRUCTURES", "Found", "Instance", "KeptWeight", "Structure"]

STRUCTURES: Final[Mapping[str, Structure]] = {"qkv": SeparateQKV()}
