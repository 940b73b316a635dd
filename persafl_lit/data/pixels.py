"""Images that stay bytes: memory-mapped, shared by every process that reads them, normalised when a batch is
gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Pixels:
    """uint8 images (n, channels, height, width) in one or more pieces; indexing gives them normalised, (x / 255 - mean)
    / std."""

    pieces: tuple[Tensor, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(len, self.pieces)), *self.pieces[0].shape[1:])

    @property
    def device(self) -> torch.device:
        return self.pieces[0].device

    def nbytes(self) -> int:
        """Of all images, normalised."""
        return int(np.prod(self.shape)) * torch.finfo(self.dtype).bits // 8

    def to(self, device: torch.device, dtype: torch.dtype) -> Pixels:
        joined = self.pieces if device.type == "cpu" else (torch.cat(self.pieces).to(device),)
        return replace(self, pieces=joined, dtype=dtype)

    def __getitem__(self, indices: Tensor) -> Tensor:
        scale, shift = [1 / (255 * s) for s in self.std], [-m / s for m, s in zip(self.mean, self.std, strict=True)]
        fine = torch.promote_types(self.dtype, torch.float32)  # bfloat16 rounds once, at the end
        per_channel = torch.tensor([scale, shift], dtype=fine, device=self.device).view(2, -1, 1, 1)
        return self._bytes(indices).to(fine).mul_(per_channel[0]).add_(per_channel[1]).to(self.dtype)

    def _bytes(self, indices: Tensor) -> Tensor:
        """The images as they are stored. numpy copies whole rows, in a fifth of the time that torch takes pixel by
        pixel."""
        if self.device.type != "cpu":
            return self.pieces[0][indices]  # `to` joined them
        wanted, found = indices.numpy(), np.empty((len(indices), *self.shape[1:]), np.uint8)
        start = 0
        for piece in self.pieces:
            inside = (wanted >= start) & (wanted < start + len(piece))
            found[inside] = piece.numpy()[wanted[inside] - start]
            start += len(piece)
        return torch.from_numpy(found)

    def normalised(self) -> Tensor:
        """All images at once."""
        return self[torch.arange(self.shape[0], device=self.device)]


def read_idx(paths: Sequence[Path]) -> tuple[Tensor, ...]:
    """MNIST's format, four verified files: images and labels for training, then for testing."""
    return tuple(_mapped(path, 16).view(-1, 1, 28, 28) for path in paths[::2])


def read_cifar(paths: Sequence[Path]) -> tuple[Tensor, ...]:
    """CIFAR-10's binary format, verified files: records of a label byte and three planes of 32x32 bytes."""
    return tuple(_mapped(path, 0).view(-1, 3073)[:, 1:].unflatten(1, (3, 32, 32)) for path in paths)


def _mapped(path: Path, offset: int) -> Tensor:
    # Copy-on-write: nothing writes, so all processes share the pages of the file; torch wants the array writable.
    return torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c", offset=offset))
