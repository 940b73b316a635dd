"""Whole runs against a naive numpy reference, and the laws between methods."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from persafl_lit import compose, run
from persafl_lit.errors import ConfigError
from tests.support import reference
from tests.support.quadratics import random_quadratics, save

ETA, Q, N, D = 0.02, 4, 8, 5
QUIET = ["tracking.enabled=false", "checkpoint.every=0", "eval.finetune=none"]


@pytest.fixture
def quadratics(tmp_path):
    H, a = random_quadratics(N, D, seed=1)
    w0 = np.random.default_rng(2).normal(size=D)
    return save(tmp_path / "q.npz", H, a, w0=w0), H, a, w0


def train(path, *overrides):
    result = run(
        [*QUIET, "data=quadratic", f"data.path={path}", f"eta={ETA}", f"local_steps={Q}", "updates=60", *overrides]
    )
    return result, result.state_dict()["w"].numpy()


COHORT = ["schedule.cohort=4"]


def polynomial(staleness):
    return (staleness + 1) ** -0.5


def hinge(staleness):
    return 1.0 if staleness <= 2 else 1 / (0.3 * (staleness - 2) + 1)


REFERENCES = {
    "fedasync": ([], {"gradient": lambda H, a, w, r: reference.plain(H, a, w)}),
    "fedasync beta": (["method.beta=0.7"], {"gradient": lambda H, a, w, r: reference.plain(H, a, w), "beta": 0.7}),
    "fedavg": (COHORT, {"gradient": lambda H, a, w, r: reference.plain(H, a, w), "buffer": 4}),
    "fedprox": (
        [*COHORT, "method.mu=0.5"],
        {"gradient": lambda H, a, w, r: reference.plain(H, a, w) + 0.5 * (w - r), "buffer": 4},
    ),
    "per_fedavg": (
        [*COHORT, "method.alpha=0.05", "method.hvp=exact"],
        {"gradient": lambda H, a, w, r: reference.maml(H, a, w, 0.05), "buffer": 4},
    ),
    "persafl_maml": (
        ["method.alpha=0.05", "method.hvp=finite_difference"],
        {"gradient": lambda H, a, w, r: reference.maml(H, a, w, 0.05)},
    ),
    "pfedme": (
        [*COHORT, "method.lam=3", "method.inner_steps=5", "method.inner_lr=0.1"],
        {"gradient": lambda H, a, w, r: 3 * (w - reference.moreau_steps(H, a, w, 3, 5, 0.1)), "buffer": 4},
    ),
    "persafl_me": (
        ["method.lam=3", "method.inner_steps=5", "method.inner_lr=0.1"],
        {"gradient": lambda H, a, w, r: 3 * (w - reference.moreau_steps(H, a, w, 3, 5, 0.1))},
    ),
    "persafl_me nu": (
        ["method.lam=3", "method.inner_steps=null", "method.nu=1e-12"],
        {"gradient": lambda H, a, w, r: 3 * (w - reference.moreau_point(H, a, w, 3))},
    ),
    "fedbuff": (
        ["method.buffer=3"],
        {"gradient": lambda H, a, w, r: reference.plain(H, a, w), "buffer": 3, "weight": polynomial},
    ),
    "fedbuff hinge": (
        ["method.buffer=2", "method.discount=hinge", "method.discount_a=0.3", "method.discount_b=2"],
        {"gradient": lambda H, a, w, r: reference.plain(H, a, w), "buffer": 2, "weight": hinge},
    ),
    "fedasync_mix": (
        ["method.mu=0.1"],
        {"gradient": lambda H, a, w, r: reference.plain(H, a, w) + 0.1 * (w - r), "mix": 0.6, "weight": polynomial},
    ),
}


@pytest.mark.parametrize("case", REFERENCES)
def test_a_run_is_the_papers_algorithm(case, quadratics):
    path, H, a, w0 = quadratics
    overrides, settings = REFERENCES[case]
    result, w = train(path, f"method={case.split()[0]}", *overrides)
    expected = reference.federate(result.timeline, H, a, w0, eta=ETA, local_steps=Q, **settings)
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-10)
    assert not np.allclose(expected, w0, atol=1e-2), "it moved"


def test_scaffold_is_the_papers_algorithm(quadratics):
    path, H, a, w0 = quadratics
    result, w = train(path, "method=scaffold", "method.beta=0.9", *COHORT)
    expected = reference.scaffold(result.timeline, H, a, w0, eta=ETA, local_steps=Q, beta=0.9, cohort=4)
    np.testing.assert_allclose(w, expected, rtol=0, atol=1e-10)


def test_local_training_is_gradient_descent_of_each_client_alone(quadratics):
    path, H, a, w0 = quadratics
    result, w = train(path, "method=local")
    np.testing.assert_array_equal(w, w0)
    for row, visits in zip(result.clients(), result.timeline.arrivals_per_client(), strict=True):
        i, alone = int(row["client"]), w0
        for _ in range(Q * visits):
            alone = alone - ETA * H[i] @ (alone - a[i])
        assert row["test_loss"] == pytest.approx(0.5 * (alone - a[i]) @ H[i] @ (alone - a[i]), abs=1e-10)


def test_scaffold_reaches_the_optimum_that_fedavg_misses(quadratics):
    """With all clients every round and many rounds: FedAvg stops where the drifts cancel, SCAFFOLD at the minimum."""
    path, H, a, w0 = quadratics
    optimum = np.linalg.solve(H.sum(axis=0), np.einsum("nij,nj->i", H, a))
    full = ["schedule.cohort=8", "updates=1200", "local_steps=5", "eta=0.1"]
    _, scaffold = train(path, "method=scaffold", *full)
    _, fedavg = train(path, "method=fedavg", *full)
    assert np.abs(scaffold - optimum).max() < 1e-8
    assert np.abs(fedavg - optimum).max() > 1e-2


def test_gradients_are_counted_honestly(quadratics):
    """Per local step: 1 plain, 4 for MAML (2 first-order), K for Moreau; per job 1 more to measure Moreau's residual, and
    SCAFFOLD's pass over the local data (here one batch)."""
    path, *_ = quadratics
    jobs, steps = 60, Q
    for overrides, evaluations in (
        (["method=fedasync"], jobs * steps),
        (["method=persafl_maml", "method.hvp=exact"], jobs * steps * 4),
        (["method=persafl_maml", "method.hvp=finite_difference"], jobs * steps * 4),
        (["method=persafl_maml", "method.hvp=first_order"], jobs * steps * 2),
        (["method=persafl_me", "method.inner_steps=7"], jobs * (steps * 7 + 1)),
        (["method=scaffold", *COHORT], jobs * (steps + 1)),
    ):
        assert train(path, *overrides)[0].summary()["grad_evals"] == evaluations, overrides


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
]


