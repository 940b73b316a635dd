"""How messages and results travel between processes: a small header, and the bytes of the tensors beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persafl_lit.executors.worker import ALIGNED
from persafl_lit.messages import join, separate


class Header(NamedTuple):
    """A record with names instead of tensors, and what it takes to make tensors of bytes."""

    record: Any
    kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    late: tuple[bytes | None, ...] = ()
    """Tensors that found no room in shared memory, in the header itself."""


def pack(record: Any) -> tuple[Header, list[Tensor]]:
    """The header, and each tensor as bytes."""
    bare, tensors = separate(record)
    kinds = tuple((tensor.dtype, tuple(tensor.shape)) for tensor in tensors)
    return Header(bare, kinds), [tensor.detach().cpu().contiguous().view(-1).view(torch.uint8) for tensor in tensors]


def unpack(header: Header, parts: Iterable[Tensor], device: torch.device, copy: bool = False) -> Any:
    """Undo `pack`. On a CPU the tensors are views of the parts, unless a copy is asked for."""
    found = zip(parts, header.kinds, strict=True)
    return join(header.record, [_tensor(part, dtype, shape).to(device, copy=copy) for part, (dtype, shape) in found])


def _tensor(part: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes as what they were; no bytes may have strides that cannot be viewed."""
    return part.view(dtype).view(shape) if len(part) else torch.empty(shape, dtype=dtype)


def store(record: Any, place: Tensor) -> Header:
    """Write a record's tensors into a place of shared memory; returns what must be sent beside it."""
    header, parts = pack(record)
    storage = place.untyped_storage().data_ptr()
    # What is still a view of the place, because a job has sent back what it was given, must not be overwritten while it is written.
    parts = [part.clone() if part.untyped_storage().data_ptr() == storage else part for part in parts]
    late: list[bytes | None] = []
    for part, slot in zip(parts, _slots(place, [len(part) for part in parts]), strict=True):
        if slot is not None:
            slot.copy_(part)
        late.append(part.numpy().tobytes() if slot is None else None)
    return header._replace(late=tuple(late)) if any(part is not None for part in late) else header


def fetch(header: Header, place: Tensor, device: torch.device, copy: bool = False) -> Any:
    """The record whose tensors lie in a place, as views of it or copies."""
    sizes = [dtype.itemsize * torch.Size(shape).numel() for dtype, shape in header.kinds]
    slots = _slots(place, sizes)
    late = header.late or (None,) * len(sizes)
    parts = [torch.frombuffer(bytearray(given), dtype=torch.uint8) if given else slot for slot, given in zip(slots, late, strict=True)]
    return unpack(header, parts, device, copy)  # type: ignore[arg-type]


def _slots(place: Tensor, sizes: Sequence[int]) -> list[Tensor | None]:
    """One after the other, as far as there is room."""
    slots: list[Tensor | None] = []
    start = 0
    for size in sizes:
        fits = start + size <= len(place)
        slots.append(place[start : start + size] if fits else None)
        start += -(-size // ALIGNED) * ALIGNED if fits else 0
    return slots
