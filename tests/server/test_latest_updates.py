"""Rules that keep every client's latest update (CA2FL, ACE, ACED): directions by hand, rounding, limits."""

from __future__ import annotations

import pytest
import torch

from persafl_lit.common.limits import MOST_CACHED
from persafl_lit.errors import ConfigError
from persafl_lit.server.all_clients import AllClients
from persafl_lit.server.cached_calibration import CachedCalibration
from persafl_lit.server.latest_updates import summed
from persafl_lit.server.rules import Descent
from persafl_lit.server.state import State


def walk(rule, *arrivals, dtype=torch.float64):
    """The state, from w = 0, after (client, delta) or (client, delta, staleness) arrived in turn; a delta of None must not
    enter."""
    state, visits = State(torch.zeros(1, dtype=dtype)), {}
    for client, delta, *stale in arrivals:
        visits[client] = visits.get(client, -1) + 1
        state.sender = client, visits[client]
        if delta is None:
            rule.arrive(state)
        else:
            rule.apply(state, rule.read(state), {"delta": torch.tensor([delta], dtype=dtype)}, *(stale or [0]))
    return state


def after(rule, *arrivals):
    return walk(rule, *arrivals).w.item()


# -- ACE --------------------------------------------------------------------------------------------------------------


def test_ace_goes_along_the_mean_of_everybodys_latest_update():
    """n = 4. Sums of the latest: 8; 8 - 4; then client 0's 2 replaces its 8; client 3 never comes."""
    rule = AllClients(beta=0.5, clients=4)
    assert after(rule, (0, 8.0)) == -0.5 * 8 / 4
    assert after(rule, (0, 8.0), (1, -4.0)) == -0.5 * (8 + 4) / 4
    assert after(rule, (0, 8.0), (1, -4.0), (0, 2.0)) == -0.5 * (8 + 4 - 2) / 4


def test_a_fast_client_does_not_count_more_than_a_slow_one():
    """Client 0 comes nine times and client 1 once, pulling the other way as hard: Descent follows the fast one, ACE does
    not once both are known."""
    arrivals = [(1, -1.0), *[(0, 1.0)] * 9]
    assert after(Descent(), *arrivals) == -8
    assert after(AllClients(beta=1.0, clients=2), *arrivals) == 0.5, (
        "only of the first step, when client 0 was not known"
    )


def test_with_warmup_the_model_waits_for_everybodys_first_update():
    rule = AllClients(beta=1.0, clients=3, warmup=True)
    assert after(rule, (0, 9.0), (1, -3.0), (0, 6.0)) == 0
    assert after(rule, (0, 9.0), (1, -3.0), (0, 6.0), (2, 3.0)) == -(6 - 3 + 3) / 3


def test_ace_with_a_buffer_of_all_clients_in_full_cycles_is_the_mean_update():
    cycles = [(0, 3.0), (1, 5.0), (2, -2.0), (2, 7.0), (1, 1.0), (0, 4.0)]
    assert after(AllClients(beta=1.0, clients=3, buffer=3), *cycles) == pytest.approx(
        after(Descent(buffer=3), *cycles), abs=1e-15
    )


def test_aced_forgets_updates_from_models_that_are_too_old():
    """tau_algo = 1. Version by version: 8; then 8 and 4; then 4 and 2, since 8 was computed from version 0, which is two
    versions old; and an update that is itself too stale is not used, here with nothing else left."""
    rule = AllClients(beta=1.0, clients=9, tau_algo=1)
    assert after(rule, (0, 8.0)) == -8
    assert after(rule, (0, 8.0), (1, 4.0)) == -8 - 6
    state = walk(rule, (0, 8.0), (1, 4.0), (2, 2.0))
    assert state.w.item() == -8 - 6 - 3
    assert sorted(state.latest) == [1, 2]
    assert after(rule, (0, 8.0), (1, 4.0, 1), (2, 2.0, 2)) == -8 - 6
    with pytest.raises(ConfigError, match="leave out one"):
        AllClients(tau_algo=3, warmup=True)
    with pytest.raises(ConfigError, match="method.tau_algo must be >= 0"):
        AllClients(tau_algo=-1)


def test_what_was_forgotten_comes_back_with_the_next_update():
    rule = AllClients(beta=1.0, clients=2, tau_algo=0)
    assert after(rule, (0, 8.0), (1, 4.0), (0, 1.0)) == -13


def test_a_discount_is_kept_with_the_update():
    rule = AllClients(beta=1.0, clients=2, discount="polynomial", discount_a=1.0)
    assert after(rule, (0, 8.0, 3), (1, 4.0)) == -(2 + (2 + 4)) / 2


# -- CA2FL ------------------------------------------------------------------------------------------------------------


