"""What a report says in words: who is best, what was chosen on what, and what is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from persafl_lit.report.aggregate import (
    ACCURACY,
    SELECTABLE,
    UNKNOWN,
    SettingRuns,
    TaskRuns,
    best,
    common_seeds,
    final,
    method_of,
    on_common_seeds,
    seed_of,
    seeds_text,
    usable,
    wanted_metrics,
)
from persafl_lit.report.config_keys import NONE, finetune_text, setting_text, text_of
from persafl_lit.report.curves import FEW_POINTS, mean_curve, untrained_and_best
from persafl_lit.report.record import UNCHANGED, Record, model_changed
from persafl_lit.report.table_rows import REFERENCE, curves_of, levels, thinned_curves, too_low
from persafl_lit.report.tables import TextTable, with_spread

DIRECTIONS = {1: "higher is better", -1: "lower is better", 0: "which values are better is not known"}


def verdict(task: TaskRuns) -> str:
    """The best method of a task in one or two sentences."""
    if not task.chosen:
        unchanged = (
            f"; in {_count(sum(task.unchanged.values()), 'run')} the model never changed" if task.unchanged else ""
        )
        return f"No run has finished with a score, so there is nothing to compare yet{unchanged}."
    first, others, kind = task.chosen[0], task.chosen[1:], task.measure.kind
    told = (
        f"test {kind} after fine-tuning {with_spread(first.test)} over {_count(len(first.runs), 'seed')} "
        f"({setting_text(first.setting)})"
    )
    if not others:
        return f"{first.method}: {told}."
    if not first.score.seeds:
        return (
            f"{_count(len(task.chosen), 'method')}, none with a validation score, so none is called best. The "
            f"first, {first.method}: {told}."
        )
    text = f"{first.method} is best of {len(task.chosen)} methods on validation data ({task.select.val}): {told}."
    rival = max(others, key=lambda trial: task.measure.sign * trial.test.mean)
    if task.measure.sign * rival.test.mean > task.measure.sign * first.test.mean:
        text += (
            f" On test data {rival.method} does better ({with_spread(rival.test)}); test data play no part in the "
            "choice."
        )
    return text


def method_words(task: TaskRuns) -> list[str]:
    """How the numbers of a task came about."""
    if not task.chosen:
        return ["None of these runs is a result. The table of runs says what became of them."]
    measure = task.measure
    words = [f"Seeds: {'; '.join(_seeds(trial) for trial in task.chosen)}."]
    words += _choice_words(task)
    if task.unselected:
        words.append(
            f"Not chosen: {', '.join(task.unselected)} tried several settings but have no validation score; "
            "the first setting is shown."
        )
    if measure is not ACCURACY:
        words.append(
            f"There is no accuracy to go by here (no classes, or no validation accuracy): {measure.test} is shown, "
            f"{task.select.val} selected on."
        )
    if task.further:
        names = ", ".join(f"{other.kind} ({DIRECTIONS[other.sign]})" for other in task.further)
        words.append(
            f"Further metrics, of the same models on the same data: {names}. Tables show their mean over clients on "
            "test data, after fine-tuning; clients without a value are left out."
        )
    runs = [record for trials in task.trials.values() for trial in trials for record in trial.runs]
    if all(final(record, task.select.val) == final(record, task.select.test) for record in runs):
        words.append(
            "Validation and test scores are equal in every run, so here the choice has in effect seen the test score."
        )
    words += [*_rule_words(task), *_point_words(task), _column_words(task), _spread_words(task), *_level_words(task)]
    if task.unchanged:
        told = ", ".join(f"{method} {_count(count, 'run')}" for method, count in task.unchanged.items())
        words.append(
            f"No result: in {told} the model never changed (no round was completed). They are chosen, "
            "averaged and compared nowhere."
        )
    if any(trial.begun > len(trial.runs) for trials in task.trials.values() for trial in trials):
        words.append(
            "Some settings have seeds without a result. Means are over the others, which flatters a setting "
            "that fails on hard seeds."
        )
    counted = sum(len(trial.runs) for trials in task.trials.values() for trial in trials)
    repeated = sum(usable(record, measure) for record in task.records) - counted
    if repeated:
        words.append(
            f"{_count(repeated, 'run')} repeated a setting and seed that were there already; the first of each counts."
        )
    return words


def _choice_words(task: TaskRuns) -> list[str]:
    tried = ", ".join(f"{method} {len(trials)}" for method, trials in task.trials.items())
    better = "highest" if task.select.sign > 0 else "lowest"
    words = [
        (
            f"Choice: each method is shown with the setting whose mean {task.select.val} at the end of its runs "
            f"is {better}. "
            f"Test data were used for no choice. Settings with a finished run, per method: {tried}; a method with "
            "more settings had more chances."
        )
    ]
    wanted = wanted_metrics(task.records)
    if len(wanted) > 1:
        words.append(
            f"These runs are of sweeps that choose by different metrics ({', '.join(wanted)}); here "
            f"{task.select.val} decides."
        )
    elif wanted and wanted[0] != task.select.val:
        why = "not every finished run has, or of which it is not known which values are better"
        why = "not every finished run has" if wanted[0] in SELECTABLE else why
        why = why if wanted[0].endswith(".val") else "is no validation score"
        words.append(f"The sweep chooses by {wanted[0]}, which {why}; here {task.select.val} decides.")
    staged: dict[str, list[str]] = {}
    for method, trials in task.trials.items():
        if any(trial.seeds != trials[0].seeds for trial in trials):
            staged.setdefault(_seed_words(trials), []).append(method)
    return words + [f"Seeds of the choice, {', '.join(methods)}: {text}" for text, methods in staged.items()]


def _seed_words(trials: Sequence[SettingRuns]) -> str:
    """Which seeds decided, where settings have different ones."""
    chosen, common = best(trials), common_seeds(trials)
    rivals = [trial for trial in trials if trial is not chosen]
    first = best(on_common_seeds(trials)).setting
    later = [seed for seed in chosen.seeds if seed not in common]
    if common and later and first == chosen.setting and all(trial.begun < chosen.begun for trial in rivals):
        return (
            f"the setting was chosen on {seeds_text(common)}, which all settings have, and then run on "
            f"{seeds_text(later)} too."
        )
    text = f"only settings with the most finished seeds ({len(chosen.runs)}) compete, each with the mean over its own."
    if common and first != chosen.setting:
        text += (
            f" On {seeds_text(common)} alone, which all settings have, another would be chosen: {setting_text(first)}."
        )
    return text


def _rule_words(task: TaskRuns) -> list[str]:
    config = task.chosen[0].runs[0].config
    words = [
        (
            f"Curves: every point is test {task.measure.kind} after the same fine-tuning rule, "
            f"{finetune_text(config)}, for every method."
        )
    ]
    etas = {text_of(record.config.get("eta")) for trial in task.chosen for record in trial.runs}
    if config.get("eval.finetune.name") == "sgd" and text_of(config.get("eval.finetune.lr")) == NONE and len(etas) > 1:
        words.append(
            f"The rule's step size is the run's eta, and the chosen settings differ in it ({', '.join(sorted(etas))})."
        )
    curves = [curve for trial in task.chosen if (curve := mean_curve(trial, task.measure.test)) is not None]
    if any(curve.interpolated for curve in curves):
        words.append(
            "Some seeds were evaluated at different times. Their curves are interpolated linearly onto all "
            "times that occur, "
            "as far as every seed goes; a curve can therefore end before the last evaluation, while tables "
            "use each run's own last one."
        )
    if len(curves) < len(task.chosen):
        words.append("Methods without recorded curves are in the table only.")
    return words


def _column_words(task: TaskRuns) -> str:
    text = "Columns: the global model is the shared one without fine-tuning; "
    text += (
        "worst decile is the mean of the worst tenth of clients; the own model is what a client keeps, or what the "
        "method's own rule makes of the shared model; "
    )
    return text + (
        "updates, gradients, communicated bytes and dropped updates are means over seeds, the largest "
        "staleness is over all of them."
    )


def _spread_words(task: TaskRuns) -> str:
    text = "± is the sample standard deviation over seeds (divided by n - 1); with one seed there is none. "
    text += (
        "Intervals are Student's t over seeds, those of differences the paired t test's; seeds of which one also "
        "chose the setting flatter it."
    )
    if any(trial.test.seeds < 2 for trial in task.chosen):
        text += " With one seed there is no interval, and no difference can be told from chance."
    return text


def _level_words(task: TaskRuns) -> list[str]:
    """How times to reach a level are to be read."""
    wanted, curves = levels(task), curves_of(task)
    if not wanted or not curves:
        return []
    text = (
        "Times to reach a level are known to within one evaluation: not reached at the first time that is given, "
        "reached at the second, "
    )
    text += "by the mean curve over seeds; - means not known."
    text += (
        " The levels were asked for."
        if task.levels
        else " The levels were chosen after the fact, from these test curves."
    )
    reference = task.reference(REFERENCE)
    if reference is not None and len(task.chosen) > 1:
        text += (
            f" In brackets: how many times sooner than {reference.method}, at least and at most, as the "
            "evaluations of both allow."
        )
        text += (
            " Without brackets there is no such number: one of the two never reaches the level, or had it from "
            "the start."
        )
        if low := too_low(task):
            start, end = untrained_and_best(curves, task.measure.sign)
            text += f" No speed-up is given at {', '.join(f'{level:g}' for level in low)}: below halfway between"
            text += f" the untrained model ({start:.3f}) and the best method ({end:.3f})."
    return [text]


def _point_words(task: TaskRuns) -> list[str]:
    """Curves that have few points, and why."""
    words = []
    if thinned := thinned_curves(task):
        words.append(
            f"Thinned curves: {thinned} evaluations, to keep evaluation within a quarter of the work; "
            "eval.every sets the interval instead."
        )
    curves = {
        trial.method: curve for trial in task.chosen if (curve := mean_curve(trial, task.measure.test)) is not None
    }
    if few := [f"{method} ({curve.points})" for method, curve in curves.items() if curve.points < FEW_POINTS]:
        words.append(
            f"Curves with fewer than {FEW_POINTS} points, which say little about their course, are marked: "
            f"{', '.join(few)}."
        )
    return words


def missing(records: Sequence[Record], tasks: Sequence[TaskRuns]) -> TextTable:
    """Runs that are in no figure, and why."""
    counted = {id(record): task for task in tasks for record in task.records}
    rows = []
    for record in records:
        task = counted.get(id(record))
        if task is not None and usable(record, task.measure):
            continue
        setting = setting_text(task.setting(record)) if task else ""
        rows.append(
            [method_of(record), setting, seed_of(record), record.status, _reason(record, task), str(record.run_id)]
        )
    return TextTable(("method", "setting", "seed", "status", "why", "run"), rows, long=frozenset({"setting", "why"}))


def _reason(record: Record, task: TaskRuns | None) -> str:
    if record.error:
        return record.error
    if record.pruned:
        return "pruned: its sweep stopped it because others did better"
    if task is None:
        return f"its config does not name a method {UNKNOWN}"
    if record.status == "FINISHED" and not model_changed(record.summary):
        return UNCHANGED
    reasons = {
        "RUNNING": "still running",
        "KILLED": "interrupted; can be resumed",
        "FAILED": "failed without a recorded error",
    }
    return reasons.get(
        record.status, f"no finite test {task.measure.kind} recorded" if record.status == "FINISHED" else "not finished"
    )


def _seeds(trial: SettingRuns) -> str:
    names = ", ".join(seed_of(record) for record in trial.runs)
    short = "" if trial.begun == len(trial.runs) else f" of {trial.begun} begun"
    alone = "" if len(trial.runs) > 1 or math.isfinite(trial.test.std) else ", so no spread is known"
    return f"{trial.method} {len(trial.runs)}{short} ({names}{alone})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
