"""Samples and batches are tensors, or dicts, tuples and lists of them: what is done to each tensor of such a tree."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def mapped(act: Callable[[Any], Any], tree: Any) -> Any:
    """The same tree with `act` done to each leaf."""
    if isinstance(tree, Mapping):
        return {key: mapped(act, part) for key, part in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(mapped(act, part) for part in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(mapped(act, part) for part in tree)
    return act(tree)


def leaves(tree: Any) -> Iterator[Any]:
    """Depth first."""
    if isinstance(tree, (Mapping, tuple, list)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from leaves(part)
    else:
        yield tree


def layout(tree: Any) -> str:
    """Structure, types and shapes, in words that are equal where they are."""
    if isinstance(tree, Mapping):
        return "{" + ", ".join(f"{key}: {layout(part)}" for key, part in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return "(" + ", ".join(map(layout, tree)) + ")"
    if isinstance(tree, (Tensor, np.ndarray)):
        return f"{str(tree.dtype).removeprefix('torch.')} {tuple(tree.shape)}"
    return type(tree).__name__


def placed(tree: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """On a device; only floating-point tensors take the dtype, so that token ids stay integers."""
    return mapped(lambda leaf: place(leaf, device, dtype) if isinstance(leaf, Tensor) else leaf, tree)


def place(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)


def nbytes(tree: Any) -> int:
    return sum(leaf.nbytes if isinstance(leaf, (Tensor, np.ndarray)) else 8 for leaf in leaves(tree))


def add_to(sum_: Any, tree: Any) -> None:
    """Take a tree into a hash: structure, types, shapes and bytes."""
    sum_.update(layout(tree).encode())
    for leaf in leaves(tree):
        if isinstance(leaf, Tensor):
            sum_.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        elif isinstance(leaf, np.ndarray):
            sum_.update(np.ascontiguousarray(leaf).tobytes())
        else:
            sum_.update(leaf.tobytes() if hasattr(leaf, "tobytes") else repr(leaf).encode())


def digest(tree: Any) -> str:
    found = hashlib.sha256()
    add_to(found, tree)
    return found.hexdigest()


@dataclass(frozen=True)
class Nested:
    """Inputs that are several tensors with a row per sample: indexing takes the rows of each."""

    tree: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows; a sample has no one shape."""
        return (len(next(leaves(self.tree))),)

    @property
    def device(self) -> torch.device:
        found: torch.device = next(leaves(self.tree)).device
        return found

    def __getitem__(self, indices: Tensor) -> Any:
        return mapped(lambda leaf: leaf[indices], self.tree)

    def to(self, device: torch.device, dtype: torch.dtype) -> Nested:
        return replace(self, tree=placed(self.tree, device, dtype))
