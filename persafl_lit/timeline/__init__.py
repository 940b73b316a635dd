"""When each client reads and sends. numpy only; nothing here knows about models."""

from persafl_lit.timeline.delays import DELAYS, Delays
from persafl_lit.timeline.jobs import Activity, Job, Timeline, from_csv
from persafl_lit.timeline.schedules import SCHEDULES, Asynchronous, Drawn, Replay, Rounds, Setting

__all__ = [
    "DELAYS",
    "SCHEDULES",
    "Activity",
    "Asynchronous",
    "Delays",
    "Drawn",
    "Job",
    "Replay",
    "Rounds",
    "Setting",
    "Timeline",
    "from_csv",
]
