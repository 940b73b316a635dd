"""Clients' memories beyond a limit: the same tensors from a file without a name."""

from __future__ import annotations

import os

import pytest
import torch

from persafl_lit import run
from persafl_lit.engine.memory_file import Kept, MemoryFile, OnDisk
from persafl_lit.errors import CheckpointError, ConfigError
from tests.support.runs import bits, run_for


def memory(number, size=4):
    return {
        "private": torch.full((size,), float(number)),
        "half": torch.full((2, 3), float(number)).bfloat16(),
        "one": torch.tensor(number, dtype=torch.float64),
        "flags": torch.tensor([True, False]),
        "nothing": torch.empty(0),
    }


def same(found, wanted):
    return list(found) == list(wanted) and all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in wanted.items()
    )


def test_what_does_not_fit_is_read_back_as_it_was(tmp_path):
    size = sum(tensor.nbytes for tensor in memory(0).values())
    file = MemoryFile(2 * size, tmp_path / "folder")
    kept = [file.keep(memory(number)) for number in range(5)]
    assert [type(one) for one in kept] == [Kept, Kept, OnDisk, OnDisk, OnDisk]
    assert all(same(one, memory(number)) for number, one in enumerate(kept))
    assert file.on_disk == 3 * size
    assert list((tmp_path / "folder").iterdir()) == [], "the file has no name"


def test_places_that_nobody_holds_are_used_again(tmp_path):
    size = sum(tensor.nbytes for tensor in memory(0).values())
    file = MemoryFile(size, tmp_path)
    kept = {client: file.keep(memory(client)) for client in range(4)}
    held = kept[2]  # as a job under way holds it
    for visit in range(50):
        for client in range(4):
            kept[client] = file.keep(memory(10 * visit + client))
    assert same(held, memory(2)), "written once"
    assert all(same(kept[client], memory(490 + client)) for client in range(4))
    assert file.on_disk <= 6 * size


def test_memories_outlive_the_run_that_made_them(tmp_path):
    kept = MemoryFile(0, tmp_path).keep(memory(3))
    assert same(kept, memory(3))


def test_a_folder_that_cannot_be_written_is_told_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match="clients keep more than memory_gb=0.*raise memory_gb or set checkpoint.dir"
    ):
        MemoryFile(0, tmp_path / "file" / "folder").keep(memory(1))


SMALL = ["clients=6", "updates=30", "local_steps=2", "model=mlp", "model.hidden=[8]", "tracking.enabled=false"]


@pytest.mark.parametrize("executor", [["executor=serial"], ["workers=2"]])
def test_a_run_has_the_same_bits_wherever_its_memories_are(executor, tmp_path):
    settings = [*SMALL, "method=ditto", "checkpoint.every=4", "eval.finetune=none", *executor]
    in_ram = bits(run(settings))
    some = 2 * 4 * (64 * 8 + 8 + 8 * 10 + 10) / 1e9  # two of six clients in RAM
    for limit in (0, some):
        result = run([*settings, f"memory_gb={limit}"])
        assert bits(result) == in_ram
        assert sum(isinstance(kept, OnDisk) for kept in result.memory.values()) == (6 if limit == 0 else 4)
    with pytest.raises(Exception, match="stopped after update"):
        run_for([*settings, "memory_gb=0"], 17)
    resumed = run([*settings, "memory_gb=0"], resume=True)
    assert bits(resumed) == in_ram
    assert os.listdir("mlruns/checkpoints") == []


def test_a_negative_limit_is_refused():
    with pytest.raises(ConfigError, match="memory_gb must be >= 0"):
        run([*SMALL, "memory_gb=-1"])
