"""Sweep files and their trials: what is refused, what is varied, what is chosen; no process is started here."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from persafl_lit.cli import main
from persafl_lit.cli.sweep import _print, sweeps
from persafl_lit.common.csv_table import to_csv
from persafl_lit.errors import ConfigError
from persafl_lit.sweep.dashboard import Dashboard, duration
from persafl_lit.sweep.forecast import EACH, Forecast, makespan
from persafl_lit.sweep.plan import plan_of
from persafl_lit.sweep.results import Outcome, choose, table
from persafl_lit.sweep.scheduler import varied_together
from persafl_lit.sweep.trials import first_trials, on_other_seeds
from persafl_lit.sweep.yaml_lines import Source
from persafl_lit.tracking import store_uri
from persafl_lit.tracking.store import Store
from persafl_lit.tracking.sweep_runs import SweepRuns

GOOD = """name: good
overrides: [model=logistic, updates=10]
grid:
  - {method: fedasync, method.beta: [0.8, 1.0]}
  - {method: persafl_me, method.lam: [20, 2.5e1], schedule.tau: [10, null]}
seeds: [0, 1]
"""


def plan(text, *overrides):
    return plan_of(Source("some.yaml", text), "some", overrides)


def test_a_grid_is_the_product_of_its_lists_on_every_seed():
    trials = first_trials(plan(GOOD))
    assert [trial.name for trial in trials][:4] == [
        f"fedasync beta={beta} seed={seed}" for beta in (0.8, 1.0) for seed in (0, 1)
    ]
    assert len(trials) == 2 * 2 + 4 * 2
    last = trials[-1].config
    assert (last.method["lam"], last.schedule["tau"], last.seed, last.updates) == (25.0, None, 1, 10)
    assert last.tracking.experiment == "good"
    assert last.executor == "serial"
    assert len({trial.hash for trial in trials}) == len(trials)


def test_a_trial_is_the_run_that_the_same_overrides_make():
    from persafl_lit.config.compose import compose

    trial = first_trials(plan(GOOD))[0]
    assert (
        trial.hash == compose(["model=logistic", "updates=10", "method=fedasync", "method.beta=0.8", "seed=0"]).hash()
    )


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        (GOOD.replace("seeds:", "seed:"), 6, "unknown key 'seed'; a sweep file has name, overrides"),
        (GOOD.replace("[0.8, 1.0]", "[]"), 4, "an empty list makes an empty grid"),
        (GOOD.replace("[0.8, 1.0]", "[0.8, 0.8]"), 4, "'fedasync beta=0.8 seed=0' is there twice"),
        (GOOD.replace("method.beta", "method.lam"), 4, "unknown key 'method.lam'; method=fedasync has"),
        (GOOD.replace("method: fedasync", "method: fedasinc"), 4, "unknown method 'fedasinc'"),
        (GOOD.replace("schedule.tau: [10, null]", "schedule.tau: [10, -1]"), 5, "tau"),
        (GOOD.replace("schedule.tau: [10, null]", "schedule.tau: {low: 1, high: 9}"), 5, "a range needs a search"),
        (
            GOOD.replace("method: fedasync", "method: fedavg, schedule.cohort: [10, 31]"),
            4,
            "schedule.cohort=31 is more than the 30 clients",
        ),
        (
            GOOD.replace("method: fedasync", "model: mlp, model.hidden: [[8], [-5]], method: fedasync"),
            4,
            "model.hidden must be >= 1",
        ),
        (
            GOOD.replace("method: fedasync", "eval.finetune.lr: [0.1, -1], method: fedasync"),
            4,
            "eval.finetune.lr must be > 0",
        ),
        (GOOD.replace("seeds: [0, 1]", "seeds: [0, 0]"), 6, "a seed is there twice"),
        (GOOD.replace("seeds: [0, 1]", "seeds: []"), 6, "seeds is a list of whole numbers"),
        (GOOD.replace("seeds: [0, 1]", "seeds: [x]"), 6, "seeds is a list of whole numbers"),
        (GOOD.replace("updates=10", "seed=3"), 2, "list seeds under seeds"),
        (GOOD.replace("updates=10", "updates"), 2, "is not an override"),
        (GOOD.replace("name: good", "name: ../good"), 1, "name is a word"),
        (GOOD.replace("name: good", "name: &a good\nname: x"), 2, "name is there twice"),
        (GOOD.replace("[20, 2.5e1]", "!!python/object/apply:os.system [ls]"), 5, "not a number, text, list or mapping"),
        (GOOD.replace("[20, 2.5e1]", "2024-01-01"), 5, "not a number, text, list or mapping"),
        (GOOD.replace("[20, 2.5e1]", "[20"), 5, "expected"),
        (GOOD + "select: {metric: accuracy.test}\n", 7, "nothing is chosen on test data"),
        (GOOD + "select: {metrik: accuracy.val}\n", 7, "unknown key 'select.metrik'"),
        (GOOD + "select: {stages: three}\n", 7, "select.stages must be one or two"),
        (GOOD + "search: {how: clever, trials: 3}\n", 7, "search.how must be random or adaptive"),
        (GOOD + "search: {how: random, trials: 0}\n", 7, "search.trials must be from 1"),
        (GOOD + "search: random\n", 7, "search is a mapping such as"),
        ("name: x\n", 1, "grid is a list of blocks"),
        ("name: x\ngrid: []\n", 2, "grid is a list of blocks"),
        ("name: x\ngrid: {method: fedasync}\n", 2, "write '- ' before the first key"),
        ("grid:\n  - {method: fedasync, seed: [1, 2]}\n", 2, "list seeds under seeds"),
        (
            "grid:\n  - {eta: " + str(list(range(1, 400))) + ", method.beta: " + str(list(range(1, 400))) + "}\n",
            2,
            "more than 100000 trials",
        ),
    ],
)
def test_a_bad_file_is_refused_by_line_before_anything_starts(text, place, message):
    with pytest.raises(ConfigError) as refused:
        first_trials(plan(text))
    assert str(refused.value).startswith(f"some.yaml:{place}: ")
    assert message in str(refused.value)


def test_the_command_refuses_too_and_writes_nothing(tmp_path, capsys):
    Path("bad.yaml").write_text(GOOD.replace("method.beta", "method.lam"))
    assert main(["sweep", "bad.yaml"]) == 2
    assert "persafl: bad.yaml:4: unknown key 'method.lam'" in capsys.readouterr().err
    assert main(["sweep", "nothing.yaml"]) == 2
    assert "there is no sweep file nothing.yaml; shipped are alpha, beta, buffered" in capsys.readouterr().err
    Path("good.yaml").write_text(GOOD)
    for override, message in {
        "method.beta=1": "method.beta is set by the grid (good.yaml:4) and on the command line",
        "tracking.enabled=false": "remove tracking.enabled=false",
        "etaa=1": "good.yaml, overrides: unknown key 'etaa'",
    }.items():
        assert main(["sweep", "good.yaml", override]) == 2
        assert message in capsys.readouterr().err
    assert main(["sweep", "good.yaml", "--workers", "0"]) == 2
    assert (
        sorted(
            path.name
            for path in tmp_path.rglob("*")
            if path.name not in ("bad.yaml", "good.yaml", "mlruns", "sweeps", "good", "lock")
        )
        == []
    )


def test_the_command_line_may_change_name_seeds_and_what_all_share():
    changed = plan(GOOD, "name=other", "seeds=[7]", "clients=5")
    assert (changed.name, changed.seeds) == ("other", (7,))
    assert {(trial.config.clients, trial.seed) for trial in first_trials(changed)} == {(5, 7)}


def test_a_dry_run_lists_the_trials_and_estimates_the_time(capsys, tmp_path):
    Path("good.yaml").write_text(GOOD)
    assert main(["sweep", "good.yaml", "clients=5", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "   1  " in said
    assert "fedasync beta=0.8 seed=0" in said
    assert "12 trials\n" in said
    assert "at a time on this machine; nothing was started" in said
    assert not (tmp_path / "mlruns").exists()


def test_a_dry_run_of_an_adaptive_search_does_not_pretend_to_know_its_trials(capsys):
    Path("learns.yaml").write_text(
        "grid:\n  - {method: persafl_me, method.lam: {low: 1, high: 50}}\noverrides: [model=logistic, updates=10]\nsearch: {how: adaptive, trials: 3}\n"
    )
    assert main(["sweep", "learns.yaml", "clients=5", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "learns: 3 trials in each of 1 blocks, each proposed from the results of those before it" in said
    assert "lam=" not in said
    assert "nothing was started" in said


@pytest.mark.parametrize("name", sweeps())
def test_shipped_sweeps_can_be_started(name):
    path = sweeps()[name]
    shipped = plan_of(Source(path.name, path.read_text()), name)
    assert shipped.name == name
    assert path.read_text().startswith("# ")
    if shipped.search is None:
        assert len(first_trials(shipped)) > 1


def test_the_papers_sweeps_are_the_papers_grids():
    shipped = plan_of(Source("paper_mnist.yaml", sweeps()["paper_mnist"].read_text()), "paper_mnist")
    trials = first_trials(shipped)
    assert len({trial.method for trial in trials}) == 8
    assert {trial.config.method["lam"] for trial in trials if trial.method == "persafl_me"} == {20, 25, 30}
    assert {trial.config.method["alpha"] for trial in trials if trial.method == "persafl_maml"} == {0.002, 0.005, 0.01}
    assert {trial.config.method["beta"] for trial in trials} == {0.8, 1.0, 1.2}
    assert all(
        (trial.config.data["name"], trial.config.clients, trial.config.local_steps) == ("mnist", 30, 10)
        for trial in trials
    )


# -- search -----------------------------------------------------------------------------------------------------------

RANDOM = """grid:
  - {method: persafl_me, method.lam: {low: 1, high: 100, log: true}, eta: [0.01, 0.02], local_steps: {low: 1, high: 3, whole: true}}
