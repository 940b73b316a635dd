"""Serial, worker processes, a Ray cluster: the same jobs, the same bits."""

from persafl_lit.engine.executors.executor import Evaluation, Executor, Serial
from persafl_lit.engine.executors.processes import Processes
from persafl_lit.engine.executors.worker import PRECISIONS, Work, Worker, make_fabric

__all__ = ["PRECISIONS", "Evaluation", "Executor", "Processes", "Serial", "Work", "Worker", "make_fabric"]
