"""Run many configurations: find them, run each as a job, and print a table at the end."""

from pipeline.batch.configs import PlannedRun, read_configs
from pipeline.batch.run import WIDTH, Row, batch_text, print_batch, run_batch

__all__ = ["WIDTH", "PlannedRun", "Row", "batch_text", "print_batch", "read_configs", "run_batch"]
