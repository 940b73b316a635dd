"""Users' data as a federation: Datasets, arrays, LightningDataModules, one per client or one for all.

Samples that fit into memory are read once and become `Samples`, the fast path of the built-in sets; others stay
Datasets, which `Indexed` reads when a batch is drawn. Both draw the same batches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from persafl_lit.data.federation import SPLITS, Federation, Samples
from persafl_lit.data.holdings import holdings_of, last_as_clients
from persafl_lit.data.in_memory import collected, firsts_of, is_pair
from persafl_lit.data.indexed import Indexed, Sources, sample_of, seeded
from persafl_lit.data.labels import check_labels, classes_of, infer_task, labels_of
from persafl_lit.data.ownership import parts_of
from persafl_lit.data.partition import trained
from persafl_lit.data.random_transforms import unaugment, which_change
from persafl_lit.data.trees import Nested, add_to, digest, nbytes
from persafl_lit.errors import DataError

if TYPE_CHECKING:
    from persafl_lit.data.given import Given

HASHED = 1024
"""Samples of data that is read by index whose bytes are part of the digest."""


def adapt(data: Any, settings: Given, clients: int | None, seed: int) -> Federation:
    """A federation of what `run(data=...)` takes. `clients` is how many were asked for; None is as many as there
    are."""
    if isinstance(data, Federation):
        trained(data.clients, data.holdout)
        return data
    holdings = holdings_of(data)
    sources = Sources(holdings.datasets, holdings.names, holdings.collates)
    for name, length in zip(sources.names, sources.lengths, strict=True):
        if not length:
            raise DataError(f"{name} has no samples")
    firsts = firsts_of(sources)
    changes = which_change(sources)
    notes = unaugment(sources, changes, holdings.shared())
    in_memory = not any(changes) and all(map(is_pair, firsts)) and not any(sources.collates)
    in_memory = (
        in_memory
        and sum(nbytes(first) * length for first, length in zip(firsts, sources.lengths, strict=True))
        <= settings.in_memory * 1e6
    )
    inputs, labels = collected(sources) if in_memory else (None, labels_of(sources, firsts))
    check_labels(labels, settings.classes, sources)
    parts, left_out = parts_of(holdings, sources, labels, settings, clients, seed)
    trained(len(parts), settings.holdout_clients)
    notes += left_out
    classes = classes_of(labels, settings.classes)
    tensors = [{name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)} for pieces in parts]
    if in_memory:
        assert labels is not None
        whole = inputs if isinstance(inputs, Tensor) else Nested(inputs)
        return Samples(whole, labels, classes, tensors, digest(inputs), settings.holdout_clients, notes, sources.places)
    return Indexed(
        sources,
        tensors,
        classes,
        infer_task(firsts[0], labels),
        _shape(firsts[0]),
        _sampled_digest(sources, labels),
        any(changes),
        settings.holdout_clients,
        notes,
    )


def brings_clients(data: Any) -> bool:
    """Whether the data itself says how many clients there are."""
    if isinstance(data, Mapping):
        return "client" in data
    return (
        isinstance(data, (list, Federation))
        or (isinstance(data, tuple) and last_as_clients(data) is not None)
        or hasattr(data, "clients")
    )


def described(data: Any) -> str:
    """A name for the record of a run."""
    if isinstance(data, list):
        return f"list of {len(data)}: {described(data[0])}" if data else "empty list"
    if isinstance(data, tuple):
        return f"({', '.join(map(described, data))})"
    return f"{type(data).__module__}.{type(data).__qualname__}"


def _shape(first: Any) -> tuple[int, ...]:
    inputs = first[0] if isinstance(first, (tuple, list)) and len(first) == 2 else None
    return tuple(inputs.shape) if isinstance(inputs, (Tensor, np.ndarray)) else ()


def _sampled_digest(sources: Sources, labels: Tensor | None) -> str:
    """Of data that is read by index: lengths, labels, and the bytes of up to HASHED samples spread over the
    datasets."""
    seen = hashlib.sha256(repr(sources.lengths).encode())
    if labels is not None:
        add_to(seen, labels)
    each = max(2, HASHED // len(sources.datasets))
    for dataset, name, length in zip(sources.datasets, sources.names, sources.lengths, strict=True):
        for index in np.unique(np.linspace(0, length - 1, min(each, length)).astype(int)).tolist():
            with seeded(0):
                add_to(seen, sample_of(dataset, index, name))
    return seen.hexdigest()
