"""A search that learns: Optuna proposes settings from what earlier ones came to, and gives bad trials up at
evaluations.

The only file that imports Optuna. Its storage is beside the store; a search that was interrupted goes on with the
settings it had proposed. What is proposed depends on the order in which trials end: unlike a grid, a search is not
reproducible to the bit.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna

from persafl_lit.common.logs import quieted
from persafl_lit.errors import ConfigError
from persafl_lit.sweep.plan import Block, Choice, Plan, Range
from persafl_lit.sweep.results import Outcome
from persafl_lit.sweep.run_trial import TrialMessage
from persafl_lit.sweep.trials import Trial, Varied, make_trial, rounded

STATES = optuna.trial.TrialState
BEFORE_PRUNING = 4
"""Trials that run to their end before any is given up."""


class BlockSearch:
    """One block's search."""

    def __init__(self, plan: Plan, block: Block, storage: Any) -> None:
        assert plan.search is not None
        self.plan, self.block, self.wanted = plan, block, plan.search.trials
        self.example = make_trial(plan, block, _end(block, 0), plan.seeds[0])
        kept = {study.study_name: study for study in optuna.get_all_study_summaries(storage)}
        # Known by what it searches, so that a file that was changed begins a search of its own.
        what = repr((block.fixed, block.varied, plan.seeds[0], plan.overrides, plan.select.metric))
        name = f"{plan.name} {hashlib.sha256(what.encode()).hexdigest()[:16]}"
        begun = kept[name].n_trials if name in kept else 0
        self.study = optuna.create_study(
            storage=storage,
            study_name=name,
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=plan.search.seed + begun, constant_liar=True),
            pruner=optuna.pruners.MedianPruner(BEFORE_PRUNING, 1) if plan.search.prune else optuna.pruners.NopPruner(),
        )
        interrupted = [found for found in self.study.get_trials(deepcopy=False) if found.state == STATES.RUNNING]
        self._left = [optuna.trial.Trial(self.study, found._trial_id) for found in reversed(interrupted)]

    def done(self) -> int:
        return len(self.study.get_trials(deepcopy=False))

    def ended(self) -> list[optuna.trial.FrozenTrial]:
        return [found for found in self.study.get_trials(deepcopy=False) if found.state.is_finished()]

    def reported(self, proposed: optuna.trial.Trial) -> Collection[int]:
        """The evaluations that Optuna knows of a trial."""
        return dict(self.study.get_trials(deepcopy=False)[proposed.number].intermediate_values)

    def ask(self) -> tuple[optuna.trial.Trial, Trial] | None:
        if self._left:
            proposed = self._left.pop()
        elif self.done() < self.wanted:
            proposed = self.study.ask()
        else:
            return None
        setting = {key: _suggest(proposed, key, choice) for key, choice in self.block.varied.items()}
        return proposed, make_trial(self.plan, self.block, setting, self.plan.seeds[0])


class Adaptive:
    """Trials as Optuna proposes them, block after block."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        for block in plan.blocks:
            if not block.varied:
                raise ConfigError(
                    f"{plan.place(block)}: a search needs something to vary; give a key a list or a range"
                )
            make_trial(plan, block, _end(block, -1), plan.seeds[0])  # refused now rather than later
        self._plan = plan
        with quieted({"optuna": logging.ERROR}):
            storage = optuna.storages.RDBStorage(f"sqlite:///{folder.absolute()}/optuna.db")
            self._studies = [BlockSearch(plan, block, storage) for block in plan.blocks]
        self._under_way: dict[str, list[tuple[BlockSearch, optuna.trial.Trial]]] = {}
        self._ended = [(study, found) for study in self._studies for found in study.ended()]
        self._steps: Counter[str] = Counter()

    def total(self) -> int:
        return sum(max(study.wanted, study.done()) for study in self._studies)

    def waiting(self) -> Sequence[Trial]:
        """As many as are to come, with the first values of their ranges."""
        left = [(study, study.wanted - study.done()) for study in self._studies]
        return [study.example for study, count in left for _ in range(count)]

    def settle(self, done: Callable[[Trial], bool]) -> None:
        """Those of an earlier start are the first that are handed out."""

    def next(self) -> Trial | None:
        if self._ended:  # of an earlier start: the store has their results
            study, found = self._ended.pop()
            return make_trial(self._plan, study.block, _setting(study.block, found.params), self._plan.seeds[0])
        for study in self._studies:
            if (asked := study.ask()) is not None:
                proposed, trial = asked
                self._under_way.setdefault(trial.hash, []).append((study, proposed))
                return trial
        return None

    def prunes(self, trial: Trial, message: TrialMessage) -> bool:
        metric = self._plan.select.metric
        value = message["point"].get(metric)
        if (
            value is None or value != value or trial.hash not in self._under_way
        ):  # one that Optuna thought ended is tried again
            return False
        self._steps[trial.hash] += 1
        step = self._steps[trial.hash]
        study, proposed = self._under_way[trial.hash][0]
        if step not in study.reported(proposed):  # a resumed trial tells its evaluations again
            proposed.report(self._plan.select.sign * value, step)
        return message["updates"] < message["total"] and bool(proposed.should_prune())

    def ends(self, outcome: Outcome) -> None:
        for study, proposed in self._under_way.pop(outcome.trial.hash, []):
            score = self._plan.select.score(outcome.summary) if outcome.summary else None
            if score is not None and score == score:
                study.study.tell(proposed, score)
            else:
                study.study.tell(proposed, state=STATES.PRUNED if outcome.status == "pruned" else STATES.FAIL)


def _suggest(proposed: optuna.trial.Trial, key: str, choice: Choice) -> Any:
    if isinstance(choice, Range):
        if choice.whole:
            return proposed.suggest_int(key, int(choice.low), int(choice.high), log=choice.log)
        return rounded(proposed.suggest_float(key, choice.low, choice.high, log=choice.log))
    return choice[
        proposed.suggest_categorical(key, list(range(len(choice))))
    ]  # any value may be listed, not only Optuna's types


def _setting(block: Block, params: Mapping[str, Any]) -> Varied:
    """A setting again from what Optuna keeps of it."""
    return {
        key: choice[params[key]]
        if not isinstance(choice, Range)
        else params[key]
        if choice.whole
        else rounded(params[key])
        for key, choice in block.varied.items()
    }


def _end(block: Block, which: int) -> Varied:
    return {
        key: (choice.low, choice.high)[which] if isinstance(choice, Range) else choice[which]
        for key, choice in block.varied.items()
    }
