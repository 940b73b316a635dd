"""The report: numbers by hand, what is selected on what, and that nothing a run is called can break the page."""

from __future__ import annotations

import contextlib
import csv
import html
import json
import math
import re
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

import persafl_lit
from persafl_lit.cli import main
from persafl_lit.config.compose import compose
from persafl_lit.config.schema import ADDED, ADDED_BESIDE
from persafl_lit.errors import ConfigError
from persafl_lit.report import write_report
from persafl_lit.report.aggregate import LOSS, spread, tasks_of
from persafl_lit.report.content import content_of
from persafl_lit.report.curves import mean_curve, thresholds, time_to_reach
from persafl_lit.report.palette import COLOURS, KNOWN, PLOTLY_MARKERS, style_of
from persafl_lit.report.plotly_figures import label_text, plot, to_json
from persafl_lit.report.record import Record
from persafl_lit.report.run_overview import draw_run
from persafl_lit.report.schedules import beginning, concurrency, staleness_shares
from persafl_lit.report.table_rows import facts, summary_rows
from persafl_lit.report.tables import TextTable, bytes_text, latex_text, markdown_text, ratio_text, with_spread
from persafl_lit.report.task_charts import charts_of
from persafl_lit.timeline import Activity, Timeline
from persafl_lit.timeline.timeline import jobs_to_timeline
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.messages import PLANNED, PRUNED
from persafl_lit.tracking.store import Store
from persafl_lit.tracking.sweep_runs import SweepRuns
from tests.support.records import record

HOSTILE = "<script>alert(1)</script>|$\\frac$&%{y}\"'`*\x00_"
PAPER = ("fedavg", "per_fedavg", "pfedme", "scaffold", "fedprox", "fedasync", "persafl_maml", "persafl_me")


def task(*records):
    (only,) = tasks_of(records)
    return only


def two_clients() -> Timeline:
    """Client 0 is active on [0, 1] and [2, 4], client 1 on [0, 3]; the third arrival read the model after one."""
    client, reads = np.array([0, 1, 0]), np.array([0, 0, 1])
    return jobs_to_timeline(2, client, reads, np.array([0.0, 0.0, 2.0]), np.array([1.0, 3.0, 4.0]), 4.0)


# -- numbers ----------------------------------------------------------------------------------------------------------


def test_mean_and_sample_deviation_over_seeds():
    chosen = task(record(seed=0, test=(0.0, 0.6)), record(seed=1, test=(0.0, 0.8))).chosen[0]
    assert chosen.test.mean == pytest.approx(0.7)
    assert chosen.test.std == pytest.approx(math.sqrt(0.02))  # ((0.1)^2 + (0.1)^2) / (2 - 1)
    assert with_spread(chosen.test) == "0.700 ± 0.141"


def test_one_seed_has_no_spread():
    assert with_spread(spread([0.5])) == "0.500"
    assert with_spread(spread([math.nan])) == "-"


def curve(times, test, **config):
    """The mean curve of a single run."""
    return mean_curve(task(record(val=test, test=test, times=times, **config)).chosen[0], "accuracy.test")


def test_the_time_of_a_level_is_known_to_within_one_evaluation():
    seen = curve([0.0, 10.0, 30.0], (0.1, 0.5, 0.7))
    assert time_to_reach(seen, 0.3) == (0.0, 10.0)
    assert time_to_reach(seen, 0.6) == (10.0, 30.0)
    assert time_to_reach(seen, 0.7) == (10.0, 30.0)
    assert time_to_reach(seen, 0.1) == (0.0, 0.0), "there from the start"
    assert time_to_reach(seen, 0.71) is None
    assert time_to_reach(curve([0, 10], (0.9, 0.2)), 0.3, sign=-1) == (0, 10)
    assert time_to_reach(curve([0, 1, 2, 3], (0.0, 0.6, 0.2, 0.8)), 0.3) == (0, 1), (
        "the first crossing counts, though the curve falls again"
    )


def test_a_time_is_no_finer_than_the_coarsest_of_the_seeds_grids():
    # Seed 0 is evaluated at 0, 4, 8 and seed 1 at 0, 1, ..., 8; both are 0.1 t. The mean has 0.45 between 4 and 5, but seed 0 tells nothing before 8.
    coarse = record(seed=0, val=(0, 0, 0), test=(0.0, 0.4, 0.8), times=[0, 4, 8])
    fine = record(seed=1, val=[0] * 9, test=[0.1 * time for time in range(9)], times=list(range(9)))
    mean = mean_curve(task(coarse, fine).chosen[0], "accuracy.test")
    assert len(mean.x) == 9
    assert time_to_reach(mean, 0.45) == (4.0, 8.0)


def raced(slow, fast, step=10, **more):
    """FedAvg and another method, evaluated every `step`."""
    runs = [record("fedavg", val=slow, test=slow, times=[step * i for i in range(len(slow))])]
    runs.append(record("fedasync", val=fast, test=fast, times=[step * i for i in range(len(fast))]))
    (found,) = tasks_of(runs, **more)
    return {fact.trial.method: fact.times for fact in facts(found)}


def test_a_speed_up_is_the_range_that_the_evaluations_allow():
    # 50, 80 and 95 % of the way from 0 to 0.8. FedAvg comes to 0.4 between 30 and 40, the other between 10 and 20: from 30/20 to 40/10 times.
    told = raced((0.0, 0.1, 0.2, 0.3, 0.45, 0.5), (0.0, 0.3, 0.6, 0.7, 0.8, 0.8))
    assert list(told["fedavg"]) == pytest.approx([0.4, 0.64, 0.76])
    assert told["fedasync"][0.4] == ((10.0, 20.0), (1.5, 4.0), True)
    assert told["fedasync"][0.4].text() == "10.0 to 20.0 (1.5x to 4x)"
    assert (told["fedavg"][0.4].gain, told["fedavg"][0.4].text()) == (None, "30.0 to 40.0"), (
        "nothing is compared with itself"
    )
    assert told["fedavg"][0.64].text() == "not reached"
    assert told["fedasync"][0.64].text() == "20.0 to 30.0", "no ratio to what was not reached"
    early = raced((0.0, 0.1, 0.2, 0.3, 0.45, 0.5), (0.0, 0.6, 0.8, 0.8, 0.8, 0.8))["fedasync"][0.4]
    assert (early.gain, early.text()) == ((3.0, math.inf), "0.0 to 10.0 (at least 3x)")


def test_bounds_of_a_ratio_are_rounded_to_the_safe_side():
    assert ratio_text(2.6999, 6.01) == "2.6x to 6.1x"
    assert ratio_text(1.5, 4.0) == "1.5x to 4x"
    assert ratio_text(0.0, 123.0) == "at most 130x"
    assert ratio_text(12.34, math.inf) == "at least 12x"
    assert ratio_text(0.0, math.inf) == "cannot be told"


def test_no_speed_up_is_told_below_halfway_from_the_untrained_model_to_the_best():
    # As in the demo: untrained 0.229, the best 0.829, halfway 0.529; FedAvg's best, 0.243, is no level worth timing.
    slow, fast = (0.229, 0.235, 0.240, 0.243), (0.229, 0.6, 0.7, 0.829)
    told = raced(slow, fast)
    assert min(told["fedasync"]) >= (0.229 + 0.829) / 2
    assert {timing.text() for timing in told["fedavg"].values()} == {"not reached"}
    assert not any(timing.gain for timing in told["fedasync"].values())
    asked = raced(slow, fast, levels=[0.243])
    assert (asked["fedavg"][0.243].text(), asked["fedasync"][0.243].text()) == ("20.0 to 30.0", "0.0 to 10.0")
    runs = [record("fedavg", val=slow, test=slow), record("fedasync", val=fast, test=fast)]
    assert (
        "No speed-up is given at 0.243: below halfway between the untrained model (0.229) and the best method (0.829)."
        in words_of(runs, [0.243])
    )


