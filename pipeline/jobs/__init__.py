"""Jobs over processes of this machine or over a Ray cluster, with a table that knows what is done."""

from pipeline.jobs.job import Job, Outcome, Spread, State
from pipeline.jobs.local import LocalProcesses
from pipeline.jobs.run import Ended, run_jobs, spread_over

__all__ = ["Ended", "Job", "LocalProcesses", "Outcome", "Spread", "State", "run_jobs", "spread_over"]