seeds: [0]
search: {how: random, trials: 40, seed: 5}
"""


def test_a_random_search_draws_from_its_ranges_and_draws_the_same_again():
    trials = first_trials(plan(RANDOM))
    assert [trial.hash for trial in trials] == [trial.hash for trial in first_trials(plan(RANDOM))]
    assert [trial.hash for trial in trials] != [
        trial.hash for trial in first_trials(plan(RANDOM.replace("seed: 5", "seed: 6")))
    ]
    values = [trial.config.method["lam"] for trial in trials]
    assert len(values) == 40
    assert all(1 <= value <= 100 for value in values)
    assert 10 <= sum(value < 10 for value in values) <= 30  # half of a logarithmic range
    assert {trial.config.eta for trial in trials} == {0.01, 0.02}
    assert {trial.config.local_steps for trial in trials} == {1, 2, 3}


def test_a_random_search_of_few_settings_takes_each_once():
    text = "grid:\n  - {eta: [0.01, 0.02], method.beta: [1.0]}\nsearch: {how: random, trials: 10}\n"
    assert sorted(trial.config.eta for trial in first_trials(plan(text))) == [0.01, 0.02]


def test_ranges_that_cannot_be_are_refused():
    for wrong, message in {
        "low: 1, high: 100": "low: 5, high: 5",
        "log: true": "log: maybe",
        "low: 1, ": "low: 0, ",
    }.items():
        with pytest.raises(ConfigError, match=r"some.yaml:2: "):
            plan(RANDOM.replace(wrong, message))


# -- choosing ---------------------------------------------------------------------------------------------------------


def outcome(trial, val, test=0.5, status="finished"):
    summary = {
        "accuracy": {"val": val, "test": test, "std": 0.1, "worst_decile": 0.2, "global": 0.3},
        "loss": {"val": -val, "test": 1.0},
        "staleness": {"mean": 1.0, "max": 2},
        **dict.fromkeys(("updates", "versions", "sim_time", "grad_evals", "dropped"), 1),
    }
    return Outcome(
        trial,
        "run",
        status,
        summary if status == "finished" else None,
        "" if status == "finished" else "DivergenceError: x",
    )


def test_each_methods_best_setting_is_chosen_on_validation_data():
    trials = first_trials(plan(GOOD))
    scores = {"fedasync beta=0.8": (0.8, 0.6), "fedasync beta=1.0": (0.75, 0.75)}
    outcomes = [
        outcome(trial, scores[trial.name.rpartition(" ")[0]][trial.seed], test=trial.seed)
        for trial in trials
        if trial.method == "fedasync"
    ]
    outcomes += [
        outcome(trial, 0.9, status="failed" if trial.seed else "finished")
        for trial in trials
        if trial.method == "persafl_me"
    ]
    best = choose(outcomes, plan(GOOD).select)
    assert [chosen.trial.method for chosen in best] == ["persafl_me", "fedasync"]
    assert best[1].trial.setting == {"method.beta": 1.0}
    assert best[1].over_seeds("accuracy.test") == (0.5, pytest.approx(math.sqrt(0.5)))
    assert len(best[0].outcomes) == 1


def test_a_setting_tried_on_fewer_seeds_does_not_compete():
    trials = [trial for trial in first_trials(plan(GOOD)) if trial.method == "fedasync"]
    outcomes = [
        outcome(trial, 0.9 if trial.setting["method.beta"] == 0.8 else 0.7) for trial in trials[:1] + trials[2:]
    ]
    (best,) = choose(outcomes, plan(GOOD).select)
    assert best.trial.setting == {"method.beta": 1.0}


def test_of_equal_settings_the_same_is_chosen_in_whatever_order_they_ended():
    trials = [trial for trial in first_trials(plan(GOOD)) if trial.method == "persafl_me"]
    equal = [outcome(trial, 0.9) for trial in trials]
    assert choose(equal, plan(GOOD).select)[0].trial.setting == choose(equal[::-1], plan(GOOD).select)[0].trial.setting


def test_the_second_stage_is_the_chosen_settings_on_the_other_seeds():
    two = plan(GOOD + "select: {metric: loss.val, stages: two}\n", "seeds=[3,4,5]")
    first = first_trials(two)
    assert {trial.seed for trial in first} == {3}
    best = choose([outcome(trial, trial.config.method["beta"]) for trial in first], two.select)  # the loss is -val here
    second = on_other_seeds(two, [chosen.trial for chosen in best])
    assert {(trial.method, trial.seed) for trial in second} == {
        (method, seed) for method in ("fedasync", "persafl_me") for seed in (4, 5)
    }
    assert {trial.config.method["beta"] for trial in second if trial.method == "fedasync"} == {1.0}


ACROSS = """name: across
overrides: [model=logistic, updates=10]
grid:
  - {method: fedasync, method.beta: [0.8, 1.0], delays: [constant, pareto]}
  - {method: fedbuff, method.buffer: 5, data.concentration: 0.1, method.beta: [0.8, 1.0]}
  - {method: fedbuff, method.buffer: 9, data.concentration: 0.1, method.beta: [0.8, 1.0]}
