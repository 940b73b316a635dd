"""Every objective against its closed form on quadratics, and against autograd on a small CNN."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from persafl_lit.data.federation import Batch
from persafl_lit.errors import ConfigError, DivergenceError
from persafl_lit.learning.flat_loss import FlatLoss
from persafl_lit.learning.objectives import Maml, Moreau, Plain, Proximal, Scaffold, Step
from persafl_lit.models.classifier import Classifier
from persafl_lit.models.networks import Cnn2
from tests.support import reference
from tests.support.quadratics import loss_and_batch, random_quadratics

SEEDS = range(5)


def quadratic(seed):
    (H,), (a,) = random_quadratics(1, 6, seed)
    w = np.random.default_rng(100 + seed).normal(size=6)
    f, batch = loss_and_batch(H, a)
    return H, a, w, f, batch


def at(w, batches, read=None, given=None):
    w = torch.from_numpy(w)
    return Step(w, w if read is None else torch.from_numpy(read), batches, given or {})


def close(vector, expected, tolerance=1e-10):
    np.testing.assert_allclose(vector.numpy(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("seed", SEEDS)
def test_plain_gradient_is_the_slope(seed):
    H, a, w, f, D = quadratic(seed)
    close(Plain().gradient(f, at(w, [D])), H @ (w - a))
    assert f.evaluations == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_proximal_gradient_pulls_towards_the_model_that_was_read(seed):
    H, a, w, f, D = quadratic(seed)
    read = np.random.default_rng(seed).normal(size=6)
    close(Proximal(mu=0.7).gradient(f, at(w, [D], read)), H @ (w - a) + 0.7 * (w - read))
    assert f.evaluations == 1


def test_proximal_with_mu_zero_is_plain():
    H, a, w, f, D = quadratic(0)
    expected = Plain().gradient(f, at(w, [D])).clone()
    assert torch.equal(Proximal(mu=0.0).gradient(f, at(w, [D], read=w + 1)), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_scaffold_gradient_adds_the_correction(seed):
    H, a, w, f, D = quadratic(seed)
    correction = np.random.default_rng(seed).normal(size=6)
    close(
        Scaffold().gradient(f, at(w, [D], given={"correction": torch.from_numpy(correction)})), H @ (w - a) + correction
    )
    assert f.evaluations == 1


def test_scaffold_corrects_by_the_difference_of_controls_and_sends_how_its_own_changed():
    c, own, new = torch.tensor([5.0, 1.0]), torch.tensor([2.0, 3.0]), torch.tensor([10.0, -10.0])
    read, memory = {"w": torch.zeros(2), "control": c}, {"control": own}
    assert Scaffold().begin({"w": torch.zeros(2)}, memory) == {}, "the first round has no c"
    assert Scaffold().begin(read, memory)["correction"].tolist() == [3.0, -2.0]
    assert Scaffold().begin(read, {})["correction"].tolist() == [5.0, 1.0], "c_i begins at 0"
    sent, kept = Scaffold().end(lambda: new, memory)
    assert (sent["control"].tolist(), kept["control"].tolist()) == ([8.0, -13.0], [10.0, -10.0])
    sent, kept = Scaffold().end(lambda: new, {})
    assert (sent["control"].tolist(), kept["control"].tolist()) == ([10.0, -10.0], [10.0, -10.0])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("hvp", ["exact", "finite_difference"])
def test_maml_gradient_is_the_closed_form(seed, hvp):
    H, a, w, f, D = quadratic(seed)
    tolerance = 1e-10 if hvp == "exact" else 1e-8  # a difference of length 1e-5 multiplies rounding by as much
    close(Maml(alpha=0.1, hvp=hvp).gradient(f, at(w, [D, D, D])), reference.maml(H, a, w, 0.1), tolerance)
    assert f.evaluations == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_first_order_maml_drops_the_hessian(seed):
    H, a, w, f, D = quadratic(seed)
    close(Maml(alpha=0.1, hvp="first_order").gradient(f, at(w, [D, D, D])), H @ (w - 0.1 * H @ (w - a) - a))
    assert f.evaluations == 2


@pytest.mark.parametrize("seed", SEEDS)
def test_as_printed_is_twice_the_hessian_term(seed):
    """The paper's appendix divides the central difference by d instead of 2d."""
    H, a, w, f, D = quadratic(seed)
    u = H @ (w - 0.1 * H @ (w - a) - a)
    close(Maml(alpha=0.1, hvp="as_printed").gradient(f, at(w, [D, D, D])), u - 0.1 * 2 * H @ u, tolerance=1e-9)


