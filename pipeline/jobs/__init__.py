"""Run jobs in processes of this machine or on a Ray cluster, and record their outcomes in a table."""

from passes.doors import list_names
from pipeline.jobs.job import Job as Job
from pipeline.jobs.job import JobExecutor as JobExecutor
from pipeline.jobs.job import JobStatus as JobStatus
from pipeline.jobs.job import LocalProcesses as LocalProcesses
from pipeline.jobs.job import Outcome as Outcome
from pipeline.jobs.run import JobProgress as JobProgress
from pipeline.jobs.run import choose_executor as choose_executor
from pipeline.jobs.run import run_jobs as run_jobs

list_names(__name__)
