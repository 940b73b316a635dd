"""Clients' memories beyond a limit, in a file without a name."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from persafl_lit.common.tensors import Tensors
from persafl_lit.errors import CheckpointError


class MemoryFile:
    """Keeps memories in RAM up to `limit` bytes, and those that come then in a file.

    What a client keeps is written once and never changes; its place is used again when nobody holds it any more. The
    file has no name, so nothing is left of it however the process ends: checkpoints have copies of their own.
    """

    def __init__(self, limit: float, folder: Path) -> None:
        self._limit = limit
        self._folder = folder
        self._in_ram = 0
        self._file: int | None = None
        self._end = 0
        self._free: dict[int, list[int]] = {}
        """Places by size."""

    def keep(self, tensors: Tensors) -> Tensors:
        """The same tensors by name, where there is room for them."""
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._in_ram + size > self._limit:
            return self._written(tensors, size)
        self._in_ram += size
        kept = Kept(tensors)
        weakref.finalize(kept, self._release_ram, size)
        return kept

    @property
    def on_disk(self) -> int:
        """Bytes that the file holds or has held."""
        return self._end

    def read(self, start: int, size: int) -> bytes:
        assert self._file is not None
        parts = []
        while size:
            parts.append(os.pread(self._file, size, start))
            start, size = start + len(parts[-1]), size - len(parts[-1])
        return b"".join(parts)

    def _release_ram(self, size: int) -> None:
        self._in_ram -= size

    def _written(self, tensors: Tensors, size: int) -> Tensors:
        free = self._free.get(size)
        place = free.pop() if free else self._end
        layout, start = {}, place
        try:
            if self._file is None:
                self._file = self._opened()
            for name, tensor in tensors.items():
                _write(self._file, tensor, start)
                layout[name] = _Place(start, tensor.nbytes, tensor.dtype, tensor.shape, tensor.device)
                start += tensor.nbytes
        except OSError as error:
            raise CheckpointError(
                f"clients keep more than memory_gb={self._limit / 1e9:g}, and the rest cannot be written to "
                f"{self._folder}: {error.strerror}; raise memory_gb or set checkpoint.dir"
            ) from error
        self._end = max(self._end, start)
        kept = OnDisk(self, layout)
        weakref.finalize(kept, self._free.setdefault(size, []).append, place)
        return kept

    def _opened(self) -> int:
        self._folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._folder) as file:
            number = os.dup(file.fileno())
        weakref.finalize(self, _close, number)
        return number


class Kept(dict[str, Tensor]):
    """A memory in RAM; it may be referred to weakly."""


class _Place(NamedTuple):
    start: int
    size: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class OnDisk(Mapping[str, Tensor]):
    """A memory in the file; each look at a tensor reads it."""

    def __init__(self, file: MemoryFile, layout: Mapping[str, _Place]) -> None:
        self._file = file
        self._layout = layout

    def __getitem__(self, name: str) -> Tensor:
        place = self._layout[name]
        content = bytearray(self._file.read(place.start, place.size))
        if not content:
            return torch.empty(place.shape, dtype=place.dtype, device=place.device)
        return torch.frombuffer(content, dtype=place.dtype).reshape(place.shape).to(place.device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._layout)

    def __len__(self) -> int:
        return len(self._layout)


def _write(file: int, tensor: Tensor, start: int) -> None:
    content = memoryview(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]
    while content:
        written = os.pwrite(file, content, start)
        content, start = content[written:], start + written


def _close(number: int) -> None:
    with contextlib.suppress(OSError):
        os.close(number)
