"""Freed memory stays with the process: a gradient asks the system for no page that the last one had. Imports are not searched for garbage."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from persafl_lit import run
from persafl_lit.common.process_memory import gc_paused
from persafl_lit.models.classifier import Classifier
from persafl_lit.models.networks import Logistic

PAGES = """
import resource, sys, torch
from persafl_lit.common.process_memory import keep_freed_memory
from persafl_lit.models.networks import Cnn3
torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_freed_memory()
network, inputs = Cnn3().network((3, 32, 32), 10).to(memory_format=torch.channels_last), torch.randn(32, 3, 32, 32)
def gradients(count):
    for _ in range(count):
        torch.autograd.grad(network(inputs).square().sum(), list(network.parameters()))
gradients(5)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
gradients(20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how):
    return int(subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_the_pages_of_freed_tensors_serve_the_next_ones():
    assert page_faults("kept") < page_faults("usual") / 5


def test_the_collector_rests_and_wakes_up_again():
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_wakes_up_after_an_error_too():
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()


def test_whoever_switched_it_off_finds_it_so():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.slow
def test_a_run_leaves_the_collector_awake(tmp_path):
    """In a process of its own, where everything is imported for the first time, MLflow in the background included."""
    code = "import gc, persafl_lit; persafl_lit.run(['model=logistic', 'updates=5', 'clients=4']); assert gc.isenabled(); print('awake')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "awake", done.stderr


class Awake(Classifier):
    def training_step(self, batch, batch_idx):
        assert gc.isenabled(), "asleep"
        return super().training_step(batch, batch_idx)


def test_workers_that_are_forked_meanwhile_are_awake():
    with gc_paused():
        result = run(
            ["clients=4", "updates=4", "workers=2", "tracking.enabled=false"],
            model=Awake(Logistic().network((1, 8, 8), 10)),
        )
    assert result.summary()["updates"] == 4