def test_levels_that_are_asked_for_are_the_ones_that_are_timed():
    runs = [
        record("fedavg", test=(0.0, 0.6), times=[0, 60]),
        record("fedasync", test=(0.0, 0.8), val=(0.0, 0.9), times=[0, 20]),
    ]
    (asked,) = tasks_of(runs, levels=[0.3, 0.7])
    assert list(facts(asked)[0].times) == [0.3, 0.7]
    content = content_of(runs, "t", levels=[0.3, 0.7])
    assert {"time to 0.3", "time to 0.7"} <= set(content.parts[0].table.columns)
    assert any("The levels were asked for." in text for text in content.parts[0].words)
    with pytest.raises(ConfigError, match="no accuracy reaches a level above 1; got 70"):
        content_of(runs, "t", levels=[0.3, 70.0])
    losses = [record(metric="loss", val=(9, 2), test=(80.0, 60.0))]
    assert list(facts(tasks_of(losses, levels=[70.0])[0])[0].times.values()) == [((0, 1), None, True)]


@pytest.mark.parametrize("levels", [["x"], ["0.5", "nan"], ["inf"], ["0"], ["-1"]])
def test_levels_that_are_no_scores_are_refused_in_one_sentence(levels, capsys):
    assert main(["report", "t", "--levels", *levels]) == 2
    assert (
        capsys.readouterr().err
        == f"persafl: --levels takes finite numbers above 0, such as 0.5 0.7; got {levels[-1]!r}\n"
    )


def test_without_fedavg_there_is_no_speed_up():
    assert not [key for row in summary_rows(task(record("fedasync")), "") for key in row if "speed" in key]


def test_levels_that_fine_tuning_alone_reaches_are_not_timed():
    # The start is at 0.8 of 0.9: no share of 0.9 but 95 % is above it, so levels lie on the way from 0.8 to 0.9.
    curve = mean_curve(task(record(test=(0.8, 0.9))).chosen[0], "accuracy.test")
    assert thresholds([curve], task(record()).measure) == pytest.approx([0.85, 0.88, 0.895])
    flat = mean_curve(task(record(test=(0.5, 0.5))).chosen[0], "accuracy.test")
    assert thresholds([flat], task(record()).measure) == []


def test_curves_on_different_grids_meet_on_their_union_as_far_as_both_go():
    # Seed 0 is 0.1 t at 0, 2, 4; seed 1 is 0.3 t at 0, 1, 3. Mean 0.2 t, deviation 0.1 t sqrt 2, until t = 3.
    runs = task(
        record(seed=0, val=(0, 0, 0), test=(0.0, 0.2, 0.4), times=[0, 2, 4]),
        record(seed=1, val=(0, 0, 0), test=(0.0, 0.3, 0.9), times=[0, 1, 3]),
    )
    curve = mean_curve(runs.chosen[0], "accuracy.test")
    assert curve.x.tolist() == [0, 1, 2, 3]
    assert curve.mean == pytest.approx([0.0, 0.2, 0.4, 0.6])
    assert curve.std == pytest.approx(np.array([0.0, 0.1, 0.2, 0.3]) * math.sqrt(2))
    assert curve.interpolated
    assert any("interpolated linearly" in text for text in content_of(runs.records, "t").parts[0].words)


def test_curves_on_one_grid_are_not_called_interpolated():
    runs = task(record(seed=0), record(seed=1))
    assert not mean_curve(runs.chosen[0], "accuracy.test").interpolated
    assert not any("interpolated" in text for text in content_of(runs.records, "t").parts[0].words)


def test_concurrency_is_the_time_average_over_windows():
    # Both are active on [0, 1], one on [1, 2], both on [2, 3], one on [3, 4].
    times, shares = concurrency([two_clients()], windows=2)
    assert times.tolist() == [1.0, 3.0]
    assert shares == pytest.approx([0.75, 0.75])
    assert concurrency([two_clients()], windows=4)[1] == pytest.approx([1.0, 0.5, 1.0, 0.5])


def test_staleness_shares_count_arrivals():
    # Arrivals 0, 1, 2 read after 0, 0, 1 arrivals: staleness 0, 1, 1.
    run = record(method__buffer=1)
    assert staleness_shares([with_timeline(run)]) == pytest.approx([1 / 3, 2 / 3])
    cohort = record(method__buffer="cohort", schedule__cohort=3)  # one version per three arrivals: nothing is stale
    assert staleness_shares([with_timeline(cohort)]) == pytest.approx([1.0])


def with_timeline(run, timeline=None):
    return replace(run, timeline=timeline or two_clients())


def test_the_beginning_of_a_schedule_keeps_every_arrival_in_its_window():
    shown = beginning(two_clients(), 3.5, clients=1)
    assert (shown.clients, shown.horizon) == (1, 3.5)
    assert shown.arrives.tolist() == [1.0, 3.0]  # client 1 is not drawn, but its update reaches the server
    assert isinstance(shown.activity, Activity)
    assert shown.activity.read_at.tolist() == [0.0, 2.0]


# -- intervals --------------------------------------------------------------------------------------------------------


def test_the_confidence_interval_of_a_mean_is_students():
    # t(0.975; 2) = 4.302653. Scores 0.6, 0.7, 0.8 have the deviation 0.1, so the mean 0.7 is known to -+ 4.302653 * 0.1 / sqrt 3.
    chosen = task(*(record(seed=seed, test=(0.0, test)) for seed, test in enumerate((0.6, 0.7, 0.8)))).chosen[0]
    assert chosen.test.interval == pytest.approx((0.7 - 0.2484138, 0.7 + 0.2484138), abs=1e-6)
    # t(0.975; 1) = tan(0.475 pi) = 12.7062. Of 0.6 and 0.8 the standard error is 0.1.
    assert spread([0.6, 0.8]).interval == pytest.approx(
        (0.7 - 0.1 * math.tan(0.475 * math.pi), 0.7 + 0.1 * math.tan(0.475 * math.pi))
    )
    assert all(math.isnan(end) for end in spread([0.6]).interval)


def two_methods(seeds=(0, 1, 2)):
    """fedavg is worse than persafl_me by 0.1, 0.2 and 0.3 on the same seeds, though both vary by more from seed to seed."""
    best, behind = {0: 0.5, 1: 0.7, 2: 0.9}, {0: 0.1, 1: 0.2, 2: 0.3}
    runs = [record("persafl_me", seed, val=(0, 0.9), test=(0, best[seed])) for seed in seeds]
    return runs + [record("fedavg", seed, val=(0, 0.8), test=(0, best[seed] - behind[seed])) for seed in seeds]


def test_differences_are_paired_by_seed():
    # Differences -0.1, -0.2, -0.3: mean -0.2, deviation 0.1, -+ 4.302653 * 0.1 / sqrt 3. Unpaired, the scores' deviations would hide it.
    first, second = facts(task(*two_methods()))
    assert (first.trial.method, first.difference) == ("persafl_me", None)
    assert second.difference.mean == pytest.approx(-0.2)
    assert second.difference.interval == pytest.approx((-0.2 - 0.2484138, -0.2 + 0.2484138), abs=1e-6)
    table = content_of(two_methods(), "t").parts[0].table
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["difference to persafl_me"] for row in rows] == ["reference", "-0.200 [-0.448, 0.048]"]
    assert [row["95 % CI"] for row in rows] == ["[0.203, 1.197]", "[0.252, 0.748]"]
    assert "95 % CI is Student's t interval" in table.caption
    assert "paired t test" in table.caption
    (_, written) = csv.DictReader(content_of(two_methods(), "t").files["summary.csv"].splitlines())
    assert (written["difference_to"], float(written["difference_seeds"])) == ("persafl_me", 3)
    assert float(written["difference_ci_low"]) == pytest.approx(-0.4484138, abs=1e-6)
    assert float(written["test_ci_high"]) == pytest.approx(0.5 + 0.2484138, abs=1e-6)


def test_only_seeds_that_both_methods_have_are_paired():
    runs = [run for run in two_methods() if not (run.method == "fedavg" and run.seed == 2)]
    assert facts(task(*runs))[1].difference == (pytest.approx(-0.15), pytest.approx(math.sqrt(0.005)), 2)