seeds: [0, 1, 2]
select: {metric: accuracy.val, stages: two}
"""


def test_settings_are_chosen_within_a_task_and_not_across_delays_or_data():
    """Under constant delays beta=0.8 is best, under pareto beta=1.0, whose scores are all lower: both run on."""
    two = plan(ACROSS)
    scores = {("constant", 0.8): 0.9, ("constant", 1.0): 0.8, ("pareto", 0.8): 0.3, ("pareto", 1.0): 0.4}
    first = [trial for trial in first_trials(two) if trial.method == "fedasync"]
    best = choose(
        [outcome(trial, scores[trial.config.delays["name"], trial.config.method["beta"]]) for trial in first],
        two.select,
    )
    assert [(found.trial.config.delays["name"], found.trial.config.method["beta"]) for found in best] == [
        ("constant", 0.8),
        ("pareto", 1.0),
    ]
    assert len(on_other_seeds(two, [found.trial for found in best])) == 4


def test_what_a_block_fixes_is_told_where_its_settings_are(capsys):
    trials = [trial for trial in first_trials(plan(ACROSS)) if trial.method == "fedbuff"]
    outcomes = [outcome(trial, 0.1 * trial.config.method["buffer"]) for trial in trials]
    assert [row["method.buffer"] for row in table(outcomes)] == [5, 5, 9, 9]
    _print(plan(ACROSS), outcomes)
    assert "buffer=9" in capsys.readouterr().out


def test_a_dry_run_does_not_count_trials_that_would_fail_again(tmp_path, capsys):
    Path("across.yaml").write_text(ACROSS)
    two = plan(ACROSS)
    first = first_trials(two)
    assert main(["sweep", "across.yaml", "--dry-run"]) == 0
    assert "8 trials, then each method's best by accuracy.val on 2 more seeds: 6 trials" in capsys.readouterr().out
    family = SweepRuns(Store(store_uri(two.tracking.uri)), two.tracking.experiment, two.name, [], two.select.metric)
    family.end(family.child(first[0].config, "a"), "FAILED", "DivergenceError: the run diverges")
    family.end(family.child(first[1].config, "b"), "FAILED", "WorkerError: it was killed")
    assert main(["sweep", "across.yaml", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "8 trials; 0 are finished, 7 remain, 1 failed and would fail again (--retry-failed begins them anew)" in said
    assert f"{first[0].name}  (failed: DivergenceError: the run diverges)" in said
    assert main(["sweep", "across.yaml", "--dry-run", "--retry-failed"]) == 0
    assert "8 trials, then" in capsys.readouterr().out


def test_the_table_has_every_trial_and_what_was_varied():
    trials = first_trials(plan(GOOD))
    rows = table([outcome(trials[0], 0.1), outcome(trials[-1], 0.2, status="failed")])
    assert (rows[0]["method.beta"], rows[0]["method.lam"], rows[0]["status"]) == (0.8, None, "finished")
    assert (rows[1]["method.lam"], rows[1]["accuracy.val"], rows[1]["error"]) == (25.0, None, "DivergenceError: x")
    assert to_csv(rows).splitlines()[1].startswith("fedasync,0.8,,,0,finished,0.1,0.5,")


def test_the_ui_compares_by_the_keys_that_each_block_varies():
    assert varied_together(plan(GOOD)) == [("method.beta",), ("method.lam", "schedule.tau")]
    assert varied_together(plan("grid:\n  - {method: [fedasync, fedavg], method.beta: [1, 2]}\n")) == [("method.beta",)]


# -- the time left ----------------------------------------------------------------------------------------------------

KINDS = """name: kinds
overrides: [model=logistic, updates=20, clients=5]
grid:
  - {method: fedasync, method.beta: [0.8, 1.0, 1.2]}
  - {method: persafl_me, method.lam: [20, 25, 30]}
