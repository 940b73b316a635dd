"""Methods whose clients keep a model of their own: whole runs against the naive reference, and laws between them."""

from __future__ import annotations

import itertools
import json
import pickle

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.api import work_of
from persafl_lit.engine.executors import Worker
from persafl_lit.errors import ConfigError, DivergenceError
from persafl_lit.learning.personal_models import Apfl
from persafl_lit.learning.sharing import Sharing
from persafl_lit.models.backbone import build_backbone
from tests.support import reference
from tests.support.quadratics import Parts, random_quadratics, save
from tests.support.runs import bits, run_for

ETA, Q, N, S, P = 0.02, 4, 6, 3, 2
"""Clients, and how many values are shared and private."""
QUIET = ["tracking.enabled=false", "checkpoint.every=0", "eval.finetune=none"]
SCHEDULES = {
    "asynchronous": ([], 1),
    "rounds": (["schedule=rounds", "schedule.cohort=3"], 3),
    "drawn, behind a buffer": (["schedule=drawn", "schedule.tau=8", "method.buffer=4"], 4),
    "drop": (["schedule.tau=4", "schedule.policy=drop"], 1),
}
OBJECTIVES = {
    "plain": ([], lambda H, a, w, read: reference.plain(H, a, w)),
    "proximal": (["method.mu=0.5"], lambda H, a, w, read: reference.plain(H, a, w) + 0.5 * (w - read)),
    "maml": (["method.alpha=0.05"], lambda H, a, w, read: reference.maml(H, a, w, 0.05)),
    "moreau": (
        ["method.lam=3", "method.inner_steps=5", "method.inner_lr=0.1"],
        lambda H, a, w, read: 3 * (w - reference.moreau_steps(H, a, w, 3, 5, 0.1)),
    ),
}


class Vector(L.LightningModule):
    def __init__(self, w0):
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(w0.copy()))

    def training_step(self, batch, batch_idx):
        H, a = batch
        return 0.5 * (self.w - a) @ (H @ (self.w - a))


@pytest.fixture
def quadratics(tmp_path):
    H, a = random_quadratics(N, S + P, seed=1)
    return save(tmp_path / "q.npz", H, a), H, a, np.random.default_rng(2).normal(size=S + P)


def train(path, model, *overrides):
    settings = [
        "data=quadratic",
        f"data.path={path}",
        "precision=64",
        f"eta={ETA}",
        f"local_steps={Q}",
        "updates=45",
        "executor=serial",
    ]
    return run([*QUIET, *settings, *overrides], model=model)


def value(H, a, w):
    return 0.5 * (w - a) @ H @ (w - a)


# -- whole runs against the reference ---------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_fedrep_moves_the_private_part_first_and_then_the_shared_one(schedule, objective, quadratics):
    path, H, a, w0 = quadratics
    (overrides, buffer), (settings, gradient) = SCHEDULES[schedule], OBJECTIVES[objective]
    fedrep = ["method=fedrep", "method.private=[own]", "method.body_steps=1", f"method.objective={objective}"]
    result = train(path, Parts(w0, S), *fedrep, *settings, *overrides)
    shared, memories = reference.federate_turns(
        result.timeline, H, a, w0[:S], w0[S:], gradient=gradient, eta=ETA, head_steps=3, body_steps=1, buffer=buffer
    )
    np.testing.assert_allclose(result.state_dict()["common"], shared, rtol=0, atol=1e-10)
    np.testing.assert_array_equal(result.state_dict()["own"], w0[S:], err_msg="the initial private values")
    for client, private in memories.items():
        np.testing.assert_allclose(result.client_state_dict(client)["own"], private, rtol=0, atol=1e-10)