def test_one_seed_has_no_interval_and_the_report_says_so():
    table = content_of(two_methods(seeds=(0,)), "t").parts[0].table
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["95 % CI"] for row in rows] == ["-", "-"]
    assert rows[1]["difference to persafl_me"] == "-0.100 (one seed)"
    assert "One seed, so no interval: persafl_me, fedavg." in table.caption


def test_differences_may_be_asked_for_against_a_method():
    table = content_of(two_methods(), "t", against="fedavg").parts[0].table
    assert [row[table.columns.index("difference to fedavg")] for row in table.rows] == [
        "+0.200 [-0.048, 0.448]",
        "reference",
    ]
    with pytest.raises(
        ConfigError, match="no result of 'fedavq' to compare with; there are fedavg, persafl_me. Did you mean 'fedavg'?"
    ):
        content_of(two_methods(), "t", against="fedavq")


# -- runs that are no result, and curves that say little -----------------------------------------------------------------


def untrained(method="fedavg", seed=0, score=0.95):
    """No round was completed: a score that no training earned."""
    summary = {"versions": 0, "model_changed": False, "notes": ["the model never changed"]}
    return replace(record(method, seed, val=(score, score), test=(score, score)), summary=summary)


def test_a_run_whose_model_never_changed_is_shown_but_counts_nowhere(tmp_path):
    runs = [
        untrained("fedavg"),
        record("fedasync"),
        untrained("persafl_me", seed=1),
        record("persafl_me", val=(0, 0.9)),
    ]
    found = task(*runs)
    assert [trial.method for trial in found.chosen] == ["persafl_me", "fedasync"], "not selected"
    assert (found.chosen[0].test.mean, found.chosen[0].test.seeds) == (0.7, 1), "not averaged"
    assert not any(timing.gain for fact in facts(found) for timing in fact.times.values()), "no speed-up over it"
    content = content_of(runs, "t")
    table = content.parts[0].table
    assert dict(zip(table.columns, table.rows[-1], strict=True)) == dict.fromkeys(table.columns, "-") | {
        "method": "fedavg",
        "chosen setting": "no result: the model never changed",
        "versions": "0",
    }
    assert "versions" in content.runs.columns
    assert [row[content.runs.columns.index("test")] for row in content.runs.rows].count(
        "no result: the model never changed"
    ) == 2
    assert [line[4] for line in content.missing.rows] == ["no result: the model never changed"] * 2
    assert "No result: in fedavg 1 run, persafl_me 1 run the model never changed" in " ".join(content.parts[0].words)
    chart = dict(content.parts[0].charts)["accuracy"]
    assert [series.label for series in chart.series][-1] == "fedavg: no result: the model never changed"
    assert "Not drawn, because the model never changed in them: runs of fedavg (1), persafl_me (1)." in chart.caption
    written = {row["method"]: row for row in csv.DictReader(content.files["summary.csv"].splitlines())}
    assert (written["fedavg"]["test_mean"], written["fedavg"]["note"]) == ("", "no result: the model never changed")
    seen = [replace(run, clients=[{"client": 0, "test_accuracy": 0.5}]) for run in runs]
    for name in ("clients.csv", "runs.csv"):
        rows = list(csv.DictReader(content_of(seen, "t").files[name].splitlines()))
        noted = {(row["method"], row["seed"]) for row in rows if row["note"] == "no result: the model never changed"}
        assert noted == {("fedavg", "0"), ("persafl_me", "1")}, name
    write_report(runs, "t", tmp_path)
    assert "no result: the model never changed" in (tmp_path / "accuracy.svg").read_text()
    alone = content_of([untrained()], "t")
    assert "nothing to compare yet; in 1 run the model never changed" in alone.lead[0]
    assert "In 2 of the finished runs the model never changed: they are no results." in content.lead


def test_runs_of_0_1_tell_by_their_versions_whether_the_model_changed():
    old = replace(record(), summary={"versions": 0})
    assert task(old).chosen == []
    assert len(task(replace(old, summary={"versions": 3})).chosen) == 1
    assert len(task(replace(old, summary={"versions": 0, "model_changed": True})).chosen) == 1, (
        "a method that shares nothing"
    )


def test_thinned_curves_and_those_with_few_points_are_marked():
    thinned = replace(
        record("fedavg", val=[0.5] * 6, test=[0.5] * 6), summary={"evaluations": {"made": 6, "thinned_from": 11}}
    )
    content = content_of([thinned, record("fedasync")], "t")
    table = content.parts[0].table
    assert {row[0]: row[table.columns.index("evaluations")] for row in table.rows} == {
        "fedavg": "6 of 11",
        "fedasync": "2",
    }
    chart = dict(content.parts[0].charts)["accuracy"]
    assert "left out to keep within the evaluation budget: fedavg 6 of 11." in chart.caption
    assert {series.label for series in chart.series} == {"fedavg", "fedasync (2 points)"}
    words = " ".join(content.parts[0].words)
    assert "Thinned curves: fedavg 6 of 11 evaluations" in words
    assert "Curves with fewer than 5 points, which say little about their course, are marked: fedasync (2)." in words
    whole = words_of([record(val=[0.5] * 5, test=[0.5] * 5)])
    assert "Thinned" not in whole
    assert "fewer than" not in whole
    assert "6 of 11" in words_of([record(val=[0.5] * 6, test=[0.5] * 6, eval__every=None)]), (
        "a run of 0.1, by its config"
    )


# -- choice -----------------------------------------------------------------------------------------------------------


def test_the_setting_is_chosen_on_validation_even_if_test_prefers_another():
    runs = [
        record(method__lam=lam, seed=seed, val=(0, val), test=(0, test))
        for lam, val, test in ((20, 0.8, 0.6), (30, 0.7, 0.9))
        for seed in (0, 1)
    ]
    chosen = task(*runs).chosen[0]
    assert chosen.setting == (("method.lam", "20"),)
    assert chosen.test.mean == pytest.approx(0.6)


def test_the_best_method_is_named_by_validation_and_the_page_says_if_test_disagrees():
    content = content_of(
        [record("fedavg", val=(0, 0.8), test=(0, 0.6)), record("fedasync", val=(0, 0.7), test=(0, 0.9))], "t"
    )
    assert content.lead[0].startswith("fedavg is best of 2 methods on validation data")
    assert "On test data fedasync does better (0.900)" in content.lead[0]


def test_a_mean_over_seeds_decides_not_the_best_seed():
    lucky = [record(method__lam=1, seed=seed, val=(0, val)) for seed, val in enumerate((0.9, 0.1))]
    steady = [record(method__lam=2, seed=seed, val=(0, 0.6)) for seed in (0, 1)]
    assert task(*lucky, *steady).chosen[0].setting == (("method.lam", "2"),)


def test_of_equal_settings_the_first_by_name_is_chosen_as_a_sweep_chooses():
    runs = [record(method__lam=lam, val=(0, 0.8)) for lam in (30, 20)]
    assert task(*runs).chosen[0].setting == (("method.lam", "20"),)
    sums = [
        record(method__lam=lam, seed=seed, val=(0, val))
        for lam, vals in ((2, (0.1, 0.2, 0.3)), (1, (0.3, 0.2, 0.1)))
        for seed, val in enumerate(vals)
    ]
    assert task(*sums).chosen[0].setting == (("method.lam", "1"),), "in whatever order the seeds are added up"


def two_stages(**config):
    """Of two settings lam=20 is better on seed 0 (0.8 against 0.7), and so run on seeds 1 and 2, where it does badly."""
    first = [
        record(method__lam=lam, val=(0, val), test=(0, test), **config)
        for lam, val, test in ((20, 0.8, 0.75), (30, 0.7, 0.65))
    ]
    return [*first, *(record(method__lam=20, seed=seed, val=(0, 0.2), test=(0, 0.1), **config) for seed in (1, 2))]


def words_of(runs, levels=()):
    return " ".join(content_of(runs, "t", levels).parts[0].words)