seeds: [0, 1, 2]
select: {stages: two}
"""
TOOK = {"fedasync": 12.0, "persafl_me": 123.0}


def ended(trial, wall_seconds=None, **more):
    """As a trial tells it: 10 seconds of evaluation, the rest is training."""
    found = outcome(trial, 0.5)
    seconds = TOOK[trial.method] if wall_seconds is None else wall_seconds
    return replace(
        found, summary={**found.summary, "wall_seconds": seconds, "evaluation_share": 10.0 / seconds}, **more
    )


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_kind_that_has_not_been_seen_costs_by_its_gradients():
    forecast = Forecast()
    plain, moreau = (
        next(trial for trial in first_trials(plan(KINDS)) if trial.method == method)
        for method in ("fedasync", "persafl_me")
    )
    assert forecast.seconds([plain]) is None
    forecast.finished(plain, 12.0, 10.0 / 12.0)
    ratio = forecast.gradients(moreau) / forecast.gradients(plain)
    assert ratio >= 10
    assert forecast.seconds([plain, moreau]) == pytest.approx([EACH + 12.0, EACH + 2.0 * ratio + 10.0])
    forecast.finished(moreau, 123.0, 10.0 / 123.0)  # then by what its own kind took
    assert forecast.seconds([plain, moreau]) == pytest.approx([EACH + 12.0, EACH + 123.0])


def test_trials_of_a_kind_under_way_tell_of_those_that_wait():
    forecast = Forecast()
    plain, moreau = (
        next(trial for trial in first_trials(plan(KINDS)) if trial.method == method)
        for method in ("fedasync", "persafl_me")
    )
    forecast.finished(plain, 12.0, 0.0)
    assert forecast.seconds([moreau], [(moreau, 500.0)]) == pytest.approx([EACH + 500.0])
    assert forecast.seconds([plain], [(plain, 500.0)]) == pytest.approx([EACH + 12.0])  # what has ended is known better


def test_more_gradients_of_the_same_kind_take_longer():
    forecast = Forecast()
    short, long = first_trials(
        plan("grid:\n  - {method: fedasync, updates: [20, 60], horizon: [null]}\noverrides: [clients=5]\n")
    )
    forecast.finished(short, 10.0, 0.0)
    assert forecast.seconds([long]) == pytest.approx([EACH + 30.0])


def test_lanes_take_the_next_trial_when_they_are_free():
    assert makespan([], [], 2) == 0.0
    assert makespan([30.0], [], 2) == 30.0  # a second lane does not help the last trial
    assert makespan([30.0, 10.0], [5.0, 40.0], 2) == 55.0
    assert makespan([], [10.0] * 4, 2) == 20.0


def test_the_time_left_is_what_the_sweep_then_takes():
    """Two lanes, two kinds, two stages, from the first word of the first expensive trial on to the end."""
    two = plan(KINDS)
    first = first_trials(two)
    second = on_other_seeds(two, [first[0], first[3]])
    clock, said = Clock(), []
    board = Dashboard("kinds", len(first), 2, clock)
    by_method = [[trial for trial in first if trial.method == method] for method in TOOK]
    for stage, later in ((first, [group for group in by_method for _ in two.seeds[1:]]), (second, [])):
        board.later, queue, ends = later, list(stage), {}
        while queue or ends:
            while queue and len(ends) < 2:
                trial = queue.pop(0)
                board.starts(trial)
                ends[trial.hash] = (trial, clock.now, clock.now + EACH + TOOK[trial.method])
            board.waiting = queue
            if clock.now % 5 == 0 and (left := board.seconds_left()) is not None:
                said.append((clock.now, left))
            clock.now += 0.5
            for trial, began, end in list(ends.values()):
                if clock.now >= began + EACH:
                    updates = int(20 * (clock.now - began - EACH) / TOOK[trial.method])
                    board.goes_on(trial, {"updates": min(updates, 20), "total": 20})
                if clock.now >= end:
                    del ends[trial.hash]
                    board.ends(ended(trial))
    assert board.seconds_left() == 0.0
    informed = [(at, left) for at, left in said if at > 60]  # both kinds have been seen
    assert len(informed) > 50
    assert all(left == pytest.approx(clock.now - at, rel=0.15, abs=15.0) for at, left in informed)


def test_a_resumed_trial_is_judged_by_what_it_did_here():
    clock, (trial, other, *_) = Clock(), first_trials(plan(KINDS))
    board = Dashboard("kinds", 2, 1, clock)
    board.starts(trial)
    board.goes_on(trial, {"updates": 10, "total": 20})
    clock.now = 10.0
    board.goes_on(trial, {"updates": 15, "total": 20})  # a quarter of it in 10 seconds
    assert board.seconds_left() == pytest.approx(10.0, rel=0.1)
    board.ends(ended(trial, 40.0))
    board.waiting = [other]
    assert board.seconds_left() == pytest.approx(EACH + 40.0)


def test_trials_of_an_earlier_start_are_known_and_those_of_another_machine_are_not():
    board, (trial, other, *_) = Dashboard("kinds", 2, 1), first_trials(plan(KINDS))
    board.waiting = [other]
    board.ends(ended(trial, 40.0, imported="runs.csv"), before=True)
    assert board.seconds_left() is None
    board.ends(ended(trial, 40.0), before=True)
    assert board.seconds_left() == pytest.approx(EACH + 40.0)


def test_a_trial_that_ends_is_a_line_where_there_is_no_terminal(capsys):
    trials = first_trials(plan(GOOD))
    with Dashboard("some", len(trials), 2) as board:
        board.starts(trials[0])
        board.ends(outcome(trials[0], 0.5))
    assert "1/12 fedasync beta=0.8 seed=0: accuracy 0.5000" in capsys.readouterr().err
    assert [duration(seconds) for seconds in (9.6, 150, 7300)] == ["10 s", "2 min", "2 h 02"]


# -- odd input --------------------------------------------------------------------------------------------------------


def test_a_bomb_of_aliases_is_refused():
    bomb = "a0: &a0 [x]\n" + "\n".join(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10)}]" for k in range(1, 9))
    with pytest.raises(ConfigError, match="more than 10000 values"):
        plan(bomb)


def test_a_trial_that_a_search_thought_ended_and_is_tried_again_is_not_pruned(tmp_path):
    pytest.importorskip("optuna")
    from persafl_lit.sweep.optuna_search import Adaptive

    searching = plan(
        "grid:\n  - {method: persafl_me, method.lam: {low: 1, high: 50}}\nsearch: {how: adaptive, trials: 3}\n"
    )
    search = Adaptive(searching, tmp_path)
    (stranger,) = first_trials(plan("grid:\n  - {method: persafl_me, method.lam: [7]}\n"))
    assert not search.prunes(stranger, {"updates": 1, "total": 9, "point": {"accuracy.val": 0.1}})


# -- trials that trained nothing --------------------------------------------------------------------------------------


def unchanged(trial, val):
    """A trial whose server never had a full buffer: its score is the untrained model's."""
    found = outcome(trial, val)
    told = {"versions": 0, "model_changed": False, "notes": ["the model never changed: only 1 updates arrived"]}
    return Outcome(trial, "run", "finished", {**found.summary, **told})