def test_maml_uses_each_of_its_three_batches_where_the_paper_says():
    """(I - alpha H'') grad f(w - alpha grad f(w; D'); D), with three different quadratics as D, D', D''."""
    H, a = random_quadratics(3, 4, seed=3)
    w = np.random.default_rng(5).normal(size=4)
    f, _ = loss_and_batch(H[0], a[0])
    batches = [loss_and_batch(H[k], a[k])[1] for k in range(3)]
    inner = H[0] @ (w - 0.1 * H[1] @ (w - a[1]) - a[0])
    for hvp in ("exact", "finite_difference"):
        close(Maml(alpha=0.1, hvp=hvp).gradient(f, at(w, batches)), inner - 0.1 * H[2] @ inner)


def test_maml_with_alpha_zero_is_plain():
    H, a, w, f, D = quadratic(1)
    expected = Plain().gradient(f, at(w, [D])).clone()
    for hvp in ("exact", "finite_difference", "first_order", "as_printed"):
        assert torch.equal(Maml(alpha=0.0, hvp=hvp).gradient(f, at(w, [D, D, D])), expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_moreau_gradient_reaches_the_closed_form_as_inner_steps_grow(seed):
    H, a, w, f, D = quadratic(seed)
    exact = 2.0 * (w - reference.moreau_point(H, a, w, 2.0))
    errors = [
        np.abs(Moreau(lam=2.0, inner_steps=k, inner_lr=0.2).gradient(f, at(w, [D])).numpy() - exact).max()
        for k in (5, 20, 100)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-10


@pytest.mark.parametrize("seed", SEEDS)
def test_moreau_takes_exactly_its_inner_steps_from_w(seed):
    H, a, w, f, D = quadratic(seed)
    theta = reference.moreau_steps(H, a, w, 3.0, steps=4, lr=0.1)
    close(Moreau(lam=3.0, inner_steps=4, inner_lr=0.1).gradient(f, at(w, [D])), 3.0 * (w - theta))
    assert f.evaluations == 4


def test_moreau_stops_when_the_inner_gradient_is_below_nu():
    H, a, w, f, D = quadratic(2)
    objective = Moreau(lam=2.0, inner_steps=None, nu=1e-3, inner_lr=0.2)
    theta = torch.from_numpy(w) - objective.gradient(f, at(w, [D])) / 2.0
    slope = H @ (theta.numpy() - a) + 2.0 * (theta.numpy() - w)
    before = reference.moreau_steps(H, a, w, 2.0, steps=f.evaluations - 2, lr=0.2)
    assert np.linalg.norm(slope) <= 1e-3
    assert np.linalg.norm(H @ (before - a) + 2.0 * (before - w)) > 1e-3, "it did not stop late"


def test_moreau_stops_at_whichever_comes_first():
    H, a, w, f, D = quadratic(2)
    Moreau(lam=2.0, inner_steps=3, nu=1e-12, inner_lr=0.2).gradient(f, at(w, [D]))
    assert f.evaluations == 3
    Moreau(lam=2.0, inner_steps=3, nu=1e9, inner_lr=0.2).gradient(f, at(w, [D]))
    assert f.evaluations == 4


@pytest.mark.parametrize("seed", SEEDS)
def test_the_residual_reported_is_that_of_the_theta_that_was_used(seed):
    H, a, w, f, D = quadratic(seed)
    objective = Moreau(lam=3.0, inner_steps=4, inner_lr=0.1)
    step = at(w, [D])
    residual = objective.residual(f, step, objective.gradient(f, step).clone())
    theta = reference.moreau_steps(H, a, w, 3.0, steps=4, lr=0.1)
    assert residual == pytest.approx(np.linalg.norm(H @ (theta - a) + 3.0 * (theta - w)), abs=1e-10)
    assert f.evaluations == 5, "the measurement is counted"


def test_moreau_tends_to_plain_as_lam_grows():
    H, a, w, f, D = quadratic(3)
    gaps = []
    for lam in (1e1, 1e3, 1e5):
        objective = Moreau(lam=lam, inner_steps=None, nu=1e-9)
        gaps.append(np.abs(objective.gradient(f, at(w, [D])).numpy() - H @ (w - a)).max())
    assert gaps[0] > gaps[1] > gaps[2]
    assert gaps[2] < 1e-3


def test_moreau_tends_to_local_training_as_lam_vanishes():
    """theta(w) tends to the client's own optimum a, and the pull on the shared model to nothing."""
    H, a, w, f, D = quadratic(4)
    for lam, near in ((1e-2, 0.1), (1e-4, 1e-3)):
        gradient = Moreau(lam=lam, inner_steps=None, nu=1e-8, inner_lr=0.3).gradient(f, at(w, [D])).numpy()
        assert np.abs(w - gradient / lam - a).max() < near
        assert np.abs(gradient).max() < 10 * lam


def test_the_default_inner_step_follows_lam_and_the_known_smoothness():
    assert Moreau(lam=30.0).step_size(None) == pytest.approx(1 / 40)
    assert Moreau(lam=30.0).step_size(5.0) == pytest.approx(1 / 35)
    assert Moreau(lam=30.0, inner_lr=0.01).step_size(5.0) == 0.01


def test_an_inner_step_that_diverges_is_refused():
    with pytest.raises(ConfigError, match=r"inner_lr=0.1 diverges with method.lam=25"):
        Moreau(lam=25.0, inner_lr=0.1)
    Moreau(lam=25.0, inner_lr=0.07).check_inner_step(1.0)
    with pytest.raises(ConfigError, match=r"diverges"):
        Moreau(lam=25.0, inner_lr=0.07).check_inner_step(10.0)


def test_a_tolerance_that_is_never_reached_is_given_up(monkeypatch):
    monkeypatch.setattr("persafl_lit.learning.objectives.moreau.MOST_INNER_STEPS", 20)
    H, a, w, f, D = quadratic(0)
    with pytest.raises(DivergenceError, match=r"after 20 inner steps"):
        Moreau(lam=2.0, inner_steps=None, nu=1e-300, inner_lr=0.01).gradient(f, at(w, [D]))


# -- on a network -----------------------------------------------------------------------------------------------------


def cnn(dtype=torch.float64, dropout=0.0, seed=0):
    torch.manual_seed(seed)
    backbone = Classifier(Cnn2(channels=(3, 4), hidden=(8,), dropout=dropout).network((1, 8, 8), 10)).to(dtype)
    return FlatLoss(backbone)


def images(dtype=torch.float64, count=3, size=12):
    stream = torch.Generator().manual_seed(7)
    return [
        Batch(
            (torch.randn(size, 1, 8, 8, generator=stream, dtype=dtype), torch.randint(10, (size,), generator=stream)),
            mask,
        )
        for mask in range(count)
    ]


def adapted_loss_gradient(f, alpha, batch):
    """grad_w of f(w - alpha grad f(w; D); D) by autograd through functional_call: nothing of ours in it."""
    network, (inputs, labels) = f.backbone, batch.data
    names = dict(network.named_parameters())
    w = {name: p.detach().clone().requires_grad_() for name, p in names.items()}

    def loss(parameters):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(network, parameters, (inputs,)), labels)

    slopes = torch.autograd.grad(loss(w), list(w.values()), create_graph=True)
    adapted = {name: p - alpha * slope for (name, p), slope in zip(w.items(), slopes, strict=True)}
    return dict(zip(w, torch.autograd.grad(loss(adapted), list(w.values())), strict=True))


def as_parameters(f, vector):
    """A flat vector in the shapes of the parameters, through the views themselves."""
    return {name: view.clone() for (name, _), view in zip(f.backbone.named_parameters(), f._views(vector), strict=True)}


def test_maml_gradient_is_the_slope_of_the_adapted_loss():
    f, (D, *_) = cnn(), images()
    w = f.point.clone()
    expected = adapted_loss_gradient(f, 0.5, D)
    got = as_parameters(f, Maml(alpha=0.5, hvp="exact").gradient(f, Step(w, w, [D, D, D])))
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-12)


