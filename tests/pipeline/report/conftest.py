from __future__ import annotations

from tests.support.browser import browser
from tests.support.run_fixtures import config_file, config_in

__all__ = ["browser", "config_file", "config_in"]
