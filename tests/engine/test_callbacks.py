"""Callbacks and loggers: what they are told, what they may do, and what happens when they fail."""

from __future__ import annotations

import collections
import csv
import json
import logging
import pathlib

import mlflow
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import persafl_lit
from persafl_lit import run
from persafl_lit.errors import CallbackError, ConfigError, DivergenceError, Interrupted
from persafl_lit.tracking import store_uri
from tests.support.runs import Patience

FAST = [
    "clients=6",
    "updates=40",
    "local_steps=2",
    "model=mlp",
    "model.hidden=[8]",
    "model.dropout=0.2",
    "eval.every=5",
    "checkpoint.every=6",
]
QUIET = [*FAST, "tracking.enabled=false"]
SERIAL, TWO = ["executor=serial"], ["workers=2"]
STEEP = [
    "tracking.enabled=false",
    "data=quadratic",
    "clients=6",
    "method=fedasync",
    "eta=1e6",
    "updates=60",
    "eval.every=1",
    "eval.finetune=none",
]


def bits(result):
    model = {name: value.tolist() for name, value in result.state_dict().items()}
    memory = {client: {name: value.tolist() for name, value in kept.items()} for client, kept in result.memory.items()}
    summary = {
        key: value
        for key, value in result.summary().items()
        if key not in ("wall_seconds", "evaluation_share", "run_id", "config")
    }
    return json.dumps([result.curves(), result.clients(), model, memory, summary])


# -- what they are told -----------------------------------------------------------------------------------------------


class Witness(persafl_lit.Callback):
    """Writes down everything it is told."""

    def __init__(self):
        self.said = []

    def on_run_start(self, experiment):
        self.said.append(("start", len(experiment.timeline)))

    def on_update(self, experiment, job, staleness, loss):
        assert experiment.timeline[experiment.state.arrivals - 1] == job
        assert loss > 0
        self.said.append(("update", experiment.state.arrivals, staleness))

    def on_evaluation(self, experiment, point):
        assert point.updates <= experiment.state.arrivals
        self.said.append(("evaluation", point.updates))

    def on_checkpoint(self, experiment):
        assert experiment.checkpoint.path.exists()
        self.said.append(("checkpoint", experiment.state.arrivals))

    def on_run_end(self, experiment, result):
        self.said.append(("end", result.summary()["updates"]))

    def on_run_error(self, experiment, error):
        self.said.append(("error", type(error).__name__))

    def of(self, kind):
        return [entry for entry in self.said if entry[0] == kind]


@pytest.mark.parametrize("executor", [SERIAL, TWO])
def test_every_moment_of_a_run_is_told_in_order(executor):
    witness = Witness()
    result = run([*QUIET, *executor, "method=fedasync"], callbacks=[witness])
    assert witness.said[0] == ("start", 40)
    assert witness.said[-1] == ("end", 40)
    staleness = result.timeline.staleness().tolist()
    assert witness.of("update") == [("update", index + 1, staleness[index]) for index in range(40)]
    assert witness.of("evaluation") == [("evaluation", point.updates) for point in result.points]
    assert witness.of("checkpoint") == [("checkpoint", count) for count in range(6, 41, 6)]
    assert not witness.of("error")


def test_a_callback_may_be_any_object_with_some_hooks_and_some_arguments():
    class Brief:
        points = 0

        def on_evaluation(self, point):
            self.points += 1

    brief, given = Brief(), []
    given.append(brief)
    result = run([*QUIET, "method=fedasync"], callbacks=given)
    assert brief.points == len(result.points)
    assert given == [brief], "the caller's list is left alone"


@pytest.mark.parametrize(
    ("overrides", "kind"),
    [(["eta=1e12"], DivergenceError), (["model.hidden=[8]"], Interrupted)],
    ids=["diverged", "interrupted"],
)
def test_a_run_that_ends_without_a_result_is_told_too(overrides, kind):
    witness = Witness()
    with pytest.raises(kind):
        run(
            [*QUIET, "method=fedasync", *overrides],
            callbacks=[witness],
            should_stop=lambda: len(witness.of("update")) >= 9,
        )
    assert witness.said[-1] == ("error", kind.__name__)
    assert not witness.of("end")


def test_a_resumed_run_tells_only_what_is_new():
    first, second = Witness(), Witness()
    with pytest.raises(Interrupted):
        run([*QUIET, "method=fedasync"], callbacks=[first], should_stop=lambda: len(first.of("update")) >= 17)
    result = run([*QUIET, "method=fedasync"], callbacks=[second], resume=True)
    assert first.of("update") + second.of("update") == [
        ("update", i + 1, s) for i, s in enumerate(result.timeline.staleness().tolist())
    ]
    assert [entry for entry in (*first.said, *second.said) if entry[0] == "evaluation"] == [
        ("evaluation", p.updates) for p in result.points
    ]


