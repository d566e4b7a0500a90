from __future__ import annotations

from tests.support.run_fixtures import command_line, config_file, config_in

__all__ = ["command_line", "config_file", "config_in"]
