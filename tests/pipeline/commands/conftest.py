from __future__ import annotations

from tests.support.run_fixtures import config_file, config_in, small_config

__all__ = ["config_file", "config_in", "small_config"]