def test_a_flat_gradient_is_autograds_gradient():
    f, (D, *_) = cnn(), images()
    inputs, labels = D.data
    loss = torch.nn.functional.cross_entropy(f.backbone(inputs), labels)
    expected = torch.autograd.grad(loss, list(f.backbone.parameters()))
    got = as_parameters(f, f.gradient(f.point, D))
    for value, exact in zip(got.values(), expected, strict=True):
        torch.testing.assert_close(value, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
def test_finite_difference_agrees_with_exact_in_float32(seed):
    f, batches = cnn(torch.float32, seed=seed), images(torch.float32)
    w = f.point.clone()
    exact = Maml(alpha=0.01, hvp="exact").gradient(f, Step(w, w, batches)).clone()
    difference = Maml(alpha=0.01, hvp="finite_difference").gradient(f, Step(w, w, batches))
    assert float((difference - exact).norm() / exact.norm()) < 1e-3


def test_finite_difference_sees_one_dropout_mask_in_both_evaluations():
    """With a mask of its own in each evaluation the difference would be divided by a tiny d: an error of order 1/d."""
    f, batches = cnn(dropout=0.5), images()
    f.backbone.train()
    w = f.point.clone()
    exact = Maml(alpha=0.1, hvp="exact").gradient(f, Step(w, w, batches)).clone()
    difference = Maml(alpha=0.1, hvp="finite_difference").gradient(f, Step(w, w, batches))
    assert float((difference - exact).norm() / exact.norm()) < 1e-6


def test_another_mask_is_another_function():
    f, (D, *_) = cnn(dropout=0.5), images()
    f.backbone.train()
    first = f.gradient(f.point, D).clone()
    assert torch.equal(f.gradient(f.point, D), first)
    assert not torch.equal(f.gradient(f.point, D._replace(mask=99)), first)


def test_objectives_leave_w_alone():
    f, batches = cnn(), images()
    w = f.point.clone()
    for objective in (Plain(), Proximal(), Maml(hvp="finite_difference"), Maml(), Moreau(), Scaffold()):
        kept = w.clone()
        objective.gradient(f, Step(kept, kept, batches))
        assert torch.equal(kept, w)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Proximal(mu=-1.0), "method.mu"),
        (lambda: Maml(alpha=-0.1), "method.alpha"),
        (lambda: Maml(hvp="exakt"), "method.hvp"),
        (lambda: Maml(delta=0.0), "method.delta"),
        (lambda: Moreau(lam=0.0), "method.lam"),
        (lambda: Moreau(inner_steps=0), "method.inner_steps"),
        (lambda: Moreau(nu=-1.0), "method.nu"),
        (lambda: Moreau(inner_steps=None), "never ends"),
        (lambda: Moreau(inner_lr=-0.1), "method.inner_lr"),
    ],
)
def test_bad_settings_are_refused_by_name(make, named):
    with pytest.raises(ConfigError, match=named):
        make()
