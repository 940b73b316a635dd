"""A federation: what each client holds, and how it draws batches from its own distribution p_i."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from persafl_lit.common.seeding import rng
from persafl_lit.data import partition
from persafl_lit.data.partition import Shares
from persafl_lit.data.pixels import Pixels
from persafl_lit.data.trees import Nested, leaves, place

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")
IGNORED = -100
"""The label of a token that no loss counts, as in torch's cross-entropy."""
Task = Literal["classification", "regression", "tokens"]


class Batch(NamedTuple):
    """Samples and the seed of the dropout mask that goes with them: together they make f(.; D) a function."""

    data: Any
    mask: int


class Federation(ABC):
    """The clients' data. Draws are named by (seed, purpose, client, visit), never by the order of calls."""

    clients: int
    holdout: int = 0
    """The last so many clients never train and are only evaluated."""
    smoothness: float | None = None
    """L, where it is known."""
    notes: tuple[str, ...] = ()
    """What a user should be told about how this federation was made."""
    shape: tuple[int, ...]
    """Of a sample's inputs. Our networks are built for `shape`, `classes` and `task`; a federation for a model of yours
    may lack them."""
    classes: int
    """Labels are 0 to classes - 1. Of a regression, how many numbers a target has."""
    task: Task
    """What a target is: a class (if this is missing, too), numbers, or a class for each of several tokens."""

    @abstractmethod
    def batches(self, client: int, purpose: str, visit: int, steps: int, size: int, seed: int) -> list[Batch]:
        """`steps` independent batches of a client's training data; `purpose` tells D, D', D'' and fine-tuning apart."""

    @abstractmethod
    def whole(self, client: int, split: Split, size: int) -> Iterator[tuple[Any, int]]:
        """A client's whole split in chunks of at most `size`: (data, number of samples)."""

    @abstractmethod
    def to(self, device: torch.device, dtype: torch.dtype) -> Federation:
        """The same data on a device, in a floating-point type."""

    @abstractmethod
    def sizes(self) -> np.ndarray:
        """Samples per client and split, shape (clients, 3)."""

    @abstractmethod
    def count(self, client: int, split: Split) -> int:
        """Samples of a client in a split."""

    def trained(self) -> int:
        """How many clients train; at least one must."""
        return partition.trained(self.clients, self.holdout)

    @abstractmethod
    def digest(self) -> str:
        """A hash of the data and of who holds what."""

    def not_finite(self, client: int) -> str | None:
        """Where a client's data holds nan or infinity first; None if it does not."""
        for split in SPLITS:
            for position, (data, _) in enumerate(self.whole(client, split, 1)):
                numbers = (leaf for leaf in leaves(data) if isinstance(leaf, Tensor) and leaf.is_floating_point())
                if not all(torch.isfinite(leaf).all() for leaf in numbers):
                    return self.sample_name(client, split, position)
        return None

    def sample_name(self, client: int, split: Split, position: int) -> str:
        """A sample as the user knows it."""
        return f"client {client}: sample {position} of its {split} data"

    def before_fork(self) -> None:  # noqa: B027
        """Called before worker processes are forked: what must not be shared with them is made ready to be copied."""


@dataclass(frozen=True)
class Places:
    """Datasets one after the other, under one range of indices."""

    names: Sequence[str]
    offsets: np.ndarray
    """Where each begins, and the last ends."""

    def of(self, index: int) -> tuple[int, int]:
        """The dataset that has a sample, and its index there."""
        source = int(np.searchsorted(self.offsets, index, side="right")) - 1
        return source, index - int(self.offsets[source])

    def name(self, index: int) -> str:
        source, local = self.of(index)
        return f"{self.names[source]}: sample {local}"