def test_settings_are_compared_on_the_seeds_that_all_of_them_have():
    (chart,) = [chart for chart in charts_of(task(*two_stages())) if chart.name == "sensitivity_method.lam"]
    test, val = chart.series
    assert test.y == [0.75, 0.65]  # over three seeds lam=20 would be at 0.95 / 3
    assert val.y == [0.8, 0.7]
    assert "persafl_me: on seed 0 alone, which all settings have." in chart.caption
    runs = [replace(run, config=run.config | {"method.beta": beta}) for run in two_stages() for beta in (1, 2)]
    (heat,) = [chart for chart in charts_of(task(*runs)) if chart.name == "heat_persafl_me"]
    assert heat.values == [[0.8, 0.8], [0.7, 0.7]]
    assert "on seed 0 alone" in heat.caption
    equal = [record(method__lam=lam, seed=seed) for lam in (20, 30) for seed in (0, 1)]
    assert not any("alone" in chart.caption for chart in charts_of(task(*equal)))


def test_settings_without_a_common_seed_are_shown_on_their_own_and_the_caption_says_so():
    runs = [
        record(method__lam=20, seed=0, test=(0, 0.6)),
        record(method__lam=30, seed=1, test=(0, 0.5)),
        record(method__lam=30, seed=2, test=(0, 0.9)),
    ]
    (chart,) = [chart for chart in charts_of(task(*runs)) if chart.name == "sensitivity_method.lam"]
    assert chart.series[0].y == pytest.approx([0.6, 0.7])
    assert "settings share no seed, so each is shown on its own seeds" in chart.caption


def test_the_words_name_the_seed_that_decided_in_two_stages():
    assert task(*two_stages()).chosen[0].test.mean == pytest.approx(0.95 / 3)
    assert (
        "persafl_me: the setting was chosen on seed 0, which all settings have, and then run on seeds 1, 2 too."
        in words_of(two_stages())
    )
    assert "Seeds of the choice" not in words_of(
        [record(method__lam=lam, seed=seed) for lam in (20, 30) for seed in (0, 1)]
    )


def test_the_words_do_not_call_lost_seeds_a_second_stage():
    failed = [record(method__lam=30, seed=seed, status="FAILED", error="DivergenceError: x") for seed in (1, 2)]
    said = words_of([*two_stages(), *failed])
    assert "and then run on" not in said
    assert "only settings with the most finished seeds (3) compete" in said
    # lam=30 was better on the common seed, and the other was run further nevertheless.
    said = words_of(
        [record(method__lam=30, val=(0, 0.9)), *(record(method__lam=20, seed=seed, val=(0, 0.5)) for seed in (0, 1))]
    )
    assert "On seed 0 alone, which all settings have, another would be chosen: method.lam=30." in said


def by_both(lam, accuracy, loss, select="loss.val", **more):
    run = record(method__lam=lam, val=(0, accuracy), test=(0, accuracy - 0.1), **more)
    return replace(run, curves=run.curves | {"loss.val": [9.0, loss], "loss.test": [9.0, loss + 1]}, select=select)


def test_settings_are_chosen_by_the_metric_of_their_sweep_and_everything_says_so():
    runs = [
        by_both(lam, accuracy, loss, method__beta=beta)
        for lam, accuracy, loss in ((20, 0.8, 2.0), (30, 0.7, 1.0))
        for beta in (1, 2)
    ]
    content, chosen = content_of(runs, "t"), task(*runs).chosen[0]
    assert dict(chosen.setting) == {"method.lam": "30", "method.beta": "1"}
    assert chosen.test.mean == pytest.approx(0.6)  # what is reported stays accuracy
    assert "mean loss.val at the end of its runs is lowest" in " ".join(content.parts[0].words)
    row = dict(zip(content.parts[0].table.columns, content.parts[0].table.rows[0], strict=True))
    assert (row["test accuracy"], row["validation accuracy"], row["validation loss (selected on)"]) == (
        "0.600",
        "0.700",
        "1.000",
    )
    (written,) = csv.DictReader(content.files["summary.csv"].splitlines())
    assert (written["selected_on"], float(written["loss.val_mean"])) == ("loss.val", 1.0)
    heat = dict(content.parts[0].charts)["heat_persafl_me"]
    assert (heat.values, heat.metric, heat.sign, heat.rows[heat.marked[0]]) == (
        [[2.0, 2.0], [1.0, 1.0]],
        "loss.val",
        -1,
        "30",
    )
    assert heat.caption.startswith("Mean loss.val")
    rivals = content_of([*runs, replace(by_both(20, 0.9, 5.0), config=record("fedavg").config)], "t")
    assert rivals.lead[0].startswith("persafl_me is best of 2 methods on validation data (loss.val)")


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (
            ("loss.val", "accuracy.val"),
            "sweeps that choose by different metrics (accuracy.val, loss.val); here accuracy.val decides",
        ),
        (
            ("accuracy.test", None),
            "The sweep chooses by accuracy.test, which is no validation score; here accuracy.val decides",
        ),
        ((None, None), "mean accuracy.val at the end of its runs is highest"),
    ],
)
def test_without_one_usable_metric_the_reported_one_decides(tags, said):
    runs = [by_both(20, 0.8, 2.0, tags[0]), by_both(30, 0.7, 1.0, tags[1])]
    assert task(*runs).chosen[0].setting == (("method.lam", "20"),)
    assert said in words_of(runs)


def test_a_metric_that_a_finished_run_lacks_does_not_decide():
    runs = [by_both(20, 0.8, math.nan), by_both(30, 0.7, 1.0)]
    assert task(*runs).chosen[0].setting == (("method.lam", "20"),)
    assert "The sweep chooses by loss.val, which not every finished run has; here accuracy.val decides" in words_of(
        runs
    )
    assert task(by_both(20, 0.8, math.nan, status="RUNNING"), *runs[1:]).select is LOSS, (
        "a run that goes on need not have it yet"
    )


def test_only_what_varies_within_a_method_is_a_setting():
    runs = task(
        record("fedavg", method__beta=1.0),
        record("fedasync", method__beta=0.8),
        record("fedasync", method__beta="1.0", seed=1),
    )
    assert runs.keys == {"fedavg": [], "fedasync": ["method.beta"]}


def test_keys_that_change_nothing_do_not_split_seeds():
    runs = [
        record(seed=seed, executor=name, tracking__experiment=name, eval__every=seed)
        for seed, name in enumerate(("serial", "ray"))
    ]
    assert len(task(*runs).chosen[0].runs) == 2


def test_a_repeated_seed_counts_once():
    runs = task(record(test=(0, 0.5)), record(test=(0, 0.5)), record(seed=1, test=(0, 0.7)))
    assert runs.chosen[0].test.mean == pytest.approx(0.6)
    assert any("1 run repeated" in text for text in content_of(runs.records, "t").parts[0].words)


def test_nothing_is_chosen_across_data_sets():
    content = content_of([record(data__name="mnist", val=(0, 0.9)), record(data__name="cifar10", val=(0, 0.5))], "t")
    assert [part.heading for part in content.parts] == ["data.name=mnist", "data.name=cifar10", "Across data.name"]
    assert "2 different tasks" in content.lead[1]
    texts = [text for _, texts in content.words for text in texts]
    assert len(texts) == len(set(texts))  # what holds for both is said once


def test_a_task_without_classes_is_judged_by_its_loss_and_says_so():
    runs = [
        record(method__lam=lam, metric="loss", val=(9, val), test=(8.0, test))
        for lam, val, test in ((1, 2.0, 3.0), (2, 4.0, 1.0))
    ]
    found = task(*runs)
    assert found.measure is LOSS
    assert found.chosen[0].setting == (("method.lam", "1"),)
    # From 8 down to 3: half, 80 % and 95 % of the way.
    assert list(facts(found)[0].times) == pytest.approx([5.5, 4.0, 3.25])
    assert any("loss.val selected on" in text for text in content_of(runs, "t").parts[0].words)


