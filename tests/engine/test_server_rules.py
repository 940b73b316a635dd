"""Whole runs with server optimisers, CA2FL and ACE against the naive reference, and the laws between them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from persafl_lit import run
from persafl_lit.errors import ConfigError, Interrupted
from tests.support import reference
from tests.support import reference_rules as rules
from tests.support.quadratics import random_quadratics, save
from tests.support.runs import bits, run_for

ETA, Q, N, D = 0.02, 4, 8, 5
QUIET = ["tracking.enabled=false", "checkpoint.every=0", "eval.finetune=none"]
ROUNDS = ["schedule=rounds", "schedule.cohort=4", "method.buffer=cohort"]
BUFFER = ["schedule=asynchronous", "method.buffer=3"]
ONE = ["schedule=asynchronous", "method.buffer=1"]
DRAWN = ["schedule=drawn", "schedule.tau=8", "method.buffer=3"]
SCHEDULES = {"rounds": (ROUNDS, 4), "buffer": (BUFFER, 3), "asynchronous": (ONE, 1), "drawn": (DRAWN, 3)}
DISCOUNTS = {
    "constant": (["method.discount=constant"], rules.constant),
    "polynomial": (["method.discount=polynomial"], lambda staleness: (staleness + 1) ** -0.5),
}
ADAPTIVE = ["method.beta=0.05", "method.beta1=0.7", "method.eps=0.02"]
SERVERS = {
    "fedavgm": (
        ["method.beta=0.6", "method.momentum=0.7"],
        lambda **where: rules.fedavgm(step=0.6, momentum=0.7, **where),
    ),
    "fedadam": (
        [*ADAPTIVE, "method.beta2=0.8"],
        lambda **where: rules.fedopt(rules.adam(0.8), step=0.05, beta1=0.7, tau=0.02, **where),
    ),
    "fedyogi": (
        [*ADAPTIVE, "method.beta2=0.8"],
        lambda **where: rules.fedopt(rules.yogi(0.8), step=0.05, beta1=0.7, tau=0.02, **where),
    ),
    "fedadagrad": (ADAPTIVE, lambda **where: rules.fedopt(rules.adagrad, step=0.05, beta1=0.7, tau=0.02, **where)),
    "ca2fl": (["method.beta=0.6"], lambda **where: rules.ca2fl(N, step=0.6, **where)),
    "ace": (["method.beta=0.6"], lambda **where: rules.ace(N, step=0.6, **where)),
    "ace warmup": (
        ["method.beta=0.6", "method.warmup=true"],
        lambda **where: rules.ace(N, step=0.6, warmup=True, **where),
    ),
    "aced": (["method.beta=0.6", "method.tau_algo=4"], lambda **where: rules.ace(N, step=0.6, tau_algo=4, **where)),
}


@pytest.fixture
def quadratics(tmp_path):
    H, a = random_quadratics(N, D, seed=1)
    w0 = np.random.default_rng(2).normal(size=D)
    return save(tmp_path / "q.npz", H, a, w0=w0), H, a, w0


def train(path, *overrides):
    data = ["data=quadratic", f"data.path={path}", f"eta={ETA}", f"local_steps={Q}", "updates=60", "executor=serial"]
    result = run([*QUIET, *data, *overrides])
    return result, result.state_dict()["w"].numpy()


def plain(H, a, w, read):
    return reference.plain(H, a, w)


@pytest.mark.parametrize("discount", DISCOUNTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", SERVERS)
def test_a_run_is_the_papers_algorithm(case, schedule, discount, quadratics):
    path, H, a, w0 = quadratics
    (settings, server), (overrides, buffer), (weighted, weight) = (
        SERVERS[case],
        SCHEDULES[schedule],
        DISCOUNTS[discount],
    )
    result, w = train(path, f"method={case.split()[0]}", *settings, *overrides, *weighted)
    expected = rules.federate(
        result.timeline,
        H,
        a,
        w0,
        server=server(buffer=buffer, weight=weight),
        gradient=plain,
        eta=ETA,
        local_steps=Q,
        buffer=buffer,
    )
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-10)
    assert not np.allclose(expected, w0, atol=1e-2), "it moved"


OBJECTIVES = {
    "maml": (["method.alpha=0.05"], lambda H, a, w, read: reference.maml(H, a, w, 0.05)),
    "moreau": (
        ["method.lam=3", "method.inner_steps=5", "method.inner_lr=0.1"],
        lambda H, a, w, read: 3 * (w - reference.moreau_steps(H, a, w, 3, 5, 0.1)),
    ),
    "proximal": (["method.mu=0.5"], lambda H, a, w, read: reference.plain(H, a, w) + 0.5 * (w - read)),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("case", ["fedadam", "ca2fl", "ace"])
def test_a_rule_works_with_any_objective(case, objective, quadratics):
    path, H, a, w0 = quadratics
    (settings, server), (objectives, gradient) = SERVERS[case], OBJECTIVES[objective]
    result, w = train(path, f"method={case}", f"method.objective={objective}", *settings, *objectives, *BUFFER)
    expected = rules.federate(
        result.timeline, H, a, w0, server=server(buffer=3), gradient=gradient, eta=ETA, local_steps=Q, buffer=3
    )
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", ["fedavgm", "fedadam", "ca2fl", "ace", "aced"])
def test_a_skipped_update_does_not_enter(case, tmp_path, capfd):
    """Client 2 overflows: the reference leaves its updates out, and versions exist all the same."""
    H, a = random_quadratics(N, D, seed=1)
    H[2] = 1e99 * np.eye(D)
    path = save(tmp_path / "q.npz", H, a, w0=np.ones(D))
    settings, server = SERVERS[case]
    for overrides, buffer in (SCHEDULES["buffer"], SCHEDULES["asynchronous"]):
        result, w = train(path, f"method={case}", *settings, *overrides, "on_divergence=skip")
        H[2] = 0
        expected = rules.federate(
            result.timeline,
            H,
            a,
            np.ones(D),
            server=server(buffer=buffer),
            gradient=plain,
            eta=ETA,
            local_steps=Q,
            buffer=buffer,
            skipped={2},
        )
        np.testing.assert_allclose(w, expected, rtol=0, atol=1e-10)
        assert result.summary()["skipped"] == result.timeline.arrivals_per_client()[2] > 0


@pytest.mark.parametrize("buffer", [1, 2])
@pytest.mark.parametrize("case", ["ca2fl", "ace", "aced"])
def test_an_update_that_makes_the_model_infinite_is_put_back(case, buffer, tmp_path, capfd):
    """Client 2 sends 1e37 and beta = 1e4 makes that infinite: it is forgotten again, and the sum stays that of the updates
    that are kept."""
    H, a = random_quadratics(N, D, seed=1)
    H *= 1e-5
    H[2] = 1e37 * np.eye(D)
    path = save(tmp_path / "q.npz", H, a)

    class Watch:
        def on_update(self, experiment):
            state = experiment.state
            if state.latest:
                total = sum(state.latest[client].tensors["update"].double() for client in sorted(state.latest))
                torch.testing.assert_close(state.kept["latest_sum"], total)
            if buffer == 1:
                assert 2 not in state.latest

    settings = ["eta=1", "local_steps=1", "updates=60", f"method={case}", "method.beta=1e4", f"method.buffer={buffer}"]
    common = [*QUIET, "precision=32", "data=quadratic", f"data.path={path}", "on_divergence=skip", *settings]
    serial = run([*common, "executor=serial"], callbacks=[Watch()])
    assert torch.isfinite(serial.state_dict()["w"]).all()
    assert serial.summary()["skipped"] >= serial.timeline.arrivals_per_client()[2] > 1
    assert bits(run([*common, "workers=2"])) == bits(serial)


# -- laws between methods ---------------------------------------------------------------------------------------------

DIGITS = [
    *QUIET,
    "data=digits",
    "model=mlp",
    "model.hidden=[8]",
    "model.dropout=0.3",
    "clients=6",
    "updates=24",
    "local_steps=3",
    "eta=0.05",
    "executor=serial",
]


def digits(*overrides):
    return torch.cat([value.flatten() for value in run([*DIGITS, *overrides]).state_dict().values()])


def test_fedavgm_without_momentum_is_fedavg():
    cohort = "schedule.cohort=3"
    assert torch.equal(digits("method=fedavgm", "method.momentum=0", cohort), digits("method=fedavg", cohort))


def test_server_momentum_on_a_buffer_of_one_without_momentum_is_fedasync():
    assert torch.equal(
        digits("method=fedasync", "method.rule=momentum", "method.momentum=0"), digits("method=fedasync")
    )


@pytest.mark.parametrize("method", ["ca2fl", "ace"])
def test_full_participation_without_staleness_is_federated_averaging(method):
    """Everybody's latest update is this round's: the calibration cancels, and the mean is the mean of the round."""
    rounds = ["schedule=rounds", "schedule.cohort=6", "method.buffer=cohort", "method.beta=1"]
    torch.testing.assert_close(
        digits(f"method={method}", *rounds), digits("method=fedavg", "schedule.cohort=6"), rtol=0, atol=1e-6
    )


def test_ace_without_fast_clients_reaches_the_optimum_that_fedasync_misses(quadratics):
    """With one local step an update is a gradient, so ACE settles at the minimum of the mean cost, however uneven the
    clients' speeds are; applied as they arrive, updates of fast clients pull the model to themselves."""
    path, H, a, _ = quadratics
    optimum = np.linalg.solve(H.sum(axis=0), np.einsum("nij,nj->i", H, a))
    uneven = ["local_steps=1", "updates=6000", "delays=pareto"]
    result, ace = train(path, "method=ace", "method.beta=0.3", *uneven)
    _, fedasync = train(path, "method=fedasync", *uneven)
    arrivals = result.timeline.arrivals_per_client()
    assert arrivals.max() > 1.5 * arrivals.min()
    assert np.abs(ace - optimum).max() < 1e-6
    assert np.abs(fedasync - optimum).max() > 1e-3


