"""What clients keep between visits: against a naive reference on every schedule, and through executors, checkpoints and kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from persafl_lit import compose, run
from persafl_lit.engine.executors.transport import Place
from persafl_lit.engine.memory_slots import Slots
from persafl_lit.engine.messages import Train, Update, join, separate
from persafl_lit.errors import CheckpointError, ConfigError
from persafl_lit.learning.sharing import Sharing
from persafl_lit.timeline import Asynchronous, Drawn, Rounds, Setting
from persafl_lit.timeline.delays import Exponential
from tests.support import reference
from tests.support.quadratics import Parts, random_quadratics, save
from tests.support.runs import run_for

ETA, Q, N, S, P = 0.02, 4, 6, 3, 2
"""Clients, and how many values are shared and private."""
QUIET = ["tracking.enabled=false", "checkpoint.every=0", "eval.finetune=none"]


@pytest.fixture
def quadratics(tmp_path):
    H, a = random_quadratics(N, S + P, seed=1)
    return save(tmp_path / "q.npz", H, a), H, a, np.random.default_rng(2).normal(size=S + P)


def train(path, w0, *overrides):
    settings = [
        "data=quadratic",
        f"data.path={path}",
        "precision=64",
        f"eta={ETA}",
        f"local_steps={Q}",
        "updates=60",
        "method.private=[own]",
    ]
    return run([*QUIET, *settings, *overrides], model=Parts(w0, S))


SCHEDULES = {
    "asynchronous": ([], 1),
    "rounds": (["schedule=rounds", "schedule.cohort=3", "method.buffer=3"], 3),
    "drawn": (["schedule=drawn", "schedule.tau=8"], 1),
    "behind a buffer": (["method.buffer=4"], 4),
    "drawn, behind a buffer": (["schedule=drawn", "schedule.tau=8", "method.buffer=4"], 4),
    "drop": (["schedule.tau=4", "schedule.policy=drop"], 1),
    "wait": (["schedule.tau=2"], 1),
}
OBJECTIVES = {
    "fedasync": ([], lambda H, a, w, read: reference.plain(H, a, w)),
    "fedasync_mix": (
        ["method.rule=descent", "method.discount=constant", "method.mu=0.5"],
        lambda H, a, w, read: reference.plain(H, a, w) + 0.5 * (w - read),
    ),
    "persafl_maml": (["method.alpha=0.05"], lambda H, a, w, read: reference.maml(H, a, w, 0.05)),
    "persafl_me": (
        ["method.lam=3", "method.inner_steps=5", "method.inner_lr=0.1"],
        lambda H, a, w, read: 3 * (w - reference.moreau_steps(H, a, w, 3, 5, 0.1)),
    ),
}


@pytest.mark.parametrize("method", OBJECTIVES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_job_sees_the_memory_that_had_arrived_when_its_model_was_read(schedule, method, quadratics):
    """Every objective acts on [shared, private]; only the shared part is averaged, and of overlapping visits the later arrival wins."""
    path, H, a, w0 = quadratics
    (overrides, buffer), (settings, gradient) = SCHEDULES[schedule], OBJECTIVES[method]
    for executor in (["executor=serial"], ["workers=2"]):
        result = train(path, w0, f"method={method}", *settings, *overrides, *executor)
        shared, memories = reference.federate_private(
            result.timeline, H, a, w0[:S], w0[S:], gradient=gradient, eta=ETA, local_steps=Q, buffer=buffer
        )
        np.testing.assert_allclose(result.state_dict()["common"], shared, rtol=0, atol=1e-10)
        np.testing.assert_array_equal(result.state_dict()["own"], w0[S:], err_msg="the initial private values")
        assert sorted(result.memory) == sorted(memories)
        for client, private in memories.items():
            own = result.client_state_dict(client)
            np.testing.assert_allclose(own["own"], private, rtol=0, atol=1e-10)
            np.testing.assert_allclose(own["common"], shared, rtol=0, atol=1e-10)
            away = np.concatenate([shared, private]) - a[client]
            assert result.clients()[client]["test_loss"] == pytest.approx(0.5 * away @ H[client] @ away, abs=1e-10)


def test_the_cases_above_have_overlapping_visits_and_stale_memories(quadratics):
    """Else they would not tell `the last one at reads` from `the latest one`."""
    path, _, _, w0 = quadratics
    timeline = train(path, w0, "method=fedasync", "schedule=drawn", "schedule.tau=8").timeline
    latest = {}
    overlaps = 0
    for index, job in enumerate(timeline):
        overlaps += latest.get(job.client, -1) >= job.reads
        latest[job.client] = index
    assert overlaps > 5


@pytest.mark.parametrize(
    "schedule",
    [Asynchronous(), Asynchronous(tau=3), Asynchronous(tau=2, policy="drop"), Rounds(cohort=3), Drawn(tau=9)],
)
def test_the_last_visit_before_a_read_is_found_for_every_job(schedule):
    timeline = schedule.timeline(Setting(5, 1, Exponential(), 3, None, 80))
    jobs = list(timeline)
    for job, found in zip(jobs, timeline.last_visits().tolist(), strict=True):
        before = [index + 1 for index, other in enumerate(jobs[: job.reads]) if other.client == job.client]
        assert found == max(before, default=0)


def test_a_held_out_client_starts_from_the_initial_private_values(quadratics):
    path, H, a, w0 = quadratics
    result = train(path, w0, "method=fedasync", "data.holdout_clients=1")
    away = np.concatenate([result.state_dict()["common"].numpy(), w0[S:]]) - a[-1]
    (row,) = [row for row in result.clients() if row["client"] == N - 1]
    assert row["test_loss"] == pytest.approx(0.5 * away @ H[-1] @ away, abs=1e-10)
    assert N - 1 not in result.memory
    assert result.client_state_dict(N - 1).keys() == result.state_dict().keys()


def test_a_skipped_visit_leaves_the_memory_unchanged(quadratics):
    """Client 2 is so steep that four steps of it overflow: it never leaves anything."""
    path, H, a, w0 = quadratics
    H[2] = 1e99 * np.eye(S + P)
    save(path, H, a)
    result = train(path, w0, "method=fedasync", "on_divergence=skip")
    assert result.summary()["skipped"] == result.timeline.arrivals_per_client()[2] > 1
    assert sorted(result.memory) == [0, 1, 3, 4, 5]


# -- what is private --------------------------------------------------------------------------------------------------

DIGITS = [*QUIET, "clients=6", "updates=18", "local_steps=2", "model=mlp", "model.hidden=[8]"]


def test_fedper_keeps_the_last_layer_and_sends_the_rest():
    result = run([*DIGITS, "method=fedper"])
    sizes = {name: value.numel() for name, value in result.state_dict().items()}
    head, rest = (
        sizes["network.5.weight"] + sizes["network.5.bias"],
        sizes["network.2.weight"] + sizes["network.2.bias"],
    )
    assert {len(kept["private"]) for kept in result.memory.values()} == {head}
    assert result.summary()["bytes_communicated"] == 2 * 4 * rest * 18
    first = run([*DIGITS, "method=fedper", "updates=1"])
    assert torch.equal(result.state_dict()["network.5.weight"], first.state_dict()["network.5.weight"]), "as it began"
    own = [result.client_state_dict(client)["network.5.weight"] for client in result.memory]
    assert not any(torch.equal(weights, own[0]) for weights in own[1:])


def test_nothing_private_is_fedasync_and_everything_is_local_training():
    def bits(*overrides):
        result = run([*DIGITS, *overrides])
        return json.dumps(result.curves()), {name: value.tolist() for name, value in result.state_dict().items()}

    assert bits("method=fedper", "method.private=none") == bits("method=fedasync")
    assert bits("method=fedper", "method.private=all") == bits("method=local")
    assert run([*DIGITS, "method=local"]).summary()["bytes_communicated"] == 0


def test_private_parameters_are_found_by_name():
    network = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4))
    assert Sharing(("none",)).names(network) == set()
    assert Sharing(("head",)).names(network) == {"2.weight", "2.bias"}
    assert Sharing(("*.bias",)).names(network) == {"0.bias", "2.bias"}
    assert (
        Sharing(("0.*", "head")).names(network)
        == Sharing(("all",)).names(network)
        == {"0.weight", "0.bias", "2.weight", "2.bias"}
    )
    network[2].requires_grad_(False)
    assert Sharing(("head",)).names(network) == {"0.weight", "0.bias"}, "frozen parameters are nobody's"
    with pytest.raises(ConfigError, match="write none to share all of them"):
        compose(["method.private=[]"])
    with pytest.raises(
        ConfigError, match=r"method.private='conv.*' matches no parameter; the model has 0.weight, 0.bias"
    ):
        Sharing(("conv*",)).names(network)


def test_scaffold_with_private_parameters_is_refused():
    with pytest.raises(ConfigError, match="shares the whole model: leave method.private at none"):
        run([*DIGITS, "method=scaffold", "schedule.cohort=3", "method.private=head"])


@pytest.mark.parametrize(
    "overrides",
    [["schedule=drawn", "method.buffer=3"], ["schedule=rounds", "schedule.cohort=3", "method.buffer=cohort"]],
)
def test_the_number_of_workers_changes_no_bit_of_a_memory(overrides):
    settings = [*DIGITS, "method=fedper", "model.dropout=0.2", "updates=40", *overrides]
    serial, *others = [run([*settings, *executor]) for executor in (["executor=serial"], ["workers=2"], ["workers=3"])]
    for other in others:
        assert json.dumps(other.curves()) == json.dumps(serial.curves())
        for client, kept in serial.memory.items():
            assert torch.equal(other.memory[client]["private"], kept["private"])


# -- travelling -------------------------------------------------------------------------------------------------------


def test_a_record_is_the_same_after_its_journey():
    """Any names, shapes and types, with and without room, and what a job sends back of what it was given."""
    tensors = {
        "w": torch.randn(7),
        "empty": torch.empty(0),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "counts": torch.arange(6).reshape(2, 3),
        "flags": torch.tensor([True, False]),
        "half": torch.randn(5).bfloat16(),
    }
    job = Train(3, 4, {"w": tensors["w"]}, tensors, 2)
    bare, parts = separate(job)
    assert bare.memory == tuple(tensors)
    assert join(bare, parts) == job
    for room in (1024, 128, 0):
        place = Place(torch.zeros(room, dtype=torch.uint8))
        found = place.fetch(place.store(job), torch.device("cpu"))
        assert (found.client, found.visit, found.after) == (3, 4, 2)
        for name, value in tensors.items():
            assert found.memory[name].dtype == value.dtype
            assert torch.equal(found.memory[name], value)
        # The reply is written where the message lies, in another order.
        reply = Update({"delta": found.memory["counts"]}, {"w": found.read["w"], "half": found.memory["half"]}, 0.5, 2)
        back = place.fetch(place.store(reply), torch.device("cpu"), copy=True)
        assert torch.equal(back.sent["delta"], tensors["counts"])
        assert torch.equal(back.memory["w"], tensors["w"])
        assert torch.equal(back.memory["half"], tensors["half"])


# -- slots on disk ----------------------------------------------------------------------------------------------------


def memories(*names):
    return {name: {"private": torch.tensor([float(name[0]), float(name[1])])} for name in names}


def saved(slots, *names):
    segments = slots.write("me", memories(*names))
    slots.named()
    return segments


def test_a_slot_is_written_once_and_freed_when_neither_checkpoint_names_it(tmp_path):
    slots = Slots(tmp_path / "run.pt")
    first = saved(slots, (0, 0), (1, 0))
    assert first == {"run.1.slots": [[0, 0], [1, 0]]}
    written = (tmp_path / "run.1.slots").stat().st_mtime_ns
    second = saved(slots, (0, 1), (1, 0))
    assert second == {"run.1.slots": [[1, 0]], "run.2.slots": [[0, 1]]}
    assert (tmp_path / "run.1.slots").stat().st_mtime_ns == written
    third = saved(slots, (0, 1), (1, 1))
    assert third == {"run.2.slots": [[0, 1]], "run.3.slots": [[1, 1]]}
    assert {file.name for file in slots.files()} == {"run.1.slots", "run.2.slots", "run.3.slots"}, (
        "the checkpoint before needs the first"
    )
    saved(slots, (0, 1), (1, 1))
    assert {file.name for file in slots.files()} == {"run.2.slots", "run.3.slots"}
    found = Slots(tmp_path / "run.pt").read("me", third)
    assert {name: kept["private"].tolist() for name, kept in found.items()} == {(0, 1): [0.0, 1.0], (1, 1): [1.0, 1.0]}


def test_segments_that_are_mostly_out_of_date_are_written_anew(tmp_path):
    """One slow client must not keep everybody else's old memories on the disk."""
    slots = Slots(tmp_path / "run.pt")
    for visit in range(50):
        saved(slots, (99, 0), *((client, visit) for client in range(4)))
        assert len(slots.files()) <= 3


