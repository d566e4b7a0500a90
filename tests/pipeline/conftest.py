from __future__ import annotations

from tests.support.run_fixtures import small_config

__all__ = ["small_config"]