def digits(*overrides):
    result = run([*DIGITS, *overrides])
    return torch.cat([value.flatten() for value in result.state_dict().values()])


def test_fedprox_with_mu_zero_is_fedavg():
    rounds = ["schedule.cohort=3"]
    assert torch.equal(digits("method=fedprox", "method.mu=0", *rounds), digits("method=fedavg", *rounds))


def test_maml_with_alpha_zero_is_fedasync():
    assert torch.equal(digits("method=persafl_maml", "method.alpha=0"), digits("method=fedasync"))


def test_moreau_with_a_huge_lam_is_nearly_fedasync():
    plain, near, far = (
        digits(*m)
        for m in (["method=fedasync"], ["method=persafl_me", "method.lam=1e4"], ["method=persafl_me", "method.lam=10"])
    )
    assert (near - plain).norm() < 1e-2 * (far - plain).norm()


def test_rounds_with_a_full_buffer_are_federated_averaging():
    """FedBuff with buffer = cohort on a rounds timeline, where nothing is stale, is FedAvg."""
    rounds = ["schedule=rounds", "schedule.cohort=3"]
    assert torch.equal(digits("method=fedbuff", "method.buffer=3", *rounds), digits("method=fedavg", *rounds))


def test_cells_that_no_paper_has_work_without_new_code():
    """MAML x buffer 3 x discount x asynchronous."""
    one = digits("method=persafl_maml", "method.buffer=3", "method.discount=hinge")
    other = digits(
        "method=fedbuff", "method.objective=maml", "method.buffer=3", "method.discount=hinge", "method.alpha=0.01"
    )
    assert torch.equal(one, other)
    assert torch.isfinite(one).all()


def test_scaffold_refuses_a_stale_timeline():
    with pytest.raises(
        ConfigError, match=r"scaffold needs a timeline without staleness; this one reaches \d+ at arrival \d+"
    ):
        digits("method=scaffold", "schedule=asynchronous", "method.buffer=1")


def test_a_method_of_rounds_refuses_a_schedule_without_rounds():
    with pytest.raises(ConfigError, match="method.buffer=cohort waits for whole rounds"):
        digits("method=fedavg", "schedule=asynchronous")


def test_a_replay_of_less_than_a_round_needs_the_buffer_said(tmp_path):
    first = run([*DIGITS, "method=fedavg", "schedule.cohort=5", "updates=3"])
    (tmp_path / "t.csv").write_text(first.timeline.to_csv())
    with pytest.raises(ConfigError, match="set method.buffer to a number"):
        run([*DIGITS, "method=fedavg", "schedule=replay", "schedule.path=t.csv"])


# -- reproducibility --------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_and_another_does_not():
    one, two, other = digits("method=persafl_me"), digits("method=persafl_me"), digits("method=persafl_me", "seed=1")
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("method", ["fedasync", "fedavg", "persafl_maml", "fedbuff", "scaffold", "local"])
def test_a_replayed_csv_gives_the_same_model(method, tmp_path):
    overrides = [*DIGITS, f"method={method}", *(["schedule.cohort=3"] if method in ("fedavg", "scaffold") else [])]
    first = run(overrides)
    (tmp_path / "t.csv").write_text(first.timeline.to_csv())
    again = run([*DIGITS, f"method={method}", "schedule=replay", "schedule.path=t.csv"])
    assert first.points[-1].scores == again.points[-1].scores
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_dropped_updates_leave_the_model_of_a_replay(tmp_path):
    first = run([*DIGITS, "method=fedasync", "clients=12", "schedule.tau=2", "schedule.policy=drop"])
    assert first.timeline.dropped > 0
    (tmp_path / "t.csv").write_text(first.timeline.to_csv())
    again = run([*DIGITS, "method=fedasync", "clients=12", "schedule=replay", "schedule.path=t.csv"])
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_all_methods_of_a_comparison_share_one_timeline():
    common = ["clients=7", "horizon=50"]
    digests = {
        compose([*common, f"method={m}"]).timeline(7).digest()
        for m in ("fedasync", "persafl_maml", "persafl_me", "fedbuff", "local")
    }
    rounds = {
        compose([*common, f"method={m}", "schedule.cohort=3"]).timeline(7).digest()
        for m in ("fedavg", "pfedme", "scaffold")
    }
    assert len(digests) == len(rounds) == 1


def test_training_uses_one_thread_and_gives_the_callers_setting_back():
    before = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    digits("method=fedasync", "updates=2")
    assert torch.get_num_threads() == before
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
