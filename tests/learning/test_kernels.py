"""The kernels of plain layers: gradients and Hessian-vector products against autograd, by the switch, and against the Hessian itself."""

from __future__ import annotations

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.data.federation import Batch
from persafl_lit.errors import ConfigError
from persafl_lit.learning.client_module import ClientModule
from persafl_lit.learning.kernels import backprop
from persafl_lit.learning.kernels.backprop import plain_layers
from persafl_lit.learning.objectives import Maml, Plain
from persafl_lit.models.classifier import Classifier
from persafl_lit.models.dropout import Dropout
from persafl_lit.models.networks import Cnn2, Cnn3, Logistic, Mlp

SWITCH = ("auto", "autograd")
SHAPE = (2, 12, 12)
SMALL = ["clients=4", "updates=8", "local_steps=2", "executor=serial", "tracking.enabled=false", "checkpoint.every=0"]
NETWORKS = {
    "logistic": Logistic().network(SHAPE, 5),
    "mlp": Mlp(hidden=(7, 6), dropout=0.3).network(SHAPE, 5),
    "cnn2": Cnn2(channels=(3, 4), hidden=(6,)).network(SHAPE, 5),
    "cnn3": Cnn3(channels=(3, 4, 4), hidden=(6, 5)).network(SHAPE, 5),
    "unusual": nn.Sequential(
        Dropout(0.2),
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


def a_batch(dtype, mask=3, shape=SHAPE):
    stream = torch.Generator().manual_seed(1)
    inputs = torch.randn((9, *shape), generator=stream, dtype=dtype).contiguous(memory_format=torch.channels_last)
    return Batch((inputs, torch.randint(5, (9,), generator=stream)), mask)


def loss_of(network, derivatives):
    """The flat loss of a client around the network, with or without its kernels."""
    module = ClientModule(Classifier(network).train(network.training), Plain(), eta=0.1, derivatives=derivatives)
    module.configure_optimizers()
    assert bool(module.f._layers) is (derivatives == "auto")
    return module.f


def both_ways(network, dtype=torch.float64, mask=3):
    """(our product, that of double backward, and its ingredients) at the same random point."""
    batch = a_batch(dtype, mask)
    network.to(dtype)
    products = []
    for derivatives in SWITCH:
        f = loss_of(network, derivatives)
        u = torch.randn(f.point.shape, generator=torch.Generator().manual_seed(2), dtype=dtype)
        products.append(f.hessian_vector(f.point.clone(), u, batch))
        assert f.evaluations == 2
    return *products, f, u, batch


def gradients_both_ways(network, dtype, training=True):
    """((our gradient, our loss), those of autograd)."""
    network.train(training).to(dtype)
    found = []
    for derivatives in SWITCH:
        f = loss_of(network, derivatives)
        f._gradient.fill_(torch.nan)  # every slope is written
        found.append((f.gradient(f.point.clone(), a_batch(dtype)).clone(), *f.losses))
        assert f.evaluations == 1
    return found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_gradient_is_what_autograd_finds(name, training):
    assert plain_layers(NETWORKS[name])
    (ours, our_loss), (expected, loss) = gradients_both_ways(NETWORKS[name], torch.float64, training)
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)
    assert torch.equal(our_loss, loss)
    assert float(expected.norm()) > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gradient_has_autograds_bits_where_weights_are_aligned(dtype):
    """A matrix product rounds otherwise when its result does not begin at a multiple of 16 bytes: here all do."""
    (ours, our_loss), (expected, loss) = gradients_both_ways(
        Cnn2(channels=(8, 16), hidden=(32,)).network(SHAPE, 8), dtype
    )
    assert torch.equal(ours, expected)
    assert torch.equal(our_loss, loss)


def test_the_gradient_agrees_with_a_network_written_in_numpy():
    """One hidden layer, each slope from the formula: nothing of torch in it."""
    network = Mlp(hidden=(7,)).network(SHAPE, 5).double()
    f, batch = loss_of(network, "auto"), a_batch(torch.float64)
    inputs, labels = (part.numpy() for part in batch.data)
    w = f.point.clone()
    ours = f.gradient(w, batch).numpy()
    W1, b1, W2, b2 = (view.numpy() for view in f._views(w))
    x = inputs.reshape(9, -1)
    z = x @ W1.T + b1
    scores = np.maximum(z, 0) @ W2.T + b2
    p = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    g = (p - np.eye(5)[labels]) / 9
    inner = (g @ W2) * (z > 0)
    expected = np.concatenate([(inner.T @ x).ravel(), inner.sum(0), (g.T @ np.maximum(z, 0)).ravel(), g.sum(0)])
    np.testing.assert_allclose(ours, expected, rtol=1e-10, atol=1e-13)
    assert float(f.losses[0]) == pytest.approx(-np.log(p[range(9), labels]).mean(), rel=1e-12)


def test_whole_runs_have_the_same_bits_with_and_without_autograd():
    ours, expected = (
        run([*SMALL, "method=persafl_me", "model=cnn2", f"derivatives={derivatives}"]).state_dict()
        for derivatives in SWITCH
    )
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_the_switch_is_auto_by_default_and_knows_two_words():
    assert compose().derivatives == "auto"
    assert compose(["derivatives=autograd"]).hash() != compose().hash(), "the last bits may differ"
    with pytest.raises(ConfigError, match="derivatives must be one of auto, autograd; got 'torch'"):
        compose(["derivatives=torch"])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_what_double_backward_finds(name, training):
    network = NETWORKS[name].train(training)
    assert plain_layers(network)
    ours, expected, *_ = both_ways(network)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-13)
    assert float(expected.norm()) > 0.01