@pytest.mark.parametrize("objective", ["plain", "proximal", "maml"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ditto_trains_a_personal_model_that_is_pulled_towards_the_one_read(schedule, objective, quadratics):
    path, H, a, w0 = quadratics
    (overrides, buffer), (settings, gradient) = SCHEDULES[schedule], OBJECTIVES[objective]
    about = {"lam": 0.7, "personal_steps": 3, "personal_eta": 0.05}
    ditto = ["method=ditto", *(f"method.{name}={number}" for name, number in about.items())]
    result = train(path, Vector(w0), *ditto, f"method.objective={objective}", *settings, *overrides)

    def visit(H, a, read, v):
        return reference.ditto(H, a, read, v, gradient=gradient, eta=ETA, local_steps=Q, **about)

    shared, memories = reference.federate_personal(result.timeline, H, a, w0, visit=visit, start=w0, buffer=buffer)
    np.testing.assert_allclose(result.state_dict()["w"], shared, rtol=0, atol=1e-10)
    assert sorted(result.memory) == sorted(memories)
    for client, v in memories.items():
        np.testing.assert_allclose(result.client_state_dict(client)["w"], v, rtol=0, atol=1e-10)
        row = result.clients()[client]
        assert row["test_loss"] == pytest.approx(value(H[client], a[client], v), abs=1e-10), "its own model is compared"
        assert row["global_loss"] == pytest.approx(value(H[client], a[client], shared), abs=1e-10)


@pytest.mark.parametrize("adapts", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_apfl_trains_a_mixture_whose_weight_adapts(schedule, adapts, quadratics):
    path, H, a, w0 = quadratics
    overrides, buffer = SCHEDULES[schedule]
    result = train(path, Vector(w0), "method=apfl", f"method.adapt_mixture={adapts}", "method.mixture=0.3", *overrides)

    def visit(H, a, read, kept):
        return reference.apfl(H, a, read, kept, eta=ETA, local_steps=Q, adapts=adapts)

    shared, memories = reference.federate_personal(
        result.timeline, H, a, w0, visit=visit, start=(w0, 0.3), buffer=buffer
    )
    np.testing.assert_allclose(result.state_dict()["w"], shared, rtol=0, atol=1e-10)
    for client, (v, mixture) in memories.items():
        assert float(result.memory[client]["mixture"]) == pytest.approx(mixture, abs=1e-10)
        own = mixture * v + (1 - mixture) * shared
        np.testing.assert_allclose(result.client_state_dict(client)["w"], own, rtol=0, atol=1e-10)
    if adapts:
        assert len({float(kept["mixture"]) for kept in result.memory.values()}) > 2, "each its own"


# -- laws -------------------------------------------------------------------------------------------------------------

DIGITS = [*QUIET, "clients=6", "updates=18", "local_steps=2", "model=mlp", "model.hidden=[8]"]
ROUNDS = ["schedule=rounds", "schedule.cohort=3"]


def model_of(result):
    return {name: value.tolist() for name, value in result.state_dict().items()}


@pytest.mark.parametrize("schedule", [ROUNDS, ["schedule=asynchronous"]])
def test_what_is_beside_the_shared_model_does_not_touch_it(schedule):
    """With nothing private, FedPer is FedAvg (FedAsync) to the bit; so is the shared model of Ditto and of APFL."""
    plain = "fedavg" if schedule is ROUNDS else "fedasync"
    wanted = model_of(run([*DIGITS, f"method={plain}", *schedule]))
    assert model_of(run([*DIGITS, "method=fedper", "method.private=none", *schedule])) == wanted
    assert model_of(run([*DIGITS, "method=ditto", *schedule])) == wanted
    assert model_of(run([*DIGITS, "method=apfl", *schedule])) == wanted
    without_norm = run([*DIGITS, "method=fedbn", *schedule])
    assert model_of(without_norm) == wanted
    assert "no normalisation layers" in without_norm.notes[0]
    assert "own" not in without_norm.summary()["models"]


def test_a_buffer_of_auto_is_the_cohort_in_rounds_and_one_elsewhere():
    assert run([*DIGITS, "method=fedper", *ROUNDS]).summary()["versions"] == 6
    assert run([*DIGITS, "method=fedper"]).summary()["versions"] == 18
    assert run([*DIGITS, "method=fedper", "method.buffer=2"]).summary()["versions"] == 9


def test_fedrep_without_body_steps_changes_nothing_that_is_shared():
    result, first = run([*DIGITS, "method=fedrep", "method.body_steps=0"]), run([*DIGITS, "updates=1", "eta=1e-30"])
    own = result.client_state_dict(0)
    for name in ("network.2.weight", "network.2.bias"):
        assert torch.equal(result.state_dict()[name], first.state_dict()[name])
        assert torch.equal(own[name], first.state_dict()[name])
    assert not torch.equal(own["network.5.weight"], first.state_dict()["network.5.weight"])


def test_fedrep_with_body_steps_alone_leaves_the_private_part_where_it_began():
    result = run([*DIGITS, "method=fedrep", "method.body_steps=2"])
    for client in result.memory:
        own = result.client_state_dict(client)["network.5.weight"]
        assert torch.equal(own, result.state_dict()["network.5.weight"])


def test_ditto_without_a_pull_is_training_alone_beside_fedavg(quadratics):
    path, H, a, w0 = quadratics
    result = train(path, Vector(w0), "method=ditto", "method.lam=0", "schedule=rounds", "schedule.cohort=3")
    for client, visits in enumerate(result.timeline.arrivals_per_client()):
        v = w0
        for _ in range(Q * visits):
            v = v - ETA * reference.plain(H[client], a[client], v)
        np.testing.assert_allclose(result.client_state_dict(client)["w"], v, rtol=0, atol=1e-10)


def test_ditto_tends_to_the_shared_model_as_lambda_grows(quadratics):
    """With steps of 1/lam, v = w - grad f(v)/lam: the distance to the model that was read falls as 1/lam."""
    path, _, _, w0 = quadratics
    distances, rounds = [], ["schedule=rounds", "schedule.cohort=6"]
    for lam in (1e3, 1e4, 1e5):
        result = train(path, Vector(w0), "method=ditto", f"method.lam={lam:g}", *rounds, "updates=42")
        read = train(path, Vector(w0), "method=fedavg", "schedule.cohort=6", "updates=36").state_dict()["w"]
        distances.append(max(float((result.client_state_dict(i)["w"] - read).abs().max()) for i in range(N)))
    np.testing.assert_allclose(np.log10(distances[:-1]) - np.log10(distances[1:]), 1, atol=0.05)


def test_apfl_is_the_shared_model_at_a_mixture_of_zero_and_training_alone_at_one(quadratics):
    path, H, a, w0 = quadratics
    fixed = ["method=apfl", "method.adapt_mixture=false"]
    shared = train(path, Vector(w0), *fixed, "method.mixture=0")
    alone = train(path, Vector(w0), *fixed, "method.mixture=1")
    for client, visits in enumerate(alone.timeline.arrivals_per_client()):
        assert torch.equal(shared.client_state_dict(client)["w"], shared.state_dict()["w"])
        v = w0
        for _ in range(Q * visits):
            v = v - ETA * reference.plain(H[client], a[client], v)
        np.testing.assert_allclose(alone.client_state_dict(client)["w"], v, rtol=0, atol=1e-10)


class Normalised(L.LightningModule):
    """A small network with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)

    def forward(self, x):
        return self.head(torch.relu(self.norm(self.body(x.flatten(1)))))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


NAMES = ["norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"]


@pytest.mark.parametrize("schedule", [ROUNDS, ["schedule=asynchronous"]])
def test_fedbn_keeps_normalisation_layers_and_their_statistics_with_the_client(schedule):
    result = run([*DIGITS, "method=fedbn", *schedule], model=Normalised)
    first = run([*DIGITS, "method=fedbn", "updates=3", "eta=1e-30", *schedule], model=Normalised)
    for name in ("norm.weight", "norm.bias"):
        assert torch.equal(result.state_dict()[name], first.state_dict()[name]), "its initial value"
        own = [result.client_state_dict(client)[name] for client in result.memory]
        assert all(not torch.equal(one, other) for one, other in itertools.pairwise(own))
    sent = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert result.summary()["bytes_communicated"] == 2 * sent * 18
    with pytest.raises(ConfigError, match="private normalisation layers keep their statistics"):
        run([*DIGITS, "method=fedbn", "model.buffers=shared"], model=Normalised)


@pytest.mark.parametrize("method", ["ditto", "apfl"])
def test_a_personal_model_has_statistics_of_its_own(method):
    """Its statistics are those of ITS activations: a shared model with other weights does not change them."""
    result = run([*DIGITS, f"method={method}", "method.buffer=1"], model=Normalised)
    alone = run([*DIGITS, "method=local"], model=Normalised)
    kept = result.memory[0]
    assert not torch.equal(kept["personal_buffers"], kept["buffers"])
    statistics = result.client_state_dict(0)["norm.running_mean"]
    assert torch.equal(statistics, kept["personal_buffers"][:8])
    assert alone.memory[0]["buffers"].shape == kept["personal_buffers"].shape


def test_private_layers_are_found_by_kind_and_by_place():
    network = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 2))

    def found(*private):
        return sorted(Sharing(private).names(network))

    def named(*layers):
        return sorted(f"{layer}.{name}" for layer in layers for name in ("weight", "bias"))

    assert found("norm") == named(1)
    assert found("body") == named(0, 1, 3)
    assert found("head") == found("last:1") == named(4)
    assert found("last:2") == named(3, 4)
    assert found("first:2") == named(0, 1)
    assert found("first:1", "*.bias") == sorted({*named(0), "1.bias", "3.bias", "4.bias"})
    with pytest.raises(ConfigError, match="method.private=last:7 must name 1 to 4 layers"):
        found("last:7")
    for norm in (nn.BatchNorm2d(3), nn.GroupNorm(1, 3), nn.RMSNorm(3), nn.InstanceNorm2d(3, affine=True)):
        assert Sharing(("norm",)).names(nn.Sequential(nn.Conv2d(3, 3, 1), norm)) >= {"1.weight"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["method=ditto", "method.objective=moreau"], "does not go with the Moreau envelope"),
        (["method=apfl", "method.objective=moreau"], "mixes the shared model itself"),
        (["method=apfl", "method.objective=maml"], "mixes the shared model itself"),
        (["method=fedrep", "method.body_steps=9", "local_steps=4"], "more than local_steps=4"),
        (["method=fedrep", "method.body_steps=-1"], "must be >= 0 or null"),
        (["method=fedrep", "local.optimizer=momentum"], "takes turns between the private and the shared part"),
        (["method=ditto", "local.optimizer=module"], "a personal model takes plain steps"),
        (["method=apfl", "local.weight_decay=0.1"], "a personal model takes plain steps"),
        (["method=ditto", "method.lam=-1"], "method.lam must be >= 0"),
        (["method=ditto", "method.lam=50", "method.personal_eta=0.05"], "diverges with method.lam=50.*below 0.04"),
        (["method=apfl", "method.mixture=2"], r"method.mixture must lie in \[0, 1\]"),
        (["method.personal=dito"], "unknown method.personal 'dito'.*Did you mean 'ditto'"),
    ],
)
def test_a_combination_without_a_meaning_is_refused_in_a_sentence(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compose(overrides)


@pytest.mark.parametrize("private", ["none", "all"])
def test_turns_need_a_private_and_a_shared_part(private):
    with pytest.raises(ConfigError, match="takes turns between a private and a shared part, and here is only one"):
        run([*DIGITS, "method=fedrep", "method.body_steps=1", f"method.private={private}"])


def test_parts_from_python_are_checked_as_those_of_the_command_line():
    with pytest.raises(ConfigError, match="mixes the shared model itself"):
        run([*DIGITS, "method=persafl_maml"], personal=Apfl())


@pytest.mark.parametrize("private", ["norm", "all", "[norm, head]", "body"])
def test_private_normalisation_layers_never_send_their_statistics(private):
    with pytest.raises(ConfigError, match="private normalisation layers keep their statistics"):
        run([*DIGITS, "method=fedper", f"method.private={private}", "model.buffers=shared"], model=Normalised)


@pytest.mark.parametrize("method", ["fedper", "ditto", "fedadam"])
def test_replayed_rounds_are_rounds(method, tmp_path):
    rounds = run([*DIGITS, f"method={method}", *ROUNDS])
    (tmp_path / "t.csv").write_text(rounds.timeline.to_csv())
    replayed = run([*DIGITS, f"method={method}", "schedule=replay", f"schedule.path={tmp_path / 't.csv'}"])
    assert model_of(replayed) == model_of(rounds)
    assert replayed.summary()["versions"] == 6


def test_a_run_whose_clients_keep_everything_after_all_says_so():
    alone = run([*DIGITS, "model.hidden=[]", "method=fedper"])
    assert "clients train alone, as method=local does" in alone.notes[0]


def test_a_personal_model_that_diverges_is_named():
    with pytest.raises(DivergenceError, match=r"leaves what the client keeps \(personal\) infinite"):
        run([*DIGITS, "method=ditto", "method.lam=0", "method.personal_eta=1e18", "local_steps=10"])


def test_the_personal_model_is_measured_as_it_is_also_beside_maml(quadratics):
    path, H, a, w0 = quadratics
    result = train(path, Vector(w0), "method=ditto", "method.objective=maml", "method.alpha=0.05")
    v = [result.client_state_dict(client)["w"].numpy() for client in range(N)]
    wanted = np.mean([value(H[i], a[i], v[i]) for i in range(N)])
    assert result.summary()["models"]["own"]["as_is"]["test"] == pytest.approx(wanted, abs=1e-10)


def test_a_worker_made_of_the_same_work_starts_from_the_first_weights():
    """As a process does that replaces a lost one, after callbacks have looked at trained models."""
    config = compose([*DIGITS, "method=ditto"])
    federation = config.federation()
    work = work_of(config, federation, build_backbone(config.build("model"), federation, config.seed))
    worker = Worker(work)
    worker.state_dict({"w": worker.start + 1}, {})
    assert Worker(pickle.loads(pickle.dumps(work))).digest == worker.digest


def test_a_personal_model_with_private_parameters_is_refused():
    with pytest.raises(ConfigError, match="a whole model beside the shared one: leave method.private at none"):
        run([*DIGITS, "method=ditto", "method.private=head"])


# -- accounts ---------------------------------------------------------------------------------------------------------


def test_gradients_bytes_time_and_memory_are_accounted_for_what_a_method_really_does():
    def account(*overrides):
        return run([*DIGITS, *overrides, "delays.per_gradient=0.1", "horizon=30"]).summary()

    fedasync = run([*DIGITS, "method=fedasync"]).summary()
    ditto = run([*DIGITS, "method=ditto", "method.personal_steps=5"]).summary()
    apfl = run([*DIGITS, "method=apfl"]).summary()
    assert [one["grad_evals"] for one in (fedasync, ditto, apfl)] == [18 * 2, 18 * (2 + 5), 18 * (2 + 2)]
    assert fedasync["bytes_communicated"] == ditto["bytes_communicated"] == apfl["bytes_communicated"]
    size = 4 * (64 * 8 + 8 + 8 * 10 + 10)
    assert [one["memory_bytes_per_client"] for one in (fedasync, ditto, apfl)] == [0, size, size + 4]
    assert run([*DIGITS, "method=fedper"]).summary()["memory_bytes_per_client"] == 4 * (8 * 10 + 10)
    slower = compose([*DIGITS, "method=ditto", "delays.per_gradient=0.1"]).timeline(6)
    same = compose([*DIGITS, "method=apfl", "delays.per_gradient=0.1"]).timeline(6)
    faster = compose([*DIGITS, "method=fedasync", "delays.per_gradient=0.1"]).timeline(6)
    assert slower.horizon == same.horizon > faster.horizon, "twice the gradients take twice the time"


def test_statistics_count_as_memory_only_where_a_client_keeps_them():
    """BatchNorm1d(8) has a mean and a variance of 8 values and a counter: 17 numbers of 4 bytes."""

    def kept(*overrides):
        return run([*DIGITS, "updates=1", *overrides], model=Normalised).summary()["memory_bytes_per_client"]

    assert kept("method=fedasync") == 4 * 17
    assert kept("method=fedasync", "model.buffers=shared") == 0
    personal = 4 * (64 * 8 + 8 + 8 + 8 + 8 * 10 + 10)
    assert kept("method=ditto") == personal + 2 * 4 * 17
    assert kept("method=ditto", "model.buffers=shared") == personal + 4 * 17


def test_every_model_of_a_method_is_measured_before_and_after_the_common_budget(quadratics):
    path, H, a, w0 = quadratics
    tuned = ["eval.finetune=sgd", "eval.finetune.steps=2", "data.holdout_clients=1"]

    def after(w, client):
        for _ in range(2):
            w = w - ETA * reference.plain(H[client], a[client], w)
        return w

    result = train(path, Vector(w0), "method=ditto", *tuned)
    shared = result.state_dict()["w"].numpy()
    for clients, models in (
        (range(N - 1), result.summary()["models"]),
        ([N - 1], result.summary()["holdout"]["models"]),
    ):
        v = {client: result.client_state_dict(client)["w"].numpy() for client in clients}
        if clients == [N - 1]:
            np.testing.assert_array_equal(v[N - 1], w0, err_msg="a held-out client has the first weights")
        for model, state, w in (
            ("shared", "as_is", lambda i: shared),
            ("shared", "tuned", lambda i: after(shared, i)),
            ("own", "as_is", lambda i, v=v: v[i]),
            ("own", "tuned", lambda i, v=v: after(v[i], i)),
        ):
            wanted = np.mean([value(H[client], a[client], w(client)) for client in clients])
            assert models[model][state]["test"] == pytest.approx(wanted, abs=1e-10), (model, state)


def test_the_proximal_point_is_measured_before_and_after_the_common_budget(quadratics):
    path, H, a, w0 = quadratics
    me = ["method=persafl_me", "method.lam=3", "method.inner_steps=4", "method.inner_lr=0.1"]
    result = train(path, Vector(w0), *me, "eval.finetune=sgd", "eval.finetune.steps=1")
    shared, models = result.state_dict()["w"].numpy(), result.summary()["models"]
    theta = [reference.moreau_steps(H[i], a[i], shared, 3, 4, 0.1) for i in range(N)]
    tuned = [theta[i] - ETA * reference.plain(H[i], a[i], theta[i]) for i in range(N)]
    for state, found in (("as_is", theta), ("tuned", tuned)):
        wanted = np.mean([value(H[i], a[i], found[i]) for i in range(N)])
        assert models["own"][state]["test"] == pytest.approx(wanted, abs=1e-10)


# -- exactness --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, Normalised])
@pytest.mark.parametrize("method", ["fedrep", "lg_fedavg", "fedbn", "ditto", "apfl"])
def test_workers_and_interruptions_change_no_bit(method, model):
    more = {} if model is None else {"model": model}
    settings = [*DIGITS, "checkpoint.every=3", f"method={method}", "schedule=drawn", "method.buffer=2"]
    settings += ["method.body_steps=1"] if method == "fedrep" else []
    serial = bits(run([*settings, "executor=serial"], **more))
    assert bits(run([*settings, "workers=2"], **more)) == serial
    with pytest.raises(Exception, match="stopped after update"):
        run_for([*settings, "workers=2"], 8, **more)
    assert bits(run([*settings, "workers=2"], resume=True, **more)) == serial


def test_results_are_json_and_survive_a_sweep_of_methods():
    summary = run([*DIGITS, "method=apfl"]).summary()
    assert json.loads(json.dumps(summary))["models"]["own"].keys() == {"as_is", "tuned"}
