"""Results as data: what `persafl report` exports, and sweeps that count exported trials as done. A real store; processes only where trials run."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from pathlib import Path

import pytest

from persafl_lit import __version__
from persafl_lit.cli import main
from persafl_lit.report.export import column_of, runs_csv
from persafl_lit.report.record import Record
from persafl_lit.sweep.finished import keys_of_others, read_finished
from persafl_lit.sweep.plan import plan_of
from persafl_lit.sweep.trials import first_trials, on_other_seeds
from persafl_lit.sweep.yaml_lines import Source
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.store import Store
from persafl_lit.tracking.sweep_runs import SweepRuns

SWEEP = """name: small
overrides: [model=logistic, clients=4, updates=12, local_steps=1, eval.every=5.0, tracking.model=false, tracking.figures=false]
grid:
  - {method: fedasync, method.beta: [0.8, 1.2]}
  - {method: persafl_me, method.lam: [20, 30]}
seeds: [0, 1]
select: {metric: accuracy.val, stages: two}
"""
CONTRACT = [
    "method",
    "seed",
    "status",
    "trial",
    "sim_time",
    "updates",
    "versions",
    "grad_evals",
    "accuracy_val",
    "accuracy_test",
]


def plan(text=SWEEP):
    return plan_of(Source("small.yaml", text), "small")


def read(path):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path, rows):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def row(trial, val, **more):
    """As an export has it, with the least that it must have."""
    told = dict.fromkeys(CONTRACT, "1") | {
        "method": trial.method,
        "seed": str(trial.seed),
        "status": "FINISHED",
        "trial": trial.hash,
    }
    return told | {"accuracy_val": str(val), "accuracy_test": "0.5", "version": __version__} | more


def rows_of_all(text=SWEEP):
    """The second setting of each method is its best; so is every second-stage row that might be asked for there."""
    first = first_trials(plan(text))
    return [
        row(trial, 0.6 + 0.1 * (number % 2))
        for number, trial in enumerate([*first, *on_other_seeds(plan(text), first)])
    ]


def children(folder="."):
    store = Store(store_uri(f"sqlite:///{folder}/mlruns/mlflow.db"))
    return store, store.search(
        [found.experiment_id for found in store.client.search_experiments()], "tags.`persafl.trial` != ''"
    )


@pytest.fixture
def sweep_file(tmp_path):
    (tmp_path / "small.yaml").write_text(SWEEP)
    return "small.yaml"


# -- export -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A sweep that ran, and its report."""
    folder, before = tmp_path_factory.mktemp("machine"), Path.cwd()
    os.chdir(folder)
    try:
        Path("small.yaml").write_text(SWEEP)
        assert main(["sweep", "small.yaml", "--workers", "2"]) == 0
        assert main(["report", "small", "--out", "export"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.mark.slow
def test_an_export_has_every_run_to_the_last_bit(exported):
    store, runs = children(exported)
    rows = read(exported / "export/runs.csv")
    head = list(rows[0])
    assert head[:13] == [*CONTRACT, "bytes_communicated", "version", "wall_seconds"]
    assert head[-2:] == ["method.beta", "method.lam"]
    assert {found["trial"] for found in rows} == {run.data.tags["persafl.trial"] for run in runs}
    assert [(found["method"], found["seed"], found["trial"]) for found in rows] == sorted(
        (r["method"], r["seed"], r["trial"]) for r in rows
    )
    for found in rows:
        summary = json.loads(store.text(found["run_id"], "summary.json"))
        assert (found["status"], found["version"]) == ("FINISHED", __version__)
        assert float(found["accuracy_val"]) == summary["accuracy"]["val"]
        assert float(found["staleness_mean"]) == summary["staleness"]["mean"]
        assert int(found["grad_evals"]) == summary["grad_evals"]
    assert {(found["method"], found["method.lam"]) for found in rows} == {
        ("fedasync", ""),
        ("persafl_me", "20.0"),
        ("persafl_me", "30.0"),
    }
    curves = read(exported / "export/curves.csv")
    assert list(curves[0])[:7] == ["method", "seed", "trial", "sim_time", "updates", "grad_evals", "accuracy_val"]
    last = {found["trial"]: found for found in curves}
    assert {trial: found["accuracy_val"] for trial, found in last.items()} == {
        found["trial"]: found["accuracy_val"] for found in rows
    }


@pytest.mark.slow
def test_a_sweep_that_ran_elsewhere_is_whole_here_and_is_exported_as_it_was(exported, sweep_file, capsys):
    assert main(["sweep", sweep_file, "--finished", str(exported / "export/runs.csv")]) == 0
    said = capsys.readouterr()
    assert "6 trials, 6 finished, 6 of them from " in said.out
    assert "/6" not in said.err  # no trial was begun
    here, there = (read(folder / "mlruns/sweeps/small/trials.csv") for folder in (Path(), exported))
    assert all(found.pop("imported").endswith("runs.csv") for found in here)
    assert not any(found.pop("imported") for found in there)
    assert here == there
    assert main(["report", "small", "--out", "export"]) == 0
    assert Path("export/curves.csv").read_bytes() == (exported / "export/curves.csv").read_bytes()
    assert Path("export/summary.csv").read_bytes() == (exported / "export/summary.csv").read_bytes()
    again, before = (read(folder / "export/runs.csv") for folder in (Path(), exported))
    assert [{**found, "run_id": ""} for found in again] == [{**found, "run_id": ""} for found in before]


@pytest.mark.slow
def test_exported_trials_take_part_in_the_selection_and_the_rest_is_run(exported, sweep_file, capsys):
    rows = read(exported / "export/runs.csv")
    left_out = next(
        found
        for found in rows
        if found["method"] == "persafl_me" and found["seed"] == "0" and found["method.lam"] == "30.0"
    )
    for found in rows:
        if found["method"] == "fedasync" and found["seed"] == "0":  # the worse setting elsewhere is the better one here
            found["accuracy_val"] = "0.99" if found["method.beta"] == "0.8" else "0.01"
    part = write("part.csv", [found for found in rows if found is not left_out and found["seed"] == "0"])
    assert main(["sweep", sweep_file, "--workers", "2", "--json", "--finished", part]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"method": "fedasync", "setting": {"method.beta": 0.8}} in found["chosen"]
    assert [trial["imported"] for trial in found["trials"]] == [part, part, part, "", "", ""]
    original = {told["trial"]: told for told in rows}
    for trial in found["trials"][3:]:
        assert trial["trial"] not in original or trial["accuracy.val"] == float(
            original[trial["trial"]]["accuracy_val"]
        )


# -- what counts ------------------------------------------------------------------------------------------------------


def test_exported_trials_are_runs_of_the_store_that_the_next_start_finds(sweep_file, capsys):
    file = write("runs.csv", rows_of_all())
    assert main(["sweep", sweep_file, "--finished", file]) == 0
    assert "6 trials, 6 finished, 6 of them from runs.csv" in capsys.readouterr().out
    _, runs = children()
    assert (
        len(runs) == 6
    )  # four settings, and the best of two methods on the other seed; what was not asked for is left out
    assert {(run.info.status, run.data.tags["persafl.imported"], run.data.tags["persafl.version"]) for run in runs} == {
        ("FINISHED", "runs.csv", __version__)
    }
    assert main(["sweep", sweep_file, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert [trial["imported"] for trial in again["trials"]] == ["runs.csv"] * 6
    assert sorted(chosen["setting"].popitem() for chosen in again["chosen"]) == [
        ("method.beta", 1.2),
        ("method.lam", 30),
    ]
    assert len(children()[1]) == 6


def test_a_report_of_several_targets_is_read_back_by_each_of_their_sweeps(sweep_file, capsys):
    """Two sweeps in one store, reported together: what is not this sweep's is counted and left out."""
    other = SWEEP.replace("name: small", "name: other").replace("updates=12", "updates=13")
    Path("other.yaml").write_text(other)
    assert main(["sweep", sweep_file, "--finished", write("runs.csv", rows_of_all())]) == 0
    assert main(["sweep", "other.yaml", "--finished", write("runs.csv", rows_of_all(other))]) == 0
    assert main(["report", "small", "other", "--out", "both"]) == 0
    rows = read("both/runs.csv")
    assert {(found["method"], found["target"]) for found in rows} == {
        (method, target) for method in ("fedasync", "persafl_me") for target in ("small", "other")
    }
    capsys.readouterr()
    for name in ("small", "other"):
        assert main(["sweep", f"{name}.yaml", "--finished", "both/runs.csv", f"tracking.uri=sqlite:///{name}.db"]) == 0
        said = capsys.readouterr()
        assert f"{name}: 6 trials, 6 finished, 6 of them from both/runs.csv" in said.out
        left = "other" if name == "small" else "small"
        assert f"both/runs.csv: 6 finished rows of other targets ('{left}') are no trials of this sweep" in said.err


def test_a_run_that_trained_nothing_is_no_result_after_it_was_read_back(sweep_file):
    rows = rows_of_all()
    rows[0] |= {"accuracy_val": "0.99", "note": "no result: the model never changed"}
    found = read_finished(plan(), [write("runs.csv", [{"note": "", **told} for told in rows])]).trials
    trial = first_trials(plan())[0]
    assert math.isnan(plan().select.score(found[trial.hash].summary(trial)))


def test_curves_are_read_in_order_of_time_whatever_the_order_of_their_rows(sweep_file):
    file, (trial, other) = write("runs.csv", rows_of_all()), first_trials(plan())[:2]
    times = {trial.hash: (30.0, 0.0, 10.0, 20.0), other.hash: (0.0, 5.0)}
    curves = [
        {"method": "fedasync", "seed": "0", "trial": name, "sim_time": str(time), "updates": str(time / 10)}
        for place in range(4)
        for name, moments in times.items()
        for time in moments[place : place + 1]
    ]
    write("curves.csv", curves)
    found = read_finished(plan(), [file]).trials
    assert found[trial.hash].curves == {"sim_time": [0.0, 10.0, 20.0, 30.0], "updates": [0.0, 1.0, 2.0, 3.0]}
    assert found[other.hash].curves["sim_time"] == [0.0, 5.0]


def test_a_trial_that_was_interrupted_here_and_finished_elsewhere_keeps_its_one_run(sweep_file):
    trial = first_trials(plan())[0]
    family = SweepRuns(Store(store_uri(None)), "small", "small", [], "accuracy.val")
    run_id = family.child(trial.config, trial.name)
    family.end(run_id, "KILLED", "interrupted")
    assert main(["sweep", sweep_file, "--finished", write("runs.csv", rows_of_all())]) == 0
    _, runs = children()
    (run,) = [run for run in runs if run.data.tags["persafl.trial"] == trial.hash]
    assert (run.info.run_id, run.info.status, run.data.tags["persafl.error"]) == (run_id, "FINISHED", "")


def test_a_finished_run_of_the_store_comes_before_a_file(sweep_file, capsys):
    rows = rows_of_all()
    assert main(["sweep", sweep_file, "--finished", write("runs.csv", rows)]) == 0
    capsys.readouterr()
    assert (
        main(
            [
                "sweep",
                sweep_file,
                "--json",
                "--finished",
                write("other.csv", [{**found, "accuracy_val": "0.1"} for found in rows]),
            ]
        )
        == 0
    )
    assert {trial["imported"] for trial in json.loads(capsys.readouterr().out)["trials"]} == {"runs.csv"}


def test_a_dry_run_shows_what_remains(sweep_file, capsys, tmp_path):
    rows = rows_of_all()
    assert (
        main(
            [
                "sweep",
                sweep_file,
                "--dry-run",
                "--finished",
                write("a.csv", rows[:2]),
                "--finished",
                write("b.csv", rows[1:3]),
            ]
        )
        == 0
    )
    said = capsys.readouterr().out
    assert "fedasync beta=0.8 seed=0  (in a.csv)" in said
    assert (
        "4 trials; 3 are finished, 1 remain, then each method's best by accuracy.val on 1 more seeds: 2 trials" in said
    )
    assert main(["sweep", sweep_file, "--dry-run", "--finished", write("a.csv", rows[:4])]) == 0
    said = capsys.readouterr().out
    assert "   6  " in said  # all of the first stage is there, so the second is known
    assert "persafl_me lam=30.0 seed=1\n" in said
    assert "6 trials; 4 are finished, 2 remain\n" in said
    assert not (tmp_path / "mlruns").exists()


def test_a_dry_run_knows_what_the_store_has(sweep_file, capsys):
    assert main(["sweep", sweep_file, "--finished", write("runs.csv", rows_of_all())]) == 0
    capsys.readouterr()
    assert main(["sweep", sweep_file, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "persafl_me lam=30.0 seed=1  (in the store)" in said
    assert "6 trials; 6 are finished, 0 remain" in said


def test_trials_of_another_version_count_only_if_asked(sweep_file, capsys):
    rows = [{**found, "version": "0.1.0"} for found in rows_of_all()]
    stranger = {**rows[0], "trial": "f" * 16}
    file = write("runs.csv", [*rows, stranger])
    assert main(["sweep", sweep_file, "--dry-run", "--finished", file]) == 0
    said = capsys.readouterr()
    assert (
        f"runs.csv: 9 finished rows of another version (0.1.0; this is {__version__}) do not count; --any-version counts them"
        in said.err
    )
    assert "(in runs.csv)" not in said.out
    assert main(["sweep", sweep_file, "--dry-run", "--any-version", "--finished", file]) == 0
    said = capsys.readouterr()
    assert "6 trials; 6 are finished, 0 remain" in said.out
    assert "1 finished row of another version" in said.err
    assert main(["sweep", sweep_file, "--any-version"]) == 2


def test_rows_that_did_not_finish_do_not_count(sweep_file, capsys):
    rows = [
        {**found, "status": status, "accuracy_val": ""}
        for found, status in zip(rows_of_all(), ("FAILED", "KILLED", "RUNNING"), strict=False)
    ]
    assert main(["sweep", sweep_file, "--dry-run", "--finished", write("runs.csv", rows)]) == 0
    assert "(in runs.csv)" not in capsys.readouterr().out


def test_a_random_search_knows_its_trials_and_an_adaptive_one_does_not(tmp_path, capsys):
    text = "name: r\ngrid:\n  - {method: persafl_me, method.lam: {low: 1, high: 50}}\noverrides: [model=logistic, updates=10, clients=4]\n"
    for how in ("random", "adaptive"):
        (tmp_path / f"{how}.yaml").write_text(f"{text}search: {{how: {how}, trials: 2}}\n")
    trials = first_trials(plan_of(Source("random.yaml", (tmp_path / "random.yaml").read_text()), "r"))
    file = write("runs.csv", [row(trial, 0.5) for trial in trials])
    assert main(["sweep", "random.yaml", "--finished", file]) == 0
    assert "2 trials, 2 finished, 2 of them from runs.csv" in capsys.readouterr().out
    assert main(["sweep", "adaptive.yaml", "--finished", file]) == 2
    assert "an adaptive search proposes them as it goes" in capsys.readouterr().err


# -- what is refused --------------------------------------------------------------------------------------------------

FIRST = rows_of_all()[0]


def without(*columns):
    return [{key: value for key, value in found.items() if key not in columns} for found in rows_of_all()]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (without("trial"), "runs.csv:1: there is no column trial"),
        (without("version"), "runs.csv:1: there is no column version"),
        (without("grad_evals"), "runs.csv:1: there is no column grad_evals"),
        ([FIRST, {**FIRST, "trial": "0123456789abcdef"}], "runs.csv:3: '0123456789abcdef' is no trial of this sweep"),
        ([{**FIRST, "accuracy_val": "much"}], "runs.csv:2: accuracy_val must be a finite number; got 'much'"),
        ([{**FIRST, "accuracy_val": "nan"}], "runs.csv:2: accuracy_val must be a finite number; got 'nan'"),
        ([{**FIRST, "accuracy_test": "inf"}], "runs.csv:2: accuracy_test must be a finite number; got 'inf'"),
        ([{**FIRST, "accuracy_val": "91"}], "runs.csv:2: accuracy_val must be from 0 to 1; got '91'"),
        ([{**FIRST, "accuracy_val": ""}], "runs.csv:2: accuracy_val of a finished trial is empty"),
        ([{**FIRST, "updates": "-3"}], "runs.csv:2: updates must be >= 0; got '-3'"),
        ([{**FIRST, "seed": "1"}], f"runs.csv:2: the trial {FIRST['trial']} is fedasync seed=0, not 'fedasync seed=1'"),
        (
            [FIRST, FIRST, {**FIRST, "accuracy_val": "0.7"}],
            "runs.csv:4: the trial " + FIRST["trial"] + " has another result than in runs.csv:2",
        ),
    ],
)
def test_a_bad_file_is_refused_by_line(rows, message, sweep_file, capsys, tmp_path):
    assert main(["sweep", sweep_file, "--finished", write("runs.csv", rows)]) == 2
    said = capsys.readouterr().err
    assert f"persafl: {message}" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "mlruns").exists()


def test_a_file_that_is_no_table_is_refused(sweep_file, capsys):
    Path("short.csv").write_text(Path(write("runs.csv", [FIRST])).read_text() + "fedasync,0\n")
    Path("binary.csv").write_bytes(b"\xff\xfe\x00")
    Path("empty.csv").write_text("")
    for name, message in {
        "short.csv": "short.csv:3: 2 cells under 11 columns",
        "binary.csv": "cannot read 'binary.csv'",
        "empty.csv": "empty.csv:1: there is no column method",
        "none.csv": "cannot read 'none.csv': No such file",
        ".": "cannot read '.': it is not a plain file",
    }.items():
        assert main(["sweep", sweep_file, "--finished", name]) == 2
        assert message in capsys.readouterr().err


def test_a_sweep_that_selects_by_what_the_file_lacks_says_so(tmp_path, capsys):
    (tmp_path / "loss.yaml").write_text(SWEEP.replace("accuracy.val", "loss.val"))
    assert main(["sweep", "loss.yaml", "--finished", write("runs.csv", rows_of_all())]) == 2
    assert "runs.csv:1: this sweep selects by loss.val, and there is no column loss_val" in capsys.readouterr().err
    with_loss = [{**found, "loss_val": str(number % 2)} for number, found in enumerate(rows_of_all())]
    assert main(["sweep", "loss.yaml", "--json", "--finished", write("runs.csv", with_loss)]) == 0
    assert sorted(chosen["setting"].popitem() for chosen in json.loads(capsys.readouterr().out)["chosen"]) == [
        ("method.beta", 0.8),
        ("method.lam", 20),
    ]


def test_bad_curves_are_refused_by_line(sweep_file, capsys):
    file = write("runs.csv", rows_of_all())
    Path("curves.csv").write_text(
        f"method,seed,trial,sim_time,updates,accuracy_val\nfedasync,0,{FIRST['trial']},0.0,0,0.1\nfedasync,0,{FIRST['trial']},1.0,x,0.1\n"
    )
    assert main(["sweep", sweep_file, "--finished", file]) == 2
    assert "curves.csv:3: updates must be a finite number; got 'x'" in capsys.readouterr().err


def test_a_varied_key_that_is_called_like_a_result_gets_a_column_of_its_own():
    def record(updates):
        config = {"method.name": "fedasync", "seed": 0, "updates": updates}
        return Record(f"run{updates}", "FINISHED", config, summary={"updates": 7, "method": "fedasync", "seed": 0})

    header, *rows = csv.reader(io.StringIO(runs_csv([record(5), record(9)])))
    assert len(header) == len(set(header))
    assert [(row[header.index("updates")], row[header.index("config.updates")]) for row in rows] == [
        ("7", "5"),
        ("7", "9"),
    ]


def test_scores_of_other_rules_and_held_out_clients_are_read_back_under_their_keys():
    keys = {"beside.none.val", "beside.none.loss.test", "beside.sgd-3.metrics.mae.val", "beside.own.metrics.mae_2.test"}
    keys |= {"holdout.accuracy.val", "holdout.loss.val", "holdout.metrics.mae.test"}
    columns = dict.fromkeys(map(column_of, keys), "1")
    assert set(keys_of_others(columns, ["mae", "mae_2"])) == keys
