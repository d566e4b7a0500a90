"""Many configurations at once: find those that patterns name, run each as jobs, and make rows of their outcomes."""

from pipeline.batch.jobs import PlannedRun, read_configs
from pipeline.batch.rows import WIDTH, Row, print_batch
from pipeline.batch.run import run_batch
