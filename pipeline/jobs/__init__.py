"""Run jobs in processes of this machine or on a Ray cluster, and record their outcomes in a table."""

from pipeline.jobs.job import Job, JobExecutor, JobStatus, LocalProcesses, Outcome
from pipeline.jobs.run import JobProgress, choose_executor, run_jobs

__all__ = ["Job", "JobExecutor", "JobProgress", "JobStatus", "LocalProcesses", "Outcome", "choose_executor", "run_jobs"]
