"""What the theorems say against what happens: measured over T and tau, floors, limits, and a schedule that breaks
Assumption 1.

Every study simulates Algorithms 1 and 2 (`simulation.py`) on problems with known constants (`problems/`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from persafl_lit.common.limits import cores
from persafl_lit.theory import fedasync_limit, floors, uneven_schedule
from persafl_lit.theory.bounds import Option
from persafl_lit.theory.over_time import over_time_and_staleness, personal_constants, set_up, times
from persafl_lit.theory.study import Settings, Study, Tick


def study(option: Option, settings: Settings, tick: Tick = lambda what, updates: None) -> Study:
    """Everything about one option."""
    problem, theorem, about = set_up(option, settings)
    found = Study(
        option,
        {name: value for name, value in asdict(problem.constants).items() if name != "affine"}
        | personal_constants(theorem),
    )
    over_time_and_staleness(found, problem, theorem, about, settings, tick)
    if option == "a":
        uneven_schedule.uneven_schedule(found, settings, tick)
    elif option == "b":
        floors.maml_floor(found, settings, tick)
        fedasync_limit.recovers_fedasync(found, settings, tick)
    else:
        floors.moreau_floor(found, settings, tick)
        fedasync_limit.recovers_fedasync(found, settings, tick)
    return found


def updates_of(option: Option, settings: Settings) -> int:
    """Server updates that a study simulates, for a progress bar."""
    further = {
        "a": 2 * uneven_schedule.UNEVEN_T if settings.clients > 1 else 0,
        "b": floors.FLOOR_T + fedasync_limit.LIMIT_T,
        "c": floors.FLOOR_T + fedasync_limit.LIMIT_T,
    }
    return max(times(set_up(option, settings)[1], option)) + further[option]


def studies(options: Sequence[Option], settings: Settings, tick: Tick = lambda what, updates: None) -> list[Study]:
    """One after the other in this process, or several options in a process each, as far as there are cores."""
    lanes = min(len(options), cores())
    if lanes < 2:
        return [study(option, settings, tick) for option in options]
    context = get_context("spawn")
    progress: Any = context.SimpleQueue()
    longest_first = sorted(options, key=lambda option: option != "c")
    with ProcessPoolExecutor(lanes, context, _report_to, (progress,)) as pool:
        work = {option: pool.submit(_study_with_progress, option, settings) for option in longest_first}
        going = True
        while going:
            ended = wait(work.values(), timeout=0.2, return_when=FIRST_EXCEPTION)
            going = bool(ended.not_done) and not any(one.exception() for one in ended.done)
            while not progress.empty():
                tick(*progress.get())
        return [work[option].result() for option in options]


def _report_to(queue: Any) -> None:
    """In a process of the pool: where progress goes."""
    global _progress_queue
    _progress_queue = queue


_progress_queue: Any = None


def _study_with_progress(option: Option, settings: Settings) -> Study:
    return study(option, settings, lambda what, updates: _progress_queue.put((what, updates)))


def study_report(studies: Iterable[Study], settings: Settings) -> dict[str, Any]:
    """The object that `persafl theory --json` prints."""
    found = list(studies)
    return {
        "settings": asdict(settings),
        "rows": [row for one in found for row in one.rows],
        "checks": [asdict(check) for one in found for check in one.checks],
        "studies": [one.summary() for one in found],
        "passed": all(check.passed for one in found for check in one.checks),
    }