def test_a_trial_whose_model_never_changed_is_marked_and_neither_chosen_nor_averaged(capsys):
    trials = [
        trial for trial in first_trials(plan(GOOD)) if trial.method == "fedasync"
    ]  # beta=0.8 and 1.0, on two seeds each
    outcomes = [unchanged(trials[0], 0.9), unchanged(trials[1], 0.9), outcome(trials[2], 0.5), outcome(trials[3], 0.7)]
    (best,) = choose(outcomes, plan(GOOD).select)
    assert (best.trial.setting, best.score) == ({"method.beta": 1.0}, pytest.approx(0.6))
    rows = table(outcomes)
    assert [row["versions"] for row in rows[:1]] == [0]
    assert rows[0]["note"].startswith("the model never changed")
    assert choose(outcomes[:2], plan(GOOD).select) == []
    with Dashboard("some", 4, 1) as board:
        board.ends(outcomes[0])
        board.ends(outcomes[2])
    said = capsys.readouterr().err
    assert "seed=0: no result: the model never changed" in said
    assert "seed=0: accuracy 0.5000" in said
    _print(plan(GOOD), outcomes)
    printed = capsys.readouterr().out
    assert "good: 4 trials, 2 without a result, 2 finished" in printed
    assert printed.count("no result: fedasync beta=0.8 seed=") == 2


def test_an_adaptive_search_learns_nothing_from_a_trial_that_trained_nothing(tmp_path):
    pytest.importorskip("optuna")
    from persafl_lit.sweep.optuna_search import STATES, Adaptive

    searching = plan(
        "grid:\n  - {method: persafl_me, method.lam: {low: 1, high: 50}}\nsearch: {how: adaptive, trials: 3}\n"
    )
    search = Adaptive(searching, tmp_path)
    search.ends(unchanged(search.next(), 0.9))
    search.ends(outcome(search.next(), 0.5))
    assert [found.state for found in search._studies[0].ended()] == [STATES.FAIL, STATES.COMPLETE]