# -- the captured model -----------------------------------------------------------------------------------------------


class Keeper:
    """Saves the model and the memories at each evaluation."""

    def __init__(self):
        self.saved = []

    def on_evaluation(self, point):
        self.saved.append((point.updates, point.model.state_dict(), point.memory))


@pytest.mark.parametrize("method", ["persafl_maml", "fedper"])
@pytest.mark.parametrize("executor", [SERIAL, TWO])
def test_the_model_of_a_point_is_the_one_that_was_evaluated(method, executor):
    """Training has gone on meanwhile; the oracle is a run that ends after as many updates."""
    keeper = Keeper()
    result = run([*QUIET, f"method={method}", *executor], callbacks=[keeper])
    assert len(keeper.saved) == len(result.points) > 4
    for updates, model, memory in [entry for entry in keeper.saved if entry[0]][::3]:
        until_then = run([*QUIET, f"method={method}", f"updates={updates}", *SERIAL])
        assert all(torch.equal(model[name], value) for name, value in until_then.state_dict().items())
        assert memory.keys() == until_then.memory.keys()
        assert all(
            torch.equal(kept["private"], until_then.memory[client]["private"]) for client, kept in memory.items()
        )
    with pytest.raises(ConfigError, match="not afterwards"):
        _ = result.points[0].model


# -- stopping early ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedasync", "persafl_me", "fedper", "fedbuff"])
def test_a_run_stopped_early_is_the_run_up_to_that_point_whatever_the_number_of_workers(method):
    overrides = [*QUIET, f"method={method}"]
    serial, two = [run([*overrides, *executor], callbacks=[Patience(4)]) for executor in (SERIAL, TWO)]
    assert bits(serial) == bits(two)
    assert len(serial.points) == 4
    updates = serial.summary()["updates"]
    assert 4 < updates < 36
    assert len(serial.timeline) == updates == serial.points[-1].updates
    assert serial.timeline.horizon == serial.points[-1].sim_time == 15
    whole = run([*overrides, *SERIAL])
    common = [name for name in whole.curves() if "own." not in name]
    assert [whole.curves()[name][:4] for name in common] == [serial.curves()[name] for name in common]
    until_then = run([*overrides, f"updates={updates}"])
    assert all(torch.equal(value, serial.state_dict()[name]) for name, value in until_then.state_dict().items())
    assert serial.summary()["beside"].keys() == whole.summary()["beside"].keys(), (
        "its last point has all fine-tuning rules"
    )
    assert serial.summary()["grad_evals"] == serial.curves()["grad_evals"][-1] < whole.summary()["grad_evals"]


@pytest.mark.parametrize("executor", [SERIAL, TWO])
def test_a_stopped_run_that_was_interrupted_and_resumed_is_the_same(executor):
    overrides = [*QUIET, "method=fedper", *executor]
    undisturbed = run(overrides, callbacks=[Patience(5)])
    for pauses in ((9,), (3, 4), (12,)):
        for updates in pauses:
            witness = Witness()
            with pytest.raises(Interrupted):
                run(
                    overrides,
                    callbacks=[Patience(5), witness],
                    resume=True,
                    should_stop=lambda n=updates, w=witness: len(w.of("update")) >= n,
                )
        assert bits(run(overrides, callbacks=[Patience(5)], resume=True)) == bits(undisturbed)


def test_an_interruption_after_the_stop_goes_on_from_there():
    """Ctrl-C while the last point is evaluated by further rules."""
    stop = Patience(3)
    overrides = [*QUIET, "method=persafl_me", "method.inner_steps=2"]
    undisturbed = run(overrides, callbacks=[Patience(3)])
    with pytest.raises(Interrupted):
        run(overrides, callbacks=[stop], should_stop=lambda: stop.left == 0)
    assert bits(run(overrides, callbacks=[Patience(3)], resume=True)) == bits(undisturbed)


def test_a_stopped_run_is_finished_in_mlflow_with_the_metrics_of_its_last_point():
    result = run([*FAST, "method=persafl_me", "method.inner_steps=2"], callbacks=[Patience(3)])
    client = mlflow.MlflowClient(store_uri(None))
    assert client.get_run(result.run_id).info.status == "FINISHED"
    history = [(metric.step, metric.value) for metric in client.get_metric_history(result.run_id, "accuracy.test")]
    assert history == list(zip(result.curves()["updates"], result.curves()["accuracy.test"], strict=True))
    own = client.get_metric_history(result.run_id, "own.accuracy.test")
    assert [metric.value for metric in own] == [result.summary()["beside"]["own"]["test"]]


