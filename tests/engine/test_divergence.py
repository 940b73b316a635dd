"""What is not finite stays out of the model: the run ends, or goes on without it; and gradients may be clipped."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.cli import main
from persafl_lit.engine.executors import Processes, Worker
from persafl_lit.engine.experiment import Interrupted
from persafl_lit.engine.messages import Train
from persafl_lit.errors import ConfigError, DivergenceError, ModelError
from persafl_lit.learning.client_data import ClientDataModule
from persafl_lit.learning.client_module import ClientModule
from persafl_lit.learning.objectives import Plain
from persafl_lit.server.rules import ControlVariates
from persafl_lit.server.state import State
from tests.support import reference
from tests.support.clients import fit, parts
from tests.support.modules import Guarded, Stubborn
from tests.support.quadratics import random_quadratics, save
from tests.support.runs import bits, run_for

ETA, Q, N, D = 0.02, 4, 6, 3
QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
SKIP = "on_divergence=skip"


@pytest.fixture
def steep(tmp_path):
    """Quadratics where client 2 is so steep that four steps of it overflow."""
    H, a = random_quadratics(N, D)
    H[2] = 1e99 * np.eye(D)
    return save(tmp_path / "q.npz", H, a), H, a


def train(path, *overrides):
    return run(
        [
            *QUIET,
            "data=quadratic",
            f"data.path={path}",
            "precision=64",
            f"eta={ETA}",
            f"local_steps={Q}",
            "updates=40",
            *overrides,
        ]
    )


# -- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "buffer"), [("fedasync", 1), ("fedbuff", 3)])
def test_a_skipped_update_counts_as_zero(method, buffer, steep):
    """In closed form: the same run in which client 2 sends Delta = 0. A buffer still divides by its size."""
    path, H, a = steep
    settings = [] if buffer == 1 else [f"method.buffer={buffer}", "method.discount=constant"]
    result = train(path, f"method={method}", *settings, SKIP)
    expected = reference.federate(
        result.timeline,
        H,
        a,
        np.zeros(D),
        gradient=lambda H, a, w, r: H @ (w - a) if H[0, 0] < 1e90 else 0 * w,
        eta=ETA,
        local_steps=Q,
        buffer=buffer,
    )
    assert np.allclose(result.state_dict()["w"], expected, rtol=1e-10)
    sent = int(result.timeline.arrivals_per_client()[2])
    assert sent > 1
    assert result.summary()["skipped"] == sent
    assert result.curves()["skipped"][-1] == sent
    assert result.curves()["skipped"][0] == 0
    assert any(f"{sent} of 40 updates were not finite" in note for note in result.notes)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedasync_mix", "local", "persafl_maml"])
def test_every_rule_goes_on_without_the_client_that_diverges_and_says_so_once(method, steep, capfd):
    cohort = ["schedule.cohort=3"] if method in ("fedavg", "scaffold") else []
    overrides = [f"method={method}", *cohort, SKIP, "eval.every=3"]
    serial = train(steep[0], *overrides, "executor=serial")
    said = capfd.readouterr().err
    assert said.count("it is skipped, and so will others be (on_divergence=skip)") == 1
    assert torch.isfinite(serial.state_dict()["w"]).all()
    assert serial.summary()["skipped"] == serial.timeline.arrivals_per_client()[2] > 0
    assert bits(train(steep[0], *overrides, "workers=2")) == bits(serial)


def test_an_interrupted_run_goes_on_counting(steep):
    overrides = [
        "data=quadratic",
        f"data.path={steep[0]}",
        "method=fedbuff",
        "method.buffer=3",
        "eval.every=2",
        "updates=40",
        SKIP,
        *QUIET,
    ]
    whole = run(overrides)
    assert whole.summary()["skipped"] > 3
    for updates in (17, 8):
        with pytest.raises(Interrupted):
            run_for(overrides, updates, resume=True)
    assert bits(run(overrides, resume=True)) == bits(whole)


def test_an_inner_minimisation_that_never_ends_is_skipped_too(steep):
    overrides = [
        "method=persafl_me",
        "method.inner_steps=null",
        "method.nu=1e-18",
        "local_steps=1",
        "updates=2",
        "eval.finetune=none",
        "eval.beside=[]",
    ]
    with pytest.raises(DivergenceError, match=r"the run diverges: update 0 \(client .*after 10000 inner steps"):
        train(steep[0], *overrides)
    result = train(steep[0], *overrides, SKIP)
    assert result.summary()["skipped"] == 2
    assert not result.state_dict()["w"].any(), "where it began"


def test_an_update_that_makes_the_model_infinite_is_put_back(steep):
    """beta = 1e18 throws the model far off; whatever overflows is left out, and the same by every executor."""
    overrides = ["method=fedbuff", "method.buffer=2", "method.beta=1e18", "eval.finetune=none", "updates=60"]
    with pytest.raises(DivergenceError, match="makes the model infinite|has loss"):
        train(steep[0], *overrides)
    serial = train(steep[0], *overrides, SKIP, "executor=serial")
    assert torch.isfinite(serial.state_dict()["w"]).all()
    assert serial.summary()["skipped"] > serial.timeline.arrivals_per_client()[2]
    assert bits(train(steep[0], *overrides, SKIP, "workers=2")) == bits(serial)


def test_a_version_that_is_put_back_leaves_a_clean_buffer_and_the_last_memory():
    """beta = 1e18 makes every second arrival's model infinite; what waits, and what the last client keeps, goes with it."""

    class Watch:
        states = []  # noqa: RUF012

        def on_update(self, experiment):
            state = experiment.state
            self.states.append(
                (state.w, state.waiting, state.in_waiting, state.arrivals, state.skipped, sorted(state.memories))
            )

    overrides = [
        "method=fedbuff",
        "method.buffer=2",
        "method.beta=1e18",
        "data=quadratic",
        "clients=4",
        "updates=8",
        "eval.finetune=none",
    ]
    run([*QUIET, *overrides, "precision=32", "eta=1e12", "local_steps=2", SKIP, "executor=serial"], callbacks=[Watch()])
    first = Watch.states[0][0]
    for w, waiting, in_waiting, arrivals, skipped, memories in Watch.states[1::2]:
        assert torch.equal(w, first)
        assert (waiting, in_waiting, skipped, memories) == (None, 0, arrivals, [])


