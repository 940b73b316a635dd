"""Buffers that training changes, such as BatchNorm's statistics: kept by clients or mixed by the server, never part of a gradient."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from persafl_lit import compose, run
from persafl_lit.data import Digits
from persafl_lit.engine.executors import Work, Worker
from persafl_lit.engine.messages import CostGradient, Evaluate, Train
from persafl_lit.errors import ConfigError, ModelError
from persafl_lit.learning.client_data import ClientDataModule
from persafl_lit.learning.evaluation import whole_batches
from persafl_lit.learning.objectives import OBJECTIVES, Maml, Moreau, Plain
from persafl_lit.learning.personalisation import Finetune, MamlStep, Prox, Sgd
from persafl_lit.models.backbone import check_backbone
from persafl_lit.models.classifier import Classifier
from persafl_lit.server.buffers import MixedBuffers
from persafl_lit.server.rules import Descent, Mixing
from persafl_lit.server.state import State
from tests.digests import killed_and_resumed
from tests.support.runs import bits, run_for

QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
SMALL = [*QUIET, "clients=6", "updates=24", "local_steps=3", "batch_size=8"]
METHODS = {"fedasync": [], "persafl_maml": [], "persafl_me": ["method.inner_steps=3"], "fedavg": ["schedule.cohort=3"]}


def normed(momentum=0.1):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8, momentum=momentum), nn.ReLU(), nn.Linear(8, 10)
    )


def worker_of(network, objective=Plain(), rules=None, buffers="local", batch_size=8):  # noqa: B008
    federation = Digits().federation(6, 0)
    policy = compose([f"model.buffers={buffers}"]).buffers()
    return Worker(
        Work(
            check_backbone(network),
            federation,
            objective,
            rules or {"none": Finetune()},
            4,
            0.05,
            batch_size,
            0,
            buffers=policy,
        )
    )


# -- ordinary training ------------------------------------------------------------------------------------------------


def ordinary(network, steps, eta):
    """A plain PyTorch loop over the same batches."""
    backbone = Classifier(network).train()
    optimizer = torch.optim.SGD(backbone.parameters(), lr=eta)
    for (batch,) in steps:
        optimizer.zero_grad()
        backbone.training_step(batch.data, 0).backward()
        optimizer.step()
    return backbone


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize(("method", "policy"), [("local", "local"), ("fedasync", "local"), ("fedasync", "shared")])
def test_batchnorm_with_one_client_is_ordinary_training(method, policy, momentum):
    settings = [
        *QUIET,
        "clients=1",
        "updates=5",
        "local_steps=4",
        "batch_size=8",
        "eta=0.05",
        "precision=64",
        "eval.finetune=none",
    ]
    result = run([*settings, f"method={method}", f"model.buffers={policy}"], model=normed(momentum))
    federation = Digits().federation(1, 0).to(torch.device("cpu"), torch.float64)
    data = ClientDataModule(federation, 0, Plain(), 4, 8, 0)
    expected = ordinary(
        normed(momentum).double(), [step for visit in range(5) for step in data.steps(visit)], 0.05
    ).state_dict()
    found = result.client_state_dict(0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].to(value.dtype), value, rtol=1e-6, atol=1e-7)
    assert int(found["network.2.num_batches_tracked"]) == 20
    assert torch.equal(result.state_dict()["network.2.running_var"], found["network.2.running_var"]), (
        "the mean of one client"
    )


@pytest.mark.parametrize(
    "objective", [Plain(), Maml(alpha=0.1), Maml(alpha=0.1, hvp="finite_difference"), Moreau(lam=20.0, inner_steps=3)]
)
def test_only_the_first_pass_of_a_local_step_changes_the_statistics(objective):
    """The first pass of a step is at w: on D for most, on D' for MAML. Statistics are as if nothing else had been computed."""
    worker = worker_of(normed(), objective)
    data = ClientDataModule(worker.federation, 2, objective, 4, 8, 0)
    (first, *_), slot = data.steps(0), 1 if isinstance(objective, Maml) else 0
    expected = Classifier(normed()).train()
    expected.training_step(first[slot].data, 0)
    worker.module.flatten()
    worker.module.backbone.train()
    worker.module.training_step(first, 0)
    for name, value in expected.named_buffers():
        torch.testing.assert_close(dict(worker.module.backbone.named_buffers())[name], value, rtol=1e-5, atol=1e-6)
    update = worker.train(Train(2, 0, {"w": worker.start}))
    assert update.memory["buffers"][-1] == 4, "one batch per local step, whatever the objective"


