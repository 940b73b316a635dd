"""Server optimisers: steps by hand, their limits and relations, and what a skipped arrival does."""

from __future__ import annotations

import math

import pytest
import torch

from persafl_lit import compose
from persafl_lit.errors import ConfigError
from persafl_lit.server.rules import Descent
from persafl_lit.server.server_optimizers import ServerAdagrad, ServerAdam, ServerMomentum, ServerYogi
from persafl_lit.server.state import State


def after(rule, *deltas, staleness=0):
    """w, from zero, after these updates; None is an arrival that must not enter."""
    state = State(torch.zeros(1, dtype=torch.float64))
    for delta in deltas:
        if delta is None:
            rule.arrive(state)
        else:
            rule.apply(state, rule.read(state), {"delta": torch.tensor([delta], dtype=torch.float64)}, staleness)
    return state.w.item()


def test_adam_by_hand_for_three_steps():
    """beta1 = beta2 = 1/2, eps = 1, pseudo-gradients 4, -2, 0: no correction of m and v, which begin at 0 and eps^2.

    m = 2, 0, 0        v = 1/2 + 8 = 8.5, 6.25, 3.125        w = -2 / (sqrt(8.5) + 1), and then it stays
    With 6 as the third: m = 3, v = 3.125 + 18 = 21.125.
    """
    rule = ServerAdam(beta=1.0, beta1=0.5, beta2=0.5, eps=1.0)
    first = -2 / (math.sqrt(8.5) + 1)
    assert after(rule, 4.0) == pytest.approx(first, abs=1e-15)
    assert after(rule, 4.0, -2.0) == pytest.approx(first, abs=1e-15)
    assert after(rule, 4.0, -2.0, 6.0) == pytest.approx(first - 3 / (math.sqrt(21.125) + 1), abs=1e-15)


def test_yogi_by_hand_moves_v_towards_the_square():
    """beta1 = 0, beta2 = 3/4, eps = 2, so v begins at 4: g^2 = 16 adds 4, then g^2 = 1 takes 1/4 away."""
    rule = ServerYogi(beta=0.5, beta1=0.0, beta2=0.75, eps=2.0)
    first = -0.5 * 4 / (math.sqrt(8) + 2)
    assert after(rule, 4.0) == pytest.approx(first, abs=1e-15)
    assert after(rule, 4.0, -1.0) == pytest.approx(first + 0.5 / (math.sqrt(7.75) + 2), abs=1e-15)


def test_adagrad_by_hand_adds_the_squares():
    rule = ServerAdagrad(beta=1.0, eps=3.0)
    assert after(rule, 4.0, -2.0) == pytest.approx(-4 / (math.sqrt(25) + 3) + 2 / (math.sqrt(29) + 3), abs=1e-15)


def test_one_step_from_a_zero_second_moment_is_the_same_for_adam_and_yogi():
    """Both have (1 - beta2) g^2 then; afterwards Yogi's v falls more slowly when the gradients do."""
    g, zero = torch.tensor([3.0, -0.5]), torch.zeros(2)
    adam, yogi = ServerAdam(beta2=0.9), ServerYogi(beta2=0.9)
    v = adam.second_moment(zero, g.square())
    assert torch.equal(v, yogi.second_moment(zero, g.square()))
    torch.testing.assert_close(v, 0.1 * g.square())
    small = (g / 100).square()
    assert (yogi.second_moment(v, small) > adam.second_moment(v, small)).all()


@pytest.mark.parametrize("cls", [ServerAdam, ServerYogi, ServerAdagrad])
def test_a_large_eps_makes_an_adaptive_rule_descend(cls):
    """sqrt(v) + eps tends to 2 eps, since v begins at eps^2, so beta = 2 eps b is Descent with step b."""
    eps = 1e8
    expected = after(Descent(beta=0.3), 4.0, -1.0, 2.0)
    assert after(cls(beta=0.6 * eps, beta1=0.0, eps=eps), 4.0, -1.0, 2.0) == pytest.approx(expected, rel=0.03)


def test_momentum_by_hand_for_three_steps():
    """m = 4, 2 - 2 = 0, 0 + 6; a buffer takes the mean of two."""
    rule = ServerMomentum(beta=0.1, momentum=0.5)
    assert after(rule, 4.0, -2.0, 6.0) == pytest.approx(-0.1 * (4 + 0 + 6), abs=1e-15)
    rule = ServerMomentum(beta=0.1, momentum=0.5, buffer=2)
    assert after(rule, 4.0, -2.0, 6.0, 0.0) == pytest.approx(-0.1 * (1 + (0.5 + 3)), abs=1e-15)


RULES = [
    ServerMomentum(buffer=2, discount="polynomial", discount_a=1.0),
    ServerAdam(buffer=2, discount="polynomial", discount_a=1.0),
    ServerYogi(buffer=2, discount="polynomial", discount_a=1.0),
    ServerAdagrad(buffer=2, discount="polynomial", discount_a=1.0),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_skipped_arrival_is_a_zero_in_the_buffer_and_a_buffer_of_them_changes_nothing(rule):
    assert after(rule, 4.0, None) == after(rule, 4.0, 0.0) != 0
    assert after(rule, 4.0, -1.0, None, None, 2.0, 3.0) == after(rule, 4.0, -1.0, 2.0, 3.0)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_stale_update_is_discounted_before_the_optimiser_sees_it(rule):
    assert after(rule, 4.0, -6.0, staleness=1) == after(rule, 2.0, -3.0)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("beta1", 1, r"method.beta1 must lie in \[0, 1\); got 1.0"),
        ("beta2", -0.1, r"method.beta2 must lie in \[0, 1\); got -0.1"),
        ("eps", 0, "method.eps must be > 0; got 0.0"),
        ("beta", 0, "method.beta must be > 0; got 0.0"),
    ],
)
def test_values_out_of_range_are_refused(key, value, sentence):
    config = compose(["method=fedadam", f"method.{key}={value}"])
    with pytest.raises(ConfigError, match=sentence):
        config.rule(30, config.timeline(30))
    with pytest.raises(ConfigError, match=r"method.momentum must lie in \[0, 1\)"):
        ServerMomentum(momentum=1.5)
