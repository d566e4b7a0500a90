"""Many configurations at once: which they are, one run as a job, and the table at the end."""

from pipeline.batch.configs import Planned, read_configs
from pipeline.batch.rows import Row
from pipeline.batch.run import run_batch
from pipeline.batch.text import WIDTH, batch_text, print_batch

__all__ = ["WIDTH", "Planned", "Row", "batch_text", "print_batch", "read_configs", "run_batch"]
