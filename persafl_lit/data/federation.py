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

from persafl_lit.data import partition
from persafl_lit.data.partition import Shares
from persafl_lit.data.pixels import Pixels
from persafl_lit.streams import rng

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = ("train", "val", "test")


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


@dataclass(frozen=True)
class Samples(Federation):
    """Images or feature vectors with labels, dealt to clients by index."""

    inputs: Tensor | Pixels
    labels: Tensor
    classes: int
    parts: Sequence[dict[Split, Tensor]]
    fingerprint: str
    """A hash of the inputs."""
    holdout: int = 0
    notes: tuple[str, ...] = ()

    @property
    def clients(self) -> int:  # type: ignore[override]
        return len(self.parts)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.inputs.shape[1:])

    def batches(self, client: int, purpose: str, visit: int, steps: int, size: int, seed: int) -> list[Batch]:
        """Batches of distinct samples, drawn independently of each other; a client with fewer samples uses them all."""
        held = self.parts[client]["train"]
        masks = rng(seed, f"mask {purpose}", client, visit).integers(2**62, size=steps).tolist()
        if len(held) <= size:
            data = self._gather(held)
            return [Batch(data, mask) for mask in masks]
        keys = rng(seed, f"batch {purpose}", client, visit).random((steps, len(held)))
        chosen = np.argpartition(keys, size, axis=1)[:, :size].ravel()
        inputs, labels = self._gather(held[torch.from_numpy(chosen)])
        return [Batch(data, mask) for data, mask in zip(zip(inputs.split(size), labels.split(size), strict=True), masks, strict=True)]

    def whole(self, client: int, split: Split, size: int) -> Iterator[tuple[Any, int]]:
        for indices in self.parts[client][split].split(size):
            yield self._gather(indices), len(indices)

    def _gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[indices.to(self.inputs.device)]
        if inputs.dim() == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs, self.labels[indices.to(self.labels.device)]

    def to(self, device: torch.device, dtype: torch.dtype) -> Samples:
        return replace(self, inputs=self.inputs.to(device, dtype), labels=self.labels.to(device))

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


def dealt(inputs: Tensor | Pixels, shares: Shares, fingerprint: str | None = None) -> Samples:
    """A federation from samples and who holds them."""
    parts = [{name: torch.from_numpy(piece) for name, piece in zip(SPLITS, pieces, strict=True)} for pieces in shares.parts]
    if fingerprint is None:
        assert isinstance(inputs, Tensor)
        fingerprint = hashlib.sha256(inputs.numpy().tobytes()).hexdigest()
    return Samples(inputs, torch.from_numpy(shares.labels), shares.classes, parts, fingerprint, shares.holdout, shares.notes)