def test_calibration_by_hand():
    """n = 4, K = 2. First h = 0: v = (8 + 4) / 2. Then h = (8 + 4) / 4 = 3 and clients 0 and 2 send 2 and 6:
    v = 3 + ((2 - 8) + (6 - 0)) / 2 = 3."""
    rule = CachedCalibration(buffer=2, clients=4, beta=0.5)
    assert after(rule, (0, 8.0), (1, 4.0)) == -0.5 * 6
    assert after(rule, (0, 8.0), (1, 4.0), (0, 2.0), (2, 6.0)) == -0.5 * (6 + 3)


def test_of_two_updates_in_a_buffer_the_second_is_calibrated_by_the_first():
    """v = 0 + ((8 - 0) + (2 - 8)) / 2 = 1, and then h = 2/2: v = 1 + ((2 - 2) + (0 - 0)) / 2."""
    rule = CachedCalibration(buffer=2, clients=2)
    assert after(rule, (0, 8.0), (0, 2.0)) == -1
    assert after(rule, (0, 8.0), (0, 2.0), (0, 2.0), (1, 0.0)) == -2


def test_with_all_clients_in_every_buffer_calibration_cancels():
    cycles = [(0, 3.0), (1, 5.0), (2, -2.0), (2, 7.0), (1, 1.0), (0, 4.0), (1, 2.0), (0, 2.5), (2, 1.5)]
    expected = after(Descent(buffer=3), *cycles)
    assert after(CachedCalibration(buffer=3, clients=3), *cycles) == pytest.approx(expected, abs=1e-15)


def test_a_discount_is_of_the_difference_and_the_update_itself_is_kept():
    """s(1) = 1/2: v = 8/2, and then h = 8/1."""
    rule = CachedCalibration(clients=1, discount="polynomial", discount_a=1.0)
    assert after(rule, (0, 8.0, 1)) == -4
    assert after(rule, (0, 8.0, 1), (0, 6.0, 1)) == -4 - (8 - 1)


# -- both -------------------------------------------------------------------------------------------------------------

BOTH = {
    "ace": AllClients(beta=1.0, clients=3),
    "ace behind a buffer": AllClients(beta=1.0, clients=3, buffer=2),
    "aced": AllClients(beta=1.0, clients=3, tau_algo=4),
    "ca2fl": CachedCalibration(clients=3, buffer=2),
}


@pytest.mark.parametrize("rule", BOTH.values(), ids=BOTH)
def test_an_arrival_that_must_not_enter_leaves_the_latest_update_as_it_was(rule):
    arrivals = [(0, 3.0), (1, 5.0), (0, None), (1, None)]
    state = walk(rule, *arrivals)
    assert state.w.item() == after(rule, *arrivals[:2]), "nothing entered: no step"
    assert {client: slot.tensors["update"].item() for client, slot in state.latest.items()} == {0: 3.0, 1: 5.0}
    assert state.arrivals == 4


def test_a_skipped_arrival_is_a_zero_among_the_differences():
    """h = (4 + 2)/3 = 2; in the second buffer only 7 of client 2 enters: v = 2 + 7/2."""
    rule = CachedCalibration(clients=3, buffer=2)
    assert after(rule, (0, 4.0), (1, 2.0), (2, 7.0), (0, None)) == -3 - 5.5


@pytest.mark.parametrize("rule", BOTH.values(), ids=BOTH)
def test_the_running_sum_is_that_of_the_latest_updates(rule):
    stream = torch.Generator().manual_seed(3)
    clients = torch.randint(0, 3, (200,), generator=stream).tolist()
    deltas = torch.randn(200, generator=stream).tolist()
    for count in (1, 2, 3, 50, 199, 200):
        state = walk(rule, *zip(clients[:count], deltas[:count], strict=True), dtype=torch.float32)
        torch.testing.assert_close(state.kept["latest_sum"], summed(state.latest), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", BOTH.values(), ids=BOTH)
def test_a_huge_update_leaves_no_trace_once_it_is_replaced(rule):
    """1e30 in a running sum swallows everything else; every n arrivals the sum is taken anew."""
    arrivals = [(0, 1.0), (1, 1e30), (2, 3.0), (1, 2.0), (0, 1.0), (2, 3.0), (1, 2.0), (0, 1.0)]
    assert walk(rule, *arrivals).kept["latest_sum"].item() == 6


def test_more_than_the_server_can_keep_is_refused():
    rule = AllClients(clients=1_000_000)
    rule.check_size(MOST_CACHED // 1_000_000)
    with pytest.raises(ConfigError, match=r"an update per client, 1,000,000 x 1,001 values, more than 1,000,000,000"):
        rule.check_size(MOST_CACHED // 1_000_000 + 1)
