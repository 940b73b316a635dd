"""All samples of Datasets, read once and put into tensors with a row per sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from persafl_lit.data.holdings import Rows
from persafl_lit.data.indexed import Sources, sample_of, seeded
from persafl_lit.data.trees import layout, leaves, mapped
from persafl_lit.errors import DataError, shown

BLOCK = 256
"""Samples that are read before they are put into memory."""


def is_pair(sample: Any) -> bool:
    """(inputs, target) of numbers, which can be stacked."""
    return (
        isinstance(sample, (tuple, list))
        and len(sample) == 2
        and all(map(is_number, leaves(sample)))
        and not isinstance(sample[1], Mapping)
    )


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, (Tensor, bool, int, float, np.number, np.bool_)) or (
        isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf"
    )


def firsts_of(sources: Sources) -> list[Any]:
    """The first sample of each dataset; they must be alike."""
    with seeded(0):
        firsts = [sample_of(dataset, 0, name) for dataset, name in zip(sources.datasets, sources.names, strict=True)]
    for first, name, collate in zip(firsts, sources.names, sources.collates, strict=True):
        odd = next((leaf for leaf in leaves(first) if not is_number(leaf)), None)
        if odd is not None and collate is None and not isinstance(odd, (str, bytes)):
            raise DataError(
                f"{name}: sample 0 holds a {type(odd).__name__}, of which no batch can be made; "
                "give the Dataset a transform that makes tensors, or a collate_fn"
            )
        if collate is None and sources.collates[0] is None and _inputs_layout(first) != _inputs_layout(firsts[0]):
            raise DataError(
                f"clients of different shapes: samples of {name} are {_inputs_layout(first)}, those of "
                f"{sources.names[0]} {_inputs_layout(firsts[0])}"
            )
    return firsts


def _inputs_layout(sample: Any) -> str:
    return layout(sample[0] if isinstance(sample, (tuple, list)) and len(sample) == 2 else sample)


def collected(sources: Sources) -> tuple[Any, Tensor]:
    """All inputs and all targets, one row per sample."""
    parts = [
        rows_of(dataset) or _read_all(dataset, name)
        for dataset, name in zip(sources.datasets, sources.names, strict=True)
    ]
    kinds = [(layout(mapped(lambda leaf: leaf[:0], x)), y.is_floating_point(), tuple(y.shape[1:])) for x, y in parts]
    for kind, name in zip(kinds, sources.names, strict=True):
        if kind[1:] != kinds[0][1:]:
            raise DataError(
                f"clients of different targets: those of {name} have the shape {kind[2]}, those of "
                f"{sources.names[0]} {kinds[0][2]}"
            )
    if len(parts) == 1:
        return parts[0]
    columns = [list(leaves(x)) for x, _ in parts]
    joined = iter([torch.cat([column[place] for column in columns]) for place in range(len(columns[0]))])
    return mapped(lambda leaf: next(joined), parts[0][0]), torch.cat([y for _, y in parts])


def rows_of(dataset: Any) -> tuple[Any, Tensor] | None:
    """The rows of a dataset that is nothing but tensors."""
    if type(dataset) is Rows:
        return dataset.x, dataset.y
    if type(dataset) is TensorDataset and len(dataset.tensors) == 2:
        inputs, targets = dataset.tensors
        return inputs.detach(), targets.detach() if targets.is_floating_point() else targets.long()
    if (
        type(dataset) is Subset
        and type(dataset.dataset) in (Rows, TensorDataset)
        and (rows := rows_of(dataset.dataset)) is not None
    ):
        chosen = torch.as_tensor(list(dataset.indices), dtype=torch.long)
        return mapped(lambda leaf: leaf[chosen], rows[0]), rows[1][chosen]
    return None


def _read_all(dataset: Any, name: str) -> tuple[Any, Tensor]:
    """Every sample of a dataset, one after the other."""
    with seeded(0):
        first = _pair_of(sample_of(dataset, 0, name), name, 0)
        columns = [torch.empty((len(dataset), *leaf.shape), dtype=leaf.dtype) for leaf in leaves(first)]
        for start in range(0, len(dataset), BLOCK):
            samples = [sample_of(dataset, index, name) for index in range(start, min(start + BLOCK, len(dataset)))]
            if not _put_block(samples, columns, start):
                for index, sample in enumerate(samples, start):
                    _put(sample, columns, first, name, index)
    rows = iter(columns)
    inputs, targets = mapped(lambda leaf: next(rows), tuple(first))
    return inputs, targets


def _put_block(samples: Sequence[Any], columns: Sequence[Tensor], start: int) -> bool:
    """Many samples at once, if all are a tensor like the first one and a whole number: a fifth of the time."""
    if len(columns) != 2 or not all(type(sample) is tuple and len(sample) == 2 for sample in samples):
        return False
    inputs, targets = zip(*samples, strict=True)
    alike = all(type(x) is Tensor and x.dtype is columns[0].dtype and x.shape == columns[0].shape[1:] for x in inputs)
    if (
        not alike
        or not all(type(y) is int for y in targets)
        or columns[1].dtype is not torch.long
        or columns[1].dim() != 1
    ):
        return False
    torch.stack([x.detach() for x in inputs], out=columns[0][start : start + len(samples)])
    columns[1][start : start + len(samples)] = torch.tensor(targets)
    return True


def _put(sample: Any, columns: Sequence[Tensor], first: tuple[Any, Tensor], name: str, index: int) -> None:
    """One sample, which must be like the first."""
    pair = _pair_of(sample, name, index)
    found = list(leaves(pair))
    if [leaf.shape for leaf in found] != [column.shape[1:] for column in columns]:
        raise DataError(
            f"{name}: sample {index} is {layout(pair)}, sample 0 {layout(first)}; make them alike, or give a "
            "collate_fn that does"
        )
    for column, leaf in zip(columns, found, strict=True):
        if column.dtype is not leaf.dtype and torch.promote_types(column.dtype, leaf.dtype) is not column.dtype:
            raise DataError(
                f"{name}: sample {index} is {layout(pair)}, sample 0 {layout(first)}; make them of one type"
            )
        column[index] = leaf


def _pair_of(sample: Any, name: str, index: int) -> tuple[Any, Tensor]:
    if not is_pair(sample):
        raise DataError(f"{name}: sample {index} is {shown(sample)}, not (inputs, target) of numbers as sample 0")
    return mapped(_as_tensor, sample[0]), target_of(sample[1], name, index)


def _as_tensor(leaf: Any) -> Tensor:
    return (
        leaf.detach()
        if isinstance(leaf, Tensor)
        else torch.tensor(leaf, dtype=torch.float64)
        if isinstance(leaf, float)
        else torch.as_tensor(leaf)
    )


def target_of(value: Any, name: str, index: int) -> Tensor:
    """A target as a tensor: whole numbers as torch's losses take them."""
    if not is_number(value):
        raise DataError(f"{name}: sample {index} has the label {shown(value)}, which is no number")
    found = _as_tensor(value)
    return found if found.is_floating_point() else found.long()
