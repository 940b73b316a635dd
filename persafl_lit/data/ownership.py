"""Who holds which of a user's samples, and for which split."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from persafl_lit.common.seeding import rng
from persafl_lit.data.federation import SPLITS, Split
from persafl_lit.data.holdings import Holdings
from persafl_lit.data.indexed import Sources
from persafl_lit.data.partition import NATURAL, SMALLEST, Partition, Pieces, set_aside, split
from persafl_lit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from persafl_lit.data.given import Given


def parts_of(
    holdings: Holdings, sources: Sources, labels: Tensor | None, settings: Given, clients: int | None, seed: int
) -> tuple[list[Pieces], tuple[str, ...]]:
    """Each client's train, val and test samples, and what should be said about it."""
    is_class = labels is not None and labels.dim() == 1 and not labels.is_floating_point()
    strata = labels.numpy() if is_class and labels is not None else np.zeros(len(sources), dtype=np.int64)
    unused = (
        (f"data.partition={settings.partition} deals nothing here: the data says whose each sample is",)
        if settings.partition not in (Partition.partition, NATURAL)
        else ()
    )
    if holdings.clients is not None:
        spans = [
            {part: np.arange(*sources.offsets[[k, k + 1]]) for part, k in splits.items()} for splits in holdings.clients
        ]
        kept, notes = _taken(len(spans), clients, seed)
        found = [_pieces(client, spans[number], strata, settings, seed) for client, number in enumerate(kept)]
        return found, notes + unused
    if holdings.client_of is not None:
        names, numbers = np.unique(holdings.client_of, return_inverse=True)
        kept, notes = _taken(len(names), clients, seed)
        held, notes = [np.flatnonzero(numbers == number) for number in kept], notes + unused
    else:
        if not is_class and settings.partition not in ("iid", NATURAL):
            raise ConfigError(
                f"data.partition={settings.partition} deals samples by their class, and these have none; use "
                "data.partition=iid"
            )
        held, notes = settings.deal(strata, 30 if clients is None else clients, seed), ()
        left = len(sources) - sum(map(len, held))
        if left:
            notes = (f"{left} of {len(sources)} samples belong to classes that no client holds",)
    return [
        _pieces(client, _by_split(part, holdings.split_of), strata, settings, seed) for client, part in enumerate(held)
    ], notes


def _by_split(part: np.ndarray, split_of: np.ndarray | None) -> dict[Split, np.ndarray]:
    """A client's samples by the split that the data has them in; a split that the data has for nobody is missing."""
    if split_of is None:
        return {"train": part}
    present = set(split_of.tolist())
    return {
        name: part[split_of[part] == number]
        for number, name in enumerate(SPLITS)
        if number in present or name == "train"
    }


def _taken(there: int, asked: int | None, seed: int) -> tuple[list[int], tuple[str, ...]]:
    """Which of the data's own clients take part."""
    if asked is None or asked == there:
        return list(range(there)), ()
    if asked > there:
        raise ConfigError(f"clients={asked}, but the data has {there} clients; lower clients, or leave it out")
    kept = sorted(rng(seed, "clients that take part").permutation(there)[:asked].tolist())
    return kept, (f"{asked} of the data's {there} clients take part, drawn by the seed",)


def _pieces(client: int, given: Mapping[Split, np.ndarray], strata: np.ndarray, settings: Given, seed: int) -> Pieces:
    """Train, val and test of one client; what the data lacks is set aside from its training samples, by the config's
    shares."""
    train = given["train"]
    if len(given) == 1:
        if len(train) < SMALLEST:
            raise DataError(
                f"client {client} has {_samples(len(train))}, fewer than the {SMALLEST} that train, val and test need"
            )
        return split(train, strata, settings, client, seed)
    found = dict(given)
    for name, share in (("val", settings.val_share), ("test", settings.test_share)):
        if name not in found:
            if len(found["train"]) < 2:
                raise DataError(
                    f"client {client} has {_samples(len(found['train']))} to train with, too few to set one "
                    f"aside for {name}"
                )
            found[name], found["train"] = set_aside(found["train"], strata, share, client, seed)  # type: ignore[index]
    for name, piece in found.items():
        if not len(piece):
            raise DataError(f"client {client} has no samples for {name}")
    return found["train"], found["val"], found["test"]


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}" if count else "no samples"
