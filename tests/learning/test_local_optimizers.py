"""Local optimisers: against plain loops of torch.optim on the same batches, and through executors and checkpoints."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.data import Digits
from persafl_lit.engine.executors import Work, Worker
from persafl_lit.engine.messages import Train
from persafl_lit.errors import ConfigError, ModelError
from persafl_lit.learning.client_data import ClientDataModule
from persafl_lit.learning.client_module import ClientModule
from persafl_lit.learning.local_optimizers import Local
from persafl_lit.learning.objectives import Plain, Proximal
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.models.backbone import build_backbone
from persafl_lit.models.networks import Mlp
from tests.support.clients import fit
from tests.support.runs import bits, run_for

SMALL = [
    "tracking.enabled=false",
    "clients=4",
    "updates=16",
    "local_steps=3",
    "batch_size=8",
    "model=mlp",
    "model.hidden=[8]",
    "eval.finetune=none",
]
ETA, Q = 0.01, 4
OPTIMIZERS = {
    "sgd": (Local(weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=ETA, weight_decay=0.1)),
    "momentum": (
        Local("momentum", 0.8, 0.1, True),
        lambda p: torch.optim.SGD(p, lr=ETA, momentum=0.8, weight_decay=0.1),
    ),
    "default momentum": (Local("momentum"), lambda p: torch.optim.SGD(p, lr=ETA, momentum=0.9)),
    "adamw": (Local("adamw", None, 0.1, True), lambda p: torch.optim.AdamW(p, lr=ETA, weight_decay=0.1)),
    "module": (Local("module", keep_state=True), lambda p: torch.optim.NAdam(p, lr=0.03)),
}


class Own(L.LightningModule):
    """Says how to optimise it; `returns` turns the optimizer into what `configure_optimizers` returns."""

    def __init__(self, returns=lambda optimizer: optimizer):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
        self.returns = returns

    def forward(self, inputs):
        return self.net(inputs)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return self.returns(torch.optim.NAdam(self.parameters(), lr=0.03))


def backbone_for(name, federation):
    return Own() if name == "module" else build_backbone(Mlp(hidden=(8,), dropout=0.3), federation, 0)


def looped(backbone, make, steps, mu, visits):
    """A plain loop; `steps` by visit. Returns the parameters after each visit, with one optimizer for all of them or for each."""
    optimizer, reached = None, []
    backbone.train()
    for visit, kept in zip(steps, visits, strict=True):
        read = [p.detach().clone() for p in backbone.parameters()]
        optimizer = optimizer if kept and optimizer else make(backbone.parameters())
        for (batch,) in visit:
            torch.default_generator.manual_seed(batch.mask)
            optimizer.zero_grad()
            backbone.training_step(batch.data, 0).backward()
            for p, start in zip(backbone.parameters(), read, strict=True):
                p.grad.add_(p.detach() - start, alpha=mu)
            optimizer.step()
        reached.append(torch.cat([p.detach().flatten() for p in backbone.parameters()]))
    return reached


@pytest.mark.parametrize("objective", [Plain(), Proximal(mu=0.5)])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_visit_is_a_plain_loop_of_torch_optim(name, objective):
    """Three visits, each from where the last one ended: with the optimizer's state where it is kept, else with a new optimizer."""
    local, make = OPTIMIZERS[name]
    federation = Digits().federation(6, 0)
    worker = Worker(
        Work(backbone_for(name, federation), federation, objective, {"none": Finetune()}, Q, ETA, 8, 0, local=local)
    )
    data = ClientDataModule(federation, 2, objective, Q, 8, 0)
    expected = looped(
        backbone_for(name, federation),
        make,
        [data.steps(visit) for visit in range(3)],
        getattr(objective, "mu", 0.0),
        [local.keep_state] * 3,
    )
    read, memory = worker.start, {}
    for visit in range(3):
        before = {key: value.clone() for key, value in memory.items()}
        update = worker.train(Train(2, visit, {"w": read}, memory))
        assert all(torch.equal(memory[key], value) for key, value in before.items()), (
            "a memory is never changed in place"
        )
        torch.testing.assert_close(worker.module.w, expected[visit], rtol=1e-4, atol=1e-6)
        assert bool(update.memory) == local.keep_state
        assert sum(tensor.nbytes for tensor in (*update.sent.values(), *update.memory.values())) <= worker.room
        read, memory = worker.module.w.clone(), update.memory