@pytest.mark.slow
def test_it_is_the_hessian_times_u():
    """The whole matrix by autograd, column by column: nothing of ours in it."""
    network = NETWORKS["mlp"].eval()
    ours, _, f, u, batch = both_ways(network)
    inputs, labels = batch.data
    names = [name for name, _ in network.named_parameters()]

    def loss(w):
        parameters = dict(zip(names, f._views(w), strict=True))
        return nn.functional.cross_entropy(torch.func.functional_call(network, parameters, (inputs,)), labels)

    torch.testing.assert_close(
        ours, torch.autograd.functional.hessian(loss, f.point.clone()) @ u, rtol=1e-10, atol=1e-13
    )


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
        nn.Sequential(nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(2), nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.GELU()),
        nn.Sequential(nn.Flatten(), Doubled(4, 4)),
        nn.Sequential(nn.Flatten(), twice, nn.ReLU(), twice),
        nn.Sequential(nn.Flatten(), hooked()),
        nn.Sequential(nn.Flatten(), frozen(), nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding="same"), nn.Flatten()),
        nn.Sequential(nn.Conv2d(1, 1, 3, padding_mode="circular"), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 4))),
        nn.Sequential(nn.Flatten(), nn.MaxPool2d(1), nn.Linear(4, 4)),
    ],
    ids=[
        "no sequence",
        "no flatten",
        "linear on images",
        "two flattens",
        "partly flat",
        "torch's dropout",
        "other layer",
        "subclass",
        "shared",
        "hook",
        "frozen",
        "parametrised",
        "same padding",
        "circular",
        "nested",
        "pooled vectors",
    ],
)
def test_other_networks_are_left_to_autograd(network):
    assert plain_layers(network) == ()


def tied(**kind):
    first, second = nn.Linear(4, 4, **kind), nn.Linear(4, 4, **kind)
    second.weight = first.weight
    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), second)


def tied_without_bias():
    return tied(bias=False)


def further_parameter():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    network[1].scale = nn.Parameter(torch.ones(4))
    return network


def hooked_sequence():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    network.register_forward_hook(lambda module, inputs, output: output * 2)
    return network


def hooked_slope():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    network[1].weight.register_hook(lambda slope: 0 * slope)
    return network


def replaced_method():
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    network[1].forward = lambda inputs: 2 * inputs
    return network


@pytest.mark.parametrize(
    "twisted", [tied, tied_without_bias, further_parameter, hooked_sequence, hooked_slope, replaced_method]
)
def test_networks_with_a_twist_are_left_to_autograd(twisted):
    assert plain_layers(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)))
    assert plain_layers(twisted()) == ()


