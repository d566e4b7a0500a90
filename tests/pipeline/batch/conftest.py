from __future__ import annotations

from tests.support.run_fixtures import running_workers, small_config

__all__ = ["running_workers", "small_config"]