def test_only_a_point_that_was_told_can_stop_a_run():
    class Early:
        def on_update(self, experiment):
            if experiment.points:
                experiment.stop(experiment.points[0])

    with pytest.raises(
        CallbackError,
        match="Early failed in on_update: ConfigError: experiment.stop takes the point that on_evaluation is being told of",
    ):
        run([*QUIET, "method=fedasync"], callbacks=[Early()])


def test_a_stop_before_a_divergence_counts_whoever_finds_the_divergence_first():

    class Soon:
        def on_evaluation(self, experiment, point):
            if point.updates >= 1:
                experiment.stop(point)

    found = {bits(run([*STEEP, *executor], callbacks=[Soon()])) for executor in (SERIAL, TWO, ["workers=4"])}
    assert len(found) == 1
    with pytest.raises(DivergenceError):
        run(STEEP)


@pytest.mark.parametrize("executor", [SERIAL, TWO])
@pytest.mark.parametrize("method", ["fedper", "persafl_me"])
def test_a_stop_is_not_lost_when_another_callback_fails_at_the_same_point(method, executor):
    overrides = [*QUIET, f"method={method}", *executor]
    for points in (1, 3):
        undisturbed = run(overrides, callbacks=[Patience(points)])
        with pytest.raises(CallbackError, match="Raising failed in on_evaluation"):
            run(overrides, callbacks=[Patience(points), Raising("on_evaluation", points)])
        assert bits(run(overrides, callbacks=[Patience(points)], resume=True)) == bits(undisturbed)


# -- failing ----------------------------------------------------------------------------------------------------------


class Raising:
    """Fails at the n-th call of one hook."""

    def __init__(self, hook, count):
        self.left = count
        setattr(self, hook, self.fail)

    def fail(self):
        self.left -= 1
        if self.left == 0:
            raise ValueError("not today")


@pytest.mark.parametrize("executor", [SERIAL, TWO])
@pytest.mark.parametrize(
    ("hook", "count"), [("on_update", 11), ("on_evaluation", 3), ("on_checkpoint", 2), ("on_run_end", 1)]
)
def test_a_callback_that_fails_is_named_and_nothing_is_lost(hook, count, executor, capsys):
    overrides = [
        *QUIET,
        "method=fedper",
        *executor,
        "checkpoint.every=6" if hook == "on_checkpoint" else "checkpoint.every=0",
    ]
    undisturbed, witness = run(overrides), Witness()
    with pytest.raises(
        CallbackError,
        match=rf"the callback Raising failed in {hook}: ValueError: not today \(test_callbacks.py, line \d+\)",
    ):
        run(overrides, callbacks=[witness, Raising(hook, count)])
    assert witness.said[-1] == ("error", "CallbackError")
    assert "--resume continues from it" in capsys.readouterr().err
    again = Witness()
    assert bits(run(overrides, callbacks=[again], resume=True)) == bits(undisturbed)
    assert len(again.of("update")) == 40 - len(witness.of("update")), "no update is trained twice"


class Before(Witness):
    pass


def test_a_point_at_which_a_callback_failed_is_told_again_to_those_who_do_not_know_it():
    told = {kind: [kind(), kind()] for kind in (Before, Witness)}
    with pytest.raises(CallbackError):
        run([*QUIET, "method=fedasync"], callbacks=[told[Before][0], Raising("on_evaluation", 3), told[Witness][0]])
    result = run([*QUIET, "method=fedasync"], callbacks=[told[Before][1], told[Witness][1]], resume=True)
    for first, second in told.values():
        assert [*first.of("evaluation"), *second.of("evaluation")] == [
            ("evaluation", point.updates) for point in result.points
        ]


def test_a_callback_that_fails_while_a_run_diverges_leaves_a_whole_checkpoint():
    for executor in (SERIAL, ["workers=4"]):
        with pytest.raises(CallbackError):
            run([*STEEP, *executor], callbacks=[Raising("on_evaluation", 2)])
        with pytest.raises(DivergenceError):
            run([*STEEP, *executor], resume=True)