def further(model):
    model.temperature = nn.Parameter(torch.ones(()))


def hook(model):
    model.register_forward_hook(lambda module, inputs, output: output * 2)


def own_loss(model):
    model.score_loss = lambda scores, labels: scores.square().mean()


@pytest.mark.parametrize("twist", [further, hook, own_loss])
def test_classifiers_with_a_twist_are_left_to_autograd(twist):
    model = Classifier(Logistic().network(SHAPE, 5))
    twist(model)
    module = ClientModule(model, Maml(), eta=0.1)
    module.configure_optimizers()
    assert not module.f._layers


def test_pools_may_be_written_in_any_way():
    for window in (2, (2, 2), [2, 2]):
        network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.MaxPool2d(window), nn.Flatten(), nn.Linear(100, 5))
        (ours, _), (expected, _) = gradients_both_ways(network, torch.float64)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-15)


def test_only_the_classifier_itself_is_known_to_be_a_cross_entropy():
    class Other(Classifier):
        def score_loss(self, scores, labels):
            return scores.square().mean()

    for kind, expected in ((Classifier, True), (Other, False)):
        module = ClientModule(kind(NETWORKS["logistic"]), Maml(), eta=0.1)
        module.configure_optimizers()
        assert bool(module.f._layers) is expected


# -- a user's own nn.Sequential ---------------------------------------------------------------------------------------


class Wrapped(L.LightningModule):
    """The same as `Classifier`, as a user writes it."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, inputs):
        return self.network(inputs)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


def a_sequence(*layers):
    torch.manual_seed(5)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), *layers, nn.Flatten(), nn.Linear(108, 10))


@pytest.fixture
def kernel_calls(monkeypatch):
    """Batches whose gradient the kernels computed, counted beside them."""
    calls, gradient = [], backprop.gradient
    monkeypatch.setattr(backprop, "gradient", lambda *arguments: calls.append(1) or gradient(*arguments))
    return calls


@pytest.mark.parametrize("method", ["fedasync", "persafl_maml", "persafl_me"])
def test_a_users_sequence_is_the_lightning_module_around_it_but_through_the_kernels(method, kernel_calls):
    overrides = [*SMALL, f"method={method}"]
    theirs = run(overrides, model=Wrapped(a_sequence()))
    assert not kernel_calls
    ours = run(overrides, model=a_sequence())
    assert kernel_calls
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    assert ours.accuracy == pytest.approx(theirs.accuracy)
    kernel_calls.clear()
    run([*overrides, "derivatives=autograd"], model=a_sequence())
    assert not kernel_calls


def test_a_users_sequence_is_left_as_it_was_and_comes_back_trained():
    network = a_sequence()
    trained = run(SMALL, model=network).model.network
    assert type(trained) is nn.Sequential
    assert all(
        torch.equal(mine, fresh) for mine, fresh in zip(network.parameters(), a_sequence().parameters(), strict=True)
    )
    assert not any(
        torch.equal(mine, other) for mine, other in zip(network.parameters(), trained.parameters(), strict=True)
    )


@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.Tanh(), nn.GroupNorm(1, 3)])
def test_a_users_sequence_with_other_layers_goes_through_autograd(layer, kernel_calls):
    theirs = run(SMALL, model=Wrapped(a_sequence(layer))).state_dict()
    ours = run(SMALL, model=a_sequence(layer)).state_dict()
    assert not kernel_calls
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_sequences_are_told_from_each_other_by_their_layers():
    one, same, other = (run(SMALL, model=a_sequence(*layers)).config for layers in ([], [], [nn.Tanh()]))
    assert one.hash() == same.hash() != other.hash()
    assert compose(one.values).values == one.values, "the record is a config"


def test_subclasses_of_a_sequence_are_no_backbones():
    class Residual(nn.Sequential):
        def forward(self, inputs):
            return inputs + super().forward(inputs)

    with pytest.raises(
        ConfigError, match="the model must be a LightningModule whose training_step returns a loss; got Residual"
    ):
        run(SMALL, model=Residual(nn.Flatten(), nn.Linear(64, 10)))