def test_trainer_fit_uses_the_same_optimizer():
    federation = Digits().federation(6, 0)
    local = Local("adamw")
    worker = Worker(
        Work(build_backbone(Mlp(), federation, 0), federation, Plain(), {"none": Finetune()}, Q, ETA, 8, 0, local=local)
    )
    worker.train(Train(2, 0, {"w": worker.start}))
    alone = ClientModule(build_backbone(Mlp(), federation, 0), Plain(), ETA, local=local)
    fit(alone, ClientDataModule(federation, 2, Plain(), Q, 8, 0), steps=Q)
    torch.testing.assert_close(alone.w, worker.module.w, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=fedasync", "local.optimizer=momentum", "local.keep_state=true"],
        ["method=fedper", "local.optimizer=adamw", "local.keep_state=true", "model.dropout=0.2"],
        ["method=fedprox", "schedule.cohort=2", "local.optimizer=adamw", "clip=0.5"],
        ["method=fedasync", "local.optimizer=module", "local.keep_state=true"],
    ],
)
def test_workers_and_resuming_change_no_bit(overrides):
    more = {"model": Own()} if "local.optimizer=module" in overrides else {}
    overrides = [*SMALL, "checkpoint.every=3", *overrides]
    serial = run([*overrides, "executor=serial"], **more)
    assert bits(run([*overrides, "workers=2"], **more)) == bits(serial)
    with pytest.raises(Exception, match="stopped after update"):
        run_for([*overrides, "workers=2"], 7, **more)
    assert bits(run([*overrides, "workers=2"], resume=True, **more)) == bits(serial)


def test_plain_steps_are_the_default_and_their_configs_keep_their_hashes():
    assert compose(SMALL).hash() == compose([*SMALL, "local.optimizer=sgd"]).hash() == "092f120d694531d0"
    hashes = {
        compose([*SMALL, "method=fedasync", *more]).hash()
        for more in ([], ["local.optimizer=adamw"], ["local.weight_decay=0.1"])
    }
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["method=persafl_maml", "local.optimizer=adamw"],
            "local.optimizer=adamw goes with the objectives plain and proximal; maml takes plain steps",
        ),
        (
            ["method=persafl_me", "local.weight_decay=0.1"],
            "local.weight_decay > 0 goes with the objectives plain and proximal; moreau",
        ),
        (["method=scaffold", "local.optimizer=momentum"], "scaffold takes plain steps only"),
        (["method=fedasync", "local.keep_state=true"], "local.optimizer=sgd has no state to keep"),
        (["method=fedasync", "local.momentum=0.5"], "local.momentum is for local.optimizer=momentum; here it is sgd"),
        (
            ["method=fedasync", "local.optimizer=momentum", "local.momentum=1"],
            r"local.momentum must lie in \(0, 1\); got 1.0",
        ),
        (["method=fedasync", "local.optimizer=module", "local.weight_decay=1"], "the module sets its own"),
        (["method=fedasync", "local.weight_decay=-1"], "local.weight_decay must be >= 0"),
        (["method=fedasync", "local.optimizer=adam"], "local.optimizer must be .*Did you mean 'adamw'"),
    ],
)
def test_combinations_without_meaning_are_refused(overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        compose(overrides)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def fails(optimizer):
    raise KeyError("rate")


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [
        (lambda o: {"optimizer": o, "lr_scheduler": scheduler(o)}, "takes no schedulers"),
        (lambda o: ([o], [scheduler(o)]), "takes no schedulers"),
        (lambda o: [o, o], "takes one optimizer of torch.optim"),
        (lambda o: (o, o), "takes one optimizer of torch.optim"),
        (lambda o: None, "takes one optimizer of torch.optim; Own.configure_optimizers returns None"),
        (fails, "Own.configure_optimizers fails: KeyError: 'rate'"),
    ],
)
def test_what_is_not_one_optimizer_is_refused(returns, sentence):
    with pytest.raises((ConfigError, ModelError), match=sentence):
        run([*SMALL, "method=fedasync", "local.optimizer=module"], model=Own(returns))


def test_one_optimizer_may_come_in_any_of_lightnings_forms():
    settings = [*SMALL, "method=fedasync", "local.optimizer=module", "updates=4", "executor=serial"]
    results = [
        bits(run(settings, model=Own(form)))
        for form in (lambda o: o, lambda o: [o], lambda o: {"optimizer": o}, lambda o: ([o], []))
    ]
    assert len(set(results)) == 1


def test_a_model_without_an_optimizer_of_its_own_is_refused():
    with pytest.raises(ConfigError, match="needs a model with configure_optimizers; Classifier has none"):
        run([*SMALL, "method=fedasync", "local.optimizer=module"])