def test_equal_validation_and_test_scores_are_pointed_out():
    def said(run):
        return any("in effect seen the test score" in text for text in content_of([run], "t").parts[0].words)

    assert said(record(val=(0, 0.5), test=(0, 0.5)))
    assert not said(record(val=(0, 0.5), test=(0, 0.6)))


def test_without_validation_scores_nothing_is_selected_on_test():
    runs = [record(method__lam=lam, val=(math.nan, math.nan), test=(0, test)) for lam, test in ((1, 0.2), (2, 0.9))]
    found = task(*runs)
    assert (found.chosen[0].setting, found.unselected) == ((("method.lam", "1"),), ["persafl_me"])
    assert any(text.startswith("Not chosen: persafl_me") for text in content_of(runs, "t").parts[0].words)


def test_seeds_that_failed_are_counted_and_listed():
    content = content_of(
        [
            record(seed=0),
            record(seed=1, status="FAILED", error="DivergenceError: update 3"),
            record(seed=2, status="RUNNING"),
        ],
        "t",
    )
    row = dict(zip(content.parts[0].table.columns, content.parts[0].table.rows[0], strict=True))
    assert row["seeds"] == "1 of 3"
    assert [line[3:5] for line in content.missing.rows] == [
        ["FAILED", "DivergenceError: update 3"],
        ["RUNNING", "still running"],
    ]
    assert any("flatters" in text for text in content.parts[0].words)


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ("FFF", "3 of 5 planned trials finished; the sweep is still running or was interrupted."),
        ("FFFRR", "3 of 5 planned trials finished; the sweep is still running or was interrupted."),
        ("FFFXX", "3 of 5 planned trials finished; 2 failed."),
        ("FFFXP", "3 of 5 planned trials finished; 1 failed, 1 pruned."),
        ("FFFFF", "5 of 5 runs finished."),
        ("FFFFFR", "5 of 6 runs finished."),  # a second stage that has begun
        ("R", "0 of 5 planned trials finished; the sweep is still running or was interrupted."),
    ],
)
def test_an_unfinished_sweep_says_how_much_was_planned(statuses, said):
    names = {"F": "FINISHED", "R": "RUNNING", "X": "FAILED", "P": "KILLED"}
    runs = [
        replace(record(seed=seed, status=names[status]), pruned=status == "P", planned=5)
        for seed, status in enumerate(statuses)
    ]
    content = content_of(runs, "t")
    assert said in content.lead
    reasons = [row[4] for row in content.missing.rows if row[3] == "KILLED"]
    assert reasons == ["pruned: its sweep stopped it because others did better"] * statuses.count("P")


def test_the_words_name_the_fine_tuning_rule():
    words = content_of([record()], "t").parts[0].words
    assert any("sgd(steps=10, lr=null)" in text for text in words)
    differing = content_of([record("fedavg"), record("local", eta=0.1)], "t").parts[0].words
    assert any("the chosen settings differ in it (0.01, 0.1)" in text for text in differing)


# -- charts -----------------------------------------------------------------------------------------------------------


def test_varied_keys_get_a_sensitivity_chart_and_a_pair_a_heat_map():
    runs = [
        record(method__lam=lam, method__beta=beta, val=(0, lam / 100 + beta)) for lam in (20, 25) for beta in (0.1, 0.2)
    ]
    charts = {chart.name: chart for chart in charts_of(task(*runs, record("fedavg")))}
    by_key = {f"{kind}_method.{key}" for kind in ("sensitivity", "curves") for key in ("lam", "beta")}
    assert {"accuracy", "heat_persafl_me", *by_key} == set(charts)
    test, val = charts["sensitivity_method.lam"].series
    assert val.y == pytest.approx([0.4, 0.45])  # each at the better beta
    assert np.array(charts["heat_persafl_me"].values) == pytest.approx(
        np.array([[0.3, 0.4], [0.35, 0.45]])
    )  # lam down, beta across
    row, column = charts["heat_persafl_me"].marked
    assert (charts["heat_persafl_me"].rows[row], charts["heat_persafl_me"].columns[column]) == ("25", "0.2")


def test_three_varied_keys_get_a_heat_map_per_pair_each_cell_the_best_over_the_third():
    runs = [
        record(method__beta=beta, method__lam=lam, schedule__tau=tau, val=(0, beta + lam / 100 + tau / 1000))
        for beta in (0.1, 0.2) for lam in (20, 30) for tau in (1, 2)
    ]  # fmt: skip
    maps = {chart.name: chart for chart in charts_of(task(*runs)) if chart.name.startswith("heat")}
    assert list(maps) == [
        f"heat_persafl_me_{pair}"
        for pair in ("method.lam_method.beta", "method.lam_schedule.tau", "method.beta_schedule.tau")
    ]
    first = maps["heat_persafl_me_method.lam_method.beta"]
    assert (first.rows, first.columns, first.marked) == (("20", "30"), ("0.1", "0.2"), (1, 1))
    assert np.array(first.values) == pytest.approx(np.array([[0.302, 0.402], [0.402, 0.502]]))  # each at tau=2
    assert "Each cell is the best over schedule.tau, maximised over on validation data." in first.caption
    assert "method.lam=20" in first.notes[0][0]
    assert "schedule.tau=2" in first.notes[0][0]


def test_heat_maps_are_few_and_the_papers_keys_come_first():
    runs = [record(method__beta=i, method__alpha=i, eta=i, schedule__tau=i, val=(0, 0.1 * i)) for i in (1, 2)]
    maps = [chart for chart in charts_of(task(*runs)) if chart.name.startswith("heat")]
    assert [(chart.y_label, chart.x_label) for chart in maps] == [
        ("method.alpha", key) for key in ("method.beta", "schedule.tau", "eta")
    ]
    assert all("3 of 6 pairs of keys are drawn." in chart.caption for chart in maps)
    assert math.isnan(maps[0].values[0][1]), "what was not tried is empty"


def staleness_of(*runs):
    (chart,) = [chart for chart in charts_of(task(*runs)) if chart.name == "staleness"]
    return chart


def test_methods_that_are_never_stale_do_not_flatten_the_others():
    rounds = record("fedavg", method__buffer="cohort", schedule__cohort=3)
    chart = staleness_of(*(with_timeline(run) for run in (rounds, record("fedasync"), record("persafl_me"))))
    (bars,) = chart.series  # both asynchronous methods have the same timeline
    assert (bars.label, bars.style) == ("fedasync, persafl_me", style_of("fedasync"))
    assert bars.y == pytest.approx([1 / 3, 2 / 3])
    assert "share bars, in the colour of the first of them" in chart.caption
    assert "Without bars, because every update has staleness 0: fedavg." in chart.caption
    alone = staleness_of(with_timeline(rounds))
    assert alone.series[0].y == [1.0], "where nobody is stale, that is what is drawn"
    assert "Without bars" not in alone.caption
    assert "share bars" not in alone.caption


@pytest.mark.parametrize(
    ("per_gradient", "labels"),
    [(0.0, ["schedule, mean"]), (0.1, ["fedasync, schedule, mean", "persafl_me, schedule, mean"])],
)
def test_methods_share_a_schedule_only_where_gradients_take_no_time(per_gradient, labels):
    runs = (with_timeline(record(method, delays__per_gradient=per_gradient)) for method in ("fedasync", "persafl_me"))
    (chart,) = [chart for chart in charts_of(task(*runs)) if chart.name == "concurrency"]
    assert [series.label.rpartition(" ")[0] for series in chart.series] == labels


def test_bars_stand_side_by_side_around_their_staleness():
    # All three read the first model, so their updates are 0, 1 and 2 versions late.
    behind = jobs_to_timeline(3, np.array([0, 1, 2]), np.array([0, 0, 0]), np.zeros(3), np.array([1.0, 2.0, 3.0]), 3.0)
    chart = staleness_of(with_timeline(record("fedasync")), with_timeline(record("persafl_me"), behind))
    left, right = plot(chart)["data"]
    assert (left["x"], right["x"]) == ([0.0, 1.0], [0.0, 1.0, 2.0])
    assert (left["width"], left["offset"], right["width"], right["offset"]) == pytest.approx((0.45, -0.45, 0.45, 0.0))


