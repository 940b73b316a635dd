"""Named tensors: what travels between server and clients, and what a client keeps between visits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Tensors = Mapping[str, "Tensor"]
"""Tensors by name; never changed in place once they are part of a message."""
NO_VISIT = -1
"""The visit of a client that has no memory yet: it starts from the initial private values."""
