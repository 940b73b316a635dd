"""Timelines: laws of staleness, waiting, dropping and drawing, by hand and over many random settings."""

from __future__ import annotations

import dataclasses
import heapq
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from persafl_lit import compose
from persafl_lit.errors import ConfigError, TimelineError
from persafl_lit.timeline import Asynchronous, Drawn, Replay, Rounds, Setting, from_csv
from persafl_lit.timeline.delays import DELAYS, Constant, Exponential, Lognormal, Pareto, Trace, Uniform

RANDOM = (Constant(), Uniform(), Exponential(), Lognormal(), Pareto())


def setting(clients=30, delays=None, horizon=100.0, updates=None, seed=0, local_steps=10, gradients=1):
    return Setting(clients, local_steps, delays or Exponential(), seed, horizon, updates, gradients)


def same(one, other):
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("client", "visit", "reads", "read_at", "arrives")
    )


# -- by hand ----------------------------------------------------------------------------------------------------------


def trace(path, rows):
    path.write_text("client,download,compute,upload,idle\n" + "\n".join(rows) + "\n")
    return Trace(str(path))


def test_a_schedule_by_hand(tmp_path):
    """Client 0 takes 3 s and rests 1, client 1 takes 10 s: arrivals at 3, 7, 10, 11; client 0's later reads see each other."""
    delays = trace(tmp_path / "t.csv", ["0,1,0,2,1", "1,4,1,5,2"])
    timeline = Asynchronous().timeline(setting(2, delays, horizon=11.5))
    assert [tuple(job) for job in timeline] == [
        (0, 0, 0, 0.0, 3.0),
        (0, 1, 1, 4.0, 7.0),
        (1, 0, 0, 0.0, 10.0),
        (0, 2, 2, 8.0, 11.0),
    ]
    assert timeline.staleness().tolist() == [0, 0, 2, 1]
    assert timeline.staleness(buffer=2).tolist() == [0, 0, 1, 0]
    assert timeline.waves().tolist() == [0, 1, 0, 2]
    assert timeline.arrivals_per_client().tolist() == [3, 1]
    # Active until 11.5: client 0 for 3 + 3 + 3, client 1 for 10; the next visits start after 11.5.
    assert timeline.mean_concurrency() == pytest.approx(19 / (2 * 11.5))
    times, share = timeline.concurrency()
    assert times.tolist() == [0, 3, 4, 7, 8, 10, 11]
    assert share.tolist() == [1, 0.5, 1, 0.5, 1, 0.5, 0]


def test_rounds_by_hand(tmp_path):
    """Both clients each round; the second round starts when the slower one (10 s) has arrived."""
    delays = trace(tmp_path / "t.csv", ["0,1,0,2,1", "1,4,1,5,2"])
    timeline = Rounds(cohort=2).timeline(setting(2, delays, horizon=20.0))
    assert [tuple(job) for job in timeline] == [
        (0, 0, 0, 0.0, 3.0),
        (1, 0, 0, 0.0, 10.0),
        (0, 1, 2, 10.0, 13.0),
        (1, 1, 2, 10.0, 20.0),
    ]
    assert timeline.staleness(buffer=2).tolist() == [0, 0, 0, 0]


def test_equal_times_arrivals_come_before_reads_and_low_clients_before_high(tmp_path):
    """All take exactly 2 s and rest 0: all arrive at 2, 4, ..., and the reads at 2 see all three arrivals at 2."""
    delays = trace(tmp_path / "t.csv", ["0,1,0,1,0"])
    for schedule in (Asynchronous(), Asynchronous(tau=100), Asynchronous(tau=100, policy="drop")):
        timeline = schedule.timeline(setting(3, delays, horizon=4.0))
        assert timeline.client.tolist() == [0, 1, 2, 0, 1, 2]
        assert timeline.reads.tolist() == [0, 0, 0, 3, 3, 3]


# -- staleness --------------------------------------------------------------------------------------------------------


def test_one_client_alone_is_never_stale():
    for delays in RANDOM:
        timeline = Asynchronous().timeline(setting(1, delays))
        assert len(timeline) > 5
        assert not timeline.staleness().any()


