"""Freed memory stays with the process: a gradient asks the system for no page that the last one had."""

from __future__ import annotations

import subprocess
import sys

import pytest

PAGES = """
import resource, sys, torch
from persafl_lit.memory import keep_freed_memory
from persafl_lit.models import Cnn3
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
