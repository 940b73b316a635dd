"""How messages and results travel between processes: a small header, and the tensors beside it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persafl_lit.engine.executors.worker import ALIGNED
from persafl_lit.engine.messages import join, separate

Kinds = tuple[tuple[str, tuple[int, ...]], ...]
"""Type and shape of each tensor."""
DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Header(NamedTuple):
    """A record with names instead of tensors, and what it takes to find these."""

    record: Any
    kinds: Kinds
    late: tuple[bytes | None, ...] = ()
    """Tensors that found no room in shared memory, in the header itself."""


def describe(record: Any) -> tuple[Header, list[Tensor]]:
    """The header, and the tensors that go with it."""
    bare, tensors = separate(record)
    return Header(bare, tuple((DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)) for tensor in tensors)), tensors


class Place:
    """A piece of memory that two processes share, for the tensors of one message and then of its result."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self._addresses = range(memory.data_ptr(), memory.data_ptr() + len(memory))
        self._views: dict[Kinds, list[Tensor | None]] = {}

    def store(self, record: Any) -> Header:
        """Write a record's tensors; returns what must be sent beside them."""
        header, tensors = describe(record)
        # A job may send back what it was given, a view of this very place: it must not be overwritten while it is
        # written.
        tensors = [tensor.clone() if tensor.data_ptr() in self._addresses else tensor for tensor in tensors]
        views = self._views_of(header.kinds)
        for view, tensor in zip(views, tensors, strict=True):
            if view is not None:
                view.copy_(tensor)
        if None not in views:
            return header
        return header._replace(
            late=tuple(
                as_bytes(t).numpy().tobytes() if v is None else None for v, t in zip(views, tensors, strict=True)
            )
        )

    def fetch(self, header: Header, device: torch.device, copy: bool = False) -> Any:
        """The record whose tensors lie here: views of this place on a CPU, unless a copy is asked for."""
        late = header.late or (None,) * len(header.kinds)
        tensors = []
        for view, kind, given in zip(self._views_of(header.kinds), header.kinds, late, strict=True):
            found = (
                from_bytes(torch.frombuffer(bytearray(given or b"\0"), dtype=torch.uint8), kind)
                if view is None
                else view
            )
            tensors.append(found.to(device, copy=copy))
        return join(header.record, tensors)

    def _views_of(self, kinds: Kinds) -> list[Tensor | None]:
        """One after the other, as far as there is room; the same kinds always lie in the same places."""
        if kinds not in self._views:
            views: list[Tensor | None] = []
            start = 0
            for dtype, shape in kinds:
                size = DTYPES[dtype].itemsize * torch.Size(shape).numel()
                fits = start + size <= len(self._memory)
                views.append(from_bytes(self._memory[start : start + size], (dtype, shape)) if fits else None)
                start += -(-size // ALIGNED) * ALIGNED if fits else 0
            self._views[kinds] = views
        return self._views[kinds]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def from_bytes(part: Tensor, kind: tuple[str, tuple[int, ...]]) -> Tensor:
    """A view; of no bytes, whose strides cannot always be viewed, a tensor without values."""
    dtype, shape = DTYPES[kind[0]], kind[1]
    return part.view(dtype).view(shape) if torch.Size(shape).numel() else torch.empty(shape, dtype=dtype)


def unpack(header: Header, parts: Iterable[Tensor], device: torch.device) -> Any:
    """The record whose tensors came as bytes."""
    return join(
        header.record, [from_bytes(part, kind).to(device) for part, kind in zip(parts, header.kinds, strict=True)]
    )