def test_a_segment_that_no_checkpoint_names_is_removed_by_the_next(tmp_path):
    slots = Slots(tmp_path / "run.pt")
    first = saved(slots, (0, 0))
    slots.write("me", memories((0, 1)))  # and then the process is killed
    again = Slots(tmp_path / "run.pt")
    assert list(again.read("me", first)) == [(0, 0)]
    assert saved(again, (0, 1)) == {"run.3.slots": [[0, 1]]}
    assert {file.name for file in again.files()} == {"run.1.slots", "run.3.slots"}


def test_damaged_missing_and_foreign_segments_are_told(tmp_path):
    slots = Slots(tmp_path / "run.pt")
    segments = saved(slots, (0, 0))
    file = tmp_path / "run.1.slots"
    with pytest.raises(CheckpointError, match="belongs to another run"):
        Slots(tmp_path / "run.pt").read("you", segments)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        Slots(tmp_path / "run.pt").read("me", segments)
    file.unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        Slots(tmp_path / "run.pt").read("me", segments)


KILLED = """
import os, signal, sys
from persafl_lit import run
from persafl_lit.engine import memory_slots as slots
from persafl_lit.engine.checkpoint import Checkpoint

written = 0
before = slots.Slots.write
def write(self, *about):
    global written
    segments = before(self, *about)
    written += 1
    if written == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)  # the segment is there, the checkpoint that names it is not
    return segments
slots.Slots.write = write
run(sys.argv[2:], resume=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("executor", [["executor=serial"], ["workers=2"]])
def test_a_kill_between_a_segment_and_its_checkpoint_loses_nothing(executor, tmp_path):
    overrides = [*DIGITS[2:], "tracking.enabled=false", "checkpoint.every=5", "updates=40", "method=fedper", *executor]
    whole = run(overrides)
    for survives in (1, 2, 1, 3):
        done = subprocess.run(
            [sys.executable, "-c", KILLED, str(survives), *overrides], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
    folder = tmp_path / "mlruns" / "checkpoints"
    assert list(folder.glob("*.slots"))
    resumed = run(overrides, resume=True)
    assert json.dumps(resumed.curves()) == json.dumps(whole.curves())
    for client, kept in whole.memory.items():
        assert torch.equal(resumed.memory[client]["private"], kept["private"])
    assert not os.listdir(folder)


def test_a_checkpoint_whose_memories_are_damaged_gives_way_to_the_one_before(tmp_path, capsys):
    overrides = [*DIGITS[2:], "tracking.enabled=false", "checkpoint.every=7", "updates=40", "method=fedper"]
    whole = run(overrides)
    with pytest.raises(Exception, match="after update 20"):
        run_for(overrides, 20)
    newest = max((tmp_path / "mlruns" / "checkpoints").glob("*.slots"), key=lambda file: file.stat().st_mtime_ns)
    newest.write_bytes(b"junk")
    resumed = run(overrides, resume=True)
    said = capsys.readouterr().err
    assert "its checksum is wrong; the one before it is used" in said
    assert "resuming after update 14 of 40" in said
    assert json.dumps(resumed.curves()) == json.dumps(whole.curves())


def test_checkpoints_do_not_repeat_what_earlier_ones_wrote(tmp_path):
    """With 100 clients of which one moves, a checkpoint writes one slot."""
    slots = Slots(tmp_path / "run.pt")
    everybody = {(client, 0) for client in range(100)}
    saved(slots, *everybody)
    segments = saved(slots, *(everybody - {(7, 0)}), (7, 1))
    assert segments["run.2.slots"] == [[7, 1]]