def test_scaffolds_c_stays_the_mean_of_the_controls_when_one_is_skipped():
    """The server's c is 1/n sum of c_i after every whole round, whoever was skipped, and whatever was put back."""

    class Watch:
        rounds = 0

        def on_update(self, experiment):
            state = experiment.state
            if state.arrivals % 2 == 0 and "control" in state.kept:
                kept = sum(slot.tensors["control"] for slot in state.memories.values())
                torch.testing.assert_close(state.kept["control"], kept / 6)
                self.rounds += 1

    watch = Watch()
    result = run(
        [
            *QUIET,
            "method=scaffold",
            "schedule.cohort=2",
            "data=quadratic",
            "data.condition=1e12",
            "clients=6",
            "updates=60",
            "eta=0.5",
            "local_steps=9",
            SKIP,
        ],
        callbacks=[watch],
    )
    assert result.summary()["skipped"] > 0
    assert watch.rounds > 5


def test_a_skipped_arrival_is_a_zero_in_the_sum_of_controls():
    rule, state = ControlVariates(buffer=2, clients=4), State(torch.zeros(1))
    for change in (8.0, 0.0, 0.0):
        rule.apply(state, rule.read(state), {"delta": torch.ones(1), "control": torch.full((1,), change)}, 0)
        rule.arrive(state)
    assert state.kept["control"].tolist() == [8.0 / 4]
    assert state.w.tolist() == [-1.5], "three versions, each with half of one update"


# -- stop -------------------------------------------------------------------------------------------------------------