def test_marks_of_clients_are_hollow_so_that_methods_do_not_hide_each_other():
    clients = [{"client": i, "arrivals": i, "test_accuracy": 0.5} for i in range(3)]
    (chart,) = [chart for chart in charts_of(task(replace(record(), clients=clients))) if chart.name == "clients"]
    (trace,) = plot(chart)["data"]
    assert trace["marker"]["symbol"] == "circle-open"
    assert trace["marker"]["opacity"] < 1


def test_the_table_of_methods_begins_with_what_readers_look_for():
    run = record()
    run.curves.update({"accuracy.worst_decile": [0.0, 0.3], "accuracy.global": [0.0, 0.4]})
    table = content_of([run], "t").parts[0].table
    assert table.columns[:7] == (
        "method",
        "chosen setting",
        "test accuracy",
        "95 % CI",
        "worst decile",
        "global model",
        "validation accuracy",
    )
    assert table.rows[0][2:7] == ["0.700", "-", "0.300", "0.400", "0.800"]
    runs = content_of([record(data__name="a"), record(data__name="b")], "t").runs
    assert runs.columns[0] == "method"  # the first column stays in place when a table scrolls


def test_the_picture_of_a_run_has_its_methods_colour(tmp_path):
    curves = {"sim_time": [0, 1], "accuracy.test": [0.1, 0.7], "accuracy.global": [0.1, 0.4]}
    draw_run("persafl_maml", curves, two_clients(), 1, [{"arrivals": 2, "test_accuracy": 0.7}], tmp_path / "run.svg")
    picture = (tmp_path / "run.svg").read_text().lower()
    assert picture.count(style_of("persafl_maml").colour.lower()) >= 5  # two lines, two bars, a mark
    assert not [
        colour
        for colour in COLOURS
        if colour.lower() in picture and colour not in ("#000000", style_of("persafl_maml").colour)
    ]


def spent(method="persafl_me", updates=(0, 10, 20), sent=4000.0, **more):
    """A run that tells what it took: ten gradients per update, and `sent` bytes in all."""
    run = record(method, val=[0.1, 0.4, 0.6], test=[0.1, 0.4, 0.6], times=[0, 1, 2], **more)
    curves = run.curves | {"updates": list(updates), "grad_evals": [10 * count for count in updates]}
    return replace(run, curves=curves, bytes_communicated=sent)


def test_scores_are_drawn_against_time_updates_gradients_and_bytes(tmp_path):
    (chart,) = [chart for chart in charts_of(task(spent(), spent("local", sent=0.0))) if chart.name == "accuracy"]
    drawn = {"time": chart} | dict(chart.others)
    assert {name: other.x_label for name, other in drawn.items()} == {
        "time": "simulated time",
        "updates": "server updates",
        "gradients": "gradient evaluations",
        "bytes": "bytes communicated",
    }
    assert {name: list(other.series[0].x) for name, other in drawn.items()} == {
        "time": [0, 1, 2],
        "updates": [0, 10, 20],
        "gradients": [0, 100, 200],
        "bytes": [0, 2000, 4000],
    }
    nothing = drawn["bytes"].series[1]
    assert (list(nothing.x), list(nothing.y)) == ([0.0], [0.6]), "one that sends nothing is its last evaluation"
    assert "a single mark at 0" in drawn["bytes"].caption
    files = {file.name for file in write_report([spent()], "t", tmp_path)}
    assert {"accuracy.png", "accuracy_updates.png", "accuracy_gradients.png", "accuracy_bytes.png"} <= files
    markdown = (tmp_path / "report.md").read_text()
    assert "(accuracy_bytes.png)" in markdown


def test_evaluations_between_two_updates_are_one_place_on_the_axis_of_updates():
    (chart,) = [chart for chart in charts_of(task(spent(updates=(0, 0, 20)))) if chart.name == "accuracy"]
    assert list(dict(chart.others)["updates"].series[0].x) == [0, 20]


def test_each_value_of_a_varied_key_has_its_curve():
    runs = [record(method__lam=lam, val=[0.1] * 5, test=[0.1, 0.2, 0.3, 0.4, lam / 100]) for lam in (50, 6)]
    (chart,) = [chart for chart in charts_of(task(*runs)) if chart.name == "curves_method.lam"]
    assert [(series.label, series.y[-1]) for series in chart.series] == [("lam=6", 0.06), ("lam=50", 0.5)]
    assert len({series.style.colour for series in chart.series}) == 2
    both = [record(method, method__beta=beta) for method in ("fedavg", "fedasync") for beta in (1, 2)]
    names = [chart.name for chart in charts_of(task(*both)) if chart.name.startswith("curves")]
    assert names == ["curves_method.beta_fedavg", "curves_method.beta_fedasync"]


def test_the_same_method_of_two_targets_is_told_apart():
    runs = [
        replace(record("fedavg", val=(0, val)), target=target, target_number=number)
        for number, (target, val) in enumerate((("A", 0.5), ("B", 0.6)))
    ]
    found = task(*runs)
    assert [trial.method for trial in found.chosen] == ["fedavg (B)", "fedavg (A)"]
    first, second = found.chosen
    assert first.style.colour == second.style.colour == style_of("fedavg").colour
    assert first.style.dash != second.style.dash
    assert found.reference("fedavg") is not None
    assert "difference to fedavg (B)" in content_of(runs, "t").parts[0].table.columns
    differing = [replace(run, config=run.config | {"method.buffer": number}) for number, run in enumerate(runs)]
    assert [trial.setting for trial in task(*differing).chosen] == [
        (("method.buffer", "1"),),
        (("method.buffer", "0"),),
    ], "also by their settings"


def test_a_method_of_two_targets_is_compared_with_the_firsts_unless_its_target_is_named():
    runs = [
        replace(record(method, val=(0, val)), target=target, target_number=number)
        for number, (target, vals) in enumerate((("A", (0.5, 0.4)), ("B", (0.6, 0.7))))
        for method, val in zip(("fedavg", "persafl_me"), vals, strict=True)
    ]
    for asked, name in (("fedavg", "fedavg (A)"), ("fedavg (B)", "fedavg (B)")):
        table = content_of(runs, "t", against=asked).parts[0].table
        column = table.columns.index(f"difference to {name}")
        assert [row[0] for row in table.rows if row[column] == "reference"] == [name]
        (task_of_all,) = tasks_of(runs[::-1], (), asked)
        assert task_of_all.reference(None).method == name, "whatever the order of the runs"


def test_a_key_that_can_be_null_has_a_place_for_it():
    (chart,) = [
        chart
        for chart in charts_of(task(*(record(schedule__tau=tau) for tau in (10, None, 2))))
        if chart.name == "sensitivity_schedule.tau"
    ]
    assert [text for _, text in chart.ticks] == ["2", "10", "null"]


def test_every_known_method_has_its_own_colour_and_marker():
    looks = [style[:2] for style in KNOWN.values()]
    assert len(set(looks)) == len(looks)
    assert len({style_of(method).colour for method in PAPER}) == len(PAPER)


def test_an_unknown_method_always_gets_the_same_style_and_never_a_known_one():
    style = style_of("my_method")
    assert style == style_of("my_method")
    assert style.colour in COLOURS
    assert style.marker in PLOTLY_MARKERS
    assert all(style_of(f"method {i}")[:2] not in {known[:2] for known in KNOWN.values()} for i in range(200))


def test_a_method_has_one_colour_in_page_and_figures(tmp_path):
    runs = [
        record(method, seed=seed, val=[0.8] * 5, test=(0.1, 0.1, 0.1, 0.1, value + 0.1 * seed), method__lam=value)
        for method, value in (("persafl_me", 0.5), ("fedavg", 0.4), ("mine", 0.3))
        for seed in (0, 1)
    ]
    runs += [
        record(method, val=[0.7] * 5, test=[0.7] * 5, method__lam=9) for method in ("persafl_me", "fedavg", "mine")
    ]
    write_report(runs, "t", tmp_path)
    page = charts_in((tmp_path / "report.html").read_text())
    for method in ("persafl_me", "fedavg", "mine"):
        lines = [
            trace["line"]["color"]
            for plotted in page.values()
            for trace in plotted["data"]
            if trace.get("name") == method and "line" in trace
        ]
        assert len(lines) >= 3
        assert set(lines) == {style_of(method).colour}
        assert style_of(method).colour.lower() in (tmp_path / "accuracy.svg").read_text().lower()


