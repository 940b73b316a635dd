"""Our own dropout: the rule, the seed, and the types it must hold for."""

from __future__ import annotations

import pytest
import torch

from persafl_lit.models.dropout import Dropout


def draw(p, shape, dtype=torch.float32, seed=1):
    torch.default_generator.manual_seed(seed)
    return Dropout(p)(torch.ones(shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.2, 0.25, 0.5, 0.9])
def test_a_value_is_dropped_with_probability_p_and_scaled_otherwise(p, dtype):
    out = draw(p, (1000, 400), dtype)
    kept = out != 0
    assert set(out.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - p), dtype=dtype))}
    assert out.dtype is dtype
    # 400,000 draws: five standard deviations of their share
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / 400_000) ** 0.5


def test_values_are_dropped_independently():
    kept = (draw(0.5, (2000, 200)) != 0).double() - 0.5
    for neighbour in (kept.roll(1, 0), kept.roll(1, 1), kept.roll(2, 1)):
        assert abs(float((kept * neighbour).mean())) < 5 * 0.25 / 400_000**0.5


def test_the_mask_is_a_function_of_the_seed():
    assert torch.equal(draw(0.3, (5, 7)), draw(0.3, (5, 7)))
    assert not torch.equal(draw(0.3, (50, 7)), draw(0.3, (50, 7), seed=2))


def test_layers_of_one_network_have_masks_of_their_own():
    torch.default_generator.manual_seed(1)
    layer = Dropout(0.5)
    assert not torch.equal(layer(torch.ones(99)), layer(torch.ones(99)))


def test_slopes_pass_where_values_do():
    x = torch.randn(6, 8, requires_grad=True)
    out = Dropout(0.5)(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(slope * x, out)
    assert 0 < int((slope == 0).sum()) < 48


@pytest.mark.parametrize("layer", [Dropout(0.0), Dropout(0.5).eval()], ids=["p = 0", "evaluation"])
def test_nothing_is_dropped(layer):
    x, before = torch.randn(4, 4), torch.get_rng_state()
    assert layer(x) is x
    assert torch.equal(torch.get_rng_state(), before)


def test_everything_is_dropped():
    assert torch.equal(Dropout(1.0)(torch.ones(9)), torch.zeros(9))
