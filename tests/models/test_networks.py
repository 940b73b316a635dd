"""Networks of torchvision, models given as a class or an object, frozen parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from persafl_lit import run
from persafl_lit.data import Digits
from persafl_lit.engine.executors import Work, Worker
from persafl_lit.errors import ConfigError, ModelError
from persafl_lit.learning.objectives import Plain
from persafl_lit.learning.personalisation import Finetune
from persafl_lit.models.backbone import build_backbone
from persafl_lit.models.networks import Torchvision
from tests.support.modules import Net
from tests.support.runs import run_for

ROOT = Path(__file__).parent.parent.parent
SMALL = [
    "tracking.enabled=false",
    "checkpoint.every=0",
    "clients=4",
    "updates=6",
    "local_steps=2",
    "batch_size=8",
    "eval.finetune=none",
]


# -- torchvision ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arch", ["resnet18", "shufflenet_v2_x0_5", "mobilenet_v3_small", "squeezenet1_1", "mnasnet0_5", "googlenet"]
)
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_network_of_torchvision_fits_the_data(arch, norm):
    network = Torchvision(arch, norm).network((1, 28, 28), 7).eval()
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 7)
    kinds = {type(layer) for layer in network.modules()}
    assert (nn.BatchNorm2d in kinds) == (norm == "batch" and arch != "squeezenet1_1")
    for layer in network.modules():
        if norm == "group" and isinstance(layer, nn.GroupNorm):
            assert 32 % layer.num_groups == layer.num_channels % layer.num_groups == 0


def test_what_torchvision_cannot_build_is_told():
    with pytest.raises(
        ConfigError,
        match=r"unknown model.arch 'resnet19'; torchvision has \d+ classification networks. Did you mean 'resnet18'?",
    ):
        run([*SMALL, "model=torchvision", "model.arch=resnet19"])
    with pytest.raises(ConfigError, match="model.arch=alexnet cannot take images of 8x8 pixels: .*too small"):
        run([*SMALL, "model=torchvision", "model.arch=alexnet"])
    with pytest.raises(ConfigError, match="beyond the 100,000,000 that are trained"):
        Torchvision("vit_h_14").network((3, 28, 28), 10)
    with pytest.raises(ConfigError, match="needs images"):
        Torchvision().network((64,), 10)


def test_first_weights_are_named_by_the_seed():
    federation = Digits().federation(4, 0)
    first, again, other = (build_backbone(Torchvision("shufflenet_v2_x0_5"), federation, seed) for seed in (0, 0, 1))
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in first.state_dict().items())
    assert not torch.equal(first.network.conv1[0].weight, other.network.conv1[0].weight)


@pytest.mark.slow
def test_the_resnet_example_runs(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "resnet_batchnorm.py", "--small"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "model.buffers=local: test accuracy" in done.stdout
    assert "model.buffers=shared: test accuracy" in done.stdout


# -- classes and objects ----------------------------------------------------------------------------------------------


class Frozen(Net):
    def __init__(self):
        super().__init__(frozen=True)


class Needy(Net):
    def __init__(self, width):
        super().__init__()


def test_a_class_is_built_from_the_runs_seed():
    """Whatever the caller's random state; and it is the run that its path describes on the command line."""
    torch.manual_seed(1)
    first = run([*SMALL, "updates=1"], model=Net)
    torch.manual_seed(2)
    again, other = run([*SMALL, "updates=1"], model=Net), run([*SMALL, "updates=1", "seed=1"], model=Net)
    named = run([*SMALL, "updates=1", "model=custom", "model.path=tests.support.modules.Net", "allow_code=true"])
    assert first.first_weights == again.first_weights == named.first_weights != other.first_weights
    assert all(torch.equal(value, named.state_dict()[name]) for name, value in first.state_dict().items())
    assert first.config.hash() == again.config.hash()
    with pytest.raises(ModelError, match="cannot build the model Needy without arguments: TypeError"):
        run(SMALL, model=Needy)
    with pytest.raises(ConfigError, match="must be a LightningModule"):
        run(SMALL, model=dict)


def test_an_object_keeps_the_callers_weights_and_their_digest_is_recorded():
    torch.manual_seed(1)
    mine, other = Net(), Net()
    first, again, third = (
        run([*SMALL, "updates=1"], model=mine),
        run([*SMALL, "updates=1"], model=mine),
        run([*SMALL, "updates=1"], model=other),
    )
    assert first.first_weights == again.first_weights != third.first_weights
    assert first.summary()["first_weights"] == first.first_weights


def test_the_digest_is_a_tag_in_mlflow():
    from persafl_lit.tracking.location import store_uri
    from persafl_lit.tracking.store import Store

    result = run([*SMALL[1:], "updates=1", "tracking.model=false", "tracking.figures=false"], model=Net)
    found = Store(store_uri(None)).client.get_run(result.run_id)
    assert found.data.tags["persafl.first_weights"] == result.first_weights


# -- frozen parameters ------------------------------------------------------------------------------------------------


def test_frozen_parameters_are_neither_sent_nor_stored(tmp_path):
    overrides = [*SMALL[:1], *SMALL[2:], "checkpoint.every=2", "method=fedasync"]
    sizes = {}
    for model in (Net(), Net(frozen=True)):
        with pytest.raises(Exception, match="stopped after update 4"):
            run_for(overrides, 4, model=model)
        sizes[model.body.weight.requires_grad] = max(
            file.stat().st_size for file in (tmp_path / "mlruns" / "checkpoints").glob("*.pt")
        )
        for file in (tmp_path / "mlruns" / "checkpoints").glob("*"):
            file.unlink()
    assert sizes[True] > 4 * 64 * 500 > 0.8 * 4 * 64 * 500 > sizes[False] / 2
    mine = Net(frozen=True)
    result = run(overrides, model=mine)
    assert result.summary()["bytes_communicated"] == 2 * 4 * 5010 * 6
    assert torch.equal(result.state_dict()["body.weight"], mine.body.weight), "as it was given"
    assert not torch.equal(result.state_dict()["head.weight"], mine.head.weight)


def test_other_frozen_parameters_are_another_run():
    federation = Digits().federation(4, 0)
    digests = set()
    for scale in (1.0, 2.0):
        torch.manual_seed(0)
        backbone = Frozen()
        backbone.body.weight.data.mul_(scale)
        digests.add(Worker(Work(backbone, federation, Plain(), {"none": Finetune()}, 2, 0.01, 8, 0)).digest)
    assert len(digests) == 2