# -- text that came from elsewhere ------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """What a browser would see of a page: tags with attributes, and the text outside scripts."""

    def __init__(self):
        super().__init__()
        self.tags, self.text, self._open = [], "", []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._open.append(tag)

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1] not in ("script", "style"):
            self.text += data


def read(page):
    reader = Reader()
    reader.feed(page)
    return reader


def charts_in(page):
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)[1])


def hostile_records():
    runs = [
        record(HOSTILE, seed=seed, method__note=note, schedule__name=HOSTILE)
        for seed in (0, 1)
        for note in (HOSTILE, "plain")
    ]
    runs = [with_timeline(run) for run in runs]
    return [
        *runs,
        record(
            HOSTILE,
            status="FAILED",
            error=f"Boom: {HOSTILE}\nsecond line",
            method__note=HOSTILE,
            seed=7,
            schedule__name=HOSTILE,
        ),
    ]


def test_names_and_errors_are_text_in_the_page(tmp_path):
    write_report(hostile_records(), HOSTILE, tmp_path)
    page = (tmp_path / "report.html").read_text()
    seen = read(page)
    assert [tag for tag, _ in seen.tags].count("script") == 3
    assert "<script>alert(1)</script>" in seen.text
    assert "alert(1)" not in page.replace(html.escape("<script>alert(1)</script>"), "").replace(
        "\\u0026lt;script\\u0026gt;alert(1)\\u0026lt;/script\\u0026gt;", ""
    )
    for plotted in charts_in(page).values():
        assert "<script" not in json.dumps(plotted)


def test_markdown_cells_cannot_be_broken():
    line = TextTable(("a", "b"), [["x|y\nz", "<b>*`[]\\"]]).markdown().splitlines()[2]
    assert line == r"| x\|y z | &lt;b&gt;\*\`\[\]\\ |"
    assert markdown_text("a & b") == "a &amp; b"


def test_plotly_labels_and_embedded_json_are_escaped():
    assert label_text('<b onclick="x">& $x$') == '&lt;b onclick="x"&gt;&amp; &#36;x&#36;'
    assert to_json({"a": ["</script>", math.nan, math.inf]}) == '{"a":["\\u003c/script\\u003e",null,null]}'
    (chart,) = [chart for chart in charts_of(task(record("<i>me</i>"))) if chart.name == "accuracy"]
    (trace,) = plot(chart)["data"]
    assert trace["name"] == "&lt;i&gt;me&lt;/i&gt; (2 points)"
    assert trace["hovertemplate"] == "%{text}<extra></extra>"


def test_latex_cells_cannot_be_broken():
    assert latex_text("a_b & 50% of $x$ {#1} \\input ~^") == (
        r"a\_b \& 50\% of \$x\$ \{\#1\} \textbackslash{}input \textasciitilde{}\textasciicircum{}"
    )
    assert latex_text("0.7 ± 0.1\n[x]") == r"0.7 $\pm$ 0.1 {[}x{]}"
    text = TextTable(("a", "n"), [["x & y", "-1"]], frozenset({"n"}), caption="50 %").latex()
    assert text.splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{50 \%}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"a & n \\",
        r"\midrule",
        r"x \& y & {-}1 \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX on this machine")
def test_latex_tables_compile_whatever_names_are_in_them(tmp_path):
    many = [
        replace(record(HOSTILE, seed=seed, method__lam=lam), clients=[{"client": 0, "arrivals": 1.0}])
        for seed in range(30)
        for lam in (1, 2)
    ]
    write_report([*many, *hostile_records(), untrained(HOSTILE)], HOSTILE, tmp_path)
    inputs = "\n".join(f"\\input{{{file.stem}}}" for file in sorted(tmp_path.glob("*.tex")))
    packages = r"\documentclass{article}\usepackage[T1]{fontenc}\usepackage{booktabs,graphicx,longtable}"
    (tmp_path / "all.latex").write_text(f"{packages}\\begin{{document}}\n{inputs}\n\\end{{document}}\n")
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "-no-shell-escape", "all.latex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


def test_csv_files_keep_hostile_names_whole(tmp_path):
    write_report(hostile_records(), "t", tmp_path)
    with open(tmp_path / "runs.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == {HOSTILE}
    assert rows[-1]["error"] == f"Boom: {HOSTILE}\nsecond line"


# -- files ------------------------------------------------------------------------------------------------------------


def test_every_file_exists_and_the_page_loads_nothing(tmp_path):
    runs = [with_timeline(record(method, seed=seed)) for method in ("fedavg", "persafl_me") for seed in (0, 1)]
    files = write_report(runs, "sweep", tmp_path / "new" / "folder")
    assert all(file.stat().st_size for file in files)
    names = {file.name for file in files}
    tables = {f"{stem}.{kind}" for stem in ("summary", "runs", "clients") for kind in ("csv", "tex")}
    assert {"report.html", "report.md", "curves.csv"} | tables <= names
    assert {
        f"{stem}.{suffix}" for stem in ("accuracy", "concurrency", "staleness", "schedule") for suffix in ("png", "svg")
    } <= names
    page = (tmp_path / "new" / "folder" / "report.html").read_text()
    library = max(re.findall(r"<script>(.*?)</script>", page, re.DOTALL), key=len)
    assert page.count("plotly.js v") == 1
    assert not re.search(r"https?://|//cdn|@import|url\(", page.replace(library, ""))
    for tag, attributes in read(page).tags:
        assert all(
            value.startswith("data:") for key, value in attributes.items() if key in ("src", "href", "srcset")
        ), tag
    markdown = (tmp_path / "new" / "folder" / "report.md").read_text()
    assert set(re.findall(r"\]\(([^)]+)\)", markdown)) <= names


def test_the_same_records_give_the_same_bytes(tmp_path):
    runs = [with_timeline(record(seed=seed)) for seed in (0, 1)]
    first, second = (write_report(runs, "t", tmp_path / name) for name in "ab")
    for one, other in zip(first, second, strict=True):
        if one.name != "schedule.svg":  # timeline.drawing writes a date into it
            assert one.read_bytes() == other.read_bytes(), one.name


bare = Record("r", "FINISHED", {})


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "There are no runs in this report."),
        ([bare], "None of them says which method it ran"),
        ([record(status="RUNNING")], "No run has finished with a score"),
        ([Record("r", "FAILED", {"method.name": "fedavg"}, "ConfigError: no")], "ConfigError: no"),
        (
            [
                Record(
                    "r",
                    "FINISHED",
                    {"method.name": "fedavg", "seed": 1},
                    summary={"accuracy": {"val": 0.5, "test": 0.4}},
                )
            ],
            "fedavg: test accuracy after fine-tuning 0.400 over 1 seed",
        ),
        ([record(test=(0.1, None), val=(0.1, None))], "no finite test accuracy recorded"),
        ([record(test=(), val=(), times=[])], "no finite test accuracy recorded"),
        ([record(test=(0.5,), val=(0.5,), times=[0])], "so no spread is known"),
        (
            [
                Record(
                    "r",
                    "FINISHED",
                    {"method.name": "m"},
                    curves={"sim_time": [0, 1], "accuracy.test": [0.5], "accuracy.val": [1, 2]},
                    summary={},
                )
            ],
            "no finite test accuracy",
        ),
        (
            [
                Record(
                    "r",
                    "FINISHED",
                    record().config,
                    curves=record().curves,
                    clients=[{"client": 0}, {"client": 1, "arrivals": None, "test_accuracy": 0.5}],
                )
            ],
            "persafl_me",
        ),
        (
            [
                Record(
                    "r",
                    "FINISHED",
                    record().config,
                    curves=record().curves,
                    timeline=jobs_to_timeline(2, *np.zeros((2, 0), dtype=np.int64), *np.zeros((2, 0)), 0.0),
                )
            ],
            "persafl_me",
        ),
    ],
)
def test_whatever_is_missing_the_report_says_so(tmp_path, records, said):
    write_report(records, "", tmp_path)
    assert said in read((tmp_path / "report.html").read_text()).text
    assert said in html.unescape((tmp_path / "report.md").read_text())


