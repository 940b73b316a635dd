"""Datasets that are read by index: too large for memory, with random transforms, or with a collate function."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pickle
import random
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from persafl_lit.common.seeding import torch_seed
from persafl_lit.data.federation import SPLITS, Batch, Federation, Places, Split, Task, draw_masks, draw_positions
from persafl_lit.data.trees import placed
from persafl_lit.errors import DataError, first_line, located

Collate = Callable[[list[Any]], Any]


class Sources:
    """Datasets one after the other, under one range of indices. Every process reads datasets of its own.

    A forked process would share open files, and their positions, with this one. So the datasets are pickled before a
    fork (with what a fork shares safely by reference: tensors, arrays, functions and classes) and the new process
    unpickles them when it first reads: a Dataset that holds a file must know how to be pickled, and reopens it.
    """

    def __init__(self, datasets: Sequence[Any], names: Sequence[str], collates: Sequence[Collate | None]) -> None:
        """`names` are for errors; a `collate` makes a batch of a dataset's samples; if None, torch's does."""
        self._set(datasets, names, collates, datasets)

    def _set(
        self,
        datasets: Sequence[Any],
        names: Sequence[str],
        collates: Sequence[Collate | None],
        unaugmented: Sequence[Any],
    ) -> None:
        self.datasets, self.names, self.collates = list(datasets), list(names), list(collates)
        self.unaugmented = list(unaugmented)
        """What evaluation reads."""
        self.lengths = [length_of(dataset, name) for dataset, name in zip(self.datasets, self.names, strict=True)]
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int64)
        self.places = Places(self.names, self.offsets)
        self._pid = os.getpid()
        self._packed: tuple[bytes, list[Any]] | None = None

    def __getstate__(self) -> tuple[Any, ...]:
        return self.datasets, self.names, self.collates, self.unaugmented

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._set(*state)

    def __len__(self) -> int:
        return int(self.offsets[-1])

    def read(self, indices: Sequence[int], unaugmented: bool = False) -> list[Any]:
        """Samples by their indices; all of a client's and a split's are in one dataset, mostly."""
        if os.getpid() != self._pid:
            self._unpack()
        datasets, samples = self.unaugmented if unaugmented else self.datasets, []
        wanted = np.asarray(indices)
        owners = np.searchsorted(self.offsets, wanted, side="right") - 1
        for run in np.split(np.arange(len(wanted)), np.flatnonzero(np.diff(owners)) + 1):
            source = int(owners[run[0]])
            samples += self._from_one(
                datasets[source], self.names[source], (wanted[run] - self.offsets[source]).tolist()
            )
        return samples

    def _from_one(self, dataset: Any, name: str, indices: list[int]) -> list[Any]:
        if hasattr(dataset, "__getitems__"):
            with contextlib.suppress(Exception, SystemExit):  # one by one, the index that fails has a name
                samples = dataset.__getitems__(indices)
                if len(samples) == len(indices):
                    return list(samples)
        return [sample_of(dataset, index, name) for index in indices]

    def before_fork(self) -> None:
        if self._packed is None:
            try:
                self._packed = pack((self.datasets, self.unaugmented))
            except Exception as error:  # a Dataset's own way of being pickled may raise anything
                raise DataError(
                    f"{self._unpicklable()} cannot be pickled ({first_line(error)}), and worker processes "
                    "need one of their own; "
                    "give it a __getstate__ that leaves out open files and a __setstate__ that reopens them, "
                    "or use executor=serial"
                ) from None

    def _unpack(self) -> None:
        assert self._packed is not None, "before_fork comes before a fork"
        try:
            self.datasets, self.unaugmented = unpack_dataset(*self._packed)
        except (Exception, SystemExit) as error:
            raise DataError(f"the Datasets cannot be reopened in a worker process: {located(error)}") from None
        self._pid = os.getpid()

    def _unpicklable(self) -> str:
        for dataset, name in zip(self.datasets, self.names, strict=True):
            try:
                pack(dataset)
            except Exception:  # as above
                return f"{name}: the {type(dataset).__name__}"
        return "the data"


SHARED = (Tensor, np.ndarray, type, types.FunctionType, types.ModuleType)
"""What a forked process may share with its parent, and what need not be found again by its name."""


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.shared: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, SHARED):
            return None
        if any(isinstance(held, io.IOBase) for held in _enclosed(obj)):
            raise pickle.PicklingError(f"the function {getattr(obj, '__qualname__', obj)} holds an open file")
        self.shared.append(obj)
        return len(self.shared) - 1


def _enclosed(obj: Any) -> Iterator[Any]:
    """What a function has from where it was made."""
    for cell in getattr(obj, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            yield cell.cell_contents


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(file)
        self.shared = shared

    def persistent_load(self, pid: int) -> Any:
        return self.shared[pid]


def pack(value: Any) -> tuple[bytes, list[Any]]:
    """A pickle for a process that is forked from this one, and what it refers to."""
    file = io.BytesIO()
    packer = _Packer(file)
    packer.dump(value)
    return file.getvalue(), packer.shared


def unpack_dataset(content: bytes, shared: list[Any]) -> Any:
    return _Unpacker(io.BytesIO(content), shared).load()


def length_of(dataset: Any, name: str) -> int:
    try:
        return len(dataset)
    except (Exception, SystemExit) as error:
        raise DataError(f"{name}: the {type(dataset).__name__} cannot tell its length: {located(error)}") from None


def sample_of(dataset: Any, index: int, name: str) -> Any:
    try:
        return dataset[index]
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        raise DataError(f"{name}: the {type(dataset).__name__} raises at index {index}: {located(error)}") from None


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's, numpy's and Python's own generators, which transforms draw from, begin at the seed, and afterwards are
    as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@dataclass(frozen=True)
class Indexed(Federation):
    """Samples that are read when a batch is drawn. The same samples in memory give the same bits.

    Random transforms are seeded by (seed, purpose, client, visit, step); evaluation reads the datasets without them
    where it knows how, and else with seeds of its own that are the same every time.
    """

    sources: Sources
    parts: Sequence[dict[Split, Tensor]]
    classes: int
    task: Task
    shape: tuple[int, ...]
    fingerprint: str
    """A hash of samples and labels."""
    augmented: bool = False
    """Whether reading a sample again may give something else."""
    holdout: int = 0
    notes: tuple[str, ...] = ()
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    @property
    def clients(self) -> int:  # type: ignore[override]
        return len(self.parts)

    def batches(self, client: int, purpose: str, visit: int, steps: int, size: int, seed: int) -> list[Batch]:
        held = self.parts[client]["train"]
        masks = draw_masks(purpose, client, visit, steps, seed)
        if len(held) <= size:
            chosen: Sequence[Tensor] = [held] * steps
        else:
            chosen = held[draw_positions(len(held), purpose, client, visit, steps, size, seed)].split(size)
        if len(held) <= size and not self.augmented:
            data = self._gather(held, client, torch_seed(seed, f"read {purpose}", client, visit, 0))
            return [Batch(data, mask) for mask in masks]
        return [
            Batch(self._gather(indices, client, torch_seed(seed, f"read {purpose}", client, visit, step)), mask)
            for step, (indices, mask) in enumerate(zip(chosen, masks, strict=True))
        ]

    def whole(self, client: int, split: Split, size: int) -> Iterator[tuple[Any, int]]:
        for chunk, indices in enumerate(self.parts[client][split].split(size)):
            yield (
                self._gather(indices, client, torch_seed(0, f"read {split}", client, chunk), unaugmented=True),
                len(indices),
            )

    def _gather(self, indices: Tensor, client: int, seed: int, unaugmented: bool = False) -> Any:
        with seeded(seed):
            samples = self.sources.read(indices.tolist(), unaugmented)
            collate = self.sources.collates[self.sources.places.of(int(indices[0]))[0]]
            try:
                data = (collate or usual_collate)(samples)
            except (Exception, SystemExit) as error:
                raise DataError(f"client {client}: its samples cannot be made a batch: {located(error)}") from None
        data = placed(data, self.device, self.dtype)
        if isinstance(data, tuple) and len(data) == 2 and isinstance(data[0], Tensor) and data[0].dim() == 4:
            data = data[0].contiguous(memory_format=torch.channels_last), data[1]
        return data

    def to(self, device: torch.device, dtype: torch.dtype) -> Indexed:
        return replace(self, device=device, dtype=dtype)

    def sample_name(self, client: int, split: Split, position: int) -> str:
        return self.sources.places.name(int(self.parts[client][split][position]))

    def count(self, client: int, split: Split) -> int:
        return len(self.parts[client][split])

    def sizes(self) -> np.ndarray:
        return np.array([[len(part[split]) for split in SPLITS] for part in self.parts])

    def digest(self) -> str:
        seen = hashlib.sha256(self.fingerprint.encode())
        for part in self.parts:
            for split in SPLITS:
                seen.update(part[split].numpy().tobytes())
        return seen.hexdigest()

    def before_fork(self) -> None:
        self.sources.before_fork()


def usual_collate(samples: list[Any]) -> Any:
    """torch's own, but a pair stays a tuple, and integer targets are what a cross-entropy takes."""
    data = default_collate(samples)
    if isinstance(data, list) and len(data) == 2:
        inputs, target = data
        return inputs, target.long() if isinstance(
            target, Tensor
        ) and not target.is_floating_point() and not target.is_complex() else target
    return tuple(data) if isinstance(data, list) else data