def test_an_error_of_ours_that_a_callback_raises_is_the_callbacks():
    """A run within a callback may diverge; the outer run does not, and keeps its checkpoint."""

    class Nested:
        def on_evaluation(self, point):
            if point.updates > 5:
                run([*QUIET, "method=fedasync", "eta=1e12"])

    undisturbed = run([*QUIET, "method=fedasync"])
    with pytest.raises(CallbackError, match="the callback Nested failed in on_evaluation: DivergenceError: "):
        run([*QUIET, "method=fedasync"], callbacks=[Nested()])
    assert bits(run([*QUIET, "method=fedasync"], resume=True)) == bits(undisturbed)


def test_a_callback_that_exits_is_an_error_with_its_name():
    class Leaving:
        def on_update(self):
            raise SystemExit(0)

    with pytest.raises(CallbackError, match="the callback Leaving failed in on_update: SystemExit"):
        run([*QUIET, "method=fedasync"], callbacks=[Leaving()])


class Stateful:
    def __init__(self, state):
        self.state, self.loaded = state, None

    def on_run_start(self):
        """Every callback has a hook."""

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.loaded = state


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"seen": [1, {2}]}, r"state_dict\(\)\['seen'\]\[1\] is a set; checkpoints hold"),
        ({"counts": collections.defaultdict(int)}, r"state_dict\(\)\['counts'\] is a defaultdict"),
        ({(1, 2): 3.0, frozenset(): 1}, "a key of state_dict.* is a frozenset"),
        (torch.ones(2), r"state_dict\(\) must return a dict; got a Tensor"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_by_name_and_nothing_else_is_lost(state, why):
    undisturbed = run([*QUIET, "method=fedasync"])
    with pytest.raises(CallbackError, match=f"the callback Stateful failed in state_dict: TypeError: {why}"):
        run([*QUIET, "method=fedasync"], callbacks=[Stateful(state)])
    witness = Witness()
    assert bits(run([*QUIET, "method=fedasync"], callbacks=[witness], resume=True)) == bits(undisturbed)
    assert len(witness.of("update")) == 34, "it goes on after the sixth update, where the first checkpoint was due"


def test_a_state_comes_back_as_it_was():
    state = {"mean": np.float64(0.5), "count": np.int64(3), "w": torch.arange(3), "deep": [None, ("a", {"b": True})]}
    witness = Witness()
    with pytest.raises(Interrupted):
        run(
            [*QUIET, "method=fedasync"],
            callbacks=[Stateful(state), witness],
            should_stop=lambda: len(witness.of("update")) >= 9,
        )
    again = Stateful({})
    run([*QUIET, "method=fedasync"], callbacks=[again], resume=True)
    assert torch.equal(again.loaded.pop("w"), torch.arange(3))
    assert again.loaded == {"mean": 0.5, "count": 3, "deep": [None, ("a", {"b": True})]}


def test_one_callback_that_fails_when_it_is_told_of_an_error_keeps_nobody_else_from_it(capsys):
    witness = Witness()
    with pytest.raises(DivergenceError):
        run([*QUIET, "method=fedasync", "eta=1e12"], callbacks=[Raising("on_run_error", 1), witness])
    assert witness.said[-1] == ("error", "DivergenceError")
    assert "the callback Raising failed in on_run_error: ValueError: not today" in capsys.readouterr().err


def test_a_callback_that_fails_at_once_does_not_wait_for_the_store(monkeypatch):
    monkeypatch.setattr("persafl_lit.tracking.tracker.OPENS_WITHIN", 1e6)  # it would wait for so long
    with pytest.raises(CallbackError, match="failed in on_run_start"):
        run([*FAST, "method=fedasync"], callbacks=[Raising("on_run_start", 1)])


def test_a_run_whose_callback_fails_is_failed_in_mlflow():
    with pytest.raises(CallbackError):
        run([*FAST, "method=fedasync"], callbacks=[Raising("on_update", 20)])
    client = mlflow.MlflowClient(store_uri(None))
    (failed,) = client.search_runs([client.get_experiment_by_name("persafl").experiment_id])
    assert failed.info.status == "FAILED"
    assert "the callback Raising failed in on_update" in failed.data.tags["persafl.error"]
    resumed = run([*FAST, "method=fedasync"], resume=True)
    assert resumed.run_id == failed.info.run_id
    assert client.get_run(resumed.run_id).info.status == "FINISHED"


# -- loggers ----------------------------------------------------------------------------------------------------------


def rows(logger):
    with open(f"{logger.log_dir}/metrics.csv") as file:
        return list(csv.DictReader(file))


def test_lightnings_own_loggers_get_every_evaluation_beside_mlflow(tmp_path):
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    table, board = CSVLogger(tmp_path / "csv"), TensorBoardLogger(tmp_path / "board")
    result = run([*FAST, "method=fedasync"], loggers=[table, board])
    curves = result.curves()
    found = rows(table)
    assert [int(row["step"]) for row in found] == curves["updates"]
    assert [float(row["sim_time"]) for row in found] == curves["sim_time"]
    assert [float(row["accuracy.test"]) for row in found] == curves["accuracy.test"]
    assert "method: fedasync" in (pathlib.Path(table.log_dir) / "hparams.yaml").read_text().replace(
        "method.name", "method"
    )

    events = EventAccumulator(board.log_dir)
    events.Reload()
    scalars = events.Scalars("accuracy.test")
    assert [event.step for event in scalars] == curves["updates"]
    assert [event.value for event in scalars] == pytest.approx(curves["accuracy.test"])
    assert [event.value for event in events.Scalars("sim_time")] == pytest.approx(curves["sim_time"])

    history = mlflow.MlflowClient(store_uri(None)).get_metric_history(result.run_id, "accuracy.test")
    assert [metric.value for metric in history] == curves["accuracy.test"]


def test_a_logger_of_a_resumed_run_has_the_whole_curve(tmp_path):
    witness = Witness()
    with pytest.raises(Interrupted):
        run(
            [*QUIET, "method=fedasync"],
            loggers=[CSVLogger(tmp_path)],
            callbacks=[witness],
            should_stop=lambda: len(witness.of("update")) >= 17,
        )
    again = CSVLogger(tmp_path)
    result = run([*QUIET, "method=fedasync"], loggers=[again], resume=True)
    assert [int(row["step"]) for row in rows(again)] == result.curves()["updates"]


class Final(CSVLogger):
    def __init__(self, folder, fails=False):
        super().__init__(folder)
        self.statuses, self.fails = [], fails

    def finalize(self, status):
        self.statuses.append(status)
        super().finalize(status)
        if self.fails:
            raise OSError("no space left")


def test_every_logger_is_finalised_once_also_beside_one_that_fails(tmp_path):
    loggers = [Final(tmp_path / "a"), Final(tmp_path / "b", fails=True), Final(tmp_path / "c")]
    with pytest.raises(CallbackError, match="the logger Final failed in finalize: OSError: no space left"):
        run([*QUIET, "method=fedasync"], loggers=loggers)
    assert [logger.statuses for logger in loggers] == [["success"]] * 3


def test_a_logger_has_the_further_rules_of_a_stopped_run(tmp_path):
    logger = CSVLogger(tmp_path)
    result = run([*QUIET, "method=persafl_me", "method.inner_steps=2"], loggers=[logger], callbacks=[Patience(3)])
    found = [row["own.accuracy.test"] for row in rows(logger) if row.get("own.accuracy.test")]
    assert [float(value) for value in found] == [result.summary()["beside"]["own"]["test"]]
    assert any("a callback ended the run at simulated time 10, after" in note for note in result.notes)


@pytest.mark.parametrize(("overrides", "status"), [([], "success"), (["eta=1e12"], "failed")])
def test_loggers_are_finalised_also_when_a_run_fails(overrides, status, tmp_path):
    logger = Final(tmp_path)
    try:
        run([*QUIET, "method=fedasync", *overrides], loggers=[logger])
    except DivergenceError:
        assert status == "failed"
    assert logger.statuses == [status]
    assert status == "failed" or rows(logger)[0]["step"] == "0"


def test_a_logger_that_fails_is_named(tmp_path):
    class Full(CSVLogger):
        def log_metrics(self, metrics, step=None):
            raise OSError("no space left")

    with pytest.raises(CallbackError, match="the logger Full failed in log_metrics: OSError: no space left"):
        run([*QUIET, "method=fedasync"], loggers=[Full(tmp_path)])


@pytest.mark.parametrize(
    ("listeners", "sentence"),
    [
        ({"callbacks": [object()]}, r"the callback <object .*> has none of the hooks on_run_start, on_update, "),
        ({"callbacks": [EarlyStopping("loss")]}, "the callback <.*EarlyStop.*> has none of the hooks on_run_start"),
        ({"callbacks": [Witness]}, r"callbacks= takes objects; got the class Witness: write Witness\(...\)"),
        (
            {"loggers": [object()]},
            "the logger <object .*> is none of Lightning's: it needs log_hyperparams, log_metrics",
        ),
        ({"loggers": [CSVLogger]}, "loggers= takes objects; got the class CSVLogger"),
    ],
)
def test_what_can_be_told_nothing_is_refused_before_anything_runs(listeners, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run([*QUIET, "method=fedasync"], **listeners)
