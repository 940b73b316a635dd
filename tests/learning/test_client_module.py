"""The client as a LightningModule: under Fabric, under Trainer.fit, and around a user's own module."""

from __future__ import annotations

import sys
import warnings

import lightning as L
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.data import Digits
from persafl_lit.engine.executors import Worker
from persafl_lit.engine.messages import Evaluate, Train
from persafl_lit.errors import ConfigError, ModelError
from persafl_lit.learning.client_data import ClientDataModule
from persafl_lit.learning.client_module import ClientModule
from persafl_lit.learning.objectives import OBJECTIVES, Maml, Moreau, Objective, Plain
from persafl_lit.models.backbone import build_backbone
from persafl_lit.models.networks import Cnn2, Mlp
from tests.support.clients import fit, parts

QUIET = ["tracking.enabled=false", "checkpoint.every=0"]
SMALL = [*QUIET, "clients=6", "updates=12", "local_steps=3", "batch_size=8"]


@pytest.mark.parametrize(
    "objective", [Plain(), Maml(alpha=0.05), Maml(alpha=0.05, hvp="exact"), Moreau(lam=20.0, inner_steps=3)]
)
def test_trainer_fit_on_one_client_gives_the_bits_of_the_fabric_loop(objective):
    """The same ClientModule, once under Trainer.fit with the client's LightningDataModule, once as a job under Fabric."""
    _, _, work = parts(objective)
    worker = Worker(work)
    worker.train(Train(2, 0, {"w": worker.start}))

    federation, backbone, _ = parts(objective)
    alone = ClientModule(backbone, objective, eta=0.05)
    data = ClientDataModule(federation, 2, objective, local_steps=4, batch_size=8, seed=0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    trainer = fit(alone, data, steps=4)
    torch.set_num_threads(threads)
    assert trainer.global_step == 4
    assert torch.equal(alone.w, worker.module.w)
    assert torch.equal(torch.cat([p.flatten() for p in backbone.parameters()]), alone.w), (
        "the backbone holds the trained weights"
    )


def test_local_training_is_trainer_fit_for_as_many_visits():
    """method=local: what a client reaches after v visits is Trainer.fit over v * Q steps."""
    result = run([*SMALL, "method=local", "model=mlp", "eval.finetune=none", "eta=0.05"])
    client = int(result.timeline.arrivals_per_client().argmax())
    visits = int(result.timeline.arrivals_per_client()[client])
    assert visits > 1
    federation = Digits().federation(6, 0)
    backbone = build_backbone(Mlp(), federation, 0)
    fit(
        ClientModule(backbone, Plain(), eta=0.05),
        ClientDataModule(federation, client, Plain(), 3, 8, 0, visits),
        steps=3 * visits,
    )
    (data, _), *_ = federation.whole(client, "test", 1000)
    backbone.eval()
    assert float(backbone.training_step(data, 0).detach()) == pytest.approx(
        result.clients()[client]["test_loss"], rel=1e-4
    )


def test_an_update_is_the_difference_between_what_was_read_and_what_was_reached():
    _, _, work = parts(Plain())
    worker = Worker(work)
    read = worker.start
    update = worker.train(Train(1, 0, {"w": read}))
    assert torch.equal(update.sent["delta"], read - worker.module.w)
    assert update.evaluations == 4


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_job_depends_on_nothing_but_its_inputs(name):
    """The same job twice, with other jobs and an evaluation in between, on a worker and on a fresh one."""
    work = parts(OBJECTIVES[name]())[2]
    worker = Worker(work)
    job = Train(3, 2, {"w": worker.start})
    first = worker.train(job)
    worker.train(Train(1, 0, {"w": worker.start + 0.1}))
    worker.evaluate(Evaluate(2, ("none",), {"w": worker.start}))
    fresh = Worker(parts(OBJECTIVES[name]())[2])
    for again in (worker.train(job), fresh.train(job)):
        assert {name: value.tolist() for name, value in first.sent.items()} == {
            name: value.tolist() for name, value in again.sent.items()
        }
        assert (first.loss, first.evaluations, first.residual) == (again.loss, again.evaluations, again.residual)


def test_another_dropout_does_not_change_the_batches_a_client_sees():
    """Every batch that reaches the backbone, with dropout 0 and 0.5 and with other delays, is the same."""

    class Watching(L.LightningModule):
        def __init__(self, dropout):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 10))
            self.seen = []

        def forward(self, inputs):
            return self.net(inputs)

        def training_step(self, batch, batch_idx):
            if self.training:
                seen.append(batch[1].tolist())
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    logs = []
    for dropout, delays in ((0.0, "exponential"), (0.5, "exponential"), (0.0, "constant")):
        seen: list = []
        result = run(
            [*SMALL, "method=local", "eval.finetune=none", f"delays={delays}", "updates=40", "executor=serial"],
            model=Watching(dropout),
        )
        steps = iter(seen)
        logs.append({(job.client, job.visit): [next(steps) for _ in range(3)] for job in result.timeline})
    assert logs[0] == logs[1]
    shared = logs[0].keys() & logs[2].keys()
    assert len(shared) > 10
    assert all(logs[0][key] == logs[2][key] for key in shared)


