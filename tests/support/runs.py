"""Small runs that several files share: settings that differ in what they exercise, runs that stop early, and what a run computed."""

from __future__ import annotations

import json

import pytest

from persafl_lit import run
from persafl_lit.errors import Interrupted

BASE = [
    "data=digits",
    "model=mlp",
    "model.hidden=[8]",
    "model.dropout=0.2",
    "clients=8",
    "updates=40",
    "local_steps=3",
    "checkpoint.every=7",
    "eval.every=1.0",
]
METHODS = {
    "fedasync": [],
    "persafl_me": ["method.inner_steps=3"],
    "persafl_maml": [],
    "fedbuff": ["method.buffer=3"],
    "fedasync_mix": [],
    "fedavg": ["schedule.cohort=3"],
    "scaffold": ["schedule.cohort=3"],
    "local": [],
    "fedper": [],
    "fedrep": ["method.body_steps=1"],
    "ditto": [],
    "apfl": [],
    "fedavgm": ["schedule.cohort=3"],
    "fedadam": ["schedule=asynchronous", "method.buffer=3"],
    "fedyogi": ["schedule.cohort=3"],
    "fedadagrad": ["schedule=asynchronous", "method.buffer=1"],
    "ca2fl": ["method.buffer=3"],
    "ace": [],
    "aced": ["method.tau_algo=5", "method.private=head"],
}
"""Every kind of objective, server rule, schedule and memory."""


class Stopper:
    """Watches a run and asks it to stop after so many updates."""

    def __init__(self, updates):
        self.left = updates

    def __call__(self):
        return self.left <= 0

    def on_update(self):
        self.left -= 1


class At:
    """A callback that does something when an update has been applied: At(u2=first, u40=second)."""

    def __init__(self, **actions):
        self.actions = {int(name.removeprefix("u")): action for name, action in actions.items()}

    def on_update(self, experiment):
        self.actions.get(experiment.state.arrivals - 1, lambda: None)()


class Patience:
    """A callback that stops a run after so many evaluations, which it counts itself."""

    def __init__(self, points: int) -> None:
        self.left = points

    def on_evaluation(self, experiment, point):
        self.left -= 1
        if self.left == 0:
            experiment.stop(point)

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left = state["left"]


def run_for(overrides, updates, **more):
    """A run that is asked to stop after so many updates."""
    stop = Stopper(updates)
    return run(overrides, should_stop=stop, callbacks=[stop], **more)


def interrupted(overrides, after):
    """Leave the checkpoint of a run that was interrupted after so many of its 40 updates."""
    with pytest.raises(Interrupted, match=f"after update {after} of 40; the same command with --resume continues"):
        run_for(overrides, after)


def bits(result):
    """Everything that a run computes, to the last bit."""
    model = tuple((name, value.numpy().tobytes()) for name, value in result.state_dict().items())
    memory = {client: {name: value.tolist() for name, value in kept.items()} for client, kept in result.memory.items()}
    return model, json.dumps(result.curves()), json.dumps(result.clients()), json.dumps(memory)