def test_evaluation_fine_tuning_and_costs_leave_no_trace():
    rules = {"sgd": Sgd(), "maml": MamlStep(), "prox": Prox()}
    worker = worker_of(normed(), Moreau(inner_steps=3), rules)
    kept = {"buffers": worker.train(Train(2, 0, {"w": worker.start})).memory["buffers"]}
    read = {"w": worker.start}
    scores = worker.evaluate(Evaluate(2, tuple(rules), read, kept))
    assert torch.equal(worker.module.f.statistics.vector(), kept["buffers"])
    worker.cost_gradient(CostGradient(2, read, kept))
    assert torch.equal(worker.module.f.statistics.vector(), kept["buffers"])
    assert worker.evaluate(Evaluate(2, tuple(rules), read, kept)) == scores
    other = {"buffers": kept["buffers"] * 2}
    assert worker.evaluate(Evaluate(2, tuple(rules), read, other)).personalised != scores.personalised, (
        "a client is measured with its own"
    )


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_a_job_depends_on_nothing_but_its_inputs(name, policy):
    worker = worker_of(normed(), OBJECTIVES[name](), buffers=policy)
    job = Train(3, 2, {"w": worker.start, **worker.published})
    first = worker.train(job)
    worker.evaluate(Evaluate(2, ("none",), {"w": worker.start}))
    worker.train(Train(1, 0, {"w": worker.start + 0.1, **worker.published}, first.memory))
    again = worker.train(job)
    for before, after in ((first.sent, again.sent), (first.memory, again.memory)):
        assert {key: value.tolist() for key, value in before.items()} == {
            key: value.tolist() for key, value in after.items()
        }


def test_a_client_without_statistics_is_evaluated_with_those_of_its_training_data():
    worker = worker_of(normed())
    backbone = Classifier(normed()).train()
    backbone.network[2].momentum = None
    for batch, _ in whole_batches(worker.federation, 4, 8, 0, join=True):
        backbone.training_step(batch.data, 0)
    found = worker.evaluate(Evaluate(4, ("none",), {"w": worker.start})).personalised
    (data, _), *_ = worker.federation.whole(4, "test", 1000)
    assert found.test_loss == pytest.approx(backbone.eval().training_step(data, 0).item(), rel=1e-5)
    state = worker.state_dict({"w": worker.start}, {}, 4)
    torch.testing.assert_close(state["network.2.running_var"], backbone.network[2].running_var, rtol=1e-5, atol=1e-6)
    assert worker.module.backbone.network[2].momentum == 0.1


def test_held_out_clients_and_clients_that_never_arrived_are_evaluated():
    result = run([*SMALL, "method=fedasync", "updates=3", "data.holdout_clients=2"], model=normed())
    assert len(result.points[-1].held_out) == 2
    assert len(result.memory) <= 3
    absent = next(client for client in range(4) if client not in result.memory)
    own = result.client_state_dict(absent)
    assert not torch.equal(own["network.2.running_var"], torch.ones(8))
    assert torch.equal(own["network.1.weight"], result.state_dict()["network.1.weight"])


# -- local ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_local_statistics_are_never_sent(method):
    result = run([*SMALL, f"method={method}", *METHODS[method]], model=normed())
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    assert result.summary()["bytes_communicated"] == 2 * 4 * parameters * 24
    worker = worker_of(normed(), OBJECTIVES["plain"]())
    update = worker.train(Train(0, 0, {"w": worker.start}))
    assert update.sent.keys() == {"delta"}
    assert update.memory.keys() == {"buffers"}
    mean = torch.stack([kept["buffers"].double() for kept in result.memory.values()]).mean(0)
    torch.testing.assert_close(result.state_dict()["network.2.running_mean"].double(), mean[:8], rtol=1e-5, atol=1e-6)
    client = next(iter(result.memory))
    assert torch.equal(result.client_state_dict(client)["network.2.running_mean"], result.memory[client]["buffers"][:8])


# -- shared -----------------------------------------------------------------------------------------------------------


