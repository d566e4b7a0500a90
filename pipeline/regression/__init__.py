"""What a run came to, as a small text file to review and to keep in git: a baseline.

baseline.py   a run's report → plain data     text.py   plain data ↔ the file     compare.py   what is otherwise now
"""

from __future__ import annotations

from pipeline.regression.baseline import baseline_of
from pipeline.regression.compare import changes
from pipeline.regression.text import check_place, file_beside, read_baseline, write_baseline

__all__ = ["baseline_of", "changes", "check_place", "file_beside", "read_baseline", "write_baseline"]
