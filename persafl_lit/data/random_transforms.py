"""Which Datasets draw random transforms, and how evaluation reads them without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from persafl_lit.data.augmented import has_random_transform, without_random
from persafl_lit.data.in_memory import rows_of
from persafl_lit.data.indexed import Sources, sample_of, seeded
from persafl_lit.data.trees import digest, layout
from persafl_lit.errors import DataError

PROBED = 64
"""Samples that are read more than once to see whether they change."""


def which_change(sources: Sources) -> list[bool]:
    """Of each dataset, whether a sample read again is another: it has random transforms. What no seed repeats is
    refused."""
    changes = []
    each = max(1, PROBED // len(sources.datasets))
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        if rows_of(dataset) is not None:
            changes.append(False)
            continue
        changing = has_random_transform(dataset)
        for index in np.unique(np.linspace(0, length - 1, min(each, length)).astype(int)).tolist():
            first, second, again = (_read_digest(dataset, index, name, seed) for seed in (1, 2, 1))
            if first != again:
                raise DataError(
                    f"{name}: sample {index} is another each time it is read, whatever the seed; random "
                    "transforms must draw from the generators "
                    "of torch, numpy or random themselves, so that a run can be repeated"
                )
            changing = changing or first != second
        changes.append(changing)
    return changes


def _read_digest(dataset: Any, index: int, name: str, seed: int) -> str:
    with seeded(seed):
        return digest(sample_of(dataset, index, name))


def unaugment(sources: Sources, changes: Sequence[bool], shared: Sequence[bool]) -> tuple[str, ...]:
    """Let evaluation read datasets without their random transforms; says so where that cannot be."""
    left = 0
    for number, (dataset, name) in enumerate(zip(sources.datasets, sources.names, strict=True)):
        if not changes[number]:
            continue
        plain = without_random(dataset)
        if plain is not None and _repeats(dataset, plain, name):
            sources.unaugmented[number] = plain
        else:
            left += shared[number]
    if not left:
        return ()
    return (
        f"evaluation reads samples with the random transforms of {left} of {len(changes)} Datasets, the same "
        "every time; "
        "give (train, val, test), or persafl_lit.Augmented(dataset, transform), to evaluate them as they are",
    )


def _repeats(dataset: Any, plain: Any, name: str) -> bool:
    """Whether samples without random transforms are as large as with them, and do not change."""
    try:
        return layout(sample_of(plain, 0, name)) == layout(sample_of(dataset, 0, name)) and not any(
            _read_digest(plain, index, name, 1) != _read_digest(plain, index, name, 2)
            for index in range(min(8, len(plain)))
        )
    except DataError:
        return False