def test_every_executor_records_the_same_points_before_a_divergence():
    class Watch:
        def __init__(self):
            self.points = []

        def on_evaluation(self, point):
            self.points.append((point.sim_time, json.dumps(point.metrics())))

    overrides = [
        "data=quadratic",
        "clients=8",
        "method=fedasync",
        "eta=0.5",
        "updates=500",
        "eval.every=0.25",
        "eval.finetune=none",
    ]
    seen = []
    for executor in ("serial", "processes"):
        watch = Watch()
        with pytest.raises(DivergenceError) as error:
            run([*QUIET, *overrides, f"executor={executor}", "workers=2"], callbacks=[watch])
        seen.append((str(error.value), watch.points))
    assert len(seen[0][1]) > 5
    assert seen[0] == seen[1]


def test_other_values_are_refused(capsys):
    for overrides, sentence in (
        (["on_divergence=ignore"], "on_divergence must be one of stop, skip"),
        (["clip=0"], "clip must be > 0"),
    ):
        assert main(["run", *overrides]) == 2
        assert sentence in capsys.readouterr().err
    with pytest.raises(ConfigError, match="checkpoint.seconds must be > 0"):
        compose(["checkpoint.seconds=-1"])
    base = compose([])
    assert compose(["checkpoint.seconds=5"]).hash() == base.hash()
    assert len({base.hash(), compose(["clip=1"]).hash(), compose([SKIP]).hash()}) == 3


# -- clipping ---------------------------------------------------------------------------------------------------------


def test_clipping_is_by_the_norm_of_each_local_steps_gradient(tmp_path):
    H, a = random_quadratics(N, D)
    path = save(tmp_path / "q.npz", H, a)

    def gradient(H, a, w, read):
        slope = H @ (w - a)
        return slope * min(1.0, 0.7 / np.linalg.norm(slope))

    result = train(path, "method=fedasync", "clip=0.7")
    expected = reference.federate(result.timeline, H, a, np.zeros(D), gradient=gradient, eta=ETA, local_steps=Q)
    assert np.allclose(result.state_dict()["w"], expected, rtol=1e-10)
    free, loose = train(path, "method=fedasync"), train(path, "method=fedasync", "clip=1e9")
    assert bits(free) == bits(loose)
    assert not np.allclose(free.state_dict()["w"], expected, rtol=1e-3)


def test_a_clipped_run_does_not_diverge(steep):
    """In 32 bits the square of the steep client's gradient is infinite; its norm is not."""
    path, H, a = steep
    H[2] = 1e25 * np.eye(D)
    save(path, H, a)
    result = train(path, "method=fedasync", "precision=32", "clip=1", "eval.finetune=none")
    assert result.summary()["skipped"] == 0
    assert math.isfinite(float(result.state_dict()["w"].sum()))
    assert float(result.state_dict()["w"].norm()) <= 40 * Q * ETA + 1e-3
    assert float(result.state_dict()["w"].norm()) > ETA


def test_trainer_fit_clips_as_the_loop_does():
    federation, backbone, work = parts(Plain())
    worker = Worker(work)
    worker.module.clip = 0.5
    worker.train(Train(2, 0, {"w": worker.start}))
    clipped = worker.module.w.clone()
    worker.module.clip = None
    worker.train(Train(2, 0, {"w": worker.start}))
    assert not torch.equal(clipped, worker.module.w)

    federation, backbone, _ = parts(Plain())
    alone = ClientModule(backbone, Plain(), eta=0.05, clip=0.5)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fit(alone, ClientDataModule(federation, 2, Plain(), local_steps=4, batch_size=8, seed=0), steps=4)
    torch.set_num_threads(threads)
    assert torch.equal(alone.w, clipped)


# -- models that cannot travel ----------------------------------------------------------------------------------------


def test_a_model_that_cannot_be_sent_to_processes_is_one_sentence():
    _, _, work = parts(Plain())
    worker = Worker(type(work)(**{**vars(work), "backbone": Stubborn()}))
    with pytest.raises(
        ModelError, match=r"Stubborn cannot be sent to worker processes \(TypeError: I stay here\); use executor=serial"
    ):
        Processes(worker, 1, start="spawn")


def test_a_model_that_cannot_be_copied_is_one_sentence():
    with pytest.raises(ModelError, match="Guarded cannot be copied, and a run trains a copy: TypeError: cannot pickle"):
        run([*QUIET, "updates=2"], Guarded())
