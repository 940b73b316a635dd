"""The report: numbers by hand, what is selected on what, and that nothing a run is called can break the page."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

import persafl_lit
from persafl_lit.cli import main
from persafl_lit.report import write_report
from persafl_lit.report.aggregate import LOSS, spread, tasks_of
from persafl_lit.report.charts import charts_of
from persafl_lit.report.content import content_of
from persafl_lit.report.curves import mean_curve, thresholds, time_to_reach
from persafl_lit.report.palette import COLOURS, KNOWN, PLOTLY_MARKERS, style_of
from persafl_lit.report.plots import label_text, plot, to_json
from persafl_lit.report.record import Record
from persafl_lit.report.rows import facts, summary_rows
from persafl_lit.report.schedules import beginning, concurrency, staleness_shares
from persafl_lit.report.tables import Table, bytes_text, markdown_text, with_spread
from persafl_lit.timeline import Activity, Timeline
from persafl_lit.timeline.jobs import jobs_to_timeline
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.store import Store

HOSTILE = "<script>alert(1)</script>|$\\frac$&%{y}\"'`*\x00_"
PAPER = ("fedavg", "per_fedavg", "pfedme", "scaffold", "fedprox", "fedasync", "persafl_maml", "persafl_me")


def record(method="persafl_me", seed=0, val=(0.2, 0.8), test=(0.1, 0.7), times=None, status="FINISHED", error=None, metric="accuracy", **config):
    """A run by hand; config keys are written with __ for dots."""
    values = {"method.name": method, "seed": seed, "eta": 0.01, "eval.finetune.name": "sgd", "eval.finetune.steps": 10, "eval.finetune.lr": None}
    values |= {key.replace("__", "."): value for key, value in config.items()}
    times = list(range(len(test))) if times is None else times
    curves = {"sim_time": times, "updates": [10 * time for time in times], f"{metric}.val": list(val), f"{metric}.test": list(test)}
    run_id = "-".join(map(str, (method, seed, status, *config.values())))
    return Record(run_id, status, values, error, curves=curves)


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


def test_time_to_a_level_is_linear_between_evaluations():
    times, values = np.array([0.0, 10.0, 30.0]), np.array([0.1, 0.5, 0.7])
    assert time_to_reach(times, values, 0.3) == pytest.approx(5.0)
    assert time_to_reach(times, values, 0.6) == pytest.approx(20.0)
    assert time_to_reach(times, values, 0.7) == pytest.approx(30.0)
    assert time_to_reach(times, values, 0.1) == 0.0
    assert time_to_reach(times, values, 0.71) is None
    assert time_to_reach(times, -values, -0.3, sign=-1) == pytest.approx(5.0)


def test_the_first_crossing_counts_even_if_the_curve_falls_again():
    assert time_to_reach(np.array([0.0, 1.0, 2.0, 3.0]), np.array([0.0, 0.6, 0.2, 0.8]), 0.3) == pytest.approx(0.5)


def test_speed_up_compares_times_with_fedavg():
    # 50, 80 and 95 % of 0.8 are 0.4, 0.64 and 0.76. FedAvg climbs 0.01 per second, the other 0.04.
    slow = record("fedavg", test=(0.0, 0.6), times=[0, 60])
    fast = record("fedasync", test=(0.0, 0.8), val=(0.0, 0.9), times=[0, 20])
    told = {fact.trial.method: fact.times for fact in facts(task(slow, fast))}
    assert list(told["fedavg"]) == pytest.approx([0.4, 0.64, 0.76])
    assert told["fedasync"][0.4] == (pytest.approx(10.0), pytest.approx(4.0))
    assert told["fedavg"][0.4] == (pytest.approx(40.0), pytest.approx(1.0))
    assert told["fedavg"][0.64] == (None, None)
    assert told["fedasync"][0.64] == (pytest.approx(16.0), None)


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
        record(seed=0, val=(0, 0, 0), test=(0.0, 0.2, 0.4), times=[0, 2, 4]), record(seed=1, val=(0, 0, 0), test=(0.0, 0.3, 0.9), times=[0, 1, 3])
    )
    curve = mean_curve(runs.chosen[0], "accuracy.test")
    assert curve.times.tolist() == [0, 1, 2, 3]
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


def with_timeline(run):
    return Record(run.run_id, run.status, run.config, curves=run.curves, timeline=two_clients())


def test_the_beginning_of_a_schedule_keeps_every_arrival_in_its_window():
    shown = beginning(two_clients(), 3.5, clients=1)
    assert (shown.clients, shown.horizon) == (1, 3.5)
    assert shown.arrives.tolist() == [1.0, 3.0]  # client 1 is not drawn, but its update reaches the server
    assert isinstance(shown.activity, Activity)
    assert shown.activity.read_at.tolist() == [0.0, 2.0]


# -- choice -----------------------------------------------------------------------------------------------------------


def test_the_setting_is_chosen_on_validation_even_if_test_prefers_another():
    runs = [
        record(method__lam=lam, seed=seed, val=(0, val), test=(0, test)) for lam, val, test in ((20, 0.8, 0.6), (30, 0.7, 0.9)) for seed in (0, 1)
    ]
    chosen = task(*runs).chosen[0]
    assert chosen.setting == (("method.lam", "20"),)
    assert chosen.test.mean == pytest.approx(0.6)


def test_the_best_method_is_named_by_validation_and_the_page_says_if_test_disagrees():
    content = content_of([record("fedavg", val=(0, 0.8), test=(0, 0.6)), record("fedasync", val=(0, 0.7), test=(0, 0.9))], "t")
    assert content.lead[0].startswith("fedavg is best of 2 methods on validation data")
    assert "On test data fedasync does better (0.900)" in content.lead[0]


def test_a_mean_over_seeds_decides_not_the_best_seed():
    lucky = [record(method__lam=1, seed=seed, val=(0, val)) for seed, val in enumerate((0.9, 0.1))]
    steady = [record(method__lam=2, seed=seed, val=(0, 0.6)) for seed in (0, 1)]
    assert task(*lucky, *steady).chosen[0].setting == (("method.lam", "2"),)


def test_only_what_varies_within_a_method_is_a_setting():
    runs = task(record("fedavg", method__beta=1.0), record("fedasync", method__beta=0.8), record("fedasync", method__beta="1.0", seed=1))
    assert runs.keys == {"fedavg": [], "fedasync": ["method.beta"]}


def test_keys_that_change_nothing_do_not_split_seeds():
    runs = [record(seed=seed, executor=name, tracking__experiment=name, eval__every=seed) for seed, name in enumerate(("serial", "ray"))]
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
    runs = [record(method__lam=lam, metric="loss", val=(9, val), test=(8.0, test)) for lam, val, test in ((1, 2.0, 3.0), (2, 4.0, 1.0))]
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
    content = content_of([record(seed=0), record(seed=1, status="FAILED", error="DivergenceError: update 3"), record(seed=2, status="RUNNING")], "t")
    row = dict(zip(content.parts[0].table.columns, content.parts[0].table.rows[0], strict=True))
    assert row["seeds"] == "1 of 3"
    assert [line[3:5] for line in content.missing.rows] == [["FAILED", "DivergenceError: update 3"], ["RUNNING", "still running"]]
    assert any("flatters" in text for text in content.parts[0].words)


def test_the_words_name_the_fine_tuning_rule():
    words = content_of([record()], "t").parts[0].words
    assert any("sgd(steps=10, lr=null)" in text for text in words)
    differing = content_of([record("fedavg"), record("local", eta=0.1)], "t").parts[0].words
    assert any("the chosen settings differ in it (0.01, 0.1)" in text for text in differing)


# -- charts -----------------------------------------------------------------------------------------------------------


def test_varied_keys_get_a_sensitivity_chart_and_a_pair_a_heat_map():
    runs = [record(method__lam=lam, method__beta=beta, val=(0, lam / 100 + beta)) for lam in (20, 25) for beta in (0.1, 0.2)]
    charts = {chart.name: chart for chart in charts_of(task(*runs, record("fedavg")))}
    assert {"accuracy", "sensitivity_method.lam", "sensitivity_method.beta", "heat_persafl_me"} == set(charts)
    test, val = charts["sensitivity_method.lam"].series
    assert val.y == pytest.approx([0.4, 0.45])  # each at the better beta
    assert np.array(charts["heat_persafl_me"].values) == pytest.approx(np.array([[0.3, 0.4], [0.35, 0.45]]))  # lam down, beta across
    row, column = charts["heat_persafl_me"].marked
    assert (charts["heat_persafl_me"].rows[row], charts["heat_persafl_me"].columns[column]) == ("25", "0.2")


def test_a_key_that_can_be_null_has_a_place_for_it():
    (chart,) = [chart for chart in charts_of(task(*(record(schedule__tau=tau) for tau in (10, None, 2)))) if chart.name == "sensitivity_schedule.tau"]
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
        record(method, seed=seed, test=(0.1, value + 0.1 * seed), method__lam=value)
        for method, value in (("persafl_me", 0.5), ("fedavg", 0.4), ("mine", 0.3))
        for seed in (0, 1)
    ]
    runs += [record(method, method__lam=9) for method in ("persafl_me", "fedavg", "mine")]
    write_report(runs, "t", tmp_path)
    page = charts_in((tmp_path / "report.html").read_text())
    for method in ("persafl_me", "fedavg", "mine"):
        lines = [trace["line"]["color"] for plotted in page.values() for trace in plotted["data"] if trace.get("name") == method and "line" in trace]
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
    runs = [record(HOSTILE, seed=seed, method__note=note, schedule__name=HOSTILE) for seed in (0, 1) for note in (HOSTILE, "plain")]
    runs = [with_timeline(run) for run in runs]
    return [*runs, record(HOSTILE, status="FAILED", error=f"Boom: {HOSTILE}\nsecond line", method__note=HOSTILE, seed=7, schedule__name=HOSTILE)]


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
    line = Table(("a", "b"), [["x|y\nz", "<b>*`[]\\"]]).markdown().splitlines()[2]
    assert line == r"| x\|y z | &lt;b&gt;\*\`\[\]\\ |"
    assert markdown_text("a & b") == "a &amp; b"


def test_plotly_labels_and_embedded_json_are_escaped():
    assert label_text('<b onclick="x">& $x$') == '&lt;b onclick="x"&gt;&amp; &#36;x&#36;'
    assert to_json({"a": ["</script>", math.nan, math.inf]}) == '{"a":["\\u003c/script\\u003e",null,null]}'
    (chart,) = [chart for chart in charts_of(task(record("<i>me</i>"))) if chart.name == "accuracy"]
    (trace,) = plot(chart)["data"]
    assert trace["name"] == "&lt;i&gt;me&lt;/i&gt;"
    assert trace["hovertemplate"] == "%{text}<extra></extra>"


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
    assert {"report.html", "report.md", "summary.csv", "runs.csv", "curves.csv", "clients.csv"} <= names
    assert {f"{stem}.{suffix}" for stem in ("accuracy", "concurrency", "staleness", "schedule") for suffix in ("png", "svg")} <= names
    page = (tmp_path / "new" / "folder" / "report.html").read_text()
    library = max(re.findall(r"<script>(.*?)</script>", page, re.DOTALL), key=len)
    assert page.count("plotly.js v") == 1
    assert not re.search(r"https?://|//cdn|@import|url\(", page.replace(library, ""))
    for tag, attributes in read(page).tags:
        assert all(value.startswith("data:") for key, value in attributes.items() if key in ("src", "href", "srcset")), tag
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
            [Record("r", "FINISHED", {"method.name": "fedavg", "seed": 1}, summary={"accuracy": {"val": 0.5, "test": 0.4}})],
            "fedavg: test accuracy after fine-tuning 0.400 over 1 seed",
        ),
        ([record(test=(0.1, None), val=(0.1, None))], "no finite test accuracy recorded"),
        ([record(test=(), val=(), times=[])], "no finite test accuracy recorded"),
        ([record(test=(0.5,), val=(0.5,), times=[0])], "so no spread is known"),
        (
            [Record("r", "FINISHED", {"method.name": "m"}, curves={"sim_time": [0, 1], "accuracy.test": [0.5], "accuracy.val": [1, 2]}, summary={})],
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
    assert [bytes_text(value) for value in (0.0, 999.0, 1000.0, 2.5e6, 7e15, None)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "7000.0 TB", "-"]


def test_importing_the_label_picture_loads_no_plotting_library():
    probe = "import sys, persafl_lit.report.labels, persafl_lit.report.record; print(sorted({'plotly', 'matplotlib', 'torch', 'mlflow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=persafl_lit.__path__[0] + "/..")
    assert done.stdout.strip() == "[]"


def test_real_runs_make_a_report(tmp_path):
    common = ["model=logistic", "clients=6", "updates=40", "local_steps=2", "tracking.enabled=false", "checkpoint.every=0", "executor=serial"]
    runs = []
    for method in (["method=fedavg", "schedule.cohort=3"], ["method=persafl_me", "method.lam=20"], ["method=persafl_me", "method.lam=30"]):
        result = persafl_lit.run([*common, *method])
        summary = json.loads(json.dumps(result.summary()))
        runs.append(Record("".join(method), "FINISHED", result.config.flat(), None, summary, result.curves(), result.clients(), result.timeline, 1e6))
    files = {file.name for file in write_report(runs, "real", tmp_path)}
    assert {"accuracy.png", "concurrency.png", "clients.png", "staleness.png", "schedule.png", "sensitivity_method.lam.png"} <= files
    with open(tmp_path / "summary.csv", newline="", encoding="utf-8") as file:
        rows = {row["method"]: row for row in csv.DictReader(file)}
    better = max(runs[1:], key=lambda run: run.summary["accuracy"]["val"])
    assert float(rows["persafl_me"]["test_mean"]) == pytest.approx(better.summary["accuracy"]["test"])
    assert float(rows["persafl_me"]["chosen.method.lam"]) == better.config["method.lam"]
    assert float(rows["fedavg"]["staleness_max"]) == 0
    assert float(rows["persafl_me"]["staleness_mean"]) == pytest.approx(better.summary["staleness"]["mean"])
    assert float(rows["fedavg"]["updates_mean"]) == 40


def test_the_command_reports_tracked_runs_and_keeps_the_report_with_them(tmp_path, capsys):
    common = ["tracking.experiment=few", "tracking.model=false", "tracking.figures=false", "executor=serial", "eval.every=2.0"]
    for method in ("fedavg", "fedasync"):
        persafl_lit.run([*common, f"method={method}", "model=logistic", "clients=10", "horizon=10", "local_steps=2"])
    assert main(["report", "few"]) == 0
    assert "2 runs of few: reports/few/report.html" in capsys.readouterr().out
    page = (tmp_path / "reports" / "few" / "report.html").read_text()
    assert "fedavg" in page
    store = Store(store_uri(None))
    kept = store.client.search_runs([store.experiment("few")], "tags.`persafl.report` = 'few'")
    assert [file.path for file in store.client.list_artifacts(kept[0].info.run_id, "report")].count("report/report.html") == 1
    assert main(["report", "few"]) == 0
    assert "2 runs of few" in capsys.readouterr().out, "a report is not a run to report on"
    run_id = store.records("few")[0].run_id
    assert main(["report", run_id, "--out", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "report.html").exists()
    assert main(["report", "nothing"]) == 2
    assert "is no run, sweep or experiment" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["report", "few", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write the report" in capsys.readouterr().err