def test_with_private_parameters_only_the_shared_part_is_kept():
    class Watch:
        sizes = set()  # noqa: RUF012

        def on_update(self, experiment):
            state = experiment.state
            self.sizes |= {slot.tensors["update"].numel() for slot in state.latest.values()} - {state.w.numel()}

    for method in ("ca2fl", "ace", "fedadam"):
        result = run([*DIGITS, f"method={method}", "method.private=head", *ONE], callbacks=[Watch()])
        assert result.memory
    assert not Watch.sizes


def test_a_run_whose_updates_would_not_fit_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr("persafl_lit.server.latest_updates.MOST_CACHED", 1000)
    with pytest.raises(ConfigError, match=r"an update per client, 6 x 610 values, more than 1,000; take fewer clients"):
        digits("method=ace")
    digits("method=ace", "method.private=all")


def test_a_run_that_ends_while_it_waits_for_everybody_is_no_result():
    short = ["method=ace", "updates=8"]
    result = run([*DIGITS, *short, "method.warmup=true"])
    assert len(set(result.timeline.client.tolist())) < 6
    assert not result.model_changed
    assert any("the model never changed" in note for note in result.notes)
    assert run([*DIGITS, *short]).model_changed


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_a_checkpoint_writes_an_update_once(tmp_path):
    """With checkpoints after every update, a segment holds one client's update, not everybody's."""
    overrides = [*DIGITS[1:], "tracking.enabled=false", "checkpoint.every=1", "method=ace", "updates=24"]
    with pytest.raises(Interrupted):
        run_for(overrides, 20)
    folder = tmp_path / "mlruns" / "checkpoints"
    content = torch.load(next(folder.glob("*[0-9a-f].pt")), weights_only=True)
    assert sorted(content["state"]["latest"]) == sorted(
        {-1 - name[0] for names in content["segments"].values() for name in names}
    )
    assert len(content["segments"]) > 1
    assert not [name for name in content["state"]["kept"] if content["state"]["kept"][name].dim() > 1]
