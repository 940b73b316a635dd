"""Named random streams: randomness is looked up by name, never by order of use.

`rng(seed, "batch", client, visit)` is the same generator wherever and whenever it is asked for, so a job's
result depends on nothing but (the model it read, client, visit, seed): not on the schedule, not on the number
of workers, not on what other clients draw.
"""

from __future__ import annotations

import zlib

import numpy as np


def _sequence(seed: int, name: str, *indices: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, zlib.crc32(name.encode()), *indices))


def rng(seed: int, name: str, *indices: int) -> np.random.Generator:
    """The generator called `name[indices]` of this seed."""
    return np.random.Generator(np.random.Philox(_sequence(seed, name, *indices)))


def torch_seed(seed: int, name: str, *indices: int) -> int:
    """A seed for torch's own generator, named like every other stream."""
    return int(_sequence(seed, name, *indices).generate_state(1, np.uint64)[0] >> 1)