def test_shared_statistics_are_sent_and_counted():
    result = run([*SMALL, "method=fedasync", "model.buffers=shared"], model=normed())
    parameters = sum(parameter.numel() for parameter in result.model.parameters())
    assert result.summary()["bytes_communicated"] == 2 * 4 * (parameters + 17) * 24
    assert not result.memory
    assert torch.equal(
        result.client_state_dict(3)["network.2.running_var"], result.state_dict()["network.2.running_var"]
    )


def test_all_clients_a_round_average_their_statistics():
    """a = cohort / clients = 1: the mean of what the clients reached, as federated averaging does it."""
    result = run([*SMALL, "method=fedavg", "schedule.cohort=6", "updates=6", "model.buffers=shared"], model=normed())
    worker = worker_of(normed(), buffers="shared")
    worker.work = Work(**{**vars(worker.work), "local_steps": 3, "eta": 0.01})
    worker.module.eta = 0.01
    reached = [
        worker.train(Train(client, 0, {"w": worker.start, **worker.published})).sent["buffers"] for client in range(6)
    ]
    torch.testing.assert_close(
        result.state_dict()["network.2.running_var"], torch.stack(reached).mean(0)[8:16], rtol=1e-5, atol=1e-6
    )


positive = st.floats(2.0**-100, 2.0**100, width=32)


@settings(max_examples=200, deadline=None)
@given(
    rule=st.one_of(
        st.builds(
            Descent,
            beta=st.floats(1e-3, 1e3),
            buffer=st.integers(1, 5),
            discount=st.sampled_from(["constant", "polynomial", "hinge"]),
        ),
        st.builds(Mixing, mix=st.floats(0.01, 1.0)),
    ),
    a=st.floats(1e-6, 1.0),
    start=positive,
    visits=st.lists(st.tuples(positive, st.integers(0, 100), st.booleans()), max_size=20),
)
def test_shared_variances_stay_positive_and_among_what_was_seen(rule, a, start, visits):
    """Under any beta, staleness, discount, buffer and mixture, with and without skipped updates."""
    mixed, seen = MixedBuffers(rule, a), [start]
    state = State(torch.zeros(2), kept={"buffers": torch.tensor([start])})
    for variance, staleness, enters in visits:
        if enters:
            seen.append(variance)
            mixed.apply(state, {"w": state.w}, {"delta": torch.ones(2), "buffers": torch.tensor([variance])}, staleness)
        else:
            mixed.arrive(state)
        now = float(state.kept["buffers"])
        assert now > 0
        assert 0.999 * min(seen) <= now <= 1.001 * max(seen)


def test_a_version_mixes_the_mean_of_its_updates_once():
    mixed = MixedBuffers(Descent(buffer=3, beta=7.0, discount="polynomial"), 0.5)
    state = State(torch.zeros(1), kept={"buffers": torch.tensor([8.0])})
    for value in (1.0, 3.0):
        mixed.apply(state, {"w": state.w}, {"delta": torch.ones(1), "buffers": torch.tensor([value])}, 9)
        assert mixed.read(state)["buffers"] == 8
    mixed.arrive(state)  # a skipped one: the mean is over those that entered
    assert mixed.read(state)["buffers"] == 5
    assert state.kept.keys() == {"buffers"}
    for _ in range(3):
        mixed.arrive(state)
    assert mixed.read(state)["buffers"] == 5, "skipped updates leave it alone"


# -- executors, checkpoints -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_two_workers_give_the_bits_of_one(method, policy):
    overrides = [*SMALL, f"method={method}", *METHODS[method], f"model.buffers={policy}", "data.holdout_clients=1"]
    serial, two = (run([*overrides, *executor], model=normed()) for executor in (["executor=serial"], ["workers=2"]))
    assert bits(serial) == bits(two)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_a_killed_and_resumed_run_has_the_bits_of_an_undisturbed_one(method, policy, tmp_path):
    import hashlib

    overrides = [
        "tracking.enabled=false",
        "clients=6",
        "updates=60",
        "local_steps=1",
        "batch_size=8",
        "checkpoint.every=4",
        "eval.finetune=none",
        "eta=0.001",
    ]
    overrides += [
        "model=torchvision",
        "model.arch=shufflenet_v2_x0_5",
        f"method={method}",
        *METHODS[method],
        f"model.buffers={policy}",
    ]
    found = killed_and_resumed(overrides, tmp_path)
    state = run(overrides).state_dict()
    assert (
        found
        == hashlib.sha256(
            b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(state.items()))
        ).hexdigest()
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["local", "shared"])
def test_an_interrupted_and_resumed_run_has_the_same_bits(method, policy):
    overrides = [
        *SMALL[1:],
        "tracking.enabled=false",
        "checkpoint.every=5",
        f"method={method}",
        *METHODS[method],
        f"model.buffers={policy}",
    ]
    whole = run(overrides, model=normed())
    with pytest.raises(Exception, match="stopped after update"):
        run_for(overrides, 11, model=normed())
    assert bits(run(overrides, model=normed(), resume=True)) == bits(whole)


