"""When each client reads and sends. numpy only; nothing here knows about models."""

from persafl_lit.timeline.delays import DELAYS, Delays, RandomDelays
from persafl_lit.timeline.schedules import SCHEDULES, Asynchronous, Drawn, Replay, Rounds, Schedule, Setting
from persafl_lit.timeline.timeline import Activity, Job, Timeline, check_timeline, from_csv, jobs_to_timeline

__all__ = [
    "DELAYS",
    "SCHEDULES",
    "Activity",
    "Asynchronous",
    "Delays",
    "Drawn",
    "Job",
    "RandomDelays",
    "Replay",
    "Rounds",
    "Schedule",
    "Setting",
    "Timeline",
    "check_timeline",
    "from_csv",
    "jobs_to_timeline",
]