def test_sizes_are_written_in_units():
    assert [bytes_text(value) for value in (0.0, 999.0, 1000.0, 2.5e6, 7e15, None)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "2.5 MB",
        "7000.0 TB",
        "-",
    ]


def test_importing_the_label_picture_loads_no_plotting_library():
    probe = "import sys, persafl_lit.report.label_counts, persafl_lit.report.record; print(sorted({'plotly', 'matplotlib', 'torch', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=persafl_lit.__path__[0] + "/.."
    )
    assert done.stdout.strip() == "[]"


def test_real_runs_make_a_report(tmp_path):
    common = [
        "model=logistic",
        "clients=6",
        "updates=40",
        "local_steps=2",
        "tracking.enabled=false",
        "checkpoint.every=0",
        "executor=serial",
    ]
    runs = []
    for method in (
        ["method=fedavg", "schedule.cohort=3"],
        ["method=persafl_me", "method.lam=20"],
        ["method=persafl_me", "method.lam=30"],
    ):
        result = persafl_lit.run([*common, *method])
        summary = json.loads(json.dumps(result.summary()))
        runs.append(
            Record(
                "".join(method),
                "FINISHED",
                result.config.flat(),
                None,
                summary,
                result.curves(),
                result.clients(),
                result.timeline,
                1e6,
            )
        )
    files = {file.name for file in write_report(runs, "real", tmp_path)}
    assert {
        "accuracy.png",
        "concurrency.png",
        "clients.png",
        "staleness.png",
        "schedule.png",
        "sensitivity_method.lam.png",
    } <= files
    with open(tmp_path / "summary.csv", newline="", encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    better = max(runs[1:], key=lambda run: run.summary["accuracy"]["val"])
    assert float(rows["persafl_me"]["test_mean"]) == pytest.approx(better.summary["accuracy"]["test"])
    assert float(rows["persafl_me"]["chosen.method.lam"]) == better.config["method.lam"]
    assert float(rows["fedavg"]["staleness_max"]) == 0
    assert float(rows["persafl_me"]["staleness_mean"]) == pytest.approx(better.summary["staleness"]["mean"])
    assert float(rows["fedavg"]["updates_mean"]) == 40


def test_a_sweep_that_has_only_begun_is_read_with_its_plan_and_its_metric(tmp_path):
    store = Store(store_uri(None))
    family = SweepRuns(store, "experiment", "few", [], "loss.val")
    assert store.records(family.parent) == [], "the parent is no run to report on"
    run_id = family.child(compose(["method=fedasync", "tracking.experiment=experiment"]), "one")
    assert [(found.run_id, found.select, found.pruned, found.planned) for found in store.records("few")] == [
        (run_id, "loss.val", False, None)
    ]
    family.tell(tags={PLANNED: "10"})
    planned = {
        target: [found.planned for found in store.records(target)]
        for target in ("few", family.parent, run_id, "experiment")
    }
    assert planned == {"few": [10], family.parent: [10], run_id: [None], "experiment": [None]}
    assert main(["report", "few", "--levels", "0.7", "0.5"]) == 0
    assert (
        "0 of 10 planned trials finished; the sweep is still running"
        in (tmp_path / "reports" / "few" / "report.html").read_text()
    )
    family.end(run_id, "KILLED", tags={PRUNED: "worse"})
    assert store.records("few")[0].pruned


@pytest.mark.slow
def test_the_command_reports_tracked_runs_and_keeps_the_report_with_them(tmp_path, capsys):
    common = [
        "tracking.experiment=few",
        "tracking.model=false",
        "tracking.figures=false",
        "executor=serial",
        "eval.every=2.0",
    ]
    for method in ("fedavg", "fedasync"):
        persafl_lit.run([*common, f"method={method}", "model=logistic", "clients=10", "horizon=10", "local_steps=2"])
    assert main(["report", "few", "--levels", "0.1234567"]) == 0
    assert "2 runs of few: reports/few/report.html" in capsys.readouterr().out
    assert "time_to_0.123457" in (tmp_path / "reports" / "few" / "summary.csv").read_text()
    page = (tmp_path / "reports" / "few" / "report.html").read_text()
    assert "fedavg" in page
    store = Store(store_uri(None))
    kept = store.client.search_runs([store.experiment("few")], "tags.`persafl.report` = 'few'")
    assert [file.path for file in store.client.list_artifacts(kept[0].info.run_id, "report")].count(
        "report/report.html"
    ) == 1
    assert main(["report", "few"]) == 0
    assert "2 runs of few" in capsys.readouterr().out, "a report is not a run to report on"
    run_id = store.records("few")[0].run_id
    assert main(["report", run_id, "--out", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "report.html").exists()
    assert main(["report", "few", run_id, "--out", str(tmp_path / "two"), f"tracking.uri={store_uri(None)}"]) == 0
    assert f"2 runs of few, {run_id}" in capsys.readouterr().out, "a run that both targets name is there once"
    assert "fedavg (few)" in (tmp_path / "two" / "report.md").read_text()
    assert main(["report", "few", f"tracking.uri=sqlite:///{tmp_path}/other.db"]) == 2
    assert "is no run, sweep or experiment" in capsys.readouterr().err
    assert main(["report", "few", "--uri", "a", "tracking.uri=b"]) == 2
    assert "a report reads one store; got 'a', 'b'" in capsys.readouterr().err
    assert main(["report", "tracking.uri=b"]) == 2
    assert "needs a sweep's name" in capsys.readouterr().err
    assert main(["report", "nothing"]) == 2
    assert "is no run, sweep or experiment" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", "few", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write the report" in capsys.readouterr().err


def test_runs_of_0_1_are_reported_together_with_todays(tmp_path, capsys):
    """A store as 0.1 left it: without the keys that came later, and with the rule that `local` had."""
    common = [
        "tracking.experiment=old",
        "tracking.model=false",
        "tracking.figures=false",
        "executor=serial",
        "model=logistic",
        "clients=6",
        "updates=12",
    ]
    old = [persafl_lit.run([*common, "method=fedasync"]), persafl_lit.run([*common, "method=local"])]
    persafl_lit.run([*common, "method=fedasync", "seed=1"])
    with contextlib.closing(sqlite3.connect(tmp_path / "mlruns" / "mlflow.db")) as store, store:
        for run_id in (result.run_id for result in old):
            gone = [(run_id, key) for key in ADDED]
            expected = sum(beside in old[0].config.flat() or beside == "seed" for beside in ADDED_BESIDE.values())
            assert store.executemany("delete from params where run_uuid = ? and key = ?", gone).rowcount == expected
        store.execute(
            "update params set value = 'separate' where run_uuid = ? and key = 'method.rule'", (old[1].run_id,)
        )
    for file in (tmp_path / "mlruns").rglob("results.json"):
        content = json.loads(file.read_text())
        if content["summary"]["run_id"] in {result.run_id for result in old}:
            config = content["summary"]["config"]
            del config["derivatives"], config["delays"]["per_gradient"], config["method"]["private"], config["local"]
            del config["model"]["buffers"], config["model"]["buffers_mix"]
            config["method"] |= {"rule": "separate"} if config["method"]["name"] == "local" else {}
            file.write_text(json.dumps(content))
    records = Store(store_uri(None)).records("old")
    assert len(records) == 3
    (task,) = tasks_of(records)
    (fedasync,) = [trial for trial in task.chosen if trial.method == "fedasync"]
    assert len(fedasync.runs) == 2, "two seeds of one setting, whatever version made them"
    assert main(["report", "old"]) == 0
    assert "3 runs of old" in capsys.readouterr().out