# -- what counts as statistics ----------------------------------------------------------------------------------------


class Positions(L.LightningModule):
    """A constant table, and a counter of its own that moves to another tensor each time."""

    def __init__(self, late=False):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("table", torch.linspace(0, 1, 64))
        self.register_buffer("seen", torch.zeros(()))
        self.linear = nn.Linear(64, 10)
        self.late = late

    def forward(self, inputs):
        return self.linear(inputs.flatten(1) + self.table)

    def training_step(self, batch, batch_idx):
        if self.training:
            self.seen = self.seen + 1
        if self.late and self.seen > 1:
            self.table.mul_(0.9)
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_constant_buffers_are_neither_sent_nor_kept():
    result = run([*SMALL, "method=fedasync"], model=Positions())
    assert {len(kept["buffers"]) for kept in result.memory.values()} == {1}
    assert torch.equal(result.state_dict()["table"], torch.linspace(0, 1, 64))
    visits = result.timeline.arrivals_per_client()
    assert {client: int(kept["buffers"]) for client, kept in result.memory.items()} == {
        client: 3 * int(visits[client]) for client in result.memory
    }
    assert run([*SMALL, "method=fedasync", "model.buffers=refuse"], model=Linear()).memory == {}


class Linear(Positions):
    """With the table only."""

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def test_a_constant_that_changes_later_is_refused():
    with pytest.raises(ModelError, match="the model changes its buffer 'table', which its first training step did not"):
        run([*SMALL, "method=fedasync"], model=Positions(late=True))


def test_buffers_may_be_refused():
    with pytest.raises(
        ConfigError,
        match=r"training changes the model's buffer 'network.2.running_mean' \(BatchNorm does that\), and model.buffers=refuse",
    ):
        run([*SMALL, "model.buffers=refuse"], model=normed())
    with pytest.raises(ConfigError, match="model.buffers_mix is for model.buffers=shared"):
        compose(["model.buffers_mix=0.5"])
    with pytest.raises(ConfigError, match=r"model.buffers_mix must lie in \(0, 1\]; got 1.5"):
        compose(["model.buffers=shared", "model.buffers_mix=1.5"])


def test_models_without_such_buffers_do_not_change():
    """No bit of their results, and no hash of their configs, whatever the policy."""
    overrides = [*SMALL, "model=mlp", "method=fedasync"]
    assert compose(overrides).hash() == "8c788aa2d753c0b5"
    assert bits(run(overrides)) == bits(run([*overrides, "model.buffers=shared"]))


def test_a_last_batch_of_one_sample_is_joined_to_its_neighbour():
    federation = Digits().federation(6, 0)
    size = federation.count(1, "train") - 1
    assert [count for _, count in whole_batches(federation, 1, size, 0)] == [size, 1]
    (batch, count), *rest = whole_batches(federation, 1, size, 0, join=True)
    assert not rest
    assert count == size + 1 == len(batch.data[0]) == len(batch.data[1])
    worker = worker_of(normed(), OBJECTIVES["scaffold"](), {"maml": MamlStep()}, batch_size=size)
    worker.train(Train(1, 0, {"w": worker.start}))
    worker.evaluate(Evaluate(1, ("maml",), {"w": worker.start}))


def test_a_model_that_cannot_take_a_step_is_told():
    with pytest.raises(
        ModelError, match="client 0 cannot be trained: ValueError: Expected more than 1 value per channel"
    ):
        run([*SMALL, "batch_size=1"], model=normed())


class Quits(Linear):
    def training_step(self, batch, batch_idx):
        raise SystemExit(3)


def test_a_model_that_exits_ends_the_run_in_a_sentence():
    with pytest.raises(ModelError, match="client 0 cannot be trained: SystemExit: 3"):
        run(SMALL, model=Quits())