# -- a user's own LightningModule -------------------------------------------------------------------------------------

OWN_MODULE = """
import lightning as L
import torch
from torch import nn

class Net(L.LightningModule):
    def __init__(self, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.GroupNorm(2, width), nn.ReLU(), nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y, label_smoothing=0.1)
        self.log("train_loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        raise AssertionError("the method fixes the optimiser")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_nets.py").write_text(OWN_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_nets", None)


def test_a_users_module_is_trained_through_the_python_api(own):
    from my_nets import Net

    mine = Net()
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run(
            {"clients": 6, "updates": 60, "eta": 0.05, "method": "persafl_me", "tracking.enabled": False}, model=mine
        )
    assert type(result.model) is Net
    assert result.accuracy["test"] > 0.5
    assert all(torch.equal(value, before[name]) for name, value in mine.state_dict().items()), (
        "the user's object is left alone"
    )


def test_a_class_path_needs_the_users_word(own):
    custom = [*SMALL, "model=custom", "model.path=my_nets.Net", "model.args.width=4"]
    with pytest.raises(ConfigError, match="allow_code=true"):
        run(custom)
    assert run([*custom, "allow_code=true"]).model.net[1].out_features == 4


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere.Net", "there is no module .nowhere."),
        ("my_nets.Nett", "has no .Nett.. Did you mean .Net"),
        ("my_nets.nn", "cannot build"),
        ("Net", "cannot build"),
    ],
)
def test_a_class_path_that_leads_nowhere_is_refused(own, path, why):
    with pytest.raises(ModelError, match=why):
        run([*SMALL, "model=custom", f"model.path={path}", "allow_code=true"])


def test_what_is_no_backbone_is_refused():
    class Lossless(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ConfigError, match="must be a LightningModule"):
        run(SMALL, model=nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="has no training_step"):
        run(SMALL, model=L.LightningModule())
    with pytest.raises(ConfigError, match="must return a loss; got NoneType"):
        run([*SMALL, "executor=serial"], model=Lossless())


def test_data_and_model_must_fit():
    with pytest.raises(ConfigError, match="data=quadratic goes with model=point"):
        run([*QUIET, "data=quadratic", "model=mlp"])
    with pytest.raises(ConfigError, match="data=quadratic goes with model=point"):
        run([*QUIET, "data=digits", "model=point"])
    with pytest.raises(ConfigError, match="8x8 pixels are too small"):
        run([*QUIET, "model.kernel=5", "model.padding=0"])


# -- networks and precision -------------------------------------------------------------------------------------------


def test_the_papers_mnist_network_has_the_known_number_of_parameters():
    """The two-convolution CNN of the federated literature, 32/64 channels 5x5 and 512 hidden units: 582,026."""
    network = Cnn2(channels=(32, 64), hidden=(512,), kernel=5, padding=0).network((1, 28, 28), 10)
    assert sum(p.numel() for p in network.parameters()) == 582_026


def test_pooling_before_relu_is_exact():
    inputs = torch.randn(50, 3, 8, 8)
    assert torch.equal(nn.ReLU()(nn.MaxPool2d(2)(inputs)), nn.MaxPool2d(2)(nn.ReLU()(inputs)))


def test_kaiming_weights_keep_the_size_of_the_signal_through_relu_layers():
    torch.manual_seed(0)
    inputs = torch.randn(64, 3, 32, 32)
    mlp = Mlp(hidden=(512, 512, 512), init="kaiming").network((3, 32, 32), 10)
    sizes = [
        mlp[: 2 + 3 * layer + 1](inputs).square().mean().item() for layer in range(3)
    ]  # before each ReLU: E z^2 = 2 E x^2 / 2
    assert sizes[1:] == pytest.approx(sizes[:1] * 2, rel=0.2)
    network = Cnn2(init="kaiming").network((3, 32, 32), 10)
    for layer in (layer for layer in network if isinstance(layer, (torch.nn.Conv2d, torch.nn.Linear))):
        assert float(layer.weight.detach().var()) == pytest.approx(2 / layer.weight[0].numel(), rel=0.2)
        assert not layer.bias.any()
    with pytest.raises(ConfigError, match="model.init must be torch or kaiming"):
        Mlp(init="he")


@pytest.mark.parametrize("model", ["cnn2", "cnn3", "mlp", "logistic"])
def test_every_network_learns(model):
    small = {"cnn2": ["model.channels=[4,8]"], "cnn3": ["model.channels=[8,16,16]", "eta=0.1", "model.dropout=0"]}
    result = run(
        [
            *QUIET,
            "eta=0.05",
            f"model={model}",
            *small.get(model, []),
            "clients=5",
            "updates=80",
            "method=local",
            "eval.finetune=none",
        ]
    )
    assert result.points[-1].accuracy()["test"] > result.points[0].accuracy()["test"] + 0.3


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_other_precisions_train(precision):
    exact = run([*SMALL, "method=fedasync", "model=mlp"]).state_dict()
    other = run([*SMALL, "method=fedasync", "model=mlp", f"precision={precision}"]).state_dict()
    assert all(value.dtype == exact[name].dtype for name, value in other.items()), "exported in the backbone's own type"
    gap = max(float((other[name].double() - exact[name].double()).abs().max()) for name in exact)
    assert 0 < gap < (1e-5 if precision == "64-true" else 0.05)


@pytest.mark.parametrize("method", ["fedasync", "persafl_maml", "persafl_me"])
def test_in_mixed_precision_every_step_starts_where_the_last_one_ended(method):
    """Autocast keeps rounded copies of the weights: a job whose steps all saw the first ones would go ten times straight ahead."""
    overrides = [*SMALL, f"method={method}", "model=mlp", "clients=2", "updates=1", "local_steps=10", "eta=0.3"]
    start = build_backbone(Mlp(), Digits().federation(2, 0), seed=0).state_dict()
    exact, mixed = (run([*overrides, *more]).state_dict() for more in ([], ["precision=bf16-mixed"]))
    moved, gap = (
        sum(float((exact[name] - other[name]).square().sum()) for name in exact) ** 0.5 for other in (start, mixed)
    )
    assert 0 < gap < 0.1 * moved


def test_precisions_and_devices_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="precision must be one of"):
        run([*SMALL, "precision=16-mixed"])
    with pytest.raises(ConfigError, match="drowns in the rounding"):
        run([*SMALL, "method=persafl_maml", "method.hvp=finite_difference", "precision=bf16-mixed"])
    with pytest.raises(ConfigError, match="accelerator=gpuu"):
        run([*SMALL, "accelerator=gpuu"])
    with pytest.raises(ConfigError, match="one device"):
        run([*SMALL, "devices=2"])


def test_a_saved_model_is_an_ordinary_contiguous_state_dict():
    result = run([*SMALL, "model.channels=[4,8]"])
    fresh = build_backbone(Cnn2(channels=(4, 8)), Digits().federation(6, 0), seed=99)
    fresh.load_state_dict(result.state_dict())
    assert all(value.is_contiguous() for value in result.state_dict().values())
    assert compose(SMALL).model["name"] == "cnn2"


def test_a_model_from_python_is_recorded_as_what_it_is():
    class Mine(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 10)

        def forward(self, inputs):
            return self.linear(inputs.flatten(1))

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

    mine, usual = run([*SMALL, "executor=serial"], model=Mine()), run(SMALL)
    assert mine.config.model["path"].endswith("Mine")
    assert mine.summary()["config"]["model"] == mine.config.model
    assert mine.config.hash() != usual.config.hash()


def test_a_run_that_never_fills_its_buffer_says_so():
    (note,) = run([*SMALL, "method=fedbuff", "method.buffer=50", "updates=10"]).notes
    assert note.startswith("the model never changed: only 10 updates arrived and the server waits for 50")


def test_a_model_that_never_changed_is_told_from_one_that_is_not_shared():
    waiting = run([*SMALL, "method=fedbuff", "method.buffer=50", "updates=10"])
    assert (waiting.summary()["versions"], waiting.summary()["model_changed"], waiting.model_changed) == (
        0,
        False,
        False,
    )
    assert "sweeps and reports leave it out" in waiting.notes[0]
    alone = run([*SMALL, "method=local", "method.buffer=50", "updates=10"])
    assert (alone.summary()["versions"], alone.model_changed, alone.notes) == (0, True, ()), (
        "clients' own models do change"
    )
    assert run([*SMALL, "method=fedbuff", "method.buffer=10", "updates=10"]).model_changed


def test_a_model_that_every_update_would_have_made_infinite_never_changed():
    skipped = run([*SMALL, "updates=6", "eta=1e18", "on_divergence=skip"])
    assert (skipped.summary()["skipped"], skipped.summary()["versions"], skipped.model_changed) == (6, 6, False)
    assert skipped.notes[0].startswith("the model never changed: none of 6 updates entered it")


def test_the_summary_tells_when_evaluations_were_left_out_to_save_time():
    few = run([*SMALL, "updates=10"])
    assert few.summary()["evaluations"] == {"made": len(few.points), "thinned_from": 11}
    assert len(few.points) < 11
    asked = run([*SMALL, "updates=10", "eval.every=0.5"])
    assert asked.summary()["evaluations"] == {"made": len(asked.points), "thinned_from": None}


class Elsewhere(Objective):
    """Takes a gradient at a shifted point, and forgets to say so."""

    def gradient(self, f, step):
        return f.gradient(step.w + 0.1, step.batches[0])


class InPlace(Objective):
    moves = True

    def gradient(self, f, step):
        step.w.mul_(0.5)
        return f.gradient(step.w, step.batches[0])


@pytest.mark.parametrize("objective", [Elsewhere, InPlace])
def test_an_objective_that_changes_w_behind_our_back_is_refused(objective):
    settings = [
        "tracking.enabled=false",
        "method=fedasync",
        "clients=3",
        "updates=3",
        "model=logistic",
        "executor=serial",
    ]
    with pytest.raises(ModelError, match=f"{objective.__name__}.gradient changes step.w: .*`moves = True`"):
        run(settings, objective=objective)
