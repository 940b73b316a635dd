"""Hessian-vector products through plain layers: against the Hessian itself and against double backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from persafl_lit.client import Classifier, ClientModule
from persafl_lit.data.federation import Batch
from persafl_lit.loss import FlatLoss
from persafl_lit.models import Cnn2, Cnn3, Logistic, Mlp
from persafl_lit.objectives import Maml
from persafl_lit.pearlmutter import plain_layers

SHAPE = (2, 12, 12)
NETWORKS = {
    "logistic": Logistic().network(SHAPE, 5),
    "mlp": Mlp(hidden=(7, 6), dropout=0.3).network(SHAPE, 5),
    "cnn2": Cnn2(channels=(3, 4), hidden=(6,)).network(SHAPE, 5),
    "cnn3": Cnn3(channels=(3, 4, 4), hidden=(6, 5)).network(SHAPE, 5),
    "unusual": nn.Sequential(
        nn.Dropout(0.2),
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False),
        nn.ReLU(inplace=True),
        nn.MaxPool2d((2, 3), stride=(1, 2), padding=1, dilation=(1, 2), ceil_mode=True),
        nn.Conv2d(4, 3, 2, bias=False),
        nn.Flatten(),
        nn.ReLU(),
        nn.Linear(72, 6, bias=False),
        nn.Linear(6, 5),
    ),
}


def both_ways(network, dtype=torch.float64, mask=3):
    """(our product, that of double backward, and its ingredients) at the same random point."""
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randn((9, *SHAPE), generator=stream, dtype=dtype).contiguous(memory_format=torch.channels_last)
    batch = Batch((inputs, torch.randint(5, (9,), generator=stream)), mask)
    network.to(dtype)
    products = []
    for layers in (plain_layers(network), ()):
        f = FlatLoss(Classifier(network).train(network.training), layers=layers)
        u = torch.randn(f.point.shape, generator=torch.Generator().manual_seed(2), dtype=dtype)
        products.append(f.hessian_vector(f.point.clone(), u, batch))
        assert f.evaluations == 2
    return *products, f, u, batch


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_what_double_backward_finds(name, training):
    network = NETWORKS[name].train(training)
    assert plain_layers(network)
    ours, expected, *_ = both_ways(network)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)
    assert float(expected.norm()) > 0.01


def test_it_is_the_hessian_times_u():
    """The whole matrix by autograd, column by column: nothing of ours in it."""
    network = NETWORKS["mlp"].eval()
    ours, _, f, u, batch = both_ways(network)
    inputs, labels = batch.data
    names = [name for name, _ in network.named_parameters()]

    def loss(w):
        parameters = dict(zip(names, f._views(w), strict=True))
        return nn.functional.cross_entropy(torch.func.functional_call(network, parameters, (inputs,)), labels)

    torch.testing.assert_close(ours, torch.autograd.functional.hessian(loss, f.point.clone()) @ u, rtol=1e-10, atol=1e-13)


def test_the_mask_is_that_of_the_batch():
    network = NETWORKS["mlp"].train()
    (first, expected, *_), (other, *_) = both_ways(network, mask=3), both_ways(network, mask=4)
    torch.testing.assert_close(first, expected, rtol=1e-10, atol=1e-13)
    assert not torch.allclose(first, other, rtol=1e-3)


def test_in_single_precision_it_agrees_to_rounding():
    ours, expected, *_ = both_ways(Cnn2(channels=(8, 16), hidden=(32,)).network(SHAPE, 5), torch.float32)
    assert float((ours - expected).norm() / expected.norm()) < 1e-5


def hooked():
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda module, inputs, output: output * 2)
    return layer


def frozen():
    return nn.Linear(4, 4).requires_grad_(False)


class Doubled(nn.Linear):
    def forward(self, inputs):
        return 2 * super().forward(inputs)


twice = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "network",
    [
        nn.Linear(4, 4),
        nn.Sequential(nn.Linear(4, 4), nn.GELU()),
        nn.Sequential(Doubled(4, 4)),
        nn.Sequential(twice, nn.ReLU(), twice),
        nn.Sequential(hooked()),
        nn.Sequential(frozen(), nn.Linear(4, 4)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding="same")),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="circular")),
        nn.Sequential(nn.Sequential(nn.Linear(4, 4))),
    ],
    ids=["no sequence", "other layer", "subclass", "shared", "hook", "frozen", "parametrised", "same padding", "circular", "nested"],
)
def test_other_networks_are_left_to_double_backward(network):
    assert plain_layers(network) == ()


def test_only_the_classifier_itself_is_known_to_be_a_cross_entropy():
    class Other(Classifier):
        def score_loss(self, scores, labels):
            return scores.square().mean()

    for kind, expected in ((Classifier, True), (Other, False)):
        module = ClientModule(kind(NETWORKS["logistic"]), Maml(), eta=0.1)
        module.configure_optimizers()
        assert bool(module.f._layers) is expected