@dataclass(frozen=True)
class Samples(Federation):
    """Samples in memory: images, feature vectors, token ids or trees of such, with labels; dealt to clients by
    index."""

    inputs: Tensor | Pixels | Nested
    labels: Tensor
    classes: int
    parts: Sequence[dict[Split, Tensor]]
    fingerprint: str
    """A hash of the inputs."""
    holdout: int = 0
    notes: tuple[str, ...] = ()
    places: Places | None = None
    """How the user knows the samples."""

    @property
    def clients(self) -> int:  # type: ignore[override]
        return len(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.inputs.shape[1:])

    @property
    def task(self) -> Task:  # type: ignore[override]
        if self.labels.is_floating_point():
            return "regression"
        return "tokens" if self.labels.dim() > 1 else "classification"

    def batches(self, client: int, purpose: str, visit: int, steps: int, size: int, seed: int) -> list[Batch]:
        """Batches of distinct samples, drawn independently of each other; a client with fewer samples uses them all."""
        held = self.parts[client]["train"]
        masks = draw_masks(purpose, client, visit, steps, seed)
        if len(held) <= size:
            data = self._gather(held)
            return [Batch(data, mask) for mask in masks]
        chosen = held[draw_positions(len(held), purpose, client, visit, steps, size, seed)]
        if isinstance(self.inputs, Nested):
            return [Batch(self._gather(part), mask) for part, mask in zip(chosen.split(size), masks, strict=True)]
        inputs, labels = self._gather(chosen)
        return [
            Batch(data, mask)
            for data, mask in zip(zip(inputs.split(size), labels.split(size), strict=True), masks, strict=True)
        ]

    def whole(self, client: int, split: Split, size: int) -> Iterator[tuple[Any, int]]:
        for indices in self.parts[client][split].split(size):
            yield self._gather(indices), len(indices)

    def _gather(self, indices: Tensor) -> tuple[Any, Tensor]:
        inputs = self.inputs[indices.to(self.inputs.device)]
        if isinstance(inputs, Tensor) and inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, self.labels[indices.to(self.labels.device)]

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        inputs = place(self.inputs, device, dtype) if isinstance(self.inputs, Tensor) else self.inputs.to(device, dtype)
        return replace(self, inputs=inputs, labels=place(self.labels, device, dtype))

    def sample_name(self, client: int, split: Split, position: int) -> str:
        if self.places is None:
            return super().sample_name(client, split, position)
        return self.places.name(int(self.parts[client][split][position]))

    def count(self, client: int, split: Split) -> int:
        return len(self.parts[client][split])

    def sizes(self) -> np.ndarray:
        return np.array([[len(part[split]) for split in SPLITS] for part in self.parts])

    def digest(self) -> str:
        seen = hashlib.sha256(self.fingerprint.encode() + self.labels.numpy().tobytes())
        for part in self.parts:
            for split in SPLITS:
                seen.update(part[split].numpy().tobytes())
        return seen.hexdigest()


def draw_masks(purpose: str, client: int, visit: int, steps: int, seed: int) -> list[int]:
    """The seeds of the dropout masks of a visit's batches."""
    found: list[int] = rng(seed, f"mask {purpose}", client, visit).integers(2**62, size=steps).tolist()
    return found


def draw_positions(held: int, purpose: str, client: int, visit: int, steps: int, size: int, seed: int) -> Tensor:
    """`steps` times `size` positions among a client's `held` samples; those of one step are distinct."""
    keys = rng(seed, f"batch {purpose}", client, visit).random((steps, held))
    return torch.from_numpy(np.argpartition(keys, size, axis=1)[:, :size].ravel())


def dealt(inputs: Tensor | Pixels, shares: Shares, fingerprint: str | None = None) -> Samples:
    """A federation from samples and who holds them."""
    parts = [
        {name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)} for pieces in shares.parts
    ]
    if fingerprint is None:
        assert isinstance(inputs, Tensor)
        fingerprint = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()
    return Samples(
        inputs, torch.from_numpy(shares.labels), shares.classes, parts, fingerprint, shares.holdout, shares.notes
    )