def naive_waiting(s, tau):
    """`wait` from its definition, by brute force: at every event, try the rule on the whole list of jobs in flight."""
    blocks = {}

    def delays(client, visit):
        key = client, visit // 64
        if key not in blocks:
            blocks[key] = s.delays.of(s.seed, client, s.local_steps, s.gradients)(visit // 64)
        return blocks[key][visit % 64].tolist()

    def feasible(deadlines, t):
        return all(t + k <= deadline for k, deadline in enumerate(sorted(deadlines)))

    events = [(0.0, 1, client) for client in range(s.clients)]
    visits = [0] * s.clients
    flying, held, queue, jobs = {}, [], [], []  # flying: client -> (reads, read_at)
    while events and events[0][0] <= s.horizon:
        now, kind, client = heapq.heappop(events)
        (queue if kind else held).append(client)
        while True:
            may = [c for c in held if feasible([flying[o][0] + tau for o in flying if o != c], len(jobs) + 1)]
            if not may:
                break
            chosen = min(may, key=lambda c: flying[c][2])
            held.remove(chosen)
            reads, read_at, _ = flying.pop(chosen)
            jobs.append((chosen, reads, read_at, now))
            heapq.heappush(events, (now + delays(chosen, visits[chosen] - 1)[3], 1, chosen))
        if events and events[0][:2] == (now, 0):
            continue
        while queue and len(flying) <= tau:
            client = queue.pop(0)
            flying[client] = len(jobs), now, len(jobs) + sum(visits) * 1e-9
            download, compute, upload, _ = delays(client, visits[client])
            visits[client] += 1
            heapq.heappush(events, (now + download + compute + upload, 0, client))
    return jobs


@settings(max_examples=60, deadline=None)
@given(
    clients=st.integers(1, 12),
    tau=st.integers(0, 14),
    seed=st.integers(0, 10_000),
    which=st.integers(0, len(RANDOM) - 1),
)
def test_staleness_never_exceeds_tau_and_no_update_is_lost(clients, tau, seed, which):
    s = setting(clients, RANDOM[which], horizon=60.0, seed=seed)
    timeline = Asynchronous(tau=tau).timeline(s)
    assert timeline.staleness().max(initial=0) <= tau
    assert timeline.dropped == 0
    assert [(j.client, j.reads, j.read_at, j.arrives) for j in timeline] == naive_waiting(s, tau)
    # Nothing lost: a client's visits follow each other, and only one at a time may be under way at the end.
    begun = np.bincount(timeline.activity.client, minlength=clients)
    assert ((begun - timeline.arrivals_per_client()) <= 1).all()


def test_tau_zero_is_one_client_at_a_time():
    timeline = Asynchronous(tau=0).timeline(setting(5))
    assert timeline.reads.tolist() == list(range(len(timeline)))
    assert (timeline.read_at[1:] >= timeline.arrives[:-1]).all()


def test_a_large_tau_changes_nothing():
    for delays in RANDOM:
        free = Asynchronous().timeline(setting(delays=delays))
        assert same(free, Asynchronous(tau=10**6).timeline(setting(delays=delays)))
        assert same(free, Asynchronous(tau=10**6, policy="drop").timeline(setting(delays=delays)))
        assert same(free, Asynchronous(tau=3, policy="measure").timeline(setting(delays=delays)))


@pytest.mark.parametrize("tau", [0, 3, 10, 40])
def test_drop_discards_exactly_the_late_ones_and_counts_them(tau):
    """Against a loop over all events of the free-running schedule."""
    free = Asynchronous().timeline(setting())
    events = sorted([(t, 0, c, i) for i, (t, c) in enumerate(zip(free.arrives, free.client, strict=True))]
                    + [(t, 1, c, i) for i, (t, c) in enumerate(zip(free.read_at, free.client, strict=True))])  # fmt: skip
    applied, reads, kept = 0, {}, []
    for _, kind, _, job in events:
        if kind == 1:
            reads[job] = applied
        elif applied - reads[job] <= tau:
            kept.append((int(free.client[job]), reads[job], float(free.arrives[job])))
            applied += 1
    timeline = Asynchronous(tau=tau, policy="drop").timeline(setting())
    assert [(job.client, job.reads, job.arrives) for job in timeline] == kept
    assert timeline.dropped == len(free) - len(kept)
    assert timeline.dropped > 0
    assert timeline.staleness().max() <= tau


# -- drawn ------------------------------------------------------------------------------------------------------------


def test_drawn_clients_and_staleness_are_uniform():
    """Chi-square goodness of fit, and independence of the two."""
    clients, tau, count = 10, 7, 40_000
    timeline = Drawn(tau=tau).timeline(setting(clients, horizon=None, updates=count))
    staleness = timeline.staleness()
    assert (staleness <= np.arange(count)).all(), "s is at most t"
    settled = staleness[tau:]
    assert stats.chisquare(np.bincount(timeline.client, minlength=clients)).pvalue > 1e-3
    assert stats.chisquare(np.bincount(settled, minlength=tau + 1)).pvalue > 1e-3
    table = np.histogram2d(timeline.client[tau:], settled, bins=(clients, tau + 1))[0]
    assert stats.chi2_contingency(table).pvalue > 1e-3


def test_the_first_staleness_is_uniform_up_to_t():
    """At arrival 2 with tau = 7, s is uniform on {0, 1, 2}."""
    third = [Drawn(tau=7).timeline(setting(horizon=None, updates=3, seed=seed)).staleness()[2] for seed in range(900)]
    assert stats.chisquare(np.bincount(third, minlength=3)).pvalue > 1e-3


def test_drawn_with_tau_zero_is_fresh():
    assert not Drawn(tau=0).timeline(setting(horizon=50.0)).staleness().any()


# -- delays and concurrency -------------------------------------------------------------------------------------------


def test_the_default_delays_are_the_papers():
    """Mean upload 4 to 6 times mean download for every client; about 80 % active when asynchronous, far fewer in rounds."""
    for client in range(200):
        download, _, upload, _ = Exponential().means(0, client, 10)
        assert 4 <= upload / download <= 6
    for seed in range(3):
        free = Asynchronous().timeline(setting(horizon=300.0, seed=seed)).mean_concurrency()
        rounds = Rounds().timeline(setting(horizon=300.0, seed=seed)).mean_concurrency()
        assert 0.76 < free < 0.84
        assert rounds < 0.5 * free


@pytest.mark.parametrize("delays", RANDOM)
def test_draws_scatter_around_the_clients_mean(delays):
    blocks = np.concatenate([delays.of(0, 3, 10)(block) for block in range(400)])
    tolerance = 0.15 if isinstance(delays, Pareto) else 0.05
    np.testing.assert_allclose(blocks.mean(axis=0), delays.means(0, 3, 10), rtol=tolerance)


def test_every_schedule_meets_the_same_delays():
    """The v-th visit of a client takes equally long whatever the schedule: 'the exact same communication setup'."""
    free = Asynchronous().timeline(setting())
    rounds = Rounds().timeline(setting())

    def durations(timeline, client):
        mine = timeline.client == client
        return (timeline.arrives - timeline.read_at)[mine]

    compared = 0
    for client in range(30):
        one, other = durations(free, client), durations(rounds, client)
        shared = min(len(one), len(other))
        np.testing.assert_allclose(one[:shared], other[:shared], rtol=1e-9)
        compared += shared
    assert compared > 20


# -- the time of gradients --------------------------------------------------------------------------------------------

SCHEDULED = (Asynchronous(), Asynchronous(tau=5), Asynchronous(tau=5, policy="drop"), Rounds())


@pytest.mark.parametrize("cost", [1, 2, 4, 10])
def test_with_constant_delays_each_visit_is_longer_by_the_time_of_its_gradients(cost):
    """A visit takes 1 + 3/8 + 4 and rests a quarter of that. Its 3 steps of `cost` gradients, 1/16 each, add s = 3 cost / 16 to it and
    s / 4 to its rest, so that visit v (from 0) arrives later by s (1 + 5 v / 4): all dyadic numbers, so exactly."""
    exact = Constant(download=(1.0, 1.0), upload_ratio=(4.0, 4.0), compute=0.125)
    slower = dataclasses.replace(exact, per_gradient=0.0625)
    plain, shifted = (
        Asynchronous().timeline(setting(3, delays, horizon=None, updates=12, local_steps=3, gradients=cost))
        for delays in (exact, slower)
    )
    s = 3 * cost / 16
    assert plain.arrives.tolist() == [5.375 + v * 1.25 * 5.375 for v in plain.visit.tolist()]
    assert (shifted.arrives - plain.arrives).tolist() == [s * (1 + 1.25 * v) for v in plain.visit.tolist()]
    assert (shifted.arrives - shifted.read_at == 5.375 + s).all()


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("delays", RANDOM)
def test_without_a_time_per_gradient_no_bit_depends_on_the_gradients(delays, schedule):
    assert same(schedule.timeline(setting(delays=delays)), schedule.timeline(setting(delays=delays, gradients=10)))


@pytest.mark.parametrize("delays", RANDOM)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    client=st.integers(0, 50),
    steps=st.integers(1, 20),
    cost=st.integers(1, 20),
    compute=st.floats(0, 10),
    per_gradient=st.floats(0, 10),
)
def test_only_the_mean_compute_time_and_the_rest_grow_with_the_gradients(
    delays, seed, client, steps, cost, compute, per_gradient
):
    """Q (compute + per_gradient c). The draws around the means stay the same."""
    base = dataclasses.replace(delays, compute=compute)
    slower = dataclasses.replace(base, per_gradient=per_gradient)
    download, computing, upload, rest = slower.means(seed, client, steps, cost)
    assert computing == pytest.approx(steps * (compute + per_gradient * cost), rel=1e-12)
    assert rest == pytest.approx(0.25 * (download + computing + upload), rel=1e-12)
    assert base.means(seed, client, steps, cost)[:3].tolist() == [download, compute * steps, upload]
    drawn, ratio = (
        slower.of(seed, client, steps, cost)(0),
        slower.means(seed, client, steps, cost) / Exponential(compute=1.0).means(seed, client, 1),
    )
    one = dataclasses.replace(delays, compute=1.0).of(seed, client, 1)(0)
    np.testing.assert_allclose(drawn, one * ratio, rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("delays", RANDOM)
def test_draws_scatter_around_the_mean_with_gradients(delays):
    slower = dataclasses.replace(delays, per_gradient=0.2)
    blocks = np.concatenate([slower.of(0, 3, 10, 4)(block) for block in range(400)])
    assert blocks[:, 1].mean() == pytest.approx(
        10 * (0.001 + 0.2 * 4), rel=0.15 if isinstance(delays, Pareto) else 0.05
    )


@pytest.mark.parametrize("schedule", SCHEDULED)
@pytest.mark.parametrize("delays", RANDOM)
def test_a_time_per_gradient_is_a_compute_time_per_step_times_the_gradients(delays, schedule):
    """0.25 per gradient and 4 of them are 1 per local step."""
    by_gradient = dataclasses.replace(delays, compute=0.0, per_gradient=0.25)
    by_step = dataclasses.replace(delays, compute=1.0)
    assert same(schedule.timeline(setting(delays=by_gradient, gradients=4)), schedule.timeline(setting(delays=by_step)))


COSTS = [
    (["method=fedasync"], 1),
    (["method=fedasync_mix"], 1),
    (["method=scaffold"], 1),
    (["method=persafl_maml"], 4),
    (["method=persafl_maml", "method.hvp=finite_difference"], 4),
    (["method=persafl_maml", "method.hvp=first_order"], 2),
    (["method=persafl_maml", "method.alpha=0"], 1),
    (["method=persafl_me"], 10),
    (["method=persafl_me", "method.inner_steps=3", "method.nu=0.1"], 3),
]


@pytest.mark.parametrize(("method", "cost"), COSTS)
def test_a_method_computes_as_long_as_its_gradients_take(method, cost):
    """One local step without transfers or rest: every visit takes per_gradient * cost, here the number of gradients."""
    alone = [
        "delays=constant",
        "delays.download=[0,0]",
        "delays.compute=0",
        "delays.idle=0",
        "delays.per_gradient=1",
        "local_steps=1",
    ]
    timeline = compose([*method, *alone, "clients=10"]).timeline(10)
    np.testing.assert_allclose(timeline.arrives - timeline.read_at, cost, rtol=1e-12)


def test_a_method_of_many_gradients_gets_fewer_updates_by_the_same_horizon():
    def updates(method, per_gradient):
        return len(compose([f"method={method}", f"delays.per_gradient={per_gradient}"]).timeline(30))

    methods = ("fedasync", "persafl_maml", "persafl_me")
    assert len({updates(method, 0) for method in methods}) == 1
    plain, maml, moreau = (updates(method, 0.1) for method in methods)
    assert updates("fedasync", 0) > plain > maml > moreau > 0


def test_a_moreau_step_of_unknown_length_has_no_time_per_gradient():
    open_end = ["method=persafl_me", "method.inner_steps=null", "method.nu=0.1"]
    assert len(compose(open_end).timeline(30)), "where gradients take no time, it need not be known"
    with pytest.raises(
        ConfigError, match="method.nu alone does not give it; set method.inner_steps, or delays.per_gradient=0"
    ):
        compose([*open_end, "delays.per_gradient=0.1"]).timeline(30)


def test_a_trace_has_no_time_per_gradient(tmp_path):
    delays = trace(tmp_path / "t.csv", ["0,1,0,2,1", "1,4,1,5,2"])
    assert same(Asynchronous().timeline(setting(2, delays)), Asynchronous().timeline(setting(2, delays, gradients=10)))
    with pytest.raises(ConfigError, match="unknown key 'delays.per_gradient'"):
        compose(["delays=trace", f"delays.path={tmp_path / 't.csv'}", "delays.per_gradient=0.1"])


# -- horizons and updates ---------------------------------------------------------------------------------------------


def test_updates_and_horizon_cut_the_same_schedule():
    whole = Asynchronous().timeline(setting(horizon=100.0))
    for schedule in (Asynchronous(), Asynchronous(tau=10**6), Asynchronous(tau=10**6, policy="drop")):
        cut = schedule.timeline(setting(horizon=None, updates=50))
        assert len(cut) == 50
        assert cut.arrives.tolist() == whole.arrives[:50].tolist()
        assert cut.reads.tolist() == whole.reads[:50].tolist()
        assert cut.horizon == cut.arrives[-1]


@pytest.mark.parametrize("tau", [0, 2, 8])
def test_dropping_and_counting_updates_go_together(tau):
    """`updates` counts what is kept, and what is generated does not depend on how far we looked."""
    whole = Asynchronous(tau=tau, policy="drop").timeline(setting(horizon=600.0))
    cut = Asynchronous(tau=tau, policy="drop").timeline(setting(horizon=None, updates=100))
    assert len(cut) == 100
    assert cut.arrives.tolist() == whole.arrives[:100].tolist()
    assert cut.reads.tolist() == whole.reads[:100].tolist()


def test_a_far_horizon_costs_nothing_when_updates_end_the_run():
    timeline = Asynchronous().timeline(setting(horizon=1e9, updates=10))
    assert len(timeline) == 10


def test_a_client_counts_once_in_the_concurrency_of_overlapping_visits():
    timeline = Drawn(tau=10).timeline(setting(3, horizon=None, updates=200))
    assert 0.5 < timeline.mean_concurrency() <= 1
    assert timeline.concurrency()[1].max() <= 1


def test_waves_are_independent_and_earlier_ones_suffice():
    timeline = Asynchronous().timeline(setting())
    for buffer in (1, 5):
        waves = timeline.waves(buffer)
        for job in range(len(timeline)):
            needed = waves[: timeline.reads[job] // buffer * buffer]
            assert waves[job] == (needed.max() + 1 if len(needed) else 0)


def test_a_million_arrivals_take_seconds_and_linear_memory():
    start = time.monotonic()
    timeline = Asynchronous().timeline(setting(10_000, horizon=None, updates=1_000_000))
    assert len(timeline) == 1_000_000
    assert time.monotonic() - start < 120, "a guard against quadratic time, not a benchmark"
    columns = (timeline.client, timeline.visit, timeline.reads, timeline.read_at, timeline.arrives, *timeline.activity)
    assert sum(column.nbytes for column in columns) < 150 * 1_000_000


# -- CSV --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "schedule", [Asynchronous(), Asynchronous(tau=5), Asynchronous(tau=5, policy="drop"), Rounds(), Drawn()]
)
def test_a_csv_gives_the_same_timeline_back(schedule, tmp_path):
    timeline = schedule.timeline(setting())
    path = tmp_path / "timeline.csv"
    path.write_text(timeline.to_csv())
    assert path.read_text().startswith("client,visit,reads,read_at,arrives\n")
    assert same(timeline, from_csv(path, 30))
    assert same(timeline, Replay(str(path)).timeline(setting(horizon=None)))


HEADER = "client,visit,reads,read_at,arrives\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,b\n", "line 1: the columns must be"),
        (HEADER, "no jobs"),
        (HEADER + "0,0,0,0.0\n", "line 2: expected 5 values, got 4"),
        (HEADER + "0,0,0,,1.0\n", "line 2: read_at must be a number"),
        (HEADER + "0,0,zero,0.0,1.0\n", "line 2: reads must be a whole number"),
        (HEADER + "0,0,0,0.0,nan\n", "line 2: arrives must be a number"),
        (HEADER + "0,0,-1,0.0,1.0\n", "line 2: reads must be a whole number"),
        (HEADER + "9,0,0,0.0,1.0\n", "line 2: client 9 does not exist; there are 3 clients"),
        (HEADER + "0,0,0,0.0,2.0\n1,0,0,0.0,1.0\n", "line 3: out of order"),
        (HEADER + "0,0,0,3.0,2.0\n", "line 2: the job arrives at 2.0, before it read"),
        (HEADER + "0,0,0,0.0,1.0\n1,0,2,0.5,2.0\n", "line 3: a read from the future: reads=2"),
        (HEADER + "0,0,0,0.0,1.0\n1,0,1,0.5,2.0\n", "line 3: a read from the future: reads=1"),
        (HEADER + "0,0,0,0.0,1.0\n0,2,1,1.5,2.0\n", "line 3: a gap: client 0 has visit 2"),
    ],
)
def test_a_csv_that_could_not_have_happened_is_refused(text, sentence, tmp_path):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TimelineError) as error:
        from_csv(path, 3)
    assert sentence in str(error.value)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(TimelineError, match="cannot read"):
        from_csv(tmp_path / "none.csv", 3)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(TimelineError, match="cannot read"):
        from_csv(tmp_path / "binary.csv", 3)


@pytest.mark.parametrize("rows", [[], ["0,0,0,0,0"], ["0,0,0,0,5"], ["0,1,1,1"], ["0,-1,0,1,1"], ["x,1,1,1,1"]])
def test_a_bad_trace_is_refused(rows, tmp_path):
    with pytest.raises(TimelineError):
        trace(tmp_path / "t.csv", rows)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Asynchronous(tau=-1),
        lambda: Asynchronous(policy="hope"),
        lambda: Rounds(cohort=0),
        lambda: Rounds(cohort=31).timeline(setting()),
        lambda: Drawn(tau=-1),
        lambda: Exponential(download=(2.0, 1.0)),
        lambda: Exponential(download=(1.0,)),
        lambda: Exponential(idle=-1.0),
        lambda: Exponential(per_gradient=-0.1),
        lambda: Exponential(download=(0.0, 0.0), compute=0.0),
        lambda: Uniform(spread=2.0),
        lambda: Lognormal(sigma=-1.0),
        lambda: Pareto(shape=1.0),
    ],
)
def test_bad_settings_are_refused(make):
    with pytest.raises(ConfigError):
        make()


def test_every_delay_model_is_in_the_table():
    assert {type(delays) for delays in RANDOM} | {Trace} == set(DELAYS.values())
