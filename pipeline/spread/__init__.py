"""Jobs over processes of this machine or over a Ray cluster, with a table that knows what is done."""

from pipeline.spread.choose import spread_over
from pipeline.spread.job import Job, Outcome, Spread, State
from pipeline.spread.local import LocalProcesses
from pipeline.spread.run import Ended, run_jobs

__all__ = ["Ended", "Job", "LocalProcesses", "Outcome", "Spread", "State", "run_jobs", "spread_over"]
